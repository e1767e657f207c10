"""Readers of files from strangers: what independent writers wrote comes back, and what is wrong is named with its place."""

import ast
import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import stat
import tarfile
import tracemalloc
import zipfile

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from permuteformer.tasks.readers import archives, delimited, images, lines, pickles, tables, tars, unpacking
from permuteformer.tasks.readers.archives import extract, members
from permuteformer.tasks.readers.images import cifar_batch, gray_image, gray_of_rgb
from permuteformer.tasks.readers.literals import bytes_literal
from permuteformer.tasks.readers.problems import BadItem, Problems

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def read_lines(path, **options):
    return list(lines.lines(path, Problems(), **options))


def read_rows(path, **options):
    return list(tables.rows(path, Problems(), **options))


def skipped(reader, *arguments, **options):
    """What comes, and the problems in words."""
    problems = Problems(skip=True)
    found = list(reader(*arguments, problems, **options))
    return found, problems.shown


def written(path, data):
    path.write_bytes(data)
    return path


def everything(name):
    return True


# Lines


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("named", [True, False], ids=["by its name", "by its first bytes"])
def test_lines_of_packed_files(tmp_path, ending, named):
    data = "eins\nzwei\r\n\n dr\u0085e\u2028i\rx\n\nvier".encode()
    path = written(tmp_path / (f"text.txt{ending}" if named else "text"), PACK[ending](data))
    assert read_lines(path) == [(1, "eins"), (2, "zwei"), (3, ""), (4, " dr\u0085e\u2028i\rx"), (5, ""), (6, "vier")]
    assert list(lines.raw_lines(path, Problems())) == [(number, line.encode()) for number, line in read_lines(path)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"a", ["a"]),
        (b"a\r", ["a\r"]),
        (b"a\r\r\n", ["a\r"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a", "\ufeffb"]),
        (b"a\0b\n", ["a\0b"]),
        (b"\xef\xbb\xbf\n", [""]),
    ],
)
def test_ends_of_lines(tmp_path, data, expected):
    assert read_lines(written(tmp_path / "x", data)) == list(enumerate(expected, 1))


def test_lines_of_ten_megabytes(tmp_path):
    long = b"x" * 10_000_000
    path = written(tmp_path / "x.gz", gzip.compress(b"a\n" + long + b"\nb\n" + long, compresslevel=1))
    assert [(number, len(line)) for number, line in read_lines(path)] == [(1, 1), (2, len(long)), (3, 1), (4, len(long))]


@pytest.mark.parametrize("data", [b"", gzip.compress(b""), b"\xef\xbb\xbf"])
def test_empty_file(tmp_path, data):
    path = written(tmp_path / "x.txt", data)
    with pytest.raises(BadItem, match=r"x\.txt: the file is empty"):
        read_lines(path)
    assert skipped(lines.lines, path)[0] == []


def test_a_byte_that_is_not_text_is_named(tmp_path):
    path = written(tmp_path / "x.txt", b"one\ncaf\xe9 and\nthree\n")
    found, problems = skipped(lines.lines, path)
    assert found == [(1, "one"), (3, "three")]
    assert len(problems) == 1
    assert "x.txt, line 2: byte 0xe9 at offset 3 of the line is not utf-8" in problems[0]
    assert read_lines(path, encoding="latin-1")[1] == (2, "café and")


@pytest.mark.parametrize("encoding", ["utf-16", "nonsense", "rot13", "utf-8-sig"])
def test_encodings_whose_lines_cannot_be_told(tmp_path, encoding):
    with pytest.raises(ValueError, match="encoding must be"):
        read_lines(written(tmp_path / "x", b"a"), encoding=encoding)


def test_a_line_over_the_limit_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(unpacking, "CHUNK", 7)
    path = written(tmp_path / "x", b"0123456789\r\n01234567890\nafter\n" + b"x" * 100 + b"\n0123456789")
    found, problems = skipped(lines.lines, path)
    assert found == [(1, "0123456789"), (3, "after"), (5, "0123456789")]
    assert [problem.split(":")[0].split(", ")[1] for problem in problems] == ["line 2", "line 4"]


