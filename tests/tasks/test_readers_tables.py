"""Tables in four formats: what independent writers wrote is read, and what is wrong is an error with its file and line."""

import csv
import gzip
import io
import json
import os
import re

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_data import COMPRESS, AllErrors, odd_bytes, read, written

from permuteformer.tasks.readers import tables, text
from permuteformer.tasks.readers.errors import BadItem, Errors
from permuteformer.tasks.readers.tables import column_names, rows

endings = st.sampled_from(sorted(COMPRESS))
fields = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20) | st.text(',"\n\r\t a', max_size=8)
records = st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(fields, min_size=width, max_size=width), min_size=1, max_size=6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@given(records, st.sampled_from([{}, {"lineterminator": "\n", "quoting": csv.QUOTE_ALL}]), endings)
@example([['good, "very"\nindeed\r\n', "1"], ["", ""], ["été\u2028 \U0001f600\r lone, and quoted", "0"]], {}, ".gz")
def test_csv_of_another_writer(folder, records, options, ending):
    file, names = io.StringIO(), [f"column {n}" for n in range(len(records[0]))]
    csv.writer(file, **options).writerows([names, *records])
    path = written(folder / f"x.csv{ending}", COMPRESS[ending](file.getvalue().encode()))
    found = list(rows(path, Errors()))
    assert [list(row.values()) for _, row in found] == records
    breaks = [sum(field.count("\n") for field in record) for record in records]
    assert [line for line, _ in found] == [2 + n + sum(breaks[:n]) for n in range(len(records))]
    assert column_names(path) == names


@given(records, st.sampled_from(["\n", "\r\n"]), endings)
@example([["1", '"good'], ["", ""], ["0", 'b"a\rd']], "\r\n", ".xz")
def test_tsv_of_another_writer(folder, records, line_end, ending):
    records = [[re.sub(r"[\t\n]|\r$|^\ufeff", "_", field) for field in record] for record in records]
    names = [f"column {n}" for n in range(len(records[0]))]
    for first, columns, lines in ((2, None, [names, *records]), (1, names, records)):
        content = "".join("\t".join(line) + line_end for line in lines).encode()
        found = list(rows(written(folder / f"x.tsv{ending}", COMPRESS[ending](content)), Errors(), columns=columns))
        assert found == [(n, dict(zip(names, record, strict=True))) for n, record in enumerate(records, first)]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(st.text(), values, max_size=4), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([".jsonl", ".ndjson", ".jsonlines", ".json-lines", ".JSONL"]),
    endings,
)
def test_json_lines_of_another_writer(folder, objects, ascii_only, kind, ending):
    content = "\r\n".join(json.dumps(entry, ensure_ascii=ascii_only) for entry in objects).encode("utf-8", "surrogatepass")
    path = written(folder / f"x{kind}{ending}", COMPRESS[ending](content))
    assert list(rows(path, Errors())) == list(enumerate(objects, 1))
    assert column_names(path) == list(objects[0])


@pytest.mark.parametrize("group", [3, 64, 1000])
def test_parquet_of_another_writer(tmp_path, group):
    table = pyarrow.table({"text": [f"text {n}" for n in range(300)], "data": [bytes([n % 256]) for n in range(300)]})
    nested = table.append_column("tags", pyarrow.array([[n, None] for n in range(300)]))
    pyarrow.parquet.write_table(nested, tmp_path / "x.parquet", row_group_size=group)
    assert list(rows(tmp_path / "x.parquet", Errors())) == list(enumerate(table.to_pylist(), 1)), "nested columns are ignored"
    assert column_names(tmp_path / "x.parquet") == ["text", "data"]


FIELDS = ["line 3: .* 2 fields .a, b.; it has 1", "line 4: .* it has 3", "line 5: .*empty"]


