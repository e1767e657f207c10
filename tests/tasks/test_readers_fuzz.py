"""Any bytes whatever: rows or ``BadItem``, never another exception, and no line without a row or a problem."""

import ast
import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import tarfile
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from permuteformer.tasks.readers import lines, unpacking
from permuteformer.tasks.readers.archives import extract, members
from permuteformer.tasks.readers.images import cifar_batch, gray_image
from permuteformer.tasks.readers.literals import bytes_literal
from permuteformer.tasks.readers.pickles import plain_pickle
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import column_names, rows

PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


class Every(Problems):
    """Skips, and keeps all problems."""

    def __init__(self):
        super().__init__(skip=True)
        self.all = []

    def add(self, problem):
        super().add(problem)
        assert isinstance(problem, BadItem)
        assert str(problem).isprintable()
        self.all.append(problem)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(path, data):
    path.write_bytes(data)
    return path


def everything(name):
    return True


PIECES = [b"a", b",", b"\t", b'"', b"\n", b"\n", b"\r\n", b"\r", b"\0", b"\xff", b"\xef\xbb\xbf", "é".encode(), b"{", b'{"a":1}', b"NaN"]
texts = st.one_of(st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join), st.binary(max_size=200))
headers = st.sampled_from([b"", b"a,b\n", b"a\tb\r\n", b"a\n"])


def mutated(whole):
    """A file with a few bytes changed, cut out or put in, or cut off."""

    def change(changes):
        data = bytearray(whole)
        for place, size, new in changes:
            at = int(place * len(data))
            data[at : at + size] = new
        return bytes(data)

    changes = st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([0, 1, 1, 1, 4, 1 << 30]), st.binary(max_size=4))
    return st.lists(changes, min_size=1, max_size=3).map(change)


# Lines


@given(texts, st.sampled_from([1, 2, 3, 1 << 20]))
@example(b"\xef\xbb\xbf", 1)
def test_every_line_is_there_or_a_problem(folder, data, chunk):
    expected = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = expected[:-1] if expected[-1] == b"" else expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "CHUNK", chunk)
        problems = Every()
        path = written(folder / "x", data)
        found = list(lines.raw_lines(path, problems))
        read = list(lines.lines(path, text_problems := Every()))
    ended = len(expected) - (not data.endswith(b"\n"))
    assert found == [(n, line.removesuffix(b"\r") if n <= ended else line) for n, line in enumerate(expected, 1)]
    assert problems.count == (not expected)
    assert sorted([n for n, _ in read] + [problem.line for problem in text_problems.all if problem.line]) == [n for n, _ in found]
    assert all(line.encode() == found[n - 1][1] for n, line in read)
    for problem in text_problems.all:
        if problem.line:
            with pytest.raises(UnicodeDecodeError):
                found[problem.line - 1][1].decode()


@pytest.mark.parametrize("ending", PACK)
def test_packed_lines_cut_at_every_place(folder, ending):
    text = b"first\nsecond\r\n" + bytes(range(256)) * 2 + b"\nlast"
    whole = PACK[ending](text) + PACK[ending](b" line\nmore\n")
    expected = list(lines.raw_lines(written(folder / "whole", text + b" line\nmore\n"), Problems()))
    for size in range(1, len(whole)):
        problems = Every()
        found = list(lines.raw_lines(written(folder / f"x{ending}", whole[:size]), problems))
        if problems.count:
            assert problems.count == 1
            assert found == expected[: len(found)]
            assert "ends early after line" in str(problems.all[0]) or "begins as something else" in str(problems.all[0])
        else:  # between the two streams it is a whole file
            assert size == len(PACK[ending](text))
        with pytest.raises(BadItem) if problems.count else warnings.catch_warnings():
            list(lines.lines(folder / f"x{ending}", Problems(), encoding="latin-1"))


@pytest.mark.parametrize("ending", PACK)
@given(st.data())
def test_packed_lines_that_are_damaged(folder, ending, data):
    text = b"".join(b"line %d\n" % n for n in range(300))
    problems = Every()
    found = list(lines.raw_lines(written(folder / f"x{ending}", data.draw(mutated(PACK[ending](text)))), problems))
    assert problems.count <= 1
    if not problems.count:  # before the problem there may be lines that are damaged: sums come last
        assert found == list(enumerate(text.split(b"\n")[:-1], 1))


# Tables