def test_a_line_over_the_limit_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    path = written(tmp_path / "x.gz", gzip.compress(bytes(200 << 20), compresslevel=1))
    tracemalloc.start()
    try:
        assert skipped(lines.raw_lines, path)[0] == []
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_stream_without_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "MAX_UNPACKED_BYTES", 3 << 20)
    path = written(tmp_path / "x.gz", gzip.compress(b"0123456789\n" * (1 << 20)))
    found, problems = skipped(lines.lines, path)
    assert 0 < len(found) <= (3 << 20) / 11
    assert len(problems) == 1
    assert "more than 3,145,728 bytes" in problems[0]


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_packed_data_that_breaks_off(tmp_path, ending):
    text = b"".join(b"line %d %s\n" % (n, os.urandom(20).hex().encode()) for n in range(20_000))
    whole = PACK[ending](text)
    path = written(tmp_path / f"x{ending}", whole[: len(whole) * 3 // 4])
    found, problems = skipped(lines.raw_lines, path)
    assert [line for _, line in found] == text.split(b"\n")[: len(found)]
    assert len(found) > 1_000
    name = unpacking.PACKINGS[ending]
    assert problems == [f"{path}: ends early after line {len(found):,}: the {name} data is cut off; fetch or copy it again"]


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
@pytest.mark.parametrize("rubbish", [b"rubbish", b"\0\0\0\0rubbish"])
def test_rubbish_after_packed_data_is_not_dropped(tmp_path, ending, rubbish):
    path = written(tmp_path / f"x{ending}", PACK[ending](b"one\ntwo\n") + rubbish)
    found, problems = skipped(lines.lines, path)
    assert found == [(1, "one"), (2, "two")]
    assert len(problems) == 1
    assert "ends early after line 2" in problems[0]


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_packed_streams_in_a_row_with_padding(tmp_path, ending):
    path = written(tmp_path / f"x{ending}", PACK[ending](b"one\ntw") + bytes(8) + PACK[ending](b"") + PACK[ending](b"o\n") + bytes(4))
    assert read_lines(path) == [(1, "one"), (2, "two")]


def test_a_wrong_checksum_is_found(tmp_path):
    packed = bytearray(gzip.compress(b"one\ntwo"))
    packed[-8] ^= 1
    found, problems = skipped(lines.lines, written(tmp_path / "x.gz", packed))
    assert found == [(1, "one")]
    assert "the gzip data is damaged" in problems[0]


def test_a_name_that_is_wrong_about_the_packing(tmp_path):
    with pytest.raises(BadItem, match="named as gzip data, but begins as xz"):
        read_lines(written(tmp_path / "x.gz", lzma.compress(b"a")))
    with pytest.raises(BadItem, match="named as gzip data, but begins as something else"):
        read_lines(written(tmp_path / "y.gz", b"plain"))
    assert read_lines(written(tmp_path / "z", b"BZh9 is how this text begins")) == [(1, "BZh9 is how this text begins")]


def test_an_xz_file_that_asks_for_much_memory(tmp_path):
    greedy = lzma.compress(b"a\n", filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 4096}])
    assert read_lines(written(tmp_path / "a.xz", greedy)) == [(1, "a")]
    header = bytearray(greedy)
    at = header.index(b"\x21\x01") + 2  # LZMA2's dictionary, of 2 * 2^n bytes or so
    header[at] = 40
    block = header[12 : 12 + (header[12] + 1) * 4 - 4]
    header[12 + len(block) : 12 + len(block) + 4] = __import__("zlib").crc32(block).to_bytes(4, "little")
    with pytest.raises(BadItem, match="emory usage limit"):
        read_lines(written(tmp_path / "b.xz", header))


@pytest.mark.parametrize("reader", [lines.lines, lines.raw_lines])
def test_what_is_no_file(tmp_path, reader):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere"):
        list(reader(tmp_path / "nowhere", Problems()))
    with pytest.raises(BadItem, match="this is a folder"):
        list(reader(tmp_path, Problems()))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadItem, match="a pipe or a device"):
        list(reader(tmp_path / "pipe", Problems()))
    with pytest.raises(BadItem, match="cannot be opened"):
        list(reader(str(tmp_path / "nul\0"), Problems()))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path):
    path = written(tmp_path / "x", b"a")
    path.chmod(0)
    with pytest.raises(BadItem, match="cannot be opened: Permission denied"):
        read_lines(path)


# Tables


ROWS = [
    {"label": "1", "text": 'good, "very"\nindeed\r\n'},
    {"label": "", "text": ""},
    {"label": "0", "text": "été\u2028 \U0001f600\r lone"},
]


