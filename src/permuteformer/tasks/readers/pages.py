"""The pages of Parquet, looked at before they are unpacked: Arrow makes as much room as their headers ask for.

The footer is read here too: where it is damaged in some ways, asking pyarrow for what it says of a column ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from permuteformer.tasks.readers.unpacking import Broken

MAX_PAGE_BYTES = 256 << 20
"""Writers make pages of 1 MB; a larger one holds long texts."""

MAX_GROUP_BYTES = 1 << 30
"""Of one page of each column, which are unpacked at the same time."""

MAX_PAGE_VALUES = 1 << 26
MAX_LIST_VALUES = 1 << 22
VALUES_A_BYTE = 64
"""Lists may tell of more values than ``MAX_LIST_VALUES`` only in as many bytes: else a few bytes would be a row of a thousand million."""

SLACK = 128
"""Old writers did not count a header."""

_HEADER_BYTES = 1 << 20
_DAMAGED = "what it says of its pages is damaged"
_ROW_GROUPS, _COLUMNS, _META = 4, 1, 3  # fields of Parquet's structures, by their numbers
_PATH, _PACKED, _DATA, _DICTIONARY = 3, 7, 9, 11
_KIND, _UNPACKED, _PACKED_PAGE = 1, 2, 3
_DICTIONARY_PAGE = 2


class Column(NamedTuple):
    """Where the pages of a column are, in one group of rows."""

    start: int
    end: int
    nested: bool


class Page(NamedTuple):
    """What a page's header says."""

    unpacked: int
    packed: int
    values: int
    header: int
    """Bytes of the header itself."""


def column_chunks(file: BinaryIO) -> list[list[Column]]:
    """The columns of every group of rows, by the footer. Raises ``Broken`` where it is damaged."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(size - 8, 0))
    length = int.from_bytes(file.read(8)[:4], "little")
    if not 0 < length <= size - 12:
        raise Broken(_DAMAGED)
    file.seek(size - 8 - length)
    try:
        groups = _Compact(file.read(length)).struct().get(_ROW_GROUPS, [])
        return [[_column(chunk[_META], size) for chunk in group[_COLUMNS]] for group in groups]
    except (LookupError, TypeError, AttributeError):
        raise Broken(_DAMAGED) from None


def _column(meta: dict[int, Any], size: int) -> Column:
    start, packed = meta[_DATA], meta[_PACKED]
    if 0 < meta.get(_DICTIONARY, 0) < start:
        start = meta[_DICTIONARY]
    if start < 0 or packed < 0 or start + packed > size:
        raise Broken("a column is said to be where the file has ended")
    return Column(start, start + packed, len(meta[_PATH]) > 1)


def check_columns(file: BinaryIO, columns: list[Column]) -> None:
    """Raise ``Broken`` where a group of rows asks for more memory than a file of its size may."""
    largest = 0
    for column in columns:
        found = list(_pages(file, column)) if column.start else []  # one without rows has none
        largest += max((page.unpacked for page in found), default=0)
        values, packed = sum(page.values for page in found), column.end - column.start
        if column.nested and values > max(MAX_LIST_VALUES, VALUES_A_BYTE * packed):
            raise Broken(f"lists of {values:,} values are said to be in {packed:,} bytes", "do not trust it")
    if largest > MAX_GROUP_BYTES:
        raise Broken(f"its pages unpack to {largest:,} bytes at a time; the limit is {MAX_GROUP_BYTES:,}")


def _pages(file: BinaryIO, column: Column) -> Iterator[Page]:
    at = column.start
    while at < column.end:
        page = _page(file, at)
        if page.unpacked > MAX_PAGE_BYTES:
            raise Broken(f"a page unpacks to {page.unpacked:,} bytes; the limit is {MAX_PAGE_BYTES:,}")
        yield page
        at += page.header + page.packed
        if at > column.end + SLACK:
            raise Broken("a page is said to be longer than its column")


def _page(file: BinaryIO, at: int) -> Page:
    room = 256
    while True:
        file.seek(at)
        reader = _Compact(file.read(room))
        try:
            fields = reader.struct()
            break
        except IndexError:  # it is longer
            if room >= _HEADER_BYTES or len(reader.data) < room:
                raise Broken(_DAMAGED) from None
            room *= 16
    unpacked, packed = fields.get(_UNPACKED), fields.get(_PACKED_PAGE)
    values = max((n for inner in fields.values() if isinstance(inner, dict) and isinstance(n := inner.get(1), int)), default=0)
    if not isinstance(unpacked, int) or not isinstance(packed, int) or min(unpacked, packed, values) < 0:
        raise Broken(_DAMAGED)
    most = unpacked if fields.get(_KIND) == _DICTIONARY_PAGE else MAX_PAGE_VALUES  # a value of a dictionary takes a byte at least
    if values > most:
        raise Broken(f"a page is said to have {values:,} values; it may have {most:,}")
    return Page(unpacked, packed, values, reader.at)


class _Compact:
    """Structures in Thrift's compact form, as dicts by the numbers of fields. ``IndexError`` where the data ends before them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > 16:
            raise Broken(_DAMAGED)
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            fields[number] = None if head & 15 in (1, 2) else self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2, 3):  # true and false in a list, and a byte
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind in (7, 8):
            return self._bytes(8 if kind == 7 else self._varint())
        if kind in (9, 10):
            head = self._byte()
            return [self._value(head & 15, depth + 1) for _ in range(head >> 4 if head >> 4 < 15 else self._varint())]
        if kind == 12:
            return self.struct(depth + 1)
        raise Broken(_DAMAGED)  # maps, of which Parquet has none

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _bytes(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise IndexError
        return self.data[self.at - size : self.at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise Broken(_DAMAGED)

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
