"""The tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Lines
from rich.text import Text

from permuteformer.report.table import Cell, Column, Table

LEAD_WIDTH = 14
"""Columns of a narrow terminal that are kept for the longest word of a name."""


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print tables with the paper's numbers under ours, and whether the order of rows is the paper's."""
    for table in tables:
        console.print(Text(table.title, style="bold"))
        columns = list(table.columns)
        while columns:  # those that a terminal has no room for beside the others come under them
            count = len(columns)
            while count > 1 and not _fits(table, columns[:count], console):
                count -= 1
            console.print(_lines(table, columns[:count], console))
            columns = columns[count:]
        console.print(Text(table.caption, style="dim"))
        if table.agreement is not None:
            console.print(Text(table.agreement.sentence))
        console.print()


def _lines(table: Table, columns: Sequence[Column], console: Console) -> Lines:
    """Where there is room, cells as wide as they like; else of one width, and no narrower than their words."""
    least, most = ([_cell_width(table, column, separator) for column in columns] for separator in (None, "\n"))
    room = _room(table, columns, console)
    share = [max(word, min(line, room // len(columns))) for word, line in zip(least, most, strict=True)]
    lines = Lines()
    for place, lead in enumerate(table.leads):
        lines.add_column(Text(lead), overflow="fold", min_width=_lead_width(table, place))
    widths = next((widths for widths in (most, share) if sum(widths) <= room), least)
    for column, width in zip(columns, widths, strict=True):
        lines.add_column(Text(column.title), justify="right", width=width)
    for row in table.rows:
        lines.add_row(*map(Text, row.leads), *(cell_text(table.cell(row, column)) for column in columns))
    return lines


def _room(table: Table, columns: Sequence[Column], console: Console) -> int:
    """For the cells of a row, beside its names and what is drawn between them."""
    leads = [_lead_width(table, place) for place in range(len(table.leads))]
    return console.width - sum(leads) - 3 * (len(leads) + len(columns)) - 1


def _fits(table: Table, columns: Sequence[Column], console: Console) -> bool:
    return sum(_cell_width(table, column) for column in columns) <= _room(table, columns, console)


def _lead_width(table: Table, place: int) -> int:
    """What keeps names whole where a terminal is narrow."""
    return min(LEAD_WIDTH, _longest(row.leads[place] for row in table.rows))


def _cell_width(table: Table, column: Column, separator: str | None = None) -> int:
    """Of the longest word, or whatever is between separators."""
    return _longest([column.title, *(cell_text(table.cell(row, column)).plain for row in table.rows)], separator)


def _longest(texts: Iterable[str], separator: str | None = None) -> int:
    return max((cell_len(part) for text in texts for part in text.split(separator)), default=0)


def cell_text(cell: Cell) -> Text:
    """A cell with its styles; nothing in it is taken for markup."""
    text = Text(cell.text or "–", style="bold green" if cell.best else "yellow" if cell.text and cell.mean is None else "")
    if cell.detail:
        text.append(f" {cell.detail}", style="dim not bold")
    for line in cell.under:
        text.append(f"\n{line}", style="dim not bold")
    return text