def csv_bytes(rows, **options):
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("options", [{}, {"lineterminator": "\n"}, {"quoting": csv.QUOTE_ALL}])
def test_csv_of_another_writer(tmp_path, ending, options):
    path = written(tmp_path / f"x.csv{ending}", PACK[ending](csv_bytes(ROWS, **options)))
    found = read_rows(path)
    assert [row for _, row in found] == ROWS
    assert [line for line, _ in found] == [2, 5, 6]  # the first row has three lines
    assert tables.column_names(path) == ["label", "text"]


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_tsv(tmp_path, ending, line_end):
    text = line_end.join(["label\ttext", '1\t"good', "\t", '0\tb"a\rd', ""])
    path = written(tmp_path / f"x.tsv{ending}", PACK[ending](text.encode()))
    expected = [("1", '"good'), ("", ""), ("0", 'b"a\rd')]
    assert read_rows(path) == [(n, {"label": a, "text": b}) for n, (a, b) in enumerate(expected, 2)]
    assert tables.column_names(path) == ["label", "text"]
    first = (1, {"x": "label", "y": "text"})
    assert read_rows(path, columns=["x", "y"])[0] == first


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", [".jsonl", ".ndjson", ".jsonlines", ".json-lines", ".JSONL"])
def test_json_lines_of_another_writer(tmp_path, ending, kind):
    objects = [{"text": "a\nb\0é", "n": [1, 2.5, None, {"x": True}]}, {}, {"n": -(10**30)}]
    path = written(tmp_path / f"x{kind}{ending}", PACK[ending]("\r\n".join(map(json.dumps, objects)).encode()))
    assert read_rows(path) == list(enumerate(objects, 1))
    assert tables.column_names(path) == ["text", "n"]


@pytest.mark.parametrize("group", [3, 64, 1000])
def test_parquet_of_another_writer(tmp_path, group):
    table = pyarrow.table(
        {"text": [f"text {n}" for n in range(300)], "tags": [[n, None] for n in range(300)], "data": [bytes([n % 256]) for n in range(300)]}
    )
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=group)
    assert read_rows(path) == list(enumerate(table.to_pylist(), 1))
    assert tables.column_names(path) == ["text", "tags", "data"]


