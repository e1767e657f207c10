"""Rows of tables as dicts, one at a time: CSV, TSV, JSON lines and Parquet by the file's ending."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from permuteformer.tasks.readers import delimited, jsonlines, parquet
from permuteformer.tasks.readers.columns import wrong_names
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.unpacking import PACKINGS, AnyPath
from permuteformer.texts import printable


def rows(path: AnyPath, problems: Problems, *, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row by row: the line it starts at (in Parquet its number), from 1, and a dict of its columns.

    By its ending a file is CSV (``.csv``), TSV (``.tsv``), JSON lines (``.jsonl``, ``.ndjson``, ``.jsonlines``, ``.json-lines``), each of
    them maybe packed (``.gz``, ``.xz``, ``.bz2``), or Parquet (``.parquet``). CSV knows quotes, and line breaks within them, and may have
    semicolons or tabs in place of commas; in TSV a tab always parts and a quote is a letter. Their values are strings; JSON and Parquet
    give what they hold.

    A row that cannot be used goes to ``problems``, and reading goes on: too few or too many fields, what is no JSON object, NaN, bytes that
    are not UTF-8 or are NUL, an empty line that is not at the end. A file without rows is a problem too.

    Args:
        path: the file.
        problems: takes what cannot be used.
        columns: the names of the columns of a CSV or TSV file without a header; with ``None`` the first line names them.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "reviews.csv")
    >>> _ = path.write_text('label,text\\n1,"good,\\nvery"\\n0,bad\\n')
    >>> list(rows(path, Problems()))
    [(2, {'label': '1', 'text': 'good,\\nvery'}), (4, {'label': '0', 'text': 'bad'})]
    """
    ending = _ending(path)
    if columns is not None:
        if ending not in _DELIMITED:
            raise ValueError(f"columns must be None for {printable(os.fspath(path))}, whose columns have names; it is {columns!r}")
        if wrong := wrong_names(columns):
            raise ValueError(f"columns must be different names; {wrong}")
    return _taken(path, problems, _DELIMITED[ending][0](path, columns) if ending in _DELIMITED else _OTHERS[ending][0](path))


def column_names(path: AnyPath) -> list[str]:
    """The names of the columns, from the first line alone: a header, or the keys of the first JSON object.

    Raises:
        BadItem: there is none, or it cannot be read.
    """
    ending = _ending(path)
    return (_DELIMITED[ending][1] if ending in _DELIMITED else _OTHERS[ending][1])(path)


def _taken(
    path: AnyPath, problems: Problems, found: Iterator[tuple[int, dict[str, Any] | BadItem]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    empty = True
    for number, row in found:
        empty = False
        if isinstance(row, BadItem):
            problems.add(row)
        else:
            yield number, row
    if empty:
        problems.add(BadItem(path, None, "there are no rows; fetch or copy it again"))


Found = Iterator[tuple[int, Any]]

_DELIMITED: dict[str, tuple[Callable[[AnyPath, Sequence[str] | None], Found], Callable[[AnyPath], list[str]]]] = {
    ".csv": (delimited.csv_rows, delimited.csv_header),
    ".tsv": (delimited.tsv_rows, delimited.tsv_header),
}

_OTHERS: dict[str, tuple[Callable[[AnyPath], Found], Callable[[AnyPath], list[str]]]] = {
    ".jsonl": (jsonlines.rows, jsonlines.keys),
    ".ndjson": (jsonlines.rows, jsonlines.keys),
    ".jsonlines": (jsonlines.rows, jsonlines.keys),
    ".json-lines": (jsonlines.rows, jsonlines.keys),
    ".parquet": (parquet.rows, parquet.column_names),
}

ENDINGS = (*_DELIMITED, *_OTHERS, *(ending + packing for ending in (*_DELIMITED, *_OTHERS) if ending != ".parquet" for packing in PACKINGS))
"""What names of tables end in. Parquet packs by itself."""


def _ending(path: AnyPath) -> str:
    name = os.path.basename(os.fspath(path)).lower()
    for packing in PACKINGS if name.endswith(ENDINGS) else ():
        name = name.removesuffix(packing)
    found = [ending for ending in (*_DELIMITED, *_OTHERS) if name.endswith(ending)]
    if not found:
        packed = f"all but .parquet maybe with {', '.join(PACKINGS)} after it"
        raise BadItem(path, None, f"the ending must be one of {', '.join((*_DELIMITED, *_OTHERS))}, {packed}; rename it")
    return found[0]
