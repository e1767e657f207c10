"""A table: rows, columns and cells, whatever they are of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from permuteformer.experiments.published import Number
from permuteformer.report.agreement import Agreement
from permuteformer.report.groups import Group, row_order, shorten
from permuteformer.report.quantities import Quantity
from permuteformer.report.records import FINISHED, UNFINISHED, Record, mean_and_deviation

TRANSFORMERS = ("transformer", "transformer-lm")
NOT_FINITE, NO_VALUE = "not finite", "no value"
SEEDS = "Mean ± standard deviation over seeds, whose number is in parentheses."


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What stands at one row and column."""

    text: str = ""
    """As it is shown: a mean and its deviation, or how it failed; empty where nothing was run."""
    mean: float | None = None
    deviation: float | None = None
    """Over seeds; None for one."""
    count: int = 0
    """Seeds that have a value."""
    remark: str = ""
    """What must be known of it: estimated, or how many seeds failed."""
    ratio: float | None = None
    """To the Transformer's."""
    paper: Number | None = None
    paper_text: str = ""
    paper_ratio: float | None = None
    best: bool = False
    """Of its column, as it is shown."""
    anchor: str = ""
    """Of its runs."""
    counted: bool = False
    """Whether its number of seeds is of interest."""

    @property
    def detail(self) -> str:
        """What stands behind it in parentheses: the ratio to the Transformer, or the number of seeds."""
        if self.ratio is not None:
            return f"({times(self.ratio)})"
        return f"({self.count})" if self.counted and self.count else ""

    @property
    def paper_shown(self) -> str:
        """The paper's number, and its ratio."""
        return self.paper_text + (f" ({times(self.paper_ratio)})" if self.paper_ratio is not None else "")

    @property
    def under(self) -> list[str]:
        """Lines that stand under it: what must be known, and the paper's number."""
        return [*([self.remark] if self.remark else []), *([f"paper {self.paper_shown}"] if self.paper_text else [])]


EMPTY = Cell()


@dataclass(frozen=True)
class Column:
    """What stands under one header."""

    name: str
    title: str
    quantity: Quantity


@dataclass(frozen=True)
class Row:
    """A row's name, and the texts that it begins with."""

    name: str
    leads: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows and columns of cells, with what is said about them."""

    name: str
    """For files and anchors."""
    title: str
    caption: str
    leads: tuple[str, ...] = ("Model",)
    """Headers of the texts that rows begin with."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    cells: Mapping[tuple[str, str], Cell]
    """By names of row and column."""
    notes: tuple[str, ...] = ()
    agreement: Agreement | None = None
    """With the paper's order of rows, where it has these."""
    groups: tuple[Group, ...] = field(default=(), repr=False)
    """The runs that it is made of."""
    lengths: Mapping[str, float] = field(default_factory=dict)
    """For tables over lengths, where each column stands on the axis."""
    axes: tuple[str, str] = ("", "")
    """For tables over lengths, what the axes of its figure are."""

    def cell(self, row: Row, column: Column) -> Cell:
        """What stands there; an empty cell where nothing does."""
        return self.cells.get((row.name, column.name), EMPTY)

    def cell_of_group(self, group: Group) -> Cell:
        """Where a group's metric stands, in a table of the paper or of one's own runs."""
        return self.cells.get((group.row, group.column)) or self.cells.get((f"{group.column}/{group.row}", "test"), EMPTY)

    def has_paper(self, column: Column) -> bool:
        """Whether the paper has a number in this column."""
        return any(self.cell(row, column).paper for row in self.rows)


def cell_of(group: Group, quantity: Quantity, paper: Number | None = None, paper_digits: int = 2) -> Cell:
    """The cell of a group of runs: their mean, or how they failed."""
    cell = cell_of_values([(quantity.read(record), failure(record)) for record in group.records], quantity)
    remarks = [cell.remark, "estimated" if any(record.result.get("estimated") is True for record in group.records) else ""]
    return replace(
        cell,
        remark=", ".join(filter(None, remarks)),
        anchor=group.anchor,
        counted=quantity.varies and group.first.kind == "training",
        paper=paper,
        paper_text="" if paper is None else paper_number(paper, paper_digits),
    )


