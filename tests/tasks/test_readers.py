"""Readers of files from strangers: what independent writers wrote comes back, and what is wrong is named with its place."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import tracemalloc
import zlib

import pyarrow
import pyarrow.parquet
import pytest

from permuteformer.tasks.readers import delimited, lines, tables, unpacking
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


@pytest.mark.parametrize("data", [b"", gzip.compress(b"", mtime=0), b"\xef\xbb\xbf"])
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
    whole = bz2.compress(text, 1) if ending == ".bz2" else PACK[ending](text)  # whose blocks are of 900 kB otherwise
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
    packed = bytearray(gzip.compress(b"one\n" * 500_000))
    packed[-8] ^= 1
    found, problems = skipped(lines.lines, written(tmp_path / "x.gz", packed))
    assert 200_000 < len(found) < 500_000
    assert f"ends early after line {len(found):,}: the gzip data is damaged" in problems[0]


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
    header[12 + len(block) : 12 + len(block) + 4] = zlib.crc32(block).to_bytes(4, "little")
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
    {"label": "0", "text": "été\u2028 \U0001f600\r lone, and quoted"},
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
            b"a,b\n1,2\n1\n1,2,3\n\n3,4\n5,6\n\n\n",
            [2, 6, 7],
            ["line 3: .* must be 2 .a, b.; it is 1", "line 4: .* is 3", "line 5: .*empty"],
        ),
        (
            ".tsv",
            b"a\tb\n1\t2\n1\n1\t2\t3\n\n3\t4\n5\t6\n\n",
            [2, 6, 7],
            ["line 3: .* must be 2 .a, b.; it is 1", "line 4: .* is 3", "line 5: .*empty"],
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
        (".jsonl", b'{"a":1}\n\n{"a":2}\n{}\n\n', [1, 3, 4], ["line 2: the line is empty"]),
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