@pytest.mark.parametrize(
    ("ending", "data", "good", "wrong"),
    [
        (".csv", b"a,b\n1,2\n1\n1,2,3\n\n3,4\n5,6\n\n\n", [2, 6, 7], FIELDS),
        (".tsv", b"a\tb\n1\t2\n1\n1\t2\t3\n\n3\t4\n5\t6\n\n", [2, 6, 7], FIELDS),
        (".csv", b'a,b\n1,"2\n3,4\n5,6', [], ["line 2: .*unexpected end of data.*lines 2 to 4 are skipped"]),
        (".csv", b'a,b\n1,"2"x\n3,4', [3], ["line 2: invalid CSV"]),
        (".csv", b"a,b\n1,2\rx\n3,4", [3], ["line 2: invalid CSV"]),
        (".csv", b"a,b\n1,\0\n3,4", [3], ["line 2: .* NUL"]),
        (".tsv", b"a\tb\n1\t\0\n3\t4", [3], ["line 2: .* NUL"]),
        (".csv", b'a,b\n1,"2\n\xff"\n3,4', [4], ["line 2: .*line 3: byte 0xff"]),
        (".csv", b"a,b\n1,\xff\n3,4", [3], ["line 2: byte 0xff"]),
        (".csv", b"a,\xff\n1,2\n3,4", [], ["line 1: byte 0xff"]),
        (".csv", b"a,b,a\n1,2,3\n", [], ["csv: .*'a' occurs 2 times"]),
        (".tsv", b"a\t\n1\t2\n", [], ["tsv: .*name 2 is empty"]),
        (".csv", b"\n1,2\n", [], ["csv: .*there are 0 names"]),
        (".csv", b"a,b\n", [], ["csv: .*no rows"]),
        (".tsv", b"a\tb", [], ["tsv: .*no rows"]),
        (".jsonl", b"\n \n", [], ["jsonl: .*no rows"]),
        *((ending, b"", [], [f"{ending[1:]}: the file is empty"]) for ending in (".csv", ".tsv", ".jsonl")),
        (".parquet", b"", [], ["parquet: the file .* 0 bytes"]),
        *(
            (".parquet", data, [], ["parquet: the file cannot be read as Parquet"])
            for data in (b"PAR1", b"PAR1 no", b"PAR1" + b"\xff" * 30 + b"\xff\0\0\0PAR1")
        ),
        (".jsonl", b'{"a":1}\n\n{"a":2}\n{}\n\n', [1, 3, 4], ["line 2: the line is empty"]),
        (".jsonl", b'{"a":1}\n{"a":\n[1]\n"x"\n{}{}\n', [1], ["line 2: .*Expecting value at character 6", "list", "str", "Extra data"]),
        (".jsonl", b'{"a":NaN}\n{"a":-Infinity}\n{"a":1e999}\n{}', [4], ["line 1: .*NaN", "-Infinity", "1e999 is too large"]),
        (".jsonl", b'{"a":' + b"9" * 5000 + b"}\n{}", [2], ["line 1: .* digits"]),
        (".jsonl", b'{"a":' + b"[" * 100_000 + b"}\n{}", [2], ["line 1: .* nested too deeply"]),
        (".jsonl", b'{"a":1,"b":2,"a":3}\n{"x":{"y":1,"y":1}}\n{}', [3], ["line 1: .*'a' occurs 2 times", "line 2: .*'y'"]),
        (".jsonl", b'{"a":"\0"}\n{}', [2], ["line 1: .* NUL"]),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, ending, data, good, wrong):
    path = written(tmp_path / f"x{ending}", data)
    found, errors = read(rows, path)
    assert [line for line, _ in found] == good
    for message, expected in zip(errors, wrong, strict=True):
        with pytest.raises(ValueError, match=expected):
            raise ValueError(message)
    with pytest.raises(BadItem, match=wrong[0]):
        list(rows(path, Errors()))


@pytest.mark.parametrize("ending", [".tsv", ".jsonl", ".csv"])
@given(st.sampled_from([b"", b"a,b\n", b"a\tb\r\n", b"a\n"]), odd_bytes)
def test_every_row_is_read_or_an_error(folder, ending, header, content):
    data = header + content
    path, errors = written(folder / f"x{ending}", data), AllErrors()
    found = list(rows(path, errors))
    assert found or errors.all
    if errors.all:
        with pytest.raises(BadItem):
            list(rows(path, Errors()))
    first = 1 if ending == ".jsonl" else 2
    if any(error.line is None or error.line < first for error in errors.all):  # concerns the whole file
        assert (len(errors.all), found) == (1, [])
    elif ending != ".csv" or b'"' not in data:
        places = sorted([number for number, _ in found] + [error.line for error in errors.all])
        assert places == list(range(first, first + len(places)))
        rest = b"".join(data.removeprefix(b"\xef\xbb\xbf").split(b"\n")[first - 1 + len(places) :])
        assert rest.strip(b" \t\r\x0b\x0c\x1c\x1d\x1e\x1f") == b"", "only empty lines at the end are left"


@pytest.mark.parametrize("name", ["x.txt", "x", "x.gz", "x.json", "x.parquet.gz", "csv", "x.csv.zip"])
def test_an_unknown_ending_is_refused(tmp_path, name):
    path = written(tmp_path / name, b"a,b\n1,2\n")
    for use in (lambda path: list(rows(path, Errors())), column_names):
        with pytest.raises(BadItem, match=rf"{name}: .*\.csv, \.tsv, \.jsonl.*\.parquet.*\.gz, \.xz, \.bz2"):
            use(path)
    assert not name.endswith(tables.ENDINGS)


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_column_names_that_cannot_be_read(tmp_path, ending):
    for data in (b"", b"\xff\n", b"\0"):
        with pytest.raises(BadItem, match=rf"x\{ending}"):
            column_names(written(tmp_path / f"x{ending}", data))


def test_column_names_need_the_first_line_only(tmp_path):
    assert column_names(written(tmp_path / "x.csv", b'a,b\n"')) == ["a", "b"]
    truncated = gzip.compress(b"a\tb\n" + os.urandom(1 << 22).hex().encode())[: 1 << 20]
    assert column_names(written(tmp_path / "x.tsv.gz", truncated)) == ["a", "b"]


def test_long_fields_leave_the_limit_of_csv_as_it_was(tmp_path):
    before, long = csv.field_size_limit(), "x" * 10_000_000
    found = rows(written(tmp_path / "x.csv", f"a,b\n1,{long}\n".encode()), Errors())
    assert next(found) == (2, {"a": "1", "b": long})
    assert csv.field_size_limit() == before == 131_072


def test_an_open_quote_does_not_take_all_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1000)
    found, (error,) = read(rows, written(tmp_path / "x.csv", b'a,b\n1,"open\n' + b"3,4\n" * 1000))
    assert "x.csv, line 2: " in error
    assert [line for line, _ in found][-1] == 1002, "reading continued"


