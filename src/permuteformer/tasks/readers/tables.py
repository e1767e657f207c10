"""Rows of tables as dicts: CSV, TSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from permuteformer.formatting import printable
from permuteformer.tasks.readers import text
from permuteformer.tasks.readers.errors import AnyPath, BadItem, CorruptFile, Errors, reason

MAX_COLUMNS = 100_000

PARQUET_BATCH = 8
"""Rows of Parquet in memory at a time: few, because a small file may repeat a long text many times."""

MAX_BATCH_BYTES = 1 << 30

DELIMITED = (".csv", ".tsv")
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines", ".json-lines")
FORMATS = (*DELIMITED, *JSON_LINES, ".parquet")
ENDINGS = (*FORMATS, *(format + ending for format in (*DELIMITED, *JSON_LINES) for ending in text.COMPRESSIONS))
"""Endings of the names of tables. Parquet has its own compression."""

Rows = Iterator[tuple[int, "dict[str, Any] | BadItem | None"]]
Records = Iterator[tuple[int, "list[str] | BadItem | None"]]
"""Line numbers with a row or its fields, the error in place of a row, or ``None`` for an empty line."""


def rows(path: AnyPath, errors: Errors, *, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number where a row starts (in Parquet the row number), from 1, and the row.

    The file name's ending selects the format. CSV has quotes, and commas between fields or, where the first line has no comma, semicolons
    or tabs. In TSV tabs separate fields and quotes are ordinary characters. Values of CSV and TSV are strings. Nested columns of Parquet
    (lists, structs, maps) are ignored.

    Rows that cannot be used are errors: too few or too many fields, invalid JSON, NaN, bytes that are not UTF-8, NUL bytes, empty lines
    except at the end. A file without rows is an error too.

    Args:
        path: the file.
        errors: raises or collects errors.
        columns: names of the columns of a CSV or TSV file without a header.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "reviews.csv")
    >>> _ = path.write_text('label,text\\n1,"good,\\nvery"\\n0,bad\\n')
    >>> list(rows(path, Errors()))
    [(2, {'label': '1', 'text': 'good,\\nvery'}), (4, {'label': '0', 'text': 'bad'})]
    """
    nothing, empty_lines = True, 0
    for number, row in _rows(path, columns):
        if row is None:
            empty_lines += 1
            continue
        for line in range(number - empty_lines, number):
            errors.add(BadItem(path, line, "the line is empty; delete it"))
        nothing, empty_lines = False, 0
        if isinstance(row, BadItem):
            errors.add(row)
        else:
            yield number, row
    if nothing:
        errors.add(BadItem(path, None, "the table has no rows; download or copy it again"))


def column_names(path: AnyPath) -> list[str]:
    """Return the names in the header, the first JSON object or the Parquet schema. Raise ``BadItem`` if they cannot be read."""
    format = _format(path)
    if format in DELIMITED:
        return _header(path, _records(path, format))
    if format == ".parquet":
        file, names = _open_parquet(path)
        file.close()
        return names
    return list(next(rows(path, Errors()))[1])


def _rows(path: AnyPath, columns: Sequence[str] | None) -> Rows:
    format = _format(path)
    if format in DELIMITED:
        return _delimited_rows(path, format, columns)
    return _parquet_rows(path) if format == ".parquet" else _json_rows(path)


def _format(path: AnyPath) -> str:
    name = os.path.basename(os.fspath(path)).lower()
    if not name.endswith(ENDINGS):
        compressed = f"all but .parquet optionally followed by {', '.join(text.COMPRESSIONS)}"
        raise BadItem(path, None, f"the file name must end in one of {', '.join(FORMATS)}, {compressed}; rename it")
    return next(format for format in FORMATS if name.endswith((format, *(format + ending for ending in text.COMPRESSIONS))))


def _wrong_names(names: Sequence[str]) -> str | None:
    """Return the problem with the names of columns."""
    if not 0 < len(names) <= MAX_COLUMNS:
        return f"there are {len(names):,} names; the limit is {MAX_COLUMNS:,}"
    if "" in names:
        return f"name {list(names).index('') + 1:,} is empty"
    name, times = Counter(names).most_common(1)[0]
    return f"{printable(name)!r} occurs {times:,} times" if times > 1 else None


def _lines(path: AnyPath) -> Iterator[tuple[int, str | BadItem]]:
    with text.open_stream(path) as stream:
        for number, line in text.numbered_lines(stream, path):
            nul = isinstance(line, str) and "\0" in line
            yield number, BadItem(path, number, "the line has a NUL byte; save the file as UTF-8") if nul else line


def _delimited_rows(path: AnyPath, format: str, columns: Sequence[str] | None) -> Rows:
    records = _records(path, format)
    try:
        names = columns or _header(path, records)
    except BadItem as error:
        yield 0, error
        return
    for number, fields in records:
        if fields is None and format == ".tsv" and len(names) == 1:
            fields = [""]
        if fields is None or isinstance(fields, BadItem):
            yield number, fields
        elif len(fields) == len(names):
            yield number, dict(zip(names, fields, strict=True))
        else:
            quoted = format == ".tsv" and any('"' in field for field in fields)
            hint = "; quotes have no meaning in TSV: if fields are quoted, name the file .csv" if quoted else ""
            expected = f"{len(names):,} fields ({printable(', '.join(names))})"
            yield number, BadItem(path, number, f"the row must have {expected}; it has {len(fields):,}{hint}")


def _header(path: AnyPath, records: Records) -> list[str]:
    _, names = next(records)
    if isinstance(names, BadItem):
        raise names
    if wrong := _wrong_names(names or []):
        raise BadItem(path, None, f"the first line must name the columns: {wrong}")
    return names or []


