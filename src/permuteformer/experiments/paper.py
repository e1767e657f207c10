"""The paper's tables at the paper's size, for GPUs."""

from __future__ import annotations

from permuteformer.experiments import lra, wikitext
from permuteformer.experiments.plan import Plan

PLAN = Plan(
    name="paper",
    title="the paper's sizes and budgets, for GPUs",
    tables=(lra.TABLE1, lra.TABLE2, lra.TABLE3, wikitext.TABLE4),
    seeds=5,
    also=wikitext.ALSO,
)
