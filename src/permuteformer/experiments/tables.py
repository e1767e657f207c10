"""Tables as data: rows, columns, and the experiment or measurement of every cell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from permuteformer.experiments.experiment import Experiment, Measurement
from permuteformer.registry import unknown


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    table: str
    row: str
    column: str
    seed: int
    work: Experiment | Measurement

    @property
    def name(self) -> str:
        """Unique within a plan; the name of its folder."""
        return f"table{self.table}/{self.column}/{self.row}-seed{self.seed}"

    @property
    def place(self) -> dict[str, Any]:
        """Its place in the tables, for records."""
        return {"table": self.table, "row": self.row, "column": self.column, "seed": self.seed}

    @property
    def key(self) -> str:
        """Equal for cells that do the same work, which is then done once."""
        return type(self.work).__name__ + json.dumps(self.work.to_json(), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: a task, and everything that its runs share."""

    name: str
    task: str
    model: str
    """Preset of a row, where ``{row}`` is the row's name."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the experiment or measurement."""
    same_rows: Mapping[str, str] = field(default_factory=dict)
    """Rows that are identical to another row here: without 2D, text is read as with it."""
    row_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of single rows that differ."""

    def work(self, kind: str, row: str, seed: int) -> Experiment | Measurement:
        """Return the experiment or measurement of a row."""
        shared: dict[str, Any] = {
            "task": self.task,
            "model": self.model.format(row=self.same_rows.get(row, row)),
            "task_options": self.task_options,
            "model_fields": self.model_fields,
            **self.settings,
            **self.row_settings.get(row, {}),
        }
        return Experiment(**shared, seed=seed) if kind == "training" else Measurement(**shared)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. Its kind is ``"training"``, or ``"measurement"`` for times, which have no seed."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    kind: str = "training"

    def cells(self, rows: Sequence[str], columns: Sequence[str], seeds: int) -> Iterator[Cell]:
        """Yield the cells of the chosen rows and columns, all if none are chosen. Seeds come last, so that a table fills evenly."""
        for seed in range(seeds if self.kind == "training" else 1):
            for column in self.columns:
                for row in self.rows:
                    if (not rows or row in rows) and (not columns or column.name in columns):
                        yield Cell(self.name, row, column.name, seed, column.work(self.kind, row, seed))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tables that ``permuteformer reproduce --preset NAME`` runs."""

    name: str
    title: str
    tables: tuple[Table, ...]
    seeds: int
    """Default number of seeds."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Tables and figures that are drawn from the runs of another table."""

    def with_settings(self, settings: Mapping[str, Any]) -> Plan:
        """Return the plan with other settings for all training."""
        tables = [
            replace(table, columns=tuple(replace(column, settings={**column.settings, **settings}) for column in table.columns))
            if table.kind == "training"
            else table
            for table in self.tables
        ]
        return replace(self, tables=tuple(tables))

    def cells(
        self, tables: Sequence[str] = (), rows: Sequence[str] = (), columns: Sequence[str] = (), seeds: int | None = None
    ) -> list[Cell]:
        """Return the cells of the chosen tables, rows and columns, all if none are chosen; raise for an unknown name."""
        if seeds is not None and seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {seeds}")
        known = {table.name: table for table in self.tables}
        for name in tables:
            if name not in known and name not in self.also:
                raise ValueError(unknown(f"table of preset {self.name!r}:", name, [*known, *self.also]))
        wanted = {self.also.get(name, name) for name in tables}
        chosen = [table for table in self.tables if not wanted or table.name in wanted]
        existing_rows = {row for table in chosen for row in table.rows}
        existing_columns = {column.name for table in chosen for column in table.columns}
        for kind, names, existing in (("row", rows, existing_rows), ("task", columns, existing_columns)):
            for name in names:
                if name not in existing:
                    raise ValueError(unknown(f"{kind} of these tables:", name, existing))
        return [cell for table in chosen for cell in table.cells(rows, columns, self.seeds if seeds is None else seeds)]