@pytest.mark.parametrize(
    ("ending", "data", "good", "wrong"),
    [
        (
            ".csv",
            b"a,b\n1,2\n1\n1,2,3\n\n3,4\n\n\n",
            [2, 6],
            ["line 3: .* must be 2 .a, b.; it is 1", "line 4: .* it is 3", "line 5: .*empty"],
        ),
        (
            ".tsv",
            b"a\tb\n1\t2\n1\n1\t2\t3\n\n3\t4\n\n",
            [2, 6],
            ["line 3: .* must be 2 .a, b.; it is 1", "line 4: .* it is 3", "line 5: .*empty"],
        ),
        (".csv", b'a,b\n1,"2\n3,4\n5,6', [], ["line 2: this is no CSV .unexpected end of data.; lines 2 to 4 are passed over"]),
        (".csv", b'a,b\n1,"2"x\n3,4', [3], ["line 2: this is no CSV"]),
        (".csv", b"a,b\n1,2\rx\n3,4", [3], ["line 2: this is no CSV"]),
        (".csv", b"a,b\n1,\0\n3,4", [3], ["line 2: there is a NUL byte"]),
        (".tsv", b"a\tb\n1\t\0\n3\t4", [3], ["line 2: there is a NUL byte"]),
        (".csv", b'a,b\n1,"2\n\xff"\n3,4', [4], ["line 2: the row that starts here cannot be read to its end: .*line 3: byte 0xff"]),
        (".csv", b"a,b\n1,\xff\n3,4", [3], ["line 2: byte 0xff"]),
        (".csv", b"a,\xff\n1,2\n3,4", [], ["line 1: the names of the columns cannot be read: byte 0xff"]),
        (".csv", b"a,b,a\n1,2,3\n", [], ["csv: the first line must name the columns; 'a' is there 2 times"]),
        (".tsv", b"a\t\n1\t2\n", [], ["tsv: the first line must name the columns; name 2 is empty"]),
        (".csv", b"\n1,2\n", [], ["csv: the first line must name the columns; there are none"]),
        (".csv", b"a,b\n", [], ["csv: there are no rows"]),
        (".tsv", b"a\tb", [], ["tsv: there are no rows"]),
        (".csv", b"", [], ["csv: the file is empty"]),
        (".tsv", b"", [], ["tsv: the file is empty"]),
        (".jsonl", b"", [], ["jsonl: the file is empty"]),
        (".parquet", b"", [], ["parquet: the file is empty"]),
        (".parquet", b"PAR1 no", [], ["parquet: this cannot be read as Parquet"]),
        (".jsonl", b"\n \n", [], ["jsonl: there are no rows"]),
        (".jsonl", b'{"a":1}\n\n{"a":2}\n\n', [1, 3], ["line 2: the line is empty"]),
        (
            ".jsonl",
            b'{"a":1}\n{"a":\n[1]\n"x"\n{}{}\n',
            [1],
            ["line 2: this is no JSON: Expecting value at character 6", "list", "str", "Extra data"],
        ),
        (
            ".jsonl",
            b'{"a":NaN}\n{"a":-Infinity}\n{"a":1e999}\n{}',
            [4],
            ["line 1: .*NaN is no number", "-Infinity is no", "1e999 is too large"],
        ),
        (".jsonl", b'{"a":' + b"9" * 5000 + b"}\n{}", [2], ["line 1: .* 5,000 digits"]),
        (".jsonl", b'{"a":' + b"[" * 100_000 + b"}\n{}", [2], ["line 1: .* nested too deeply"]),
        (".jsonl", b'{"a":1,"b":2,"a":3}\n{"x":{"y":1,"y":1}}\n{}', [3], ["line 1: .* key 'a' is there 2 times", "line 2: .*'y'"]),
        (".jsonl", b'{"a":"\0"}\n{}', [2], ["line 1: this is no JSON: Invalid control character"]),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, ending, data, good, wrong):
    path = written(tmp_path / f"x{ending}", data)
    problems = Problems(skip=True)
    assert [line for line, _ in tables.rows(path, problems)] == good
    assert problems.count == len(wrong)
    for said, expected in zip(problems.shown, wrong, strict=True):
        with pytest.raises(ValueError, match=expected):
            raise ValueError(said)
    with pytest.raises(BadItem, match=wrong[0]):
        list(tables.rows(path, Problems()))


def test_one_column_of_texts_may_have_empty_ones(tmp_path):
    path = written(tmp_path / "x.tsv", b"text\na\n\nb\n")
    assert read_rows(path) == [(2, {"text": "a"}), (3, {"text": ""}), (4, {"text": "b"})]


@pytest.mark.parametrize("name", ["x.txt", "x", "x.gz", "x.json", "x.parquet.gz", "csv", "x.csv.zip"])
def test_an_unknown_ending_is_refused(tmp_path, name):
    path = written(tmp_path / name, b"a,b\n1,2\n")
    for use in (read_rows, tables.column_names):
        with pytest.raises(BadItem, match=r"one of \.csv, \.tsv, \.jsonl.*\.parquet.*\.gz, \.xz, \.bz2"):
            use(path)
    assert not name.endswith(tables.ENDINGS)


def test_endings_that_are_listed_are_read(tmp_path):
    for ending in tables.ENDINGS:
        with pytest.raises(FileNotFoundError):
            read_rows(tmp_path / f"x{ending}")
        with pytest.raises(FileNotFoundError):
            tables.column_names(tmp_path / ending)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_columns_are_for_tables_that_have_no_names(tmp_path, ending):
    with pytest.raises(ValueError, match="columns must be None for"):
        tables.rows(tmp_path / f"x{ending}", Problems(), columns=["a"])


@pytest.mark.parametrize("columns", [[], ["a", "a"], ["a", ""], "ab", [1]])
def test_columns_must_be_names(tmp_path, columns):
    with pytest.raises(ValueError, match="columns must be different names"):
        tables.rows(tmp_path / "x.csv", Problems(), columns=columns)


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("data", [b"", b"\xff\n", b"\0"])
def test_names_of_columns_that_are_not_there(tmp_path, ending, data):
    with pytest.raises(BadItem):
        tables.column_names(written(tmp_path / f"x{ending}", data))


def test_names_of_columns_need_the_first_line_only(tmp_path):
    assert tables.column_names(written(tmp_path / "x.csv", b'a,b\n"')) == ["a", "b"]
    assert tables.column_names(
        written(tmp_path / "x.tsv.gz", gzip.compress(b"a\tb\n" + os.urandom(1 << 22).hex().encode())[: 1 << 20])
    ) == ["a", "b"]


def test_the_field_limit_of_csv_is_left_as_it_was(tmp_path):
    before = csv.field_size_limit()
    text = "x" * 10_000_000
    found = tables.rows(written(tmp_path / "x.csv", f"a,b\n1,{text}\n".encode()), Problems())
    assert next(found) == (2, {"a": "1", "b": text})
    assert csv.field_size_limit() == before == 131_072


def test_an_open_quote_does_not_take_all_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    path = written(tmp_path / "x.csv", b'a,b\n1,"open\n' + b"3,4\n" * 1000)
    found, problems = skipped(tables.rows, path)
    assert "line 2: the row that starts here cannot be read to its end" in problems[0]
    assert len(problems) == 1
    assert [line for line, _ in found][-1] == 1002  # it went on


def test_a_line_of_tabs_is_not_split(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "MAX_COLUMNS", 5)
    found, problems = skipped(tables.rows, written(tmp_path / "x.tsv", b"a\tb\tc\td\te\n" + b"\t" * 5 + b"\n" + b"\t" * 4))
    assert [line for line, _ in found] == [3]
    assert "line 2: there are more than 5 fields" in problems[0]


def test_a_packed_table_that_breaks_off_within_a_row(tmp_path):
    text = b"a,b\n" + b"".join(b'%d,"%s\nsecond line"\n' % (n, os.urandom(30).hex().encode()) for n in range(3000))
    packed = gzip.compress(text)
    for size in range(len(packed) // 2, len(packed) // 2 + 400, 7):
        found, problems = skipped(tables.rows, written(tmp_path / "x.csv.gz", packed[:size]))
        assert [row["a"] for _, row in found] == [str(n) for n in range(len(found))]
        assert len(problems) == 1
        assert "ends early after line" in problems[0]


def parquet_damaged(tmp_path, column):
    """Ten groups of ten rows, and rubbish where the pages of one column of the fifth group are."""
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"a": [f"a{n}" * 10 for n in range(100)], "b": list(range(100))})
    pyarrow.parquet.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False)
    with pyarrow.parquet.ParquetFile(path) as file:
        chunk = file.metadata.row_group(4).column(column)
        start, size = chunk.data_page_offset, chunk.total_compressed_size
    data = bytearray(path.read_bytes())
    data[start : start + size] = b"\xff" * size
    path.write_bytes(data)
    return path, table.to_pylist()


