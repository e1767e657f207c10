"""Images, batches of CIFAR-10 and literals of bytes: values against independent ones, and nothing runs."""

import ast
import codecs
import io
import os
import pickle
import tracemalloc
import zlib

import numpy
import pytest
from PIL import Image

from permuteformer.tasks.readers import images, pickles
from permuteformer.tasks.readers.images import cifar_batch, gray_image, gray_of_rgb
from permuteformer.tasks.readers.literals import bytes_literal


def image_bytes(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def test_gray_of_all_colours():
    levels = numpy.arange(0, 256, 3)
    rgb = numpy.stack(numpy.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).astype(numpy.uint8)
    expected = numpy.floor((rgb.astype(object) * [299, 587, 114]).sum(-1).astype(numpy.int64) / 1000 + 0.5)
    assert (gray_of_rgb(rgb) == expected).all()
    pillow = numpy.asarray(Image.fromarray(rgb.reshape(-1, 86, 3)).convert("L")).reshape(86, 86, 86)
    assert abs(gray_of_rgb(rgb).astype(int) - pillow).max() <= 1
    assert (gray_of_rgb(rgb) != pillow).mean() < 1e-3


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP", "TGA", "PCX"])
def test_gray_images_stay_as_they_are(format):
    values = numpy.random.default_rng(0).integers(0, 256, (5, 9), dtype=numpy.uint8)
    assert (gray_image(image_bytes(Image.fromarray(values), format, **({"lossless": True} if format == "WEBP" else {}))) == values).all()


def test_colours_and_palettes():
    rgb = numpy.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=numpy.uint8)
    image = Image.fromarray(rgb)
    assert (gray_image(image_bytes(image)) == gray_of_rgb(rgb)).all()
    palette = image.quantize(8)
    assert (gray_image(image_bytes(palette)) == gray_of_rgb(numpy.asarray(palette.convert("RGB")))).all()
    bilevel = Image.fromarray(rgb[..., 0] > 100)
    assert (gray_image(image_bytes(bilevel)) == (rgb[..., 0] > 100) * 255).all()
    jpeg = gray_image(image_bytes(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"))
    assert (jpeg == 255).all()


def test_white_shows_through():
    for mode, colour in {"RGBA": (0, 0, 0, 0), "LA": (0, 0)}.items():
        assert (gray_image(image_bytes(Image.new(mode, (2, 2), colour))) == 255).all()
    assert gray_image(image_bytes(Image.new("RGBA", (1, 1), (0, 0, 0, 128)))) == 127
    assert gray_image(image_bytes(Image.new("RGBA", (1, 1), (10, 10, 10, 255)))) == 10
    marked = Image.new("L", (2, 1), 7)
    marked.putpixel((1, 0), 9)
    assert gray_image(image_bytes(marked, transparency=7)).tolist() == [[255, 9]]


def test_sixteen_bits_are_scaled():
    values = numpy.array([[0, 128, 129, 257, 32_768, 65_535]], dtype=numpy.uint16)
    for format in ("PNG", "TIFF"):
        assert gray_image(image_bytes(Image.fromarray(values), format)).tolist() == [[0, 0, 1, 1, 128, 255]]
    with pytest.raises(ValueError, match="beyond 16 bits"):
        gray_image(image_bytes(Image.fromarray(numpy.array([[70_000]], dtype=numpy.int32)), "TIFF"))
    with pytest.raises(ValueError, match="fractions"):
        gray_image(image_bytes(Image.fromarray(numpy.array([[0.5]], dtype=numpy.float32)), "TIFF"))


def test_size_is_height_and_width_and_means_are_taken():
    values = numpy.arange(6 * 8, dtype=numpy.uint8).reshape(6, 8)
    data = image_bytes(Image.fromarray(values))
    assert (gray_image(data, (6, 8)) == values).all()
    small = gray_image(data, (3, 2))
    means = values.reshape(3, 2, 2, 4).mean((1, 3))
    assert small.shape == (3, 2)
    assert abs(small - means).max() <= 0.5
    assert gray_image(data, (12, 16)).shape == (12, 16)
    for size in ((0, 1), (-1, 5), (1 << 20, 1 << 20)):
        with pytest.raises(ValueError, match="size must be"):
            gray_image(data, size)


def test_images_that_cannot_be_read():
    whole = image_bytes(Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (40, 40), dtype=numpy.uint8)))
    for size in (10, 50, 500, len(whole) - 200):
        with pytest.raises(ValueError, match=r"no image|damaged or cut off"):
            gray_image(whole[:size])
    with pytest.raises(ValueError, match="the image is empty"):
        gray_image(b"")
    with pytest.raises(ValueError, match="this is no image"):
        gray_image(b"text")
    with pytest.raises(ValueError, match="this is no image"):  # Pillow would start Ghostscript for it
        gray_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")


