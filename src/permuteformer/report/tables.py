"""Tables of a report: the paper's, lengths beyond the trained one, time and memory by length, and runs without a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from permuteformer.experiments.published import COLUMN_TITLES, TABLES, Number
from permuteformer.report.cells import (
    EPOCH,
    LATENCY,
    MEMORY,
    NOT_FINITE,
    OWN,
    PARAMETERS,
    TOKEN,
    TRAINING_MEMORY,
    TRAINING_TIME,
    VALIDATION,
    Cell,
    Group,
    Quantity,
    cell_of,
    cell_of_values,
    column_order,
    group_by,
    metric_of,
    metric_quantity,
    paper_number,
    row_order,
    shorten,
    slug,
    uncertainty,
    unique,
)
from permuteformer.report.remarks import (
    Agreement,
    Standing,
    baseline_notes,
    compare,
    measurement_notes,
    missing_rows,
    speed_notes,
    task_notes,
    training_notes,
)
from permuteformer.report.runs import Run, number

TITLES = {
    "1": "Table 1: accuracy",
    "2": "Table 2: training time",
    "3": "Table 3: latency of inference",
    "4": "Table 4: perplexity of language models",
}
AVERAGED = [column for column in next(iter(TABLES["1"].values())) if column != "average"]
TRANSFORMERS = ("transformer", "transformer-lm")
SEEDS = "Mean ± standard deviation over seeds, whose number is in parentheses."
BYTES = "Ours are perplexities of bytes, the paper's of the words of WikiText-103: compare the order of rows, not the numbers."
EMPTY = Cell()


@dataclass(frozen=True)
class Column:
    """A column: its name, header and quantity."""

    name: str
    title: str
    quantity: Quantity


@dataclass(frozen=True)
class Row:
    """A row: its name, and the texts of its first columns."""

    name: str
    leads: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows and columns of cells, with caption and notes."""

    name: str
    """For files and ids."""
    title: str
    caption: str
    leads: tuple[str, ...] = ("Model",)
    """Headers of the first columns, which have texts."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    cells: Mapping[tuple[str, str], Cell]
    """By names of row and column."""
    notes: tuple[str, ...] = ()
    agreement: Agreement | None = None
    """With the paper's order of rows, where the paper has numbers."""
    groups: tuple[Group, ...] = field(default=(), repr=False)
    lengths: Mapping[str, float] = field(default_factory=dict)
    """Of tables over lengths: the length of each column."""
    axes: tuple[str, str] = ("", "")
    """Of tables over lengths: the axes of the figure."""

    def cell(self, row: Row, column: Column) -> Cell:
        """Return a cell, which may be empty."""
        return self.cells.get((row.name, column.name), EMPTY)

    def cell_of_group(self, group: Group) -> Cell:
        """Return the cell with a group's metric, in a table of the paper or of runs without a table."""
        return self.cells.get((group.row, group.column)) or self.cells.get((f"{group.column}/{group.row}", "test"), EMPTY)

    def has_paper(self, column: Column) -> bool:
        """Return whether the paper has a number in this column."""
        return any(self.cell(row, column).paper for row in self.rows)


def build_tables(groups: Sequence[Group]) -> list[Table]:
    """Return all tables that these groups fill, in the paper's order."""
    tables: list[Table] = []
    for (table, preset), grouped in groupby(groups, key=lambda group: (group.table, group.preset)):
        members = list(grouped)
        if table == OWN:
            tables += [_own_table(members), *_length_tables(members)]
        elif not table.isdigit() and all(group.first.kind == "measurement" for group in members):
            tables += _speed_tables(table, preset, members)
        else:
            tables += [_paper_table(table, preset, members), *_length_tables(members)]
    taken: set[str] = set()
    return [replace(table, name=unique(table.name, taken)) for table in tables]


