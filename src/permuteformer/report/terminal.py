"""Tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from permuteformer.report.cells import Cell
from permuteformer.report.tables import Column, Table

LEAD_WIDTH = 14
"""Width up to which words of a row's name are kept whole in a narrow terminal."""


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print tables with the paper's numbers below ours. Columns that do not fit are printed below the others."""
    for table in tables:
        console.print(Text(table.title, style="bold"))
        columns = list(table.columns)
        while columns:
            count = len(columns)
            while count > 1 and sum(_width(table, column) for column in columns[:count]) > _room(table, count, console):
                count -= 1
            console.print(_rich_table(table, columns[:count], console))
            columns = columns[count:]
        console.print(Text(table.caption, style="dim"))
        if table.agreement is not None:
            console.print(Text(table.agreement.details))
        console.print()


def cell_text(cell: Cell) -> Text:
    """Return a cell with its styles; its text is never markup."""
    text = Text(cell.text or "–", style="bold green" if cell.best else "yellow" if cell.text and cell.mean is None else "")
    if cell.detail:
        text.append(f" {cell.detail}", style="dim not bold")
    for line in cell.under:
        text.append(f"\n{line}", style="dim not bold")
    return text


def _rich_table(table: Table, columns: Sequence[Column], console: Console) -> RichTable:
    """Return columns as wide as their lines if there is room, else as their longest words."""
    words, lines = ([_width(table, column, separator) for column in columns] for separator in (None, "\n"))
    room = _room(table, len(columns), console)
    shared = [max(word, min(line, room // len(columns))) for word, line in zip(words, lines, strict=True)]
    widths = next((widths for widths in (lines, shared) if sum(widths) <= room), words)
    shown = RichTable()
    for lead, width in zip(table.leads, _lead_widths(table), strict=True):
        shown.add_column(Text(lead), overflow="fold", min_width=width)
    for column, width in zip(columns, widths, strict=True):
        shown.add_column(Text(column.title), justify="right", width=width)
    for row in table.rows:
        shown.add_row(*map(Text, row.leads), *(cell_text(table.cell(row, column)) for column in columns))
    return shown


def _room(table: Table, columns: int, console: Console) -> int:
    """Return the width that is left for this number of columns."""
    return console.width - sum(_lead_widths(table)) - 3 * (len(table.leads) + columns) - 1


def _lead_widths(table: Table) -> list[int]:
    return [min(LEAD_WIDTH, _longest(row.leads[place] for row in table.rows)) for place in range(len(table.leads))]


def _width(table: Table, column: Column, separator: str | None = None) -> int:
    """Return the width of the longest word of a column, or of the longest line."""
    return _longest([column.title, *(cell_text(table.cell(row, column)).plain for row in table.rows)], separator)


def _longest(texts: Iterable[str], separator: str | None = None) -> int:
    return max((cell_len(part) for text in texts for part in text.split(separator)), default=0)
