"""How the learning rates of preset small were found: a few of them tried on the Transformer row, for a part of its training.

The one with the lowest loss on the validation split is taken for all rows, as the paper did.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from permuteformer.experiments import small
from permuteformer.experiments.plan import Column, Plan, Table

RATES = (3e-4, 1e-3, 3e-3)
SHARE = 4
"""A trial is so many times shorter than a run."""


def _trial(column: Column, rate: float) -> Column:
    shorter: dict[str, Any] = {"train_items": column.settings["train_items"] // SHARE, "test_items": 1000, "learning_rate": rate}
    return replace(column, name=f"{rate:g}", settings={**column.settings, **shorter})


def _trials(column: Column) -> Table:
    columns = tuple(_trial(column, rate) for rate in RATES)
    return Table(name=f"rates-{column.name}", title=f"learning rates on {column.name}", rows=("transformer",), columns=columns)


PLAN = Plan(
    name="tuning",
    title="learning rates of preset small, tried on the Transformer row",
    tables=tuple(map(_trials, small.TABLE1.columns)),
    seeds=1,
)
