"""Rows of CSV and TSV files. Whole files of trouble and single rows of it come as ``BadItem`` in the place of rows."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from permuteformer.tasks.readers import lines
from permuteformer.tasks.readers.columns import without_empty_lines, wrong_names
from permuteformer.tasks.readers.lines import text_lines
from permuteformer.tasks.readers.problems import BadItem
from permuteformer.tasks.readers.unpacking import AnyPath, reason
from permuteformer.texts import printable

MAX_COLUMNS = 100_000
"""A line of tabs must not become millions of fields."""

Records = Iterator[tuple[int, "list[str] | BadItem | None"]]
"""The line it starts at, and its fields; an empty line is ``None``."""

Rows = Iterator[tuple[int, "dict[str, str] | BadItem"]]


def csv_rows(path: AnyPath, columns: Sequence[str] | None) -> Rows:
    """Rows as Python's ``csv`` takes them apart, strictly: a quote that is not closed, or that letters follow, is a problem.

    Where the header has no comma but semicolons or tabs, these part the fields, as spreadsheets of some countries have it.
    """
    return _rows(path, _csv_records(path, "," if columns is not None else _delimiter(path)), columns)


def tsv_rows(path: AnyPath, columns: Sequence[str] | None) -> Rows:
    """Rows split at tabs. In a file of one column an empty line is an empty value."""
    return _rows(path, _tsv_records(path), columns, empty_value=True)


def csv_header(path: AnyPath) -> list[str]:
    """The names in the first line."""
    return _header(path, next(_csv_records(path, _delimiter(path)))[1])


def tsv_header(path: AnyPath) -> list[str]:
    """The names in the first line."""
    return _header(path, next(_tsv_records(path))[1])


def _rows(path: AnyPath, records: Records, columns: Sequence[str] | None, empty_value: bool = False) -> Rows:
    if columns is None:
        number, first = next(records)  # there is one: an empty file is a BadItem
        try:
            names = _header(path, first)
        except BadItem as problem:
            yield number, problem
            return
    else:
        names = list(columns)
    if empty_value and len(names) == 1:
        records = ((number, [""] if fields is None else fields) for number, fields in records)
    checked: Iterator[tuple[int, list[str] | BadItem]] = without_empty_lines(path, records)
    for number, fields in checked:
        if isinstance(fields, BadItem):
            yield number, fields
        elif len(fields) != len(names):
            expected = f"{len(names):,} ({printable(', '.join(names))})"
            quoted = empty_value and '"' in "".join(fields)
            hint = "; in TSV a quote is a letter: if fields are quoted, name the file .csv" if quoted else ""
            yield number, BadItem(path, number, f"the number of fields must be {expected}; it is {len(fields):,}{hint}")
        else:
            yield number, dict(zip(names, fields, strict=True))


def _header(path: AnyPath, first: list[str] | BadItem | None) -> list[str]:
    """The names in the first record, or a problem of the whole file: rows mean nothing without names."""
    if isinstance(first, BadItem):
        raise first if first.line is None else BadItem(path, first.line, f"the names of the columns cannot be read: {first.message}")
    if wrong := wrong_names(first or []):
        raise BadItem(path, None, f"the first line must name the columns; {wrong}")
    return first or []


def _tsv_records(path: AnyPath) -> Records:
    for number, line in text_lines(path):
        if isinstance(line, BadItem):
            yield number, line
        elif "\0" in line:
            yield number, _nul(path, number)
        elif line.count("\t") >= MAX_COLUMNS:
            yield number, BadItem(path, number, f"there are more than {MAX_COLUMNS:,} fields, which is the limit")
        else:
            text = line[:-2] if line.endswith("\r\n") else line.removesuffix("\n")
            yield number, text.split("\t") if text else None


def _delimiter(path: AnyPath) -> str:
    header = next(text_lines(path))[1]
    found = [] if isinstance(header, BadItem) else [sign for sign in ",;\t" if sign in header]
    return found[0] if found else ","


def _csv_records(path: AnyPath, delimiter: str) -> Records:
    feed = _Feed(path)
    reader = csv.reader(feed, strict=True, delimiter=delimiter)
    while True:
        feed.begin()
        limit = csv.field_size_limit(lines.MAX_LINE_BYTES)  # there is one for the whole process: it is given back
        record: list[str] | BadItem
        try:
            record = next(reader)
        except StopIteration:
            return
        except BadItem as problem:
            whole = f"the row that starts here cannot be read to its end: {problem}"
            record = BadItem(path, feed.first, whole) if feed.size else problem
        except csv.Error as error:
            span = "" if feed.last == feed.first else f"; lines {feed.first:,} to {feed.last:,} are passed over"
            record = BadItem(path, feed.first, f"this is no CSV ({reason(error)}){span}; check the quotes")
        finally:
            csv.field_size_limit(limit)
        yield feed.first, record or None


class _Feed:
    """Lines for ``csv.reader``, which asks for another one as long as a quote is open."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._lines = text_lines(path)
        self.first = self.last = self.size = 0

    def begin(self) -> None:
        """A new row begins with the next line."""
        self.first = self.size = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.last, line = next(self._lines)
        self.first = self.first or self.last
        if isinstance(line, BadItem):
            raise line
        if "\0" in line:
            raise _nul(self._path, self.last)
        if self.size + len(line) > lines.MAX_LINE_BYTES + 2:
            too_long = f"a row of more than {lines.MAX_LINE_BYTES:,} characters is over the limit; check the quotes"
            raise BadItem(self._path, self.last, too_long)
        self.size += len(line)
        return line


def _nul(path: AnyPath, number: int) -> BadItem:
    return BadItem(path, number, "there is a NUL byte, which text does not have; save the file as UTF-8")
