"""Image files and batches of CIFAR-10: values are compared with independent ones, limits hold, and nothing is executed."""

import codecs
import io
import os
import pickle
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from permuteformer.tasks.readers import cifar, images
from permuteformer.tasks.readers.cifar import cifar_batch
from permuteformer.tasks.readers.images import gray_image, gray_of_rgb

RANDOM = np.random.default_rng(0)


def image_bytes(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def test_gray_of_all_colors():
    levels = np.arange(0, 256, 3)
    rgb = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).astype(np.uint8)
    expected = np.floor((rgb.astype(object) * [299, 587, 114]).sum(-1).astype(np.int64) / 1000 + 0.5)
    assert (gray_of_rgb(rgb) == expected).all()
    pillow = np.asarray(Image.fromarray(rgb.reshape(-1, 86, 3)).convert("L")).reshape(86, 86, 86)
    assert abs(gray_of_rgb(rgb).astype(int) - pillow).max() <= 1
    assert (gray_of_rgb(rgb) != pillow).mean() < 1e-3


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP", "TGA", "PCX"])
def test_gray_values_are_kept(format):
    values = RANDOM.integers(0, 256, (5, 9), dtype=np.uint8)
    options = {"lossless": True} if format == "WEBP" else {}
    assert (gray_image(image_bytes(Image.fromarray(values), format, **options)) == values).all()


