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
from permuteformer.train.interrupt import Interrupted
from permuteformer.train.state import same_random_numbers_after
from permuteformer.train.stretches import Place
from permuteformer.train.together import total


def evaluate(
    model: nn.Module,
    config: PermuteFormerConfig,
    task: Task,
    split: str,
    *,
    batch_size: int,
    items: int | None = None,
    accelerator: Accelerator | None = None,
    place: Place | None = None,
    progress: Callable[[int], None] = lambda items: None,
    interrupted: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """The task's metrics on a split, or on ``items`` of it. The model and random numbers are left as they were.

    Batches are dealt to the processes, or to groups of them where ``place`` says that they hold rows together; their sums are added in the
    order of the batches, without rounding in between, so that the number of processes does not show. Where ``interrupted`` becomes true on
    one of them, all raise ``Interrupted``.
    """
    accelerator = accelerator or Accelerator(cpu=not torch.cuda.is_available())
    place = place or Place(accelerator.process_index, accelerator.num_processes)
    was_training = model.training
    model.eval()
    sums: list[tuple[int, dict[str, float]]] = []
    try:
        with torch.no_grad(), same_random_numbers_after(accelerator.device):
            for number, batch in evaluation_batches(task, split, batch_size=batch_size, items=items, place=place):
                if interrupted is not None and total(accelerator, interrupted())[0]:
                    raise Interrupted
                batch = batch.to(accelerator.device)
                given = inputs(batch, config, task.kind)
                if task.kind == "lm":
                    given["use_cache"] = False  # type: ignore[assignment]
                with accelerator.autocast():
                    logits = model(**given).logits
                if number >= 0 and place.scores(task.kind):
                    sums.append((number, {name: float(value) for name, value in task.score(logits, batch).items()}))
                    progress(len(batch) * place.shares)
    finally:
        model.train(was_training)
    everywhere = sorted(gather_object(sums) if accelerator.num_processes > 1 else sums, key=lambda part: part[0])
    if not everywhere:
        raise ValueError(f"the {split} split of {task.name} is empty: there is nothing to evaluate")
    totals = {name: math.fsum(part[name] for _, part in everywhere) for name in everywhere[0][1]}
    return task.summarize(totals, split)