def by_column(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Return groups by column."""
    return group_by(groups, lambda group: group.column)


def capitalized(text: str) -> str:
    """Capitalize the first letter and change nothing else.

    >>> capitalized("peak memory (MB)")
    'Peak memory (MB)'
    """
    return text[:1].upper() + text[1:]


def _paper_table(table: str, preset: str, groups: Sequence[Group]) -> Table:
    """Return a table with one quantity per column, and the paper's numbers if it has them."""
    published = TABLES.get(table, {})
    timed = {"2": EPOCH, "3": LATENCY}.get(table)
    columns = [Column(name, of[0].column_title, timed or metric_quantity(of[0].first)) for name, of in by_column(groups).items()]
    quantities = {column.name: column.quantity for column in columns}
    cells = {
        (group.row, group.column): cell_of(
            group, quantities[group.column], published.get(group.row, {}).get(group.column), 0 if table == "2" else 2
        )
        for group in groups
    }
    same = len({quantity.title for quantity in quantities.values()}) == 1
    if not same:
        columns = [replace(column, title=f"{column.title}, {column.quantity.title}") for column in columns]
    if table == "1":
        columns += _add_average(cells, columns, published)
    arena = table == "1" and any(column.name in AVERAGED for column in columns)
    title = TITLES.get(table, f"Table {shorten(table)}") + (" on Long-Range Arena" if arena else "")
    better = "Higher is better." if columns[0].quantity.greater_is_better else "Lower is better."
    what = f"{capitalized(('' if timed else 'test ') + columns[0].quantity.title)}. {better}" if same else "On the test split."
    counts = "In parentheses the ratio to the Transformer." if timed else SEEDS
    agreement = _agreement(groups, columns, cells)
    notes = measurement_notes(groups) if timed else [*task_notes(groups), *training_notes(groups), *baseline_notes(groups)]
    in_bytes = table == "4" and any(group.first.task.get("unit") == "bytes" for group in groups)
    return _table(
        groups,
        columns,
        cells,
        ratios=timed is not None,
        name=slug("table" if table.isdigit() else "", table, preset),
        title=_with_detail(title, preset and f"preset {preset}"),
        caption=" ".join([what, counts, *(["The paper's numbers are below ours."] if any(cell.paper for cell in cells.values()) else [])]),
        notes=((BYTES,) if in_bytes else ()) + tuple(notes) + tuple(missing_rows(groups, published) if agreement else ()),
        agreement=agreement,
    )


def _agreement(groups: Sequence[Group], columns: Sequence[Column], cells: Mapping[tuple[str, str], Cell]) -> Agreement | None:
    titles = {column.name: column.title for column in columns}
    standings = []
    for group in groups:
        cell = cells[group.row, group.column]
        if cell.mean is not None and cell.paper:
            standings.append(Standing(titles[group.column], group.row_title, (cell.mean, uncertainty(cell, group.first)), cell.paper))
    return compare(standings)


def _add_average(
    cells: dict[tuple[str, str], Cell], columns: Sequence[Column], published: Mapping[str, Mapping[str, Number]]
) -> list[Column]:
    """Add the paper's last column, the mean over its four tasks, for rows that have all four. Runs are independent."""
    quantity = next((column.quantity for column in columns if column.name in AVERAGED), None)
    for row in list(dict.fromkeys(row for row, _ in cells)):
        found = [cell for column in AVERAGED if (cell := cells.get((row, column), EMPTY)).mean is not None]
        if quantity is None or len(found) < len(AVERAGED):
            continue
        mean = sum(cell.mean or 0.0 for cell in found) / len(found)
        deviations = [cell.deviation for cell in found if cell.deviation is not None]
        deviation = math.hypot(*deviations) / len(found) if len(deviations) == len(found) else None
        paper = published.get(row, {}).get("average")
        cells[row, "average"] = Cell(
            text=quantity.show_mean(mean, deviation),
            mean=mean,
            deviation=deviation,
            count=min(cell.count for cell in found),
            anchor=found[0].anchor,
            counted=True,
            paper=paper,
            paper_text="" if paper is None else paper_number(paper, 2),
        )
    has_average = any(column == "average" for _, column in cells)
    return [Column("average", COLUMN_TITLES["average"], quantity)] if quantity and has_average else []


def _own_table(groups: Sequence[Group]) -> Table:
    """Return the table of runs that belong to no table: one row each."""
    others = [Column(quantity.name, capitalized(quantity.name), quantity) for quantity in (PARAMETERS, TRAINING_TIME, TRAINING_MEMORY)]
    columns = [Column("test", "Test", VALIDATION), Column("validation", "Best validation", VALIDATION), *others]
    headers = ("Task", "Model", "Settings", "Metric") if any(group.settings for group in groups) else ("Task", "Model", "Metric")
    cells: dict[tuple[str, str], Cell] = {}
    rows = []
    for group in sorted(groups, key=lambda group: (group.column, row_order(group.row))):
        metric, name = metric_quantity(group.first), f"{group.column}/{group.row}"
        leads = {
            "Task": group.column_title,
            "Model": shorten(str(group.first.work.get("model", "?"))),
            "Settings": shorten(group.settings),
            "Metric": metric.title,
        }
        rows.append(Row(name, tuple(leads[header] for header in headers)))
        for column in columns:
            cell = cell_of(group, metric if column.name == "test" else column.quantity)
            if cell.mean is not None or column.name == "test":  # how a run failed is reported once
                cells[name, column.name] = cell
    for task, members in by_column(groups).items():
        _mark_best(cells, [f"{task}/{group.row}" for group in members], Column("test", "Test", metric_quantity(members[0].first)))
    return Table(
        name="own-runs",
        title="Own runs",
        caption=f"Runs that belong to no table of the paper. {SEEDS}",
        leads=headers,
        columns=tuple(columns),
        rows=tuple(rows),
        cells=cells,
        notes=(*task_notes(groups), *baseline_notes(groups)),
        groups=tuple(groups),
    )


def _length_tables(groups: Sequence[Group]) -> list[Table]:
    """Return a table per task of language models that were tested at several lengths."""
    tables = []
    for members in by_column(groups).values():
        values = {group.row: _values_by_times(group) for group in members}
        tested = [group for group in members if len(values[group.row]) > 1]
        if not tested:
            continue
        all_times = sorted({times for group in members for times in values[group.row]})
        trained = {length for group in tested for run in group.runs if (length := _trained_length(run))}
        unit = min(trained) if len(trained) == 1 else None
        first, quantity = members[0], metric_quantity(tested[0].first)
        columns = [Column(f"{t:g}", f"{t * unit:,.0f} ×{t:g}" if unit else f"{t:g} ×", quantity) for t in all_times]
        cells = {
            (group.row, f"{t:g}"): replace(cell_of_values(found, quantity), anchor=group.anchor, counted=True)
            for group in tested
            for t, found in values[group.row].items()
        }
        place = "own runs" if first.table == OWN else f"table {first.table}"
        table = _table(
            tested,
            columns,
            cells,
            name=slug("length", first.table, first.preset, first.column),
            title=_with_detail(f"Beyond the trained length: {first.column_title}", place, first.preset and f"preset {first.preset}"),
            caption=f"Test {quantity.title}; columns are tokens of a text, as a number and as a multiple of the trained length. {SEEDS}",
            notes=tuple(task_notes(tested)),
            lengths={f"{t:g}": t * (unit or 1) for t in all_times},
            axes=("length (tokens)" if unit else "length (multiples of the trained one)", f"test {quantity.title}"),
        )
        tables.append(table)
    return tables


def _values_by_times(group: Group) -> dict[float, list[tuple[float | None, str]]]:
    """Return the values of each run by the multiple of the trained length; the test itself has multiple 1."""
    tested: dict[float, list[tuple[float | None, str]]] = {}
    for run in group.runs:
        own: dict[float, tuple[float | None, str]] = {}
        for event in run.evaluations:
            times = number(event.get("times")) if event.get("event") == "length" else 1.0
            if times and event.get("event") in ("test", "length"):
                own[times] = (metric_of(run, event.get("metrics")), NOT_FINITE)
        for times, value in own.items():
            tested.setdefault(times, []).append(value)
    return tested


def _trained_length(run: Run) -> float | None:
    for event in run.evaluations:
        length, times = number(event.get("length")), number(event.get("times"))
        if event.get("event") == "length" and length and times:
            return length / times
    return None


def _speed_tables(table: str, preset: str, groups: Sequence[Group]) -> list[Table]:
    """Return tables of time and memory for measurements at several lengths."""
    tables = []
    for kind in sorted({str(group.first.work.get("kind", "")) for group in groups}):
        members = [group for group in groups if str(group.first.work.get("kind", "")) == kind]
        what = {"training": " of a training step", "inference": " of a forward pass"}.get(kind, "")
        names = sorted({group.column for group in members}, key=column_order)
        for quantity, title in ((TOKEN, "Time by length"), (MEMORY, "Memory by length")):
            cells = {(group.row, group.column): cell_of(group, quantity) for group in members}
            if not any(cell.mean is not None for cell in cells.values()):
                continue
            made = _table(
                members,
                [Column(name, f"{int(name):,}" if name.isdecimal() else shorten(name), quantity) for name in names],
                cells,
                ratios=True,
                name=slug(table, quantity.name, kind, preset),
                title=_with_detail(
                    title if table == "speed" else f"{shorten(table)}: {title.lower()}", kind, preset and f"preset {preset}"
                ),
                caption=f"{capitalized(quantity.title)}{what}; columns are tokens of a sequence. Lower is better.",
                notes=tuple(speed_notes(members)),
                lengths={name: float(name) for name in names if name.isdecimal()},
                axes=("length (tokens)", quantity.title),
            )
            tables.append(made)
    return tables


def _table(
    groups: Sequence[Group], columns: Sequence[Column], cells: dict[tuple[str, str], Cell], *, ratios: bool = False, **texts: Any
) -> Table:
    """Return a table with one row per model, in the paper's order, with the best cells marked."""
    titles = {group.row: group.row_title for group in groups}
    rows = sorted(titles, key=row_order)
    for column in columns:
        _mark_best(cells, rows, column)
        if ratios:
            _add_ratios(cells, rows, column)
    leads = tuple(Row(name, (titles[name],)) for name in rows)
    return Table(columns=tuple(columns), rows=leads, cells=cells, groups=tuple(groups), **texts)


def _mark_best(cells: dict[tuple[str, str], Cell], rows: Sequence[str], column: Column) -> None:
    """Mark the best cells of a column of two or more: all that are displayed with the same number."""
    found = {row: mean for row in rows if (mean := cells.get((row, column.name), EMPTY).mean) is not None}
    if len(found) < 2:
        return
    best = column.quantity.show((max if column.quantity.greater_is_better else min)(found.values()))
    for row, mean in found.items():
        if column.quantity.show(mean) == best:
            cells[row, column.name] = replace(cells[row, column.name], best=True)


def _add_ratios(cells: dict[tuple[str, str], Cell], rows: Sequence[str], column: Column) -> None:
    """Add ratios to the Transformer: ours to ours, and the paper's to the paper's."""
    base = next((cells[row, column.name] for row in TRANSFORMERS if (row, column.name) in cells), EMPTY)
    for row in rows:
        cell = cells.get((row, column.name))
        if cell is None:
            continue
        ours = cell.mean / base.mean if cell.mean is not None and base.mean else None
        papers = cell.paper[0] / base.paper[0] if cell.paper and base.paper else None
        cells[row, column.name] = replace(cell, ratio=ours, paper_ratio=papers)


def _with_detail(title: str, *details: str) -> str:
    detail = shorten(", ".join(filter(None, details)))
    return f"{title} ({detail})" if detail else title