@pytest.mark.parametrize("column", [0, 1])
def test_after_damage_parquet_goes_on_with_the_next_group(tmp_path, column):
    path, expected = parquet_damaged(tmp_path, column)
    found, problems = skipped(tables.rows, path)
    assert [number for number, _ in found] == [*range(1, 41), *range(51, 101)]
    assert all(row == expected[number - 1] for number, row in found)
    assert len(problems) == 1
    assert "x.parquet, line 41: rows 41 to 50 cannot be read" in problems[0]


def test_a_row_of_parquet_that_python_cannot_hold(tmp_path):
    raw = pyarrow.array([b"good", b"\xff\xfe", b"good"], pyarrow.binary())
    broken = pyarrow.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "x.parquet")
    found, problems = skipped(tables.rows, tmp_path / "x.parquet")
    assert [number for number, _ in found] == [1, 3]
    assert len(problems) == 1
    assert "line 2: this row cannot be used" in problems[0]


def test_parquet_names_must_differ(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"]), path)
    with pytest.raises(BadItem, match="columns must have different names; 'a' is there 2 times"):
        read_rows(path)
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.int64())}), path)
    with pytest.raises(BadItem, match="there are no rows"):
        read_rows(path)


# Archives


FILES = {"b/two.txt": b"two", "a/one.txt": b"1" * 5000, "a/" + "long" * 60 + ".txt": b"long", "é.txt": b"", "z/big": b"z" * 20_000}


def tar_bytes(files=FILES, mode="w", format=tarfile.PAX_FORMAT, folders=()):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=format) as tar:
        for name in folders:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zip_bytes(files=FILES, packing=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def read_members(path, wanted=everything):
    return list(members(path, Problems(), wanted=wanted))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("x.tar", "w"),
        ("x.tar.gz", "w:gz"),
        ("x.tgz", "w:gz"),
        ("lra_release.gz", "w:gz"),
        ("x.tar.xz", "w:xz"),
        ("x.tar.bz2", "w:bz2"),
        ("no ending", "w:xz"),
    ],
)
@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tar_of_another_writer(tmp_path, name, mode, format):
    path = written(tmp_path / name, tar_bytes(mode=mode, format=format, folders=["a", "b/"]))
    assert read_members(path) == list(FILES.items())
    assert read_members(path, lambda name: name.startswith("a/")) == [(n, d) for n, d in FILES.items() if n.startswith("a/")]


