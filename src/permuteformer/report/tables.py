"""Which tables there are: those of the paper, lengths, speed, and one's own runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from permuteformer.experiments.published import COLUMN_TITLES, TABLE1, TABLES, Number
from permuteformer.report.agreement import Standing, compare
from permuteformer.report.groups import OWN, Group, row_order, shorten, slug, unique
from permuteformer.report.lengths import length_tables, speed_tables
from permuteformer.report.notes import baselines_of, measurements_of, not_run, notes_of, trained_of
from permuteformer.report.quantities import EPOCH, LATENCY, PARAMETERS, TRAINING_MEMORY, TRAINING_TIME, VALIDATION, metric_quantity
from permuteformer.report.records import Record, number
from permuteformer.report.table import (
    SEEDS,
    Cell,
    Column,
    Row,
    Table,
    add_ratios,
    by_column,
    cell_of,
    mark_best,
    paper_number,
    rows_of,
    sentence,
    with_detail,
    with_deviation,
)

TITLES = {
    "1": "Table 1: accuracy",
    "2": "Table 2: training time",
    "3": "Table 3: latency of inference",
    "4": "Table 4: perplexity of language models",
}
AVERAGED = [column for column in next(iter(TABLE1.values())) if column != "average"]


def build_tables(groups: Sequence[Group]) -> list[Table]:
    """All tables that these runs fill, in the paper's order."""
    tables: list[Table] = []
    for (table, preset), members in groupby(groups, key=lambda group: (group.table, group.preset)):
        of_it = list(members)
        if table == OWN:
            tables += [_own(of_it), *length_tables(of_it)]
        elif not table.isdigit() and all(group.first.kind == "measurement" for group in of_it):
            tables += speed_tables(table, preset, of_it)
        else:
            tables += [_of_paper(table, preset, of_it), *length_tables(of_it)]
    taken: set[str] = set()
    return [replace(made, name=unique(made.name, taken)) for made in tables]


def _of_paper(table: str, preset: str, groups: Sequence[Group]) -> Table:
    """A table with a quantity a column, and the paper's numbers where it has them."""
    published = TABLES.get(table, {})
    quantities = {"2": EPOCH, "3": LATENCY}
    columns = [
        Column(name, of_it[0].column_title, quantities.get(table) or metric_quantity(of_it[0].first))
        for name, of_it in by_column(groups).items()
    ]
    if len({column.quantity.title for column in columns}) > 1:
        columns = [replace(column, title=f"{column.title}, {column.quantity.title}") for column in columns]
    rows = rows_of(groups)
    names = [row.name for row in rows]
    digits = 0 if table == "2" else 2
    cells = {}
    for group in groups:
        column = next(column for column in columns if column.name == group.column)
        cells[group.row, group.column] = cell_of(group, column.quantity, published.get(group.row, {}).get(group.column), digits)
    if table == "1":
        columns += _average(cells, names, columns, published)
    for column in columns:
        mark_best(cells, names, column)
        if table in quantities:
            add_ratios(cells, names, column)
    by_place = {(group.row, group.column): group.first for group in groups}
    agreement = compare(
        Standing(column.title, row.leads[0], (cell.mean, _deviation(cell, by_place[row.name, column.name])), cell.paper)
        for column in columns
        if column.name != "average"
        for row in rows
        if (cell := cells.get((row.name, column.name))) and cell.mean is not None and cell.paper
    )
    notes = measurements_of(groups) if table in quantities else [*notes_of(groups), *trained_of(groups), *baselines_of(groups)]
    return Table(
        name=slug("table" if table.isdigit() else "", table, preset),
        title=with_detail(_title(table, arena=any(column.name in AVERAGED for column in columns)), preset and f"preset {preset}"),
        caption=_caption(table, columns, any(cell.paper for cell in cells.values())),
        columns=tuple(columns),
        rows=tuple(rows),
        cells=cells,
        notes=(*_other_units(table, groups), *notes, *(not_run(names, published) if agreement else [])),
        agreement=agreement,
        groups=tuple(groups),
    )


def _other_units(table: str, groups: Sequence[Group]) -> list[str]:
    """What must be said where the paper's numbers are of another kind."""
    units = {str(group.first.task.get("unit")) for group in groups}
    return ["Ours are perplexities of bytes, the paper's of the words of WikiText-103: compare the order of rows, not the numbers."] * (
        table == "4" and "bytes" in units
    )