def test_a_line_of_tabs_is_not_split_into_all_of_its_fields(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_COLUMNS", 5)
    found, (error,) = read(rows, written(tmp_path / "x.tsv", b"a\tb\tc\td\te\n" + b"\t" * 50 + b"\n" + b"\t" * 4))
    assert [line for line, _ in found] == [3]
    assert "line 2: " in error
    assert "it has 6" in error


def test_a_compressed_table_that_is_truncated_within_a_row(tmp_path):
    content = b"a,b\n" + b"".join(b'%d,"%s\nsecond line"\n' % (n, os.urandom(30).hex().encode()) for n in range(3000))
    packed = gzip.compress(content)
    for size in range(len(packed) // 2, len(packed) // 2 + 400, 7):
        found, (error,) = read(rows, written(tmp_path / "x.csv.gz", packed[:size]))
        assert [row["a"] for _, row in found] == [str(n) for n in range(len(found))]
        assert "x.csv.gz: " in error
        assert "truncated" in error


@pytest.mark.parametrize("column", [0, 1])
def test_after_damage_parquet_continues_with_the_next_row_group(tmp_path, column):
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"a": [f"a{n}" * 10 for n in range(100)], "b": list(range(100))})
    pyarrow.parquet.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False)
    with pyarrow.parquet.ParquetFile(path) as file:
        chunk = file.metadata.row_group(4).column(column)
    data = bytearray(path.read_bytes())
    start, size = chunk.data_page_offset, chunk.total_compressed_size
    data[start : start + size] = b"\xff" * size
    found, (error,) = read(rows, written(path, data))
    assert found == [(n, row) for n, row in enumerate(table.to_pylist(), 1) if not 41 <= n <= 50]
    assert "x.parquet, line 41: rows 41 to 50" in error


def test_a_parquet_row_that_python_cannot_represent(tmp_path):
    raw = pyarrow.array([b"good", b"\xff\xfe", b"good"], pyarrow.binary())
    broken = pyarrow.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "x.parquet")
    found, (error,) = read(rows, tmp_path / "x.parquet")
    assert [number for number, _ in found] == [1, 3]
    assert "line 2: " in error


def test_a_parquet_file_that_states_much_more_than_its_size_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * (4 << 20)]}), path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 20_000
    assert len(list(rows(path, Errors()))) == 1
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 1 << 20)
    with pytest.raises(BadItem, match="line 1: .*limit is 1,048,576"):
        list(rows(path, Errors()))
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(BadItem, match=r"x\.parquet: .*1,048,576 bytes and 200 times"):
        list(rows(path, Errors()))


@pytest.mark.parametrize("field", [1, 2, 3])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
def test_a_parquet_page_that_states_two_gigabytes_is_an_error(tmp_path, field, compression):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some text"] * 3}), file, compression=compression)
    # In the header of the page of a dictionary: size, compressed size and number of values.
    header = re.search(rb"\x15\x04\x15(.)\x15(.)\x4c\x15(.)", file.getvalue(), re.DOTALL)
    largest = bytes([0xFE, 0xFF, 0xFF, 0xFF, 0x0F])  # 2^31 - 1
    data = file.getvalue()[: header.start(field)] + largest + file.getvalue()[header.end(field) :]
    with pytest.raises(BadItem, match=r"x\.parquet, line 1: "):
        list(rows(written(tmp_path / "x.parquet", data), Errors()))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pyarrow.table([[1], [2]], names=["a", "a"]), "'a' occurs 2 times"),
        (pyarrow.table({"a": pyarrow.array([], pyarrow.int64())}), "no rows"),
        (pyarrow.table({"a": [[1], [2]]}), "there are 0 names"),
    ],
)
def test_parquet_without_distinct_names_or_rows(tmp_path, table, message):
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(BadItem, match=rf"x\.parquet: .*{message}"):
        list(rows(tmp_path / "x.parquet", Errors()))