def test_tar_of_the_systems_tar(tmp_path):
    for name, data in FILES.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    for format in ("gnu", "posix", "ustar", "v7"):
        wanted = {name: data for name, data in FILES.items() if len(name) < 90}
        command = f"cd '{tmp_path}/in' && tar --format={format} -cf ../{format}.tar --exclude '*long*' ."
        assert os.system(command) == 0
        assert dict(read_members(tmp_path / f"{format}.tar")) == wanted  # without "./" before the names


@pytest.mark.parametrize("name", ["x.zip", "no ending"])
@pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_zip_of_another_writer(tmp_path, name, packing):
    path = written(tmp_path / name, zip_bytes({"a/": b"", **FILES}, packing))
    assert read_members(path) == list(FILES.items())


def test_folder(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert dict(read_members(tmp_path)) == FILES
    assert [name for name, _ in read_members(tmp_path)] == ["é.txt", "a/" + "long" * 60 + ".txt", "a/one.txt", "b/two.txt", "z/big"]


def test_links_in_a_folder(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "real").write_text("inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (folder / "inner").symlink_to("sub/real")
    (folder / "outer").symlink_to("../outside/secret")
    (folder / "nothing").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    (folder / "folder").symlink_to("../outside")
    (folder / "sub" / "up").symlink_to("..")
    found, problems = skipped(members, folder, wanted=everything)
    assert found == [("inner", b"inside"), ("sub/real", b"inside")]
    assert [problem.split(":")[0] for problem in problems] == [str(folder / n) for n in ("circle", "folder", "nothing", "outer", "sub/up")]
    # Not wanted, not looked at; but what is behind a link out of the folder cannot be known.
    found, problems = skipped(members, folder, wanted=lambda name: name == "inner")
    assert len(found) == 1
    assert [problem.split(":")[0] for problem in problems] == [str(folder / "folder")]


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadItem, match="pipe: this is a pipe or a device"):
        read_members(tmp_path)


EVIL = ["../evil", "a/../../evil", "/evil", "//evil", "C:evil", "c:/evil", "a\\..\\evil", "\\evil", "..", "a/..", "./../evil"]


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("make", [tar_bytes, zip_bytes])
def test_names_that_lead_out(tmp_path, name, make):
    archive = written(tmp_path / "archive", make({"good": b"1", name: b"evil", "better": b"2"}))
    found, problems = skipped(members, archive, wanted=lambda name: "evil" not in name)
    assert found == [("good", b"1"), ("better", b"2")]
    assert len(problems) == 1
    assert "archive: " in problems[0]
    assert "its name" in problems[0]
    (tmp_path / "deep" / "target").mkdir(parents=True)
    problems = Problems(skip=True)
    assert extract(archive, tmp_path / "deep" / "target", everything, problems) == 2
    assert problems.count == 1
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["archive", "better", "good"]


def test_a_name_with_nul(tmp_path):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("good")
        info.pax_headers = {"path": "good\0evil"}
        tar.addfile(info)
    with pytest.raises(BadItem, match="its name holds a NUL byte"):
        read_members(written(tmp_path / "x.tar", file.getvalue()))
    with pytest.raises(BadItem, match="its name holds a NUL byte"):
        read_members(written(tmp_path / "x.zip", zip_bytes({"goodXevil": b""}).replace(b"goodX", b"good\0")))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V"])
def test_what_is_no_file_in_a_tar(tmp_path, kind):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo("special")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
        info = tarfile.TarInfo("special/file")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"data"))
    path = written(tmp_path / "x.tar", file.getvalue())
    found, problems = skipped(members, path, wanted=everything)
    assert found == [("special/file", b"data")]
    assert len(problems) == 1
    assert "only regular files are read" in problems[0]
    assert extract(path, tmp_path / "out", everything, Problems(skip=True)) == 1
    assert not (tmp_path / "out" / "special").is_symlink()


@pytest.mark.parametrize(("mode", "said"), [(stat.S_IFLNK, "a link"), (stat.S_IFIFO, "a pipe or a device")])
def test_what_is_no_file_in_a_zip(tmp_path, mode, said):
    info = zipfile.ZipInfo("special")
    info.external_attr = (mode | 0o644) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
        archive.writestr("good", "good")
    found, problems = skipped(members, tmp_path / "x.zip", wanted=everything)
    assert found == [("good", b"good")]
    assert f"this is {said}" in problems[0]


