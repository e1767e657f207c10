"""The tables as CSV, a line a cell: what a program reads on."""

from __future__ import annotations

import csv
import io

from permuteformer.report.table import Table
from permuteformer.texts import for_spreadsheet

HEADER = (
    "row",
    "column",
    "quantity",
    "unit",
    "mean",
    "deviation",
    "seeds",
    "shown",
    "remark",
    "best",
    "ratio",
    "paper_mean",
    "paper_deviation",
    "paper_ratio",
    "runs",
)


def spreadsheet(table: Table) -> str:
    """A table as CSV. Numbers are whole, not as they are shown."""
    runs = {group.anchor: [record.run for record in group.records] for group in table.groups}
    of_row = {row.name: [record.run for group in table.groups if group.row == row.name for record in group.records] for row in table.rows}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for row in table.rows:
        for column in table.columns:
            cell = table.cell(row, column)
            if not cell.text and cell.paper is None:
                continue
            paper = cell.paper or (None, None)
            entries = (row.name, column.name, column.quantity.name, column.quantity.unit, cell.mean, cell.deviation, cell.count, cell.text)
            made_of = of_row[row.name] if column.name == "average" else runs.get(cell.anchor, [])
            entries += (cell.remark, cell.best, cell.ratio, *paper, cell.paper_ratio, "; ".join(made_of))
            writer.writerow([_safe(entry) for entry in entries])
    return text.getvalue()


def _safe(entry: object) -> object:
    return "" if entry is None else for_spreadsheet(entry) if isinstance(entry, str) else entry
