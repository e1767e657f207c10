"""What is run, as data: the paper's tables at three sizes, and a trial of learning rates. Nothing here imports torch."""

from permuteformer.experiments.base import Cell, Experiment, Measurement
from permuteformer.experiments.paper import PLAN as PAPER
from permuteformer.experiments.plan import Column, Plan, Table
from permuteformer.experiments.quick import PLAN as QUICK
from permuteformer.experiments.small import PLAN as SMALL
from permuteformer.experiments.tuning import PLAN as TUNING

PLANS = {plan.name: plan for plan in (QUICK, SMALL, PAPER, TUNING)}

__all__ = ["PLANS", "Cell", "Column", "Experiment", "Measurement", "Plan", "Table"]