def test_colors_and_palettes():
    rgb = RANDOM.integers(0, 256, (6, 4, 3), dtype=np.uint8)
    image = Image.fromarray(rgb)
    assert (gray_image(image_bytes(image)) == gray_of_rgb(rgb)).all()
    palette = image.quantize(8)
    assert (gray_image(image_bytes(palette)) == gray_of_rgb(np.asarray(palette.convert("RGB")))).all()
    assert (gray_image(image_bytes(Image.fromarray(rgb[..., 0] > 100))) == (rgb[..., 0] > 100) * 255).all()
    assert (gray_image(image_bytes(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG")) == 255).all()


def test_transparent_pixels_are_blended_with_white():
    marked = Image.new("L", (2, 1), 7)
    marked.putpixel((1, 0), 9)
    for image, options, expected in (
        (Image.new("RGBA", (1, 1), (0, 0, 0, 0)), {}, [[255]]),
        (Image.new("LA", (1, 1), (0, 0)), {}, [[255]]),
        (Image.new("RGBA", (1, 1), (0, 0, 0, 128)), {}, [[127]]),
        (Image.new("RGBA", (1, 1), (10, 10, 10, 255)), {}, [[10]]),
        (marked, {"transparency": 7}, [[255, 9]]),
    ):
        assert gray_image(image_bytes(image, **options)).tolist() == expected


def test_values_of_16_bits_are_scaled():
    values = np.array([[0, 128, 129, 257, 32_768, 65_535]], dtype=np.uint16)
    for format in ("PNG", "TIFF"):
        assert gray_image(image_bytes(Image.fromarray(values), format)).tolist() == [[0, 0, 1, 1, 128, 255]]
    for other, message in ((np.int32(70_000), "16 bits"), (np.float32(0.5), "floating-point")):
        with pytest.raises(ValueError, match=message):
            gray_image(image_bytes(Image.fromarray(np.array([[other]])), "TIFF"))


def test_size_is_height_and_width_and_pixels_are_means():
    values = np.arange(6 * 8, dtype=np.uint8).reshape(6, 8)
    data = image_bytes(Image.fromarray(values))
    assert (gray_image(data, (6, 8)) == values).all()
    small = gray_image(data, (3, 2))
    assert small.shape == (3, 2)
    assert abs(small - values.reshape(3, 2, 2, 4).mean((1, 3))).max() <= 0.5
    assert gray_image(data, (12, 16)).shape == (12, 16)
    for size in ((0, 1), (-1, 5), (1 << 20, 1 << 20)):
        with pytest.raises(ValueError, match="size must be"):
            gray_image(data, size)


def test_other_files_are_no_images():
    whole = image_bytes(Image.fromarray(RANDOM.integers(0, 256, (40, 40), dtype=np.uint8)))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"  # for which Pillow would start Ghostscript
    for data, message in {b"": "empty", b"text": "not an image", postscript: "not an image"}.items():
        with pytest.raises(ValueError, match=message):
            gray_image(data)
    for size in (10, 50, 500, len(whole) - 200):
        with pytest.raises(ValueError, match=r"not an image|truncated"):
            gray_image(whole[:size])


HEADERS = {"PNG": ">I", "BMP": "<I", "DIB": "<I", "GIF": "<H", "PPM": None, "TIFF": "<I", "TGA": "<H", "SGI": ">H"}
"""How formats write a height and a width; the header of PPM is text."""


@pytest.mark.parametrize("format", HEADERS)
@pytest.mark.parametrize("side", [9_001, 12_007, 20_011])
def test_an_image_bomb_is_refused(format, side, monkeypatch):
    """A few bytes that state hundreds of millions of pixels take no memory."""
    code = HEADERS[format]
    width, height, stated = (str(n).encode() if code is None else struct.pack(code, n) for n in (251, 253, side))
    data = image_bytes(Image.new("L", (251, 253)), format).replace(width, stated).replace(height, stated)
    if format == "PNG":
        data = data[:29] + zlib.crc32(data[12:29]).to_bytes(4, "big") + data[33:]
    with pytest.raises(ValueError, match=f"limit of {images.MAX_PIXELS:,}"):
        gray_image(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert Image.open(io.BytesIO(data)).size == (side, side), "the header is that of an image"


# CIFAR-10


def python2_batch(pixels, labels, order="C"):
    """Return a batch in the instructions of Python 2's cPickle: protocol 2, byte strings, a list in parts of a thousand."""
    parts = [labels[n : n + 1000] for n in range(0, len(labels), 1000)]
    raw = pixels.tobytes(order)
    return b"".join(
        [
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05",
            *(b"(" + b"".join(b"K" + bytes([label]) for label in part) + b"e" for part in parts),
            b"U\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\tU\x01bq\n\x87q\x0bRq\x0c(K\x01",
            b"M" + len(pixels).to_bytes(2, "little") + b"M\x00\x0c\x86q\rcnumpy\ndtype\nq\x0eU\x02u1q\x0fK\x00K\x01\x87q\x10Rq\x11",
            b"(K\x03U\x01|q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x13b",
            b"\x88" if order == "F" else b"\x89",
            b"T" + len(raw).to_bytes(4, "little") + raw + b"q\x14tb",
            b"U\tfilenamesq\x15]q\x16(" + b"".join(b"U\x05a.pngq\x17" for _ in labels) + b"eu.",
        ]
    )


PIXELS, LABELS = RANDOM.integers(0, 256, (2500, 3072), dtype=np.uint8), RANDOM.integers(0, 10, 2500).tolist()


@pytest.mark.parametrize("order", ["C", "F"])
def test_batches_of_python_2(order):
    data = python2_batch(PIXELS, LABELS, order)
    assert (pickle.loads(data, encoding="bytes")[b"data"] == PIXELS).all(), "the fixture is what pickle takes it for"
    pixels, labels = cifar_batch(data)
    assert pixels.dtype == np.uint8
    assert (pixels == PIXELS).all()
    assert labels == LABELS


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("key", [str, str.encode])
def test_batches_pickled_again(protocol, key):
    pixels, labels = cifar_batch(pickle.dumps({key("data"): PIXELS[:9], key("labels"): LABELS[:9]}, protocol))
    assert (pixels == PIXELS[:9]).all()
    assert labels == LABELS[:9]


class Call:
    """Unpickled, it calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_a_function_is_not_executed(tmp_path, protocol):
    target = tmp_path / "made"
    for bomb in (
        Call(os.mkdir, str(target)),
        Call(exec, f"open({str(target)!r}, 'w')"),
        Call(getattr, "", "format"),
        print,
        Call(np.ndarray, (1 << 40,)),  # functions that batches name, with other arguments
        Call(np.dtype, "O"),
        Call(np._core.multiarray._reconstruct, np.dtype, (1 << 40,), b"b"),
        Call(codecs.encode, "x", "rot13"),
    ):
        with pytest.raises(ValueError, match="do not trust this file"):
            cifar_batch(pickle.dumps({"data": bomb, "labels": [1]}, protocol))
    assert not target.exists()
    pickle.loads(pickle.dumps(Call(os.mkdir, str(target)), protocol))
    assert target.exists(), "the pickle is a working one"


def test_memory_and_instructions_of_a_pickle_are_bounded(monkeypatch):
    again = b"\x80\x02X\x00\x00\x10\x00" + b"x" * (1 << 20) + b"q\x01c_codecs\nencode\nq\x02]q\x03("
    again += b"h\x02h\x01X\x06\x00\x00\x00latin1\x86R" * 1000 + b"e."
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="do not trust"):
            cifar_batch(again)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(cifar, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(ValueError, match="1,000 instructions"):
        cifar_batch(b"\x80\x02" + b"]" * 2000 + b".")
    monkeypatch.setattr(cifar, "MAX_PICKLE_BYTES", 10)
    with pytest.raises(ValueError, match="limit is 10"):
        cifar_batch(b"\x80\x02" + b"]" * 20 + b".")


def batch(data, labels=(1,)):
    return pickle.dumps({"data": data, "labels": list(labels)}, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *((data, "the pickle cannot be read") for data in (b"", b"garbage", b"\x80\x02)).", b"I" + b"9" * 10_000 + b"\n.")),
        (b"\x80\x02}K\x01a.", "the pickle cannot be read"),
        (b"\x80\x02r\xff\xff\xff\xff.", "the pickle cannot be read"),  # in C's pickle, a memo of 64 GB
        (b"\x80\x05\x96\xff\xff\xff\xff\x00\x00\x00\x00.", "the pickle cannot be read"),  # 4 GB of bytes
        (pickle.dumps([1], 2), "dict"),
        (batch([1]), "array 'data'"),
        (batch(np.zeros((2, 3072), np.uint8)), "2, 3072. with 1 labels"),
        *((batch(np.zeros(shape, np.uint8)), str(shape[-1])) for shape in ((1, 3071), (3072,))),
        *((batch(np.zeros((1, 3072), np.uint8), [label]), "from 0 to 9") for label in (10, True, "1")),
        *((batch(np.zeros((1, 3072), kind)), "do not trust") for kind in (np.int64, object)),
        (python2_batch(PIXELS[:2], [1, 2]).replace(b"M\x02\x00M\x00\x0c", b"M\x03\x00M\x00\x0c"), "shape"),
    ],
)
def test_other_pickles_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        cifar_batch(data)