def _records(path: AnyPath, format: str) -> Records:
    if format == ".tsv":
        return _tsv_records(path)
    _, first = next(_lines(path))
    return _csv_records(path, next((sign for sign in ",;\t" if isinstance(first, str) and sign in first), ","))


def _tsv_records(path: AnyPath) -> Records:
    for number, line in _lines(path):
        if isinstance(line, BadItem):
            yield number, line
        else:
            content = line.removesuffix("\r\n").removesuffix("\n")
            yield number, content.split("\t", MAX_COLUMNS) if content else None


def _csv_records(path: AnyPath, delimiter: str) -> Records:
    lines = _lines(path)
    first = last = 0

    def row_lines() -> Iterator[str]:
        """Yield lines as long as ``csv.reader`` asks for them, because a quote is open."""
        nonlocal first, last
        first = size = 0
        for last, line in lines:
            first = first or last
            if isinstance(line, BadItem):
                raise line
            size += len(line)
            if size > text.MAX_LINE_BYTES + 2:
                raise BadItem(path, last, f"the row is longer than the limit of {text.MAX_LINE_BYTES:,} characters; check the quotes")
            yield line

    record: list[str] | BadItem | None = []
    while record is not None:
        limit = csv.field_size_limit(text.MAX_LINE_BYTES)  # a setting of the process
        try:
            record = next(csv.reader(row_lines(), strict=True, delimiter=delimiter), None)
        except BadItem as error:
            record = BadItem(path, first, f"the row that starts here cannot be read to its end: {error}") if last > first else error
        except csv.Error as error:
            skipped = f"; lines {first:,} to {last:,} are skipped" if last > first else ""
            record = BadItem(path, first, f"invalid CSV ({reason(error)}){skipped}; check the quotes")
        finally:
            csv.field_size_limit(limit)
        if record is not None:
            yield first, record or None


def _json_rows(path: AnyPath) -> Rows:
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    for number, line in _lines(path):
        if isinstance(line, BadItem):
            yield number, line
        else:
            yield number, None if line.isspace() else _json_object(path, number, line, decoder)


def _json_object(path: AnyPath, number: int, line: str, decoder: json.JSONDecoder) -> dict[str, Any] | BadItem:
    try:
        row = decoder.decode(line)
    except json.JSONDecodeError as error:
        at = min(error.pos, len(line.rstrip())) + 1  # the position may be after the line's end
        return BadItem(path, number, f"invalid JSON: {error.msg} at character {at:,}; write one object per line")
    except (ValueError, RecursionError) as error:
        wrong = "it is nested too deeply" if isinstance(error, RecursionError) else reason(error)
        return BadItem(path, number, f"the JSON cannot be used: {wrong}")
    if not isinstance(row, dict):
        return BadItem(path, number, f'each line must be a JSON object such as {{"text": "..."}}; this is a {type(row).__name__}')
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        key, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {printable(key)!r} occurs {times:,} times")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; write null, or omit the value")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {printable(digits, 40)} is too large")
    return number


def _parquet_rows(path: AnyPath) -> Rows:
    """Yield row numbers and rows. After damage, continue with the next row group."""
    try:
        file, names = _open_parquet(path)
    except BadItem as error:
        yield 0, error
        return
    last = 0
    with file:
        for group in range(file.num_row_groups):
            number, last = last + 1, last + file.metadata.row_group(group).num_rows
            problem = "the file ends"
            try:
                for batch in file.iter_batches(PARQUET_BATCH, row_groups=[group], columns=names, use_threads=False):
                    if batch.nbytes > MAX_BATCH_BYTES:
                        raise CorruptFile(f"{batch.num_rows} rows have {batch.nbytes:,} bytes; the limit is {MAX_BATCH_BYTES:,}")
                    for row in _batch_rows(path, batch, number):
                        yield number, row
                        number += 1
            except Exception as error:  # pyarrow raises its own errors and several of Python's
                problem = reason(error)
            if number != last + 1:
                yield number, BadItem(path, number, f"rows {number:,} to {last:,} cannot be read ({problem}); download or copy it again")


def _open_parquet(path: AnyPath) -> tuple[Any, list[str]]:
    """Open a Parquet file and return it with the names of its columns. Nested columns are ignored: few bytes may be billions of values."""
    import pyarrow.parquet

    text.open_file(path).close()  # raises if it is not a regular file
    try:
        # Mapped and not read ahead: else a whole row group, or as much as a damaged page header asks for, is in memory.
        file = pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True)
        # Row groups only: for columns of a damaged footer pyarrow ends the process.
        size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups))
        text.check_ratio(max(size, file.metadata.num_rows), os.path.getsize(path), text.MAX_LINE_BYTES)
        names = [field.name for field in file.schema_arrow if not pyarrow.types.is_nested(field.type)]
        if wrong := _wrong_names(file.schema_arrow.names) or _wrong_names(names):
            raise CorruptFile(f"columns must have distinct names: {wrong}", "rename them")
        if len(names) < len(file.schema_arrow) and any("." in name for name in file.schema_arrow.names):
            raise CorruptFile("names of columns with dots are ambiguous beside nested columns", "rename them")
    except Exception as error:  # pyarrow raises its own errors and several of Python's
        raise BadItem(path, None, f"the file cannot be read as Parquet: {reason(error)}") from None
    return file, names


def _batch_rows(path: AnyPath, batch: Any, first: int) -> list[dict[str, Any] | BadItem]:
    try:
        return list(batch.to_pylist())
    except Exception as error:  # text that is not UTF-8, dates that Python cannot represent: only their rows are lost
        if batch.num_rows == 1:
            return [BadItem(path, first, f"the row cannot be used: {reason(error)}")]
        return [row for n in range(batch.num_rows) for row in _batch_rows(path, batch.slice(n, 1), first + n)]