@pytest.mark.parametrize("ending", [".tsv", ".jsonl", ".csv"])
@given(headers, texts)
def test_every_row_is_there_or_a_problem(folder, ending, header, text):
    data = header + text
    path = written(folder / f"x{ending}", data)
    problems = Every()
    found = list(rows(path, problems))
    for number, row in found:
        assert isinstance(row, dict)
        assert 1 <= number <= data.count(b"\n") + 1
    if not problems.count:
        assert found
    with pytest.raises(BadItem) if problems.count else warnings.catch_warnings():
        assert list(rows(path, Problems())) == found
    whole_file = [problem for problem in problems.all if problem.line is None or "names of the columns" in problem.message]
    if whole_file:
        assert problems.count == 1
        assert not found
    elif ending != ".csv" or b'"' not in data:
        places = sorted([number for number, _ in found] + [problem.line for problem in problems.all])
        first = 1 if ending == ".jsonl" else 2
        assert places == list(range(first, first + len(places)))
        rest = b"".join(data.removeprefix(b"\xef\xbb\xbf").split(b"\n")[first - 1 + len(places) :])
        assert rest.strip(b" \t\r\x0b\x0c\x1c\x1d\x1e\x1f") == b""  # only empty lines at the end are left


@given(texts)
def test_names_given_make_every_line_a_row(folder, text):
    path = written(folder / "x.tsv", text)
    problems = Every()
    found = list(rows(path, problems, columns=["text"]))
    whole = list(lines.raw_lines(path, Every()))
    assert len(found) + problems.count == max(len(whole), 1)


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz", ".jsonl.xz", ".tsv.bz2"])
@given(st.binary(max_size=300))
def test_any_bytes_under_any_ending(folder, ending, data):
    path = written(folder / f"any{ending}", data)
    problems = Every()
    found = list(rows(path, problems))
    assert found or problems.count
    try:
        names = column_names(path)
    except BadItem:
        assert problems.count
    else:
        assert all(isinstance(name, str) for name in names)


fields = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20) | st.text(',"\n\r\t a', max_size=8)
tables = st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(fields, min_size=width, max_size=width), min_size=1, max_size=6))


@given(tables, st.sampled_from(["\r\n", "\n"]))
def test_csv_comes_back(folder, table, end):
    names = [f"column {n}" for n in range(len(table[0]))]
    file = io.StringIO()
    csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([names, *table])
    found = list(rows(written(folder / "x.csv", file.getvalue().encode()), Problems()))
    assert [list(row.values()) for _, row in found] == table
    breaks = [sum(field.count("\n") for field in row) for row in table]
    assert [line for line, _ in found] == [2 + n + sum(breaks[:n]) for n in range(len(table))]


@given(tables)
def test_tsv_comes_back(folder, table):
    clean = [[field.translate({9: "_", 10: "_", 13: "_"}) + "." for field in row] for row in table]
    text = "\r\n".join("\t".join(row) for row in clean)
    names = [str(n) for n in range(len(table[0]))]
    found = list(rows(written(folder / "x.tsv", text.encode()), Problems(), columns=names))
    assert [list(row.values()) for _, row in found] == [
        [f.removeprefix("\ufeff") if (n, m) == (0, 0) else f for m, f in enumerate(row)] for n, row in enumerate(clean)
    ]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(), values, max_size=4), min_size=1, max_size=5), st.booleans())
def test_json_comes_back(folder, objects, ascii_only):
    text = "\n".join(json.dumps(entry, ensure_ascii=ascii_only) for entry in objects)
    found = list(rows(written(folder / "x.jsonl", text.encode("utf-8", "surrogatepass")), Problems()))
    assert found == list(enumerate(objects, 1))


@given(st.data())
def test_parquet_that_is_damaged(folder, data):
    file = io.BytesIO()
    table = pyarrow.table({"text": [f"text {n}" for n in range(20)], "tags": [[n] for n in range(20)]})
    pyarrow.parquet.write_table(table, file, row_group_size=5, write_page_checksum=True)
    path = written(folder / "damaged.parquet", data.draw(mutated(file.getvalue())))
    problems = Every()
    found = list(rows(path, problems))
    assert found or problems.count


# Archives


names = st.text(st.sampled_from("ab/.\\:C\0é\n"), min_size=1, max_size=12)


def tar_of(files, mode="w"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=tarfile.PAX_FORMAT) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def zip_of(files):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may be there twice
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files:
                archive.writestr(name.replace("\0", "_"), content)  # zipfile does not write NUL
    return file.getvalue()


@pytest.mark.parametrize("make", [tar_of, zip_of])
@given(st.lists(st.tuples(names, st.binary(max_size=30)), min_size=1, max_size=6))
def test_nothing_leaves_the_folder(make, files):
    with tempfile.TemporaryDirectory() as place:
        top = Path(place, "a", "b", "c", "d")
        top.mkdir(parents=True)
        archive = written(Path(place, "archive"), make(files))
        problems = Every()
        found = list(members(archive, problems, wanted=everything))
        for name, _ in found:
            assert Path(place, name).resolve().is_relative_to(Path(place).resolve())
            assert not {"..", ".", ""} & set(name.split("/"))
        contents = [content for _, content in files]
        left = iter(contents)
        assert all(any(content == other for other in left) for _, content in found)  # in their order
        written_files = extract(archive, top, everything, Every())
        below = [path for path in Path(place).rglob("*") if path.is_file() and path != archive]
        assert len(below) == written_files
        assert all(path.is_relative_to(top) for path in below)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2", "zip"])