def patched_zip(patch):
    """A zip of "first" and "second" with bytes of the first one's two headers changed, at the same offset after their signatures."""
    data = bytearray(zip_bytes({"first": b"1" * 1000, "second": b"2"}))
    for signature, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        at = data.index(signature) + 4 + shift
        for offset, value in patch.items():
            data[at + offset : at + offset + len(value)] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ({2: b"\x01\x00"}, "an encrypted member"),
        ({4: b"\x63\x00"}, "packed by zip's method 99"),
        ({4: b"\x0c\x00"}, "packed by zip's method 12"),
        ({10: b"\0\0\0\0"}, "Bad CRC-32"),
        ({18: b"\x05\0\0\0"}, "cannot be unpacked"),
        ({18: b"\xff\xff\xff\x7f"}, "it has more than"),
    ],
)
def test_members_of_a_zip_that_cannot_be_unpacked(tmp_path, patch, said):
    path = written(tmp_path / "x.zip", patched_zip(patch))
    found, problems = skipped(members, path, wanted=everything)
    assert found == [("second", b"2")]
    assert len(problems) == 1
    assert "x.zip: first: " in problems[0]
    assert said in problems[0]


def test_a_zip_whose_members_overlap(tmp_path):
    data = zip_bytes({"a": os.urandom(1000)}, zipfile.ZIP_STORED)
    start, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    tail = bytearray(data[end:])
    tail[8:12] = b"\x03\0\x03\0"
    tail[12:16] = (3 * (end - start)).to_bytes(4, "little")
    path = written(tmp_path / "x.zip", data[:start] + data[start:end] * 3 + tail)
    with pytest.raises(BadItem, match="its members overlap"):
        read_members(path)


@pytest.mark.parametrize("make", [tar_bytes, zip_bytes])
def test_members_over_the_limit(tmp_path, make, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 5000)
    path = written(tmp_path / "x", make())
    found, problems = skipped(members, path, wanted=everything)
    assert [name for name, _ in found] == list(FILES)[:4]
    assert "z/big: it has more than 5,000 bytes" in problems[0]
    assert extract(path, tmp_path / "out", everything) == len(FILES)  # the disk holds more than memory does


def test_a_file_over_the_limit_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 3)
    written(tmp_path / "a", b"four")
    written(tmp_path / "b", b"yes")
    found, problems = skipped(members, tmp_path, wanted=everything)
    assert found == [("b", b"yes")]
    assert len(problems) == 1


def test_extracting_stops_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_EXTRACTED_BYTES", 6000)
    path = written(tmp_path / "x.tar", tar_bytes())
    with pytest.raises(BadItem, match="ends early in z/big: more than 6,000 bytes would be written"):
        extract(path, tmp_path / "out", everything)
    assert not (tmp_path / "out" / "z" / "big").exists()  # half a file would look like a whole one


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tar.xz", "x.tar.bz2"])
def test_a_tar_that_is_cut_anywhere_says_so(tmp_path, name):
    whole = tar_bytes({f"member {n}": os.urandom(300) for n in range(8)}, "w" if name == "x.tar" else f"w:{name[6:]}")
    end = len(whole.rstrip(b"\0")) + 512 if name == "x.tar" else len(whole)
    for size in [1, 100, *range(512, end - 1024, 509), end - 513, end - 1]:
        if name == "x.tar" and size > end - 513:
            continue  # only padding is missing
        problems = Problems(skip=True)
        found = list(members(written(tmp_path / name, whole[:size]), problems, wanted=everything))
        assert [member for member, _ in found] == [f"member {n}" for n in range(len(found))]
        assert all(len(data) == 300 for _, data in found)
        assert problems.count == 1, size
        assert "ends early" in problems.shown[0]


def test_two_tars_in_one_file_are_not_taken_for_one(tmp_path):
    with pytest.raises(BadItem, match="something comes after the end mark"):
        read_members(written(tmp_path / "x.tar", tar_bytes() * 2))


@pytest.mark.parametrize(("type", "size"), [(b"x", 1 << 40), (b"g", 2 << 20), (b"L", 1 << 33), (b"0", -1), (b"S", 0)])
def test_headers_that_ask_for_too_much(tmp_path, type, size):
    info = tarfile.TarInfo("x")
    info.type, info.size = type, size
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(BadItem, match="ends early"):
        read_members(written(tmp_path / "x.tar", header + bytes(2048)))