@pytest.mark.parametrize("side", [8200, 12_000, 20_000])
def test_image_bombs(side):
    assert side * side > images.MAX_PIXELS
    tiny = bytearray(image_bytes(Image.new("1", (1, 1))))
    tiny[16:24] = side.to_bytes(4, "big") * 2
    tiny[29:33] = zlib.crc32(tiny[12:29]).to_bytes(4, "big")
    with pytest.raises(ValueError, match="the limit"):
        gray_image(bytes(tiny))


# CIFAR-10


def python2_batch(pixels, labels, order="C"):
    """A batch in the instructions that Python 2's cPickle wrote: protocol 2, byte strings, a list in portions of a thousand."""
    portions = [labels[n : n + 1000] for n in range(0, len(labels), 1000)]
    raw = pixels.tobytes(order)
    return b"".join(
        [
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05",
            *(b"(" + b"".join(b"K" + bytes([label]) for label in portion) + b"e" for portion in portions),
            b"U\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\tU\x01bq\n\x87q\x0bRq\x0c(K\x01",
            b"M" + len(pixels).to_bytes(2, "little") + b"M\x00\x0c\x86q\rcnumpy\ndtype\nq\x0eU\x02u1q\x0fK\x00K\x01\x87q\x10Rq\x11",
            b"(K\x03U\x01|q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x13b",
            b"\x88" if order == "F" else b"\x89",
            b"T" + len(raw).to_bytes(4, "little") + raw + b"q\x14tb",
            b"U\tfilenamesq\x15]q\x16(" + b"".join(b"U\x05a.pngq\x17" for _ in labels) + b"eu.",
        ]
    )


@pytest.fixture(scope="module")
def batch():
    random = numpy.random.default_rng(0)
    return random.integers(0, 256, (2500, 3072), dtype=numpy.uint8), random.integers(0, 10, 2500).tolist()


@pytest.mark.parametrize("order", ["C", "F"])
def test_batches_of_python_2(batch, order):
    data = python2_batch(*batch, order)
    assert (pickle.loads(data, encoding="bytes")[b"data"] == batch[0]).all()  # the fixture is what pickle takes it for
    pixels, labels = cifar_batch(data)
    assert pixels.dtype == numpy.uint8
    assert (pixels == batch[0]).all()
    assert labels == batch[1]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("key", [str, str.encode])
def test_batches_pickled_again(batch, protocol, key):
    pixels, labels = cifar_batch(pickle.dumps({key("data"): batch[0][:9], key("labels"): batch[1][:9]}, protocol))
    assert (pixels == batch[0][:9]).all()
    assert labels == batch[1][:9]


class Bomb:
    """What a pickle of this class asks for when it is loaded."""

    def __init__(self, function, *arguments):
        self.asks = function, arguments

    def __reduce__(self):
        return self.asks


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_something(tmp_path, protocol):
    target = tmp_path / "ran"
    for bomb in (Bomb(os.mkdir, str(target)), Bomb(exec, f"open({str(target)!r}, 'w')"), Bomb(getattr, "", "format"), print):
        with pytest.raises(ValueError, match="do not trust this file"):
            cifar_batch(pickle.dumps({"data": bomb, "labels": [1]}, protocol))
    assert not target.exists()
    pickle.loads(pickle.dumps(Bomb(os.mkdir, str(target)), protocol))
    assert target.exists()  # the bomb is a real one


def test_the_names_that_are_let_through_do_nothing_else():
    for bomb in (
        Bomb(numpy.ndarray, (1 << 40,)),
        Bomb(numpy.dtype, "O"),
        Bomb(numpy._core.multiarray._reconstruct, numpy.dtype, (1 << 40,), b"b"),
        Bomb(codecs.encode, "x", "rot13"),
    ):
        with pytest.raises(ValueError, match="do not trust this file"):
            pickles.plain_pickle(pickle.dumps(bomb, 2))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"rubbish",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02)).",
        b"\x80\x02h\x05.",
        b"\x80\x02r\xff\xff\xff\xff.",  # for C's pickle, 64 GB of memo
        b"\x80\x02}(K\x01u.",
        b"\x80\x02}((K\x01ttK\x02s.",
        b"\x80\x02}K\x01a.",
        b"\x80\x02T\xff\xff\xff\x7f.",
        b"\x80\x05\x96\xff\xff\xff\xff\x00\x00\x00\x00.",
        b"\x80\x02K\x01K\x02b.",
        b"S'\\q'\n.",
        b"I" + b"9" * 10_000 + b"\n.",
        b"}}K\x01s.",
    ],
)
def test_pickles_that_are_damaged(data):
    with pytest.raises(ValueError, match=r"pickle|dict"):
        cifar_batch(data)


