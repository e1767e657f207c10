"""The paper's tables on real data, with budgets in which models learn: days on two cores."""

from __future__ import annotations

from permuteformer.experiments.paper import accuracy_column
from permuteformer.experiments.tables import Plan, Table

ACCURACY = Table(
    name="1",
    title="accuracy on Long-Range Arena",
    rows=("performer", "permuteformer", "permuteformer-1d", "permuteformer-decay"),
    columns=(accuracy_column("image"),),  # the paper's sizes, batch, rate and epochs
)

PLAN = Plan(name="medium", title="real data, days on two cores", tables=(ACCURACY,), seeds=1)