def _average(
    cells: dict[tuple[str, str], Cell], rows: Sequence[str], columns: Sequence[Column], published: Mapping[str, Mapping[str, Number]]
) -> list[Column]:
    """The paper's last column: the mean over its four tasks, for rows that have all four; deviations add up as independent ones do."""
    quantity = next((column.quantity for column in columns if column.name in AVERAGED), None)
    if quantity is None:
        return []
    for row in rows:
        found = [cells.get((row, column)) for column in AVERAGED]
        there = [cell for cell in found if cell is not None and cell.mean is not None]
        if len(there) < len(AVERAGED):
            continue
        mean = sum(cell.mean or 0.0 for cell in there) / len(there)
        spread = [cell.deviation for cell in there if cell.deviation is not None]
        deviation = math.hypot(*spread) / len(there) if len(spread) == len(there) else None
        paper = published.get(row, {}).get("average")
        cells[row, "average"] = Cell(
            text=with_deviation(mean, deviation, quantity),
            mean=mean,
            deviation=deviation,
            count=min(cell.count for cell in there),
            anchor=there[0].anchor,  # the others stand under it
            counted=True,
            paper=paper,
            paper_text="" if paper is None else paper_number(paper, 2),
        )
    return [Column("average", COLUMN_TITLES["average"], quantity)] if any(column == "average" for _, column in cells) else []


def _deviation(cell: Cell, record: Record) -> float | None:
    """Over seeds; of one seed, the standard error that an accuracy in percent has because so many items were tested."""
    if cell.deviation is not None:
        return cell.deviation
    items = number(record.work.get("test_items"))
    if record.metric != "accuracy" or not items or cell.mean is None or not 0 <= cell.mean <= 100:
        return None
    return math.sqrt(cell.mean * (100 - cell.mean) / items)


def _own(groups: Sequence[Group]) -> Table:
    """Runs that are in no table: one row each."""
    columns = [
        Column("test", "Test", VALIDATION),
        Column("validation", "Best validation", VALIDATION),
        *(Column(q.name, q.name.capitalize(), q) for q in (PARAMETERS, TRAINING_TIME, TRAINING_MEMORY)),
    ]
    cells: dict[tuple[str, str], Cell] = {}
    rows = []
    for group in sorted(groups, key=lambda group: (group.column, row_order(group.row))):
        metric = metric_quantity(group.first)
        name = f"{group.column}/{group.row}"
        leads = (group.column_title, shorten(str(group.first.work.get("model", "?"))), shorten(group.settings), metric.title)
        rows.append(Row(name, leads))
        for column, quantity in zip(columns, (metric, *(column.quantity for column in columns[1:])), strict=True):
            cell = cell_of(group, quantity)
            if cell.mean is not None or column.name == "test":  # how a run failed is said once
                cells[name, column.name] = cell
    for task, members in groupby(groups, key=lambda group: group.column):
        names = [f"{task}/{group.row}" for group in members]
        better = next(metric_quantity(group.first) for group in groups if group.column == task)
        mark_best(cells, names, Column("test", "Test", better))
    with_settings = any(row.leads[2] for row in rows)
    keep = (0, 1, 2, 3) if with_settings else (0, 1, 3)
    headers = ("Task", "Model", "Settings", "Metric")
    return Table(
        name="own-runs",
        title="Own runs",
        caption=f"Runs that belong to no table of the paper. {SEEDS}",
        leads=tuple(headers[i] for i in keep),
        columns=tuple(columns),
        rows=tuple(Row(row.name, tuple(row.leads[i] for i in keep)) for row in rows),
        cells=cells,
        notes=(*notes_of(groups), *baselines_of(groups)),
        groups=tuple(groups),
    )


def _title(table: str, *, arena: bool) -> str:
    return TITLES.get(table, f"Table {shorten(table)}") + (" on Long-Range Arena" if table == "1" and arena else "")


def _caption(table: str, columns: Sequence[Column], paper: bool) -> str:
    quantity = columns[0].quantity
    better = "Higher is better." if quantity.greater_is_better else "Lower is better."
    split = "" if table in ("2", "3") else "Test "
    same = len({column.quantity.title for column in columns}) == 1
    parts = [sentence(f"{split}{quantity.title}."), better] if same else ["On the test split."]
    parts.append("In parentheses the ratio to the Transformer." if table in ("2", "3") else SEEDS)
    if paper:
        parts.append("The paper's numbers are below ours.")
    return " ".join(parts)
