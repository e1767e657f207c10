"""Tables as data: rows, columns and what is run for each of their cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from permuteformer.experiments.base import Cell, Experiment, Measurement
from permuteformer.registry import unknown


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: a task, and everything that its runs share."""

    name: str
    task: str
    model: str
    """The preset of a row, where ``{row}`` is the row's name."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the experiment, or of the measurement."""
    same: Mapping[str, str] = field(default_factory=dict)
    """Rows that are another row here: without 2D, a text is read as it is with it."""

    apart: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Rows that cannot be measured as the others are, and what of their settings differs."""

    def work(self, kind: str, row: str, seed: int) -> Experiment | Measurement:
        """What is run for a row."""
        shared: dict[str, Any] = {
            "task": self.task,
            "model": self.model.format(row=self.same.get(row, row)),
            "task_options": self.task_options,
            "model_fields": self.model_fields,
        }
        if kind == "training":
            return Experiment(**shared, **self.settings, seed=seed)
        return Measurement(**shared, **{**self.settings, **self.apart.get(row, {})})


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table. Its kind is ``"training"``, or ``"measurement"`` for times, which have no seed."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    kind: str = "training"

    def cells(self, rows: Sequence[str], columns: Sequence[str], seeds: int) -> Iterator[Cell]:
        """Every cell for the chosen rows and columns, all if none are chosen. Seeds come last, so that a table fills evenly."""
        for seed in range(seeds if self.kind == "training" else 1):
            for column in self.columns:
                for row in self.rows:
                    if (not rows or row in rows) and (not columns or column.name in columns):
                        yield Cell(self.name, row, column.name, seed, column.work(self.kind, row, seed))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What ``permuteformer reproduce --preset NAME`` runs."""

    name: str
    title: str
    tables: tuple[Table, ...]
    seeds: int
    """Seeds unless told."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Tables and figures that are drawn from the runs of another table."""

    def changed(self, settings: Mapping[str, Any]) -> Plan:
        """The same, with other settings of all training."""
        if not settings:
            return self
        tables = (
            replace(table, columns=tuple(replace(column, settings={**column.settings, **settings}) for column in table.columns))
            if table.kind == "training"
            else table
            for table in self.tables
        )
        return replace(self, tables=tuple(tables))

    def cells(
        self, tables: Sequence[str] = (), rows: Sequence[str] = (), columns: Sequence[str] = (), seeds: int | None = None
    ) -> list[Cell]:
        """The cells of the chosen tables, rows and columns; all where none are chosen. A name that is in none of them is refused."""
        if seeds is not None and seeds < 1:
            raise ValueError(f"seeds must be 1 or more; it is {seeds}")
        known = {table.name: table for table in self.tables}
        wanted = []
        for name in tables:
            if name not in known and name not in self.also:
                raise ValueError(unknown(f"table of preset {self.name!r}:", name, [*known, *self.also]))
            wanted.append(self.also.get(name, name))
        chosen = [table for table in self.tables if not wanted or table.name in wanted]
        for word, names, there in (
            ("row", rows, {row for table in chosen for row in table.rows}),
            ("task", columns, {column.name for table in chosen for column in table.columns}),
        ):
            for name in names:
                if name not in there:
                    raise ValueError(unknown(f"{word} of these tables:", name, there))
        count = self.seeds if seeds is None else seeds
        return [cell for table in chosen for cell in table.cells(rows, columns, count)]
