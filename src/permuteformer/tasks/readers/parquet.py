"""Rows of Parquet files, a small batch at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from permuteformer.tasks.readers.columns import wrong_names
from permuteformer.tasks.readers.pages import check_columns, column_chunks
from permuteformer.tasks.readers.problems import BadItem
from permuteformer.tasks.readers.unpacking import AnyPath, Broken, check_file, reason

MAX_COLUMNS = 10_000

BATCH = 8
"""Rows that are in memory at once: few, as a small file may say one long text many times."""

Rows = Iterator[tuple[int, "dict[str, Any] | BadItem"]]


def rows(path: AnyPath) -> Rows:
    """Row numbers, from 1, and rows, or what is wrong in their place. After damage, reading goes on with the next group of rows."""
    try:
        file = _opened(path)
    except BadItem as problem:
        yield 0, problem
        return
    last = 0
    with file, open(path, "rb") as raw:
        chunks = column_chunks(raw)
        for group in range(file.num_row_groups):
            first, last = last + 1, last + file.metadata.row_group(group).num_rows
            try:
                check_columns(raw, chunks[group])
            except (Broken, OSError) as error:
                yield first, BadItem(path, first, f"rows {first:,} to {last:,} cannot be read: {reason(error)}")
                continue
            yield from _group(path, file, group, first, last)


def column_names(path: AnyPath) -> list[str]:
    """The names that the file gives."""
    with _opened(path) as file:
        return list(file.schema_arrow.names)


def _opened(path: AnyPath) -> Any:
    import pyarrow.parquet  # it is slow to import, and few tables need it

    check_file(path)
    if not os.path.getsize(path):
        raise BadItem(path, None, "the file is empty; fetch or copy it again")
    try:
        with open(path, "rb") as raw:
            groups = len(column_chunks(raw))
        # Buffered and not ahead: else a whole group of rows is in memory.
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        names = file.schema_arrow.names
    except Exception as error:  # Arrow's own errors, and those of Python that it raises, are of many types
        raise BadItem(path, None, f"this cannot be read as Parquet ({reason(error)}); fetch or copy it again") from None
    if groups != file.num_row_groups:  # of a footer that is read in two ways
        file.close()
        raise BadItem(path, None, "this cannot be read as Parquet (its footer is damaged); fetch or copy it again")
    if len(names) > MAX_COLUMNS:
        file.close()
        raise BadItem(path, None, f"there are more than {MAX_COLUMNS:,} columns, which is the limit")
    if wrong := wrong_names(names):
        file.close()
        raise BadItem(path, None, f"columns must have different names; {wrong}")
    return file


def _group(path: AnyPath, file: Any, group: int, first: int, last: int) -> Rows:
    number = first
    batches = file.iter_batches(BATCH, row_groups=[group], use_threads=False)
    wrong = "the file ends"
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:
            wrong, batch = reason(error), None
        if batch is None:
            break
        for row in _batch(path, batch, number):
            yield number, row
            number += 1
    if number != last + 1:
        yield number, BadItem(path, number, f"rows {number:,} to {last:,} cannot be read ({wrong}); fetch or copy it again")


def _batch(path: AnyPath, batch: Any, first: int) -> list[dict[str, Any] | BadItem]:
    try:
        return list(batch.to_pylist())
    except Exception:  # text that is not UTF-8, dates that Python does not have: only the rows that have them are lost
        return [_row(path, batch.slice(at, 1), first + at) for at in range(batch.num_rows)]


def _row(path: AnyPath, one: Any, number: int) -> dict[str, Any] | BadItem:
    try:
        row: dict[str, Any] = one.to_pylist()[0]
    except Exception as error:
        return BadItem(path, number, f"this row cannot be used: {reason(error)}")
    return row
