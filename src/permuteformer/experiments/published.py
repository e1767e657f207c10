"""The paper's numbers, as printed in its tables and its Figure 2."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

Number = tuple[float, float | None]
"""Mean, and standard deviation over runs if the paper gives one. Accuracies are in percent."""

_CONTENT: dict[str, Any] = json.loads(files("permuteformer.experiments").joinpath("published.json").read_text(encoding="utf-8"))

TABLES: dict[str, dict[str, dict[str, Number]]] = {
    table: {row: {column: (mean, spread) for column, (mean, spread) in cells.items()} for row, cells in rows.items()}
    for table, rows in _CONTENT["tables"].items()
}
FIGURE2: dict[str, tuple[float, ...]] = {row: tuple(values) for row, values in _CONTENT["figure2"].items()}
"""Test perplexity after each epoch."""

UNITS: dict[str, str] = _CONTENT["units"]

COLUMN_TITLES = {
    "text": "Text",
    "retrieval": "Retrieval",
    "image": "Image",
    "pathfinder": "Pathfinder",
    "average": "Average",
    "lm": "Language model",
}
"""Columns in the paper's order."""


def published(table: str, row: str, column: str) -> Number | None:
    """Return the paper's number for a cell, if it has one.

    >>> published("1", "permuteformer", "text")
    (65.95, 0.26)
    """
    return TABLES.get(table, {}).get(row, {}).get(column)
