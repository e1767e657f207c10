"""Tables over lengths: language models tested beyond the trained length, and time and memory by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from permuteformer.report.groups import OWN, Group, column_order, shorten, slug
from permuteformer.report.notes import notes_of
from permuteformer.report.quantities import MEMORY, TOKEN, metric_of, metric_quantity
from permuteformer.report.records import Record, number
from permuteformer.report.table import (
    NOT_FINITE,
    SEEDS,
    Column,
    Table,
    add_ratios,
    by_column,
    cell_of,
    cell_of_values,
    mark_best,
    rows_of,
    sentence,
    with_detail,
)

LENGTHS, SPEED = "length", "speed"


def length_tables(groups: Sequence[Group]) -> list[Table]:
    """Language models tested at lengths that they were not trained at: a table a task."""
    tables = []
    for of_it in by_column(groups).values():
        found = {group.row: _tested(group) for group in of_it}
        times = sorted({times for tested in found.values() for times in tested})
        tested_groups = [group for group in of_it if len(found[group.row]) > 1]
        if not tested_groups:
            continue
        quantity = metric_quantity(tested_groups[0].first)
        lengths = {length for group in tested_groups for record in group.records if (length := _trained_length(record))}
        known = len(lengths) == 1
        columns = [Column(f"{t:g}", f"{t * min(lengths):,.0f} ×{t:g}" if known else f"{t:g} ×", quantity) for t in times]
        cells = {}
        for group in tested_groups:
            for column, t in zip(columns, times, strict=True):
                if t in found[group.row]:
                    cell = cell_of_values(found[group.row][t], quantity)
                    cells[group.row, column.name] = replace(cell, anchor=group.anchor, counted=True)
        rows = rows_of(tested_groups)
        for column in columns:
            mark_best(cells, [row.name for row in rows], column)
        first = of_it[0]
        where = "own runs" if first.table == OWN else f"table {first.table}"
        tables.append(
            Table(
                name=slug(LENGTHS, first.table, first.preset, first.column),
                title=with_detail(f"Beyond the trained length: {first.column_title}", where, first.preset and f"preset {first.preset}"),
                caption=f"Test {quantity.title}; columns are tokens of a text, and how many times the trained length that is. {SEEDS}",
                columns=tuple(columns),
                rows=tuple(rows),
                cells=cells,
                notes=tuple(notes_of(tested_groups)),
                groups=tuple(tested_groups),
                lengths={column.name: t * (min(lengths) if known else 1) for column, t in zip(columns, times, strict=True)},
                axes=("length (tokens)" if known else "length (times the trained one)", f"test {quantity.title}"),
            )
        )
    return tables


def _tested(group: Group) -> dict[float, list[tuple[float | None, str]]]:
    """Values of each run by how many times the trained length; the test itself is at once that length."""
    tested: dict[float, list[tuple[float | None, str]]] = {}
    for record in group.records:
        own: dict[float, tuple[float | None, str]] = {}
        for event in record.evaluations:
            times = number(event.get("times")) if event.get("event") == "length" else 1.0
            if times and event.get("event") in ("test", "length"):
                own[times] = (metric_of(record, event.get("metrics")), NOT_FINITE)
        for times, value in own.items():
            tested.setdefault(times, []).append(value)
    return tested


def _trained_length(record: Record) -> float | None:
    for event in record.evaluations:
        length, times = number(event.get("length")), number(event.get("times"))
        if event.get("event") == "length" and length and times:
            return length / times
    return None


def speed_tables(table: str, preset: str, groups: Sequence[Group]) -> list[Table]:
    """Measurements at several lengths: time, and memory."""
    tables = []
    for kind in sorted({str(group.first.work.get("kind", "")) for group in groups}):
        of_it = [group for group in groups if str(group.first.work.get("kind", "")) == kind]
        what = {"training": "a training step", "inference": "a batch forwards"}.get(kind, "")
        for quantity, title in ((TOKEN, "Time by length"), (MEMORY, "Memory by length")):
            columns = [
                Column(name, f"{int(name):,}" if name.isdecimal() else shorten(name), quantity)
                for name in sorted({group.column for group in of_it}, key=column_order)
            ]
            cells = {(group.row, group.column): cell_of(group, quantity) for group in of_it}
            rows = rows_of(of_it)
            for column in columns:
                mark_best(cells, [row.name for row in rows], column)
                add_ratios(cells, [row.name for row in rows], column)
            if not any(cell.mean is not None for cell in cells.values()):
                continue
            name = title if table == SPEED else f"{shorten(table)}: {title.lower()}"
            caption = f"{sentence(quantity.title)}{f' of {what}' if what else ''}; columns are tokens of a sequence. Lower is better."
            tables.append(
                Table(
                    name=slug(table, quantity.name, kind, preset),
                    title=with_detail(name, kind, preset and f"preset {preset}"),
                    caption=caption,
                    columns=tuple(columns),
                    rows=tuple(rows),
                    cells=cells,
                    notes=tuple(_how(of_it)),
                    groups=tuple(of_it),
                    lengths={column.name: float(column.name) for column in columns if column.name.isdecimal()},
                    axes=("length (tokens)", quantity.title),
                )
            )
    return tables


def _how(groups: Sequence[Group]) -> list[str]:
    """Batches and devices of measurements at several lengths, in one line."""
    sizes = sorted(
        {
            (int(length), int(batch))
            for group in groups
            if (batch := number(group.first.work.get("batch_size"))) and (length := number(group.first.work.get("length")))
        }
    )
    devices = sorted({str(group.first.environment.get("device")) for group in groups if group.first.environment.get("device")})
    batches = f"batches of {', '.join(f'{batch:,} × {length:,}' for length, batch in sizes)} tokens" if sizes else ""
    told = ", ".join(part for part in (batches, f"on {' and '.join(devices)}" if devices else "") if part)
    return [f"Best of the repeats; {told}."] if told else []
