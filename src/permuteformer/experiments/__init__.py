"""Experiments as data: the paper's tables at four sizes, and a trial of learning rates. Importing this imports no torch."""

from permuteformer.experiments.experiment import Experiment, Measurement
from permuteformer.experiments.medium import PLAN as MEDIUM
from permuteformer.experiments.paper import PLAN as PAPER
from permuteformer.experiments.quick import PLAN as QUICK
from permuteformer.experiments.small import PLAN as SMALL
from permuteformer.experiments.small import TUNING
from permuteformer.experiments.tables import Cell, Column, Plan, Table

PLANS = {plan.name: plan for plan in (QUICK, SMALL, MEDIUM, PAPER, TUNING)}

__all__ = ["PLANS", "Cell", "Column", "Experiment", "Measurement", "Plan", "Table"]
