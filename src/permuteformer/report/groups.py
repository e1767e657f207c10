"""Runs that differ by their seed alone: what a cell of a table is made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from permuteformer.experiments.published import COLUMN_TITLES, ROW_TITLES
from permuteformer.report.records import Record

OWN = "own"
"""The table of runs that are in no table."""
LONGEST_TITLE = 60


@dataclass(frozen=True)
class Group:
    """One or more runs of the same work with different seeds."""

    table: str
    preset: str
    row: str
    column: str
    row_title: str
    column_title: str
    records: tuple[Record, ...]
    anchor: str
    """Where the page tells of its runs."""
    settings: str = ""
    """What sets it apart from other runs of the same model on the same task, for one's own runs."""

    @property
    def first(self) -> Record:
        """That of the lowest seed."""
        return self.records[0]

    @property
    def title(self) -> str:
        """For people."""
        place = {OWN: "Own run"}.get(self.table, f"Table {self.table}" if self.table.isdigit() else self.table.capitalize())
        return " · ".join(part for part in (place, self.preset, self.column_title, self.row_title) if part)


def group(records: Iterable[Record]) -> list[Group]:
    """Runs by cell, in the paper's order of rows and columns, and what the paper does not have after it."""
    records = list(records)
    varying = _varying([record for record in records if record.table is None])
    found: dict[tuple[str, ...], list[Record]] = {}
    settings: dict[tuple[str, ...], str] = {}
    for record in records:
        key: tuple[str, ...]
        if record.table is None:
            model, task = str(record.work.get("model", "?")), str(record.work.get("task") or record.task.get("name") or "?")
            told = _settings(record, varying.get((task, model), ()))
            key = (OWN, "", f"{model} ({told})" if told else model, task, "")
            settings[key] = told
        else:
            measured = str(record.work.get("kind", "")) if record.kind == "measurement" and not record.table.isdigit() else ""
            key = (record.table, record.preset or "", record.row or "", record.column or "", measured)
        found.setdefault(key, []).append(record)
    anchors: set[str] = set()
    groups = []
    for key in sorted(found, key=_order):
        table, preset, row, column, _ = key
        of_it = sorted(found[key], key=lambda record: (record.seed, record.run, record.path))
        groups.append(
            Group(
                table,
                preset,
                row,
                column,
                shorten(ROW_TITLES.get(row, row)),
                shorten(COLUMN_TITLES.get(column, column)),
                tuple(of_it),
                unique(slug("runs", *key), anchors),
                settings.get(key, ""),
            )
        )
    return groups


def slug(*parts: str) -> str:
    """A name for files and anchors, of letters, digits and hyphens.

    >>> slug("Table 1", "<script>")
    'table-1-script'
    """
    return "-".join(part for part in (re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] for text in parts) if part) or "unnamed"


def unique(name: str, taken: set[str]) -> str:
    """The name, or with a number after it if it is taken; it is taken from then on."""
    chosen, i = name, 2
    while chosen in taken:
        chosen, i = f"{name}-{i}", i + 1
    taken.add(chosen)
    return chosen


def shorten(text: str, most: int = LONGEST_TITLE) -> str:
    """A text that fits into a table.

    >>> shorten("a" * 100, 5)
    'aaaa…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def row_order(row: str) -> tuple[int, str]:
    """Rows in the paper's order, others behind it by name."""
    return _place(row, list(ROW_TITLES))


def column_order(column: str) -> tuple[int, int, str]:
    """Columns in the paper's order, numbers by value, others by name."""
    place, name = _place(column, list(COLUMN_TITLES))
    return place, int(column) if column.isdecimal() and len(column) < 19 else -1, name


def _order(key: tuple[str, ...]) -> tuple[Any, ...]:
    table, preset, row, column, measured = key
    return (table == OWN, not table.isdigit(), table, preset, measured, column_order(column), row_order(row))


def _place(name: str, known: Sequence[str]) -> tuple[int, str]:
    return (known.index(name), "") if name in known else (len(known), name)


def _varying(records: Sequence[Record]) -> dict[tuple[str, str], tuple[str, ...]]:
    """For each task and model of one's own runs the fields, besides the seed, in which its runs differ."""
    by_model: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        task = str(record.work.get("task") or record.task.get("name") or "?")
        by_model.setdefault((task, str(record.work.get("model", "?"))), []).append(record)
    varying = {}
    for key, of_it in by_model.items():
        names = sorted({name for record in of_it for name in record.work} - {"seed", "task", "model"})
        varying[key] = tuple(name for name in names if len({_as_text(record.work.get(name)) for record in of_it}) > 1)
    return varying


def _settings(record: Record, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={_as_text(record.work.get(name))}" for name in names)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
