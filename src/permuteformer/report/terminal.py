"""The tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table as Lines
from rich.text import Text

from permuteformer.report.table import Cell, Table

LEAD_WIDTH = 14
"""Columns of a narrow terminal that are kept for the longest word of a name."""


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print tables with the paper's numbers under ours, and whether the order of rows is the paper's."""
    for table in tables:
        console.print(Text(table.title, style="bold"))
        lines = Lines()
        for lead in table.leads:
            lines.add_column(Text(lead), overflow="fold", min_width=min(LEAD_WIDTH, _longest_word(table, lead)))
        for column in table.columns:
            lines.add_column(Text(column.title), justify="right")
        for row in table.rows:
            lines.add_row(*map(Text, row.leads), *(cell_text(table.cell(row, column)) for column in table.columns))
        console.print(lines)
        console.print(Text(table.caption, style="dim"))
        if table.agreement is not None:
            console.print(Text(table.agreement.sentence))
        console.print()


def _longest_word(table: Table, lead: str) -> int:
    """What keeps names whole where a terminal is narrow."""
    place = table.leads.index(lead)
    return max((len(word) for row in table.rows for word in row.leads[place].split()), default=0)


def cell_text(cell: Cell) -> Text:
    """A cell with its styles; nothing in it is taken for markup."""
    text = Text(cell.text or "–", style="bold green" if cell.best else "yellow" if cell.text and cell.mean is None else "")
    if cell.detail:
        text.append(f" {cell.detail}", style="dim not bold")
    for line in cell.under:
        text.append(f"\n{line}", style="dim not bold")
    return text
