"""Estimates of time and memory of a job before it runs: from a run of the same row, or from the number of operations."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from permuteformer.bench.inputs import measured_input
from permuteformer.experiments import Experiment, Measurement
from permuteformer.models import PermuteFormerConfig
from permuteformer.models.inspection import Summary, summarize
from permuteformer.reproduce.jobs import Job
from permuteformer.tasks import NotReady
from permuteformer.tasks.store import sample_numbers
from permuteformer.train.build import build_config, build_task

EFFICIENCY = 0.25
"""Share of the matmul peak that training reaches, roughly."""

TRAINING_FLOPS = 4
"""Operations of a training step, relative to a forward pass: forward, backward, and recomputed features."""

FLOATS_KEPT = 24
"""Numbers that a block stores for the backward pass, per token and unit of width, roughly."""

LOGITS_KEPT = 3
"""Numbers per token and entry of the vocabulary: logits, their logarithms, their gradients."""

PROCESS_BYTES = 600_000_000
"""Memory of Python with torch."""


@dataclass(frozen=True)
class Estimate:
    """Seconds and bytes of a job; ``None`` if unknown."""

    seconds: float | None
    memory_bytes: int | None
    measured: bool
    """Whether it comes from a run of the same row."""


def estimate(job: Job, finished: Sequence[Job], flops_per_second: float, data: str | None) -> Estimate:
    """Return the estimate of a job. A finished run that differs only in its seed is the best guess."""
    work = job.cell.work
    if isinstance(work, Measurement):
        return _estimate_measurement(work, flops_per_second)
    for other in finished:
        if isinstance(other.cell.work, Experiment) and replace(other.cell.work, seed=work.seed) == work and other.result.get("seconds"):
            return Estimate(other.result["seconds"], other.result.get("peak_memory_bytes"), True)
    return _estimate_training(work, flops_per_second, data)


def matmul_peak() -> float:
    """Return the floating-point operations per second of a large matrix product on this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(1024, 1024, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - began)
    return 2 * 1024**3 / best


def _estimate_training(work: Experiment, flops_per_second: float, data: str | None) -> Estimate:
    task = build_task(work.task, work.task_options, data)
    try:
        lengths = task.lengths("train")[sample_numbers(len(task.items("train")), work.train_items)]
        input, items, mean_length = task.input, len(lengths), float(lengths.mean())
    except NotReady:  # assume the official number of items, all of the longest length
        input = measured_input(task, work.model)
        items, mean_length = work.train_items or task.official_items.get("train", 0), input.max_length
    config = build_config(work.model, work.model_fields, input)
    seen = (work.epochs or 0) * items if work.steps is None else work.steps * work.batch_size
    tokens = seen * mean_length * (2 if input.kind == "match" else 1)
    summary = _summary(config.to_json_string(), input.max_length)
    seconds = tokens * summary.flops_per_token * TRAINING_FLOPS / (flops_per_second * EFFICIENCY)
    memory = _memory(summary.parameters, work.micro_batch_size or work.batch_size, input.max_length, config)
    return Estimate(seconds or None, memory, False)


def _estimate_measurement(work: Measurement, flops_per_second: float) -> Estimate:
    input = measured_input(build_task(work.task, work.task_options), work.model, work.length)
    config = build_config(work.model, work.model_fields, input)
    summary = _summary(config.to_json_string(), work.length)
    times = TRAINING_FLOPS if work.kind == "training" else 1
    flops = work.batch_size * work.length * summary.flops_per_token * times * (work.repeats + 1)
    return Estimate(flops / (flops_per_second * EFFICIENCY), _memory(summary.parameters, work.batch_size, work.length, config), False)


@cache
def _summary(config: str, length: int) -> Summary:
    """Return the summary of a configuration, given as JSON; seeds of a row share it."""
    return summarize(PermuteFormerConfig.from_dict(json.loads(config)), length)


def _memory(parameters: int, batch: int, length: int, config: PermuteFormerConfig) -> int:
    """Return the bytes of the process, weights, gradients, Adam's moments, stored activations, logits, and of a bias for all pairs."""
    kept = batch * length * config.hidden_size * config.num_hidden_layers * FLOATS_KEPT
    if any(entry["name"] == "t5_bias" for entry in config.position):
        kept += 4 * batch * config.num_attention_heads * length**2 * config.num_hidden_layers
    if config.causal:
        kept += LOGITS_KEPT * batch * length * config.vocab_size
    return int(PROCESS_BYTES + 4 * (4 * parameters + kept))