@given(st.data())
def test_archives_that_are_damaged(folder, mode, data):
    files = [(f"folder/{n}" + "x" * 40 * n, bytes(range(256)) * n) for n in range(6)]
    whole = zip_of(files) if mode == "zip" else tar_of(files, mode)
    path = written(folder / f"damaged.{mode.removeprefix('w:')}", data.draw(mutated(whole)))
    problems = Every()
    found = list(members(path, problems, wanted=everything))
    assert len(found) <= 8
    assert found or problems.count


@given(st.binary(max_size=600), st.sampled_from(["x.zip", "x.tar", "x.tar.gz", "x", "x.gz", "x.txz"]))
def test_any_bytes_as_an_archive(folder, data, name):
    problems = Every()
    found = list(members(written(folder / name, data), problems, wanted=everything))
    assert problems.count == 1
    assert not found


def test_a_tar_cut_at_every_place(folder):
    files = [(f"member {n}", bytes([n]) * 5) for n in range(3)]
    whole = tar_of(files)
    end = 3 * 1024  # then zeros
    for size in range(1, end + 600, 13):
        problems = Every()
        found = list(members(written(folder / "cut.tar", whole[:size]), problems, wanted=everything))
        assert found == files[: len(found)]
        assert problems.count == (size < end + 512)


# Images, pickles, literals


FORMATS = [("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "RGB"), ("GIF", "P"), ("BMP", "RGB"), ("TIFF", "RGB"), ("WEBP", "RGB"), ("PPM", "L")]
IMAGES = [
    (format, Image.fromarray(numpy.arange(192, dtype=numpy.uint8).reshape(8, 8, 3)).convert(mode))
    for format, mode in [
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("JPEG", "RGB"),
        ("GIF", "P"),
        ("BMP", "RGB"),
        ("TIFF", "RGB"),
        ("WEBP", "RGB"),
        ("PPM", "L"),
    ]
]


@pytest.mark.parametrize(("format", "image"), IMAGES, ids=[f"{format} {image.mode}" for format, image in IMAGES])
@given(st.data())
def test_images_that_are_damaged(format, image, data):
    file = io.BytesIO()
    image.save(file, format)
    outcome(gray_image, data.draw(mutated(file.getvalue())), numpy.ndarray)


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"\xff\xd8\xff", b"II*\0", b"P5 ", b"RIFF", b"%!PS"]),
)
def test_any_bytes_as_an_image(data, begin):
    outcome(gray_image, begin + data, numpy.ndarray)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@given(st.data())
def test_pickles_that_are_damaged(protocol, data):
    whole = pickle.dumps({"labels": [1, 2], "data": numpy.zeros((2, 3072), numpy.uint8), "more": ("x", b"y", None)}, protocol)
    outcome(cifar_batch, data.draw(mutated(whole)), tuple)


@given(st.lists(st.sampled_from([*b"\x80\x02}]()(NK\x01tue.R0bqh\x85\x86\x87sacU\x01X\x93\x94\x8c"]), max_size=40))
def test_any_instructions(data):
    outcome(plain_pickle, bytes(data), object)


def outcome(function, data, kind):
    """Something of this kind, or a ValueError with words, and none of its subclasses, which libraries raise."""
    try:
        made = function(data)
    except ValueError as error:
        made = error
    assert isinstance(made, kind) or (type(made) is ValueError and str(made).isprintable())


@given(st.binary())
def test_literals_come_back(data):
    assert bytes_literal(repr(data)) == data
    everything_escaped = "b'" + "".join(f"\\x{byte:02X}" for byte in data) + "'"
    assert bytes_literal(everything_escaped) == data
    octal = 'b"' + "".join(f"\\{byte:03o}" for byte in data) + '"'
    assert bytes_literal(octal) == data


ESCAPES = [*(f"\\{c}" for c in "\\'\"nrtabfv"), r"\x4a", r"\xFF", r"\0", r"\12", r"\377", "a", "x", "7", "b", " "]


@given(st.lists(st.sampled_from(ESCAPES)).map("".join), st.sampled_from("'\""))
def test_all_escapes_are_read(body, quote):
    text = f"b{quote}{body}{quote}"
    assert bytes_literal(text) == ast.literal_eval(text)


ODD = ["\\", "'", '"', "x", "4", "0", "n", "q", "é", "\n", "\r", "\0", " ", "b'", "#", "+"]


@given(st.lists(st.sampled_from(ODD), max_size=8).map("".join), st.sampled_from("'\""))
def test_what_is_read_is_what_python_reads(body, quote):
    text = f"b{quote}{body}{quote}"
    try:
        found = bytes_literal(text)
    except ValueError:
        return
    assert found == ast.literal_eval(text)  # a warning of an unknown escape would be an error
