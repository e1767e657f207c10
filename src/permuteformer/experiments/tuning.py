"""How the learning rates of preset small were found: a few of them tried on the Transformer row, for a part of its training.

The one with the lowest loss on the validation split is taken for all rows, as the paper did. Text's is taken for retrieval too, and
image's for pathfinder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from permuteformer.experiments import small
from permuteformer.experiments.plan import Column, Plan, Table

RATES = (3e-4, 1e-3, 3e-3)
TRIAL: dict[str, Any] = {"train_items": 3200, "evaluate_every": 200, "validation_items": 1000, "test_items": 500}


def _trials(column: Column) -> Table:
    """A column a rate."""
    columns = tuple(replace(column, name=f"{rate:g}", settings={**column.settings, **TRIAL, "learning_rate": rate}) for rate in RATES)
    return Table(name=f"rates-{column.name}", title=f"learning rates on {column.name}", rows=("transformer",), columns=columns)


PLAN = Plan(
    name="tuning",
    title="learning rates of preset small, tried on the Transformer row",
    tables=tuple(_trials(column) for column in small.TABLE1.columns if column.name in small.RATES),
    seeds=1,
)