def test_pickles_that_ask_for_memory_over_and_over(monkeypatch):
    again = b"\x80\x02X\x00\x00\x10\x00" + b"x" * (1 << 20) + b"q\x01c_codecs\nencode\nq\x02]q\x03("
    again += b"h\x02h\x01X\x06\x00\x00\x00latin1\x86R" * 1000 + b"e."
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="do not trust"):
            pickles.plain_pickle(again)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(pickles, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(ValueError, match="more than 1,000 instructions"):
        pickles.plain_pickle(b"\x80\x02" + b"]" * 2000 + b".")
    monkeypatch.setattr(pickles, "MAX_PICKLE_BYTES", 10)
    with pytest.raises(ValueError, match="the limit is 10"):
        pickles.plain_pickle(b"\x80\x02" + b"]" * 20 + b".")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1], "must be a dict"),
        ({}, "must have an array 'data'"),
        ({"data": [1], "labels": [1]}, "must have an array 'data'"),
        ({"data": numpy.zeros((2, 3072), numpy.uint8), "labels": [1]}, "it is .2, 3072. with 1 labels"),
        ({"data": numpy.zeros((1, 3071), numpy.uint8), "labels": [1]}, "must be of shape"),
        ({"data": numpy.zeros(3072, numpy.uint8), "labels": [1]}, "must be of shape"),
        ({"data": numpy.zeros((1, 3072), numpy.uint8), "labels": [10]}, "from 0 to 9"),
        ({"data": numpy.zeros((1, 3072), numpy.uint8), "labels": [True]}, "from 0 to 9"),
        ({"data": numpy.zeros((1, 3072), numpy.uint8), "labels": ["1"]}, "from 0 to 9"),
        ({"data": numpy.zeros((1, 3072), numpy.int64), "labels": [1]}, "do not trust"),
        ({"data": numpy.zeros((1, 3072), object), "labels": [1]}, "do not trust"),
    ],
)
def test_batches_of_something_else(content, said):
    with pytest.raises(ValueError, match=said):
        cifar_batch(pickle.dumps(content, 2))


def test_an_array_that_is_larger_than_its_data(batch):
    data = python2_batch(batch[0][:2], [1, 2])
    with pytest.raises(ValueError, match="does not fit its data"):
        cifar_batch(data.replace(b"M\x02\x00M\x00\x0c", b"M\x03\x00M\x00\x0c"))


# Literals


@pytest.mark.parametrize("data", [b"", bytes(range(256)), b"'", b'"', b"'\"", b"\\x41\\", "été\n".encode(), b"\\" * 7])
def test_what_repr_writes_is_read(data):
    assert bytes_literal(repr(data)) == data


@pytest.mark.parametrize(
    "text", [r"b'\a\b\f\v\n\r\t\\\'\"'", r"b'\0\12\123\1234\377\08\x41\x4A1'", r"b'\"'", r"""b"'\'" """.strip(), r"b'\\\\n'"]
)
def test_escapes_are_pythons(text):
    assert bytes_literal(text) == ast.literal_eval(text)


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("", 0),
        ("b", 0),
        ("'a'", 0),
        ("B'a'", 0),
        ("rb'a'", 0),
        (" b'a'", 0),
        ("b'", 2),
        ("b'a", 2),
        ("b'a\"", 3),
        ("b'a' ", 4),
        ("b'a\\'", 3),
        ("b'a'b'c'", 3),
        ("b'a' + b'c'", 3),
        ("b'''a'''", 2),
        ("b'aé'", 3),
        ("b'a\nb'", 3),
        ("b'a\0b'", 3),
        (r"b'\\\q'", 4),
        (r"b'ab\x4'", 4),
        (r"b'ab\xg0'", 4),
        (r"b'\400'", 2),
        (r"b'\u0041'", 2),
        (r"b'\\' __import__('os')'", 4),
    ],
)
def test_what_is_no_literal(text, offset):
    with pytest.raises(ValueError, match=rf"^at offset {offset}: "):
        bytes_literal(text)
