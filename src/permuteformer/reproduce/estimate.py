"""How long a job will take and how much memory, before it is run: from a run of the same row, or from the work it is."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from permuteformer.bench.items import random_items
from permuteformer.experiments import Experiment, Measurement
from permuteformer.experiments.lra import ITEMS
from permuteformer.models import PermuteFormerConfig
from permuteformer.models.inspection import Summary, summarize
from permuteformer.reproduce.jobs import Job
from permuteformer.tasks import NotReady
from permuteformer.train.build import Shape, build_config, build_task
from permuteformer.train.feed import chosen

EFFICIENCY = 0.25
"""What training reaches of the rate of large matrix products, about."""

TRAINING_FLOPS = 4
"""In units of a forward pass: forward, backward, and features that are computed again for it."""

FLOATS_KEPT = 24
"""Numbers that a block keeps of each token and each of its width for the backward pass, about."""

SCORES_KEPT = 3
"""Numbers of each word that might come next: scores, their logarithms, their gradients."""

PROCESS_BYTES = 600_000_000
"""Python with torch."""


@dataclass(frozen=True)
class Estimate:
    """Seconds and bytes of a job; ``None`` where they cannot be said."""

    seconds: float | None
    memory_bytes: int | None
    measured: bool
    """From a run of the same row, not from the work."""


def estimate(job: Job, finished: Sequence[Job], flops_per_second: float, data: str | None) -> Estimate:
    """What a job will take. A finished run that differs in its seed only says it best."""
    alike = next((other for other in finished if other.result.get("seconds") and _same_but_seed(job, other)), None)
    if alike is not None:
        return Estimate(alike.result["seconds"], alike.result.get("peak_memory_bytes"), True)
    work = job.cell.work
    return _of_training(work, flops_per_second, data) if isinstance(work, Experiment) else _of_measurement(work, flops_per_second)


def measured_rate() -> float:
    """Floating-point operations a second of a large matrix product, here and now."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(1024, 1024, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - began)
    return 2 * 1024**3 / best


def _same_but_seed(job: Job, other: Job) -> bool:
    here, there = job.cell.work, other.cell.work
    return isinstance(here, Experiment) and isinstance(there, Experiment) and replace(there, seed=here.seed) == here


def _of_training(work: Experiment, flops_per_second: float, data: str | None) -> Estimate:
    task = build_task(work.task, work.task_options, data)
    shape: Shape = task
    try:
        lengths = task.lengths("train")[chosen(len(task.dataset("train")), work.train_items)]
        items, mean_length = len(lengths), float(lengths.mean())
    except NotReady:  # as if all inputs were as long as the longest, and as many as the official data has
        fields = {name: getattr(work, name) for name in ("task", "model", "task_options", "model_fields")}
        shape = random_items(Measurement(kind="training", length=task.max_length, **fields))
        items, mean_length = work.train_items or ITEMS.get(work.task.removeprefix("lra-"), 0), task.max_length
    config = build_config(work.model, work.model_fields, shape)
    seen = (work.epochs or 0) * items if work.steps is None else work.steps * work.batch_size
    tokens = seen * mean_length * (2 if task.kind == "match" else 1)
    summary = _summary(config.to_json_string(), task.max_length)
    seconds = tokens * summary.flops_per_token * TRAINING_FLOPS / (flops_per_second * EFFICIENCY)
    memory = _memory(summary.parameters, work.micro_batch_size or work.batch_size, task.max_length, config)
    return Estimate(seconds or None, memory, False)


def _of_measurement(work: Measurement, flops_per_second: float) -> Estimate:
    task = random_items(work)
    config = build_config(work.model, work.model_fields, task)
    summary = _summary(config.to_json_string(), work.length)
    times = TRAINING_FLOPS if work.kind == "training" else 1
    flops = work.batch_size * work.length * summary.flops_per_token * times * (work.repeats + 1)
    return Estimate(flops / (flops_per_second * EFFICIENCY), _memory(summary.parameters, work.batch_size, work.length, config), False)


@cache
def _summary(config: str, length: int) -> Summary:
    """Of a configuration as JSON; seeds of a row have the same."""
    return summarize(PermuteFormerConfig.from_dict(json.loads(config)), length)


def _memory(parameters: int, batch: int, length: int, config: PermuteFormerConfig) -> int:
    """The process; weights, gradients and Adam's moments; what the blocks keep; scores of words; for a bias the weights of all pairs."""
    kept = batch * length * config.hidden_size * config.num_hidden_layers * FLOATS_KEPT
    if any(entry["name"] == "t5_bias" for entry in config.position):
        kept += 4 * batch * config.num_attention_heads * length**2 * config.num_hidden_layers
    if config.causal:
        kept += SCORES_KEPT * batch * length * config.vocab_size
    return int(PROCESS_BYTES + 4 * (4 * parameters + kept))