@pytest.mark.parametrize(
    "records",
    [b"5 a=b\n", b"0 a=b\n", b"99 a=b\n", b"x a=b\n", b"6 ab\n\n", b"-6 a=b\n", b"9" * 600 + b" a=b\n", b"11 size=-1\n", b"10 size=x\n"],
)
def test_extended_headers_that_are_damaged(tmp_path, records):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    data = info.tobuf() + records.ljust(-(-len(records) // 512) * 512, b"\0") + tarfile.TarInfo("y").tobuf() + bytes(1024)
    with pytest.raises(BadItem, match="an extended header is damaged"):
        read_members(written(tmp_path / "x.tar", data))


def test_many_extended_records_take_linear_time():
    records = b"6 a=b\n" * ((1 << 20) // 6)
    assert tars._records(records) == {"a": b"b"}


@pytest.mark.parametrize(
    ("data", "said"), [(b"", "the file is empty"), (b"no archive" * 100, "no header of a tar archive"), (b"PK\x03\x04 no", "zip archive")]
)
def test_what_is_no_archive(tmp_path, data, said):
    path = written(tmp_path / "x", data)
    with pytest.raises(BadItem, match=f"x: ends early at its start: .*{said}"):
        read_members(path)
    with pytest.raises(BadItem, match=said):
        extract(path, tmp_path / "out", everything)
    with pytest.raises(FileNotFoundError):
        read_members(tmp_path / "nowhere")


def test_an_archive_of_many_members_takes_no_memory(tmp_path):
    path = written(tmp_path / "x.tar.gz", tar_bytes({f"folder/{n}": b"x" for n in range(3000)}, "w:gz"))
    tracemalloc.start()
    try:
        assert sum(1 for _ in members(path, Problems(), wanted=everything)) == 3000
        assert tracemalloc.get_traced_memory()[1] < 6 << 20  # tarfile holds 3 kB for each
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [tar_bytes, zip_bytes])
def test_extract(tmp_path, make):
    path = written(tmp_path / "x", make())
    assert extract(path, tmp_path / "new" / "out", lambda name: name != "z/big") == len(FILES) - 1
    found = {str(file.relative_to(tmp_path / "new" / "out")): file.read_bytes() for file in (tmp_path / "new").rglob("*") if file.is_file()}
    assert found == {name: data for name, data in FILES.items() if name != "z/big"}


def test_extract_writes_over_nothing(tmp_path):
    path = written(tmp_path / "x.tar", tar_bytes({"a": b"new", "b/c": b"new"}))
    (tmp_path / "out").mkdir()
    written(tmp_path / "out" / "a", b"old")
    problems = Problems(skip=True)
    assert extract(path, tmp_path / "out", everything, problems) == 1
    assert (tmp_path / "out" / "a").read_bytes() == b"old"
    assert "is there already" in problems.shown[0]


@pytest.mark.parametrize("files", [{"a": b"file", "a/b": b"below"}, {"a/b": b"below", "a": b"file"}])
@pytest.mark.parametrize("make", [tar_bytes, zip_bytes])
def test_a_file_that_is_a_folder_too(tmp_path, files, make):
    path = written(tmp_path / "x", make(files))
    problems = Problems(skip=True)
    assert extract(path, tmp_path / "out", everything, problems) == 1
    assert problems.count == 1
    with pytest.raises(BadItem, match="is there already"):
        extract(path, tmp_path / "again", everything)


@pytest.mark.parametrize("link", ["sub", "a"])
def test_extract_goes_through_no_link(tmp_path, link):
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / link).symlink_to(tmp_path / "elsewhere")
    path = written(tmp_path / "x.tar", tar_bytes({"sub/deep/file": b"evil", "a": b"evil"}))
    problems = Problems(skip=True)
    assert extract(path, tmp_path / "out", everything, problems) == 1
    assert problems.count == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_member_that_cannot_be_written_is_a_problem(tmp_path):
    path = written(tmp_path / "x.tar", tar_bytes({"n" * 300: b"", "good": b""}))
    problems = Problems(skip=True)
    assert extract(path, tmp_path / "out", everything, problems) == 1
    assert "too long" in problems.shown[0]


# Images


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
    tiny[29:33] = __import__("zlib").crc32(tiny[12:29]).to_bytes(4, "big")
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
        Bomb(__import__("codecs").encode, "x", "rot13"),
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
