"""Time and memory of a model at a length: one measurement, in this process.

``python -m permuteformer.bench.measure JSON`` takes a measurement as JSON and prints its result as the last line of its output;
``bench.apart`` calls it so, in a process that may run out of memory without taking others along.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from permuteformer.bench.apart import BLANK, OUT_OF_MEMORY, malloc_settings, ran_out_of_memory
from permuteformer.experiments.base import Measurement
from permuteformer.models import PRESETS
from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.tasks import Batch
from permuteformer.tasks.base import Classification
from permuteformer.tasks.inputs import Values
from permuteformer.tasks.language import LanguageModelling
from permuteformer.tokens import PAPER
from permuteformer.train.build import build_config, build_model, build_task, inputs, targets
from permuteformer.train.environment import environment, peak_memory, resident_memory
from permuteformer.train.limits import limit_memory, when_parent_ends


def measure(measurement: Measurement, device: str | torch.device | None = None) -> dict[str, Any]:
    """Run a measurement and say what it took, on random tokens of the task's vocabulary: no data is needed.

    A step of training is forward, backward and an update by Adam; inference is forward without gradients. One step is done before
    those that are timed. The peak of memory is that of the whole process where there is no GPU, so measure in a new one
    (``bench.apart.measure_apart``).

    Args:
        measurement: what to measure.
        device: where; a GPU if there is one.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    idle = resident_memory()
    with torch.random.fork_rng([chosen] if chosen.type == "cuda" else []):
        torch.manual_seed(0)
        items = random_items(measurement)
        model = build_model(build_config(measurement.model, measurement.model_fields, items), items.kind).to(chosen)
        batch = items.batch(measurement.batch_size).to(chosen)
        step = STEPS[measurement.kind](model, batch, items.kind)
        if chosen.type == "cuda":
            torch.cuda.reset_peak_memory_stats(chosen)
        seconds = [_seconds(step, chosen) for _ in range(1 + measurement.repeats)][1:]
    best = min(seconds)
    epoch = None if measurement.items is None else best * math.ceil(measurement.items / measurement.batch_size)
    return {
        **BLANK,
        "status": "finished",
        "seconds_best": best,
        "seconds_median": statistics.median(seconds),
        "seconds_spread": [best, max(seconds)],
        "repeats": measurement.repeats,
        "seconds_per_epoch": epoch,
        "estimated": epoch is not None,  # from a few steps
        "peak_memory_bytes": peak_memory(chosen),
        "memory_is": "allocated on the device" if chosen.type == "cuda" else "resident in the process",
        "idle_memory_bytes": idle,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else chosen.type,
        "threads": torch.get_num_threads(),
        "malloc": malloc_settings(),
    }


@dataclass(frozen=True)
class RandomItems:
    """Items of a task as far as a model can tell, but random and all of one length: what ``build_config`` asks of a task, and batches."""

    name: str
    kind: str
    vocab_size: int
    max_length: int
    labels: list[str] = field(default_factory=list)
    grid: tuple[int, int] | None = None
    input: Any = None
    """What makes tokens of values; none for language models, whose tokens are any."""

    @property
    def padding(self) -> int | None:
        """As of the task."""
        return PAPER.pad if self.input is None else self.input.alphabet.padding

    def batch(self, size: int) -> Batch:
        """So many items, always the same."""
        random = np.random.default_rng(0)
        ids = torch.arange(size)
        if self.kind == "lm":
            tokens, following = (torch.from_numpy(random.integers(0, self.vocab_size, (size, self.max_length))) for _ in range(2))
            return Batch(ids, tokens, torch.ones_like(tokens, dtype=torch.bool), following)
        labels = torch.from_numpy(random.integers(0, len(self.labels), size))
        alphabet = self.input.alphabet
        count = self.max_length - alphabet.specials

        def sequences() -> Any:
            return self.input.encode([random.integers(0, alphabet.count, count, dtype=np.uint8).tobytes() for _ in range(size)])

        first, mask, positions = sequences()
        batch = Batch(ids, first, mask, labels, positions)
        if self.kind != "match":
            return batch
        second, second_mask, _ = sequences()
        return replace(batch, second_input_ids=second, second_key_mask=second_mask)


def random_items(measurement: Measurement) -> RandomItems:
    """Items of the measurement's task, of its length. Raises where the task cannot have it."""
    task, length = build_task(measurement.task, measurement.task_options), measurement.length
    if isinstance(task, LanguageModelling):
        return RandomItems(task.name, task.kind, _vocabulary(measurement, task), length)
    if not isinstance(task, Classification):
        raise TypeError(f"task {task.name!r} cannot be measured: it must be a Classification, a Matching or a LanguageModelling")
    if task.grid is not None and length != task.max_length:
        height, width = task.grid
        raise ValueError(
            f"length must be {task.max_length}, the {height} x {width} pixels of {task.name!r} and the tokens around them; it is {length}"
        )
    values = replace(task.input, max_length=length) if isinstance(task.input, Values) else task.input
    return RandomItems(task.name, task.kind, task.vocab_size, length, task.labels, task.grid, values)


def _vocabulary(measurement: Measurement, task: LanguageModelling) -> int:
    """Tokens there are: of bytes the alphabet's, of words as many as the preset has, for their vocabulary is made of data."""
    size = PAPER.size if task.unit == "bytes" else PRESETS.get(measurement.model, {}).get("vocab_size", PAPER.size)
    return int(measurement.model_fields.get("vocab_size", size))


def _training(model: PermuteFormerPreTrainedModel, batch: Batch, kind: str) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.Adam(model.parameters())
    arguments = {**inputs(batch, model.config, kind), **targets(batch, kind)}

    def step() -> None:
        model(**arguments).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _inference(model: PermuteFormerPreTrainedModel, batch: Batch, kind: str) -> Callable[[], None]:
    model.eval()
    arguments: dict[str, Any] = dict(inputs(batch, model.config, kind))
    if kind == "lm":
        arguments["use_cache"] = False  # nothing is to follow

    @torch.inference_mode()
    def step() -> None:
        model(**arguments)

    return step


STEPS: Mapping[str, Callable[[PermuteFormerPreTrainedModel, Batch, str], Callable[[], None]]] = {
    "training": _training,
    "inference": _inference,
}
"""What is timed, for each kind of measurement."""


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin


def main() -> None:
    """Measure what the command line says, and print the result as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m permuteformer.bench.measure", description="Measure time and memory of a model.")
    parser.add_argument("measurement", help="fields of a measurement, as JSON")
    parser.add_argument("--threads", type=int, help="threads of a CPU; torch decides unless told")
    parser.add_argument("--memory-bytes", type=int, help="memory that may be had; more is refused")
    parser.add_argument("--device", help="where; a GPU if there is one")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input ends")
    arguments = parser.parse_args()
    if arguments.with_parent:
        when_parent_ends(lambda: os._exit(1))
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    limit_memory(arguments.memory_bytes)
    try:
        result = measure(Measurement.from_json(json.loads(arguments.measurement)), arguments.device)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        message = str(error).strip().splitlines()
        result = {
            **BLANK,
            "status": OUT_OF_MEMORY,
            "message": message[0] if message else type(error).__name__,
            "threads": torch.get_num_threads(),
            "malloc": malloc_settings(),
        }
    sys.stdout.write(json.dumps({**result, "environment": environment(device=str(result.get("device") or "cpu"))}) + "\n")


if __name__ == "__main__":
    main()
