"""Evaluation: sums over a split, which come out the same on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from permuteformer.models import PermuteFormerConfig
from permuteformer.tasks import Task
from permuteformer.train.build import inputs
from permuteformer.train.feed import evaluation_batches


def evaluate(
    model: nn.Module,
    config: PermuteFormerConfig,
    task: Task,
    split: str,
    *,
    batch_size: int,
    items: int | None = None,
    accelerator: Accelerator | None = None,
    progress: Callable[[int], None] = lambda items: None,
) -> dict[str, float]:
    """The task's metrics on a split, or on ``items`` of it.

    Batches are dealt to the processes; their sums are added in the order of the batches, without rounding in between, so that the
    number of processes does not show.
    """
    accelerator = accelerator or Accelerator()
    was_training = model.training
    model.eval()
    sums: list[tuple[int, dict[str, float]]] = []
    process, processes = accelerator.process_index, accelerator.num_processes
    try:
        with torch.no_grad():
            for number, batch in evaluation_batches(
                task, split, batch_size=batch_size, items=items, process=process, processes=processes
            ):
                batch = batch.to(accelerator.device)
                given = inputs(batch, config, task.kind)
                if task.kind == "lm":
                    given["use_cache"] = False  # type: ignore[assignment]
                with accelerator.autocast():
                    logits = model(**given).logits
                if number >= 0:
                    sums.append((number, {name: float(value) for name, value in task.score(logits, batch).items()}))
                    progress(len(batch) * processes)
    finally:
        model.train(was_training)
    everywhere = sorted(gather_object(sums) if processes > 1 else sums, key=lambda part: part[0])
    if not everywhere:
        raise ValueError(f"the {split} split of {task.name} is empty: there is nothing to evaluate")
    totals = {name: math.fsum(part[name] for _, part in everywhere) for name in everywhere[0][1]}
    return task.summarize(totals, split)
