"""Tasks, one a file. A task knows its data, vocabulary, grid of positions and metric; it knows no model."""

from permuteformer.tasks.base import SPLITS, TASKS, Batch, NotReady, Source, Task

__all__ = ["SPLITS", "TASKS", "Batch", "NotReady", "Source", "Task"]