def cell_of_values(values: Iterable[tuple[float | None, str]], quantity: Quantity) -> Cell:
    """The cell of values, each with the words that stand in its place where it is None."""
    values = list(values)
    there = [value for value, _ in values if value is not None]
    failed = Counter(words for value, words in values if value is None)
    mean, deviation = mean_and_deviation(there)
    if mean is None:
        return Cell(text=", ".join(words if len(failed) == 1 else f"{words} ({count})" for words, count in failed.items()))
    remark = ", ".join(f"{count} of {len(values)} {words}" for words, count in failed.items())
    return Cell(text=with_deviation(mean, deviation, quantity), mean=mean, deviation=deviation, count=len(there), remark=remark)


def failure(record: Record) -> str:
    """The words for a run without a value."""
    if record.status != FINISHED:
        return record.status or UNFINISHED
    infinite = any(isinstance(value, float) and not math.isfinite(value) for value in record.result.values())
    return NOT_FINITE if infinite else NO_VALUE


def with_deviation(mean: float, deviation: float | None, quantity: Quantity) -> str:
    """Mean and deviation as one text."""
    return quantity.show(mean) if deviation is None or not quantity.varies else f"{quantity.show(mean)} ± {quantity.show(deviation)}"


def paper_number(number: Number, digits: int) -> str:
    """A number as the paper prints it."""
    mean, deviation = number
    return f"{mean:,.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def mark_best(cells: dict[tuple[str, str], Cell], rows: Sequence[str], column: Column) -> None:
    """Mark the best of a column, and all that look the same; one that stands alone is not marked."""
    means = {row: cells[row, column.name].mean for row in rows if (row, column.name) in cells}
    there = {row: mean for row, mean in means.items() if mean is not None}
    if len(there) < 2:
        return
    choose = max if column.quantity.greater_is_better else min
    best = column.quantity.show(choose(there.values()))
    for row, mean in there.items():
        if column.quantity.show(mean) == best:
            cells[row, column.name] = replace(cells[row, column.name], best=True)


def add_ratios(cells: dict[tuple[str, str], Cell], rows: Sequence[str], column: Column) -> None:
    """Ratios of a column to the Transformer's row, ours to ours and the paper's to the paper's."""
    base = next((cells[row, column.name] for row in TRANSFORMERS if (row, column.name) in cells), EMPTY)
    for row in rows:
        cell = cells.get((row, column.name))
        if cell is None:
            continue
        ours = cell.mean / base.mean if cell.mean is not None and base.mean else None
        papers = cell.paper[0] / base.paper[0] if cell.paper and base.paper else None
        cells[row, column.name] = replace(cell, ratio=ours, paper_ratio=papers)


def with_detail(title: str, *details: str) -> str:
    """A title, and in parentheses what sets the table apart."""
    told = shorten(", ".join(filter(None, details)))
    return f"{title} ({told})" if told else title


def times(ratio: float) -> str:
    """A ratio to three digits.

    >>> times(0.5782), times(45.96), times(142.2)
    ('0.58×', '46.0×', '142×')
    """
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×" if ratio < 100 else f"{ratio:,.0f}×"


def sentence(text: str) -> str:
    """With a capital at its beginning, and no other change.

    >>> sentence("peak memory (MB)")
    'Peak memory (MB)'
    """
    return text[:1].upper() + text[1:]


def rows_of(groups: Iterable[Group]) -> list[Row]:
    """The rows of groups, in the paper's order."""
    titles = {group.row: group.row_title for group in groups}
    return [Row(name, (titles[name],)) for name in sorted(titles, key=row_order)]


def by_column(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Groups of each column, in the order in which they come."""
    columns: dict[str, list[Group]] = {}
    for group in groups:
        columns.setdefault(group.column, []).append(group)
    return columns
