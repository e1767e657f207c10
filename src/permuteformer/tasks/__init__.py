"""Tasks, one per file. Importing them does not import torch."""

from permuteformer.tasks.base import SPLITS, TASKS, NotReady, Recipe, Source, Task
from permuteformer.tasks.generators.base import GenerateOptions
from permuteformer.tasks.inputs import Batch

__all__ = ["SPLITS", "TASKS", "Batch", "GenerateOptions", "NotReady", "Recipe", "Source", "Task"]
