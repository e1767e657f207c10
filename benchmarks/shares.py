"""Shares of the time of whole models, and a lower bound: the matrix products alone, at this machine's peak of matrix products.

    python benchmarks/shares.py    writes results/bench/shares.jsonl

Times are the best of our model, the formula and the matrix product, which alternate. The products are those of the forward pass of our
model, counted by PyTorch, and in training those of the gradients; what the kernel computes again for the backward pass does not count. Time
outside the CPU kernel is spent by Python, PyTorch's operators and, in training, the optimizer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from torch.utils.flop_counter import FlopCounterMode

from permuteformer.bench import sweeps
from permuteformer.bench.subjects import TRAINING_WORK, Subject, make, make_op
from permuteformer.machine import environment
from permuteformer.ops import linear, native_backend
from permuteformer.presets import TASK_MODELS

TASKS = ("retrieval", "image", "pathfinder")
TURNS = {"training": 8, "inference": 60}
STEPS = 20


def main() -> None:
    """Measure training and inference of each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/bench"), help="folder of shares.jsonl (default: %(default)s)")
    output = parser.parse_args().output
    lines = []
    for task in TASKS:
        for kind in TURNS:
            line = measure(task, kind)
            print(line)
            lines.append({**line, "command": "python benchmarks/shares.py", "environment": environment()})
    output.mkdir(parents=True, exist_ok=True)
    (output / "shares.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure(task: str, kind: str) -> dict[str, Any]:
    """Return the time of a step, the kernel's share of it, and the time of its matrix products alone."""
    batch_size = sweeps.BATCHES[task] if kind == "training" else 1
    ours = subject(sweeps.OURS, task, kind, batch_size)
    subjects = {sweeps.OURS: ours, sweeps.FORMULA: subject(sweeps.FORMULA, task, kind, batch_size), sweeps.MATMUL: make_op("cpu", "matmul")}
    best = dict.fromkeys(subjects, float("inf"))
    for _ in range(TURNS[kind]):
        for row, one in subjects.items():
            one.step()  # the memory of another case is in the cache
            begin = time.perf_counter()
            one.step()
            best[row] = min(best[row], time.perf_counter() - begin)
    flops = product_flops(task, batch_size) * (TRAINING_WORK if kind == "training" else 1)
    flops_per_second = (subjects[sweeps.MATMUL].flops or 0) / best[sweeps.MATMUL]
    return {
        "task": task,
        "kind": kind,
        "seconds": best[sweeps.OURS],
        "formula_seconds": best[sweeps.FORMULA],
        "kernel_share": kernel_share(ours),
        "product_flops": flops,
        "flops_per_second": flops_per_second,
        "product_seconds": flops / flops_per_second,
    }


def subject(row: str, task: str, kind: str, batch_size: int) -> Subject:
    """Return a row's call on a task, at the paper's length."""
    case = sweeps.model(row, task, kind, TASK_MODELS[task].length, batch_size)
    return make(case.subject, case.options, "cpu")


def product_flops(task: str, batch_size: int) -> int:
    """Return the multiplications and additions of the matrix products of a forward pass."""
    ours = subject(sweeps.OURS, task, "inference", batch_size)
    with mock.patch.object(linear, "DEFAULT_BACKEND", "torch"), FlopCounterMode(display=False) as counter:  # the kernel's are not counted
        ours.step()
    return int(counter.get_total_flops())


def kernel_share(subject: Subject) -> float:
    """Return the share of a step's time that is spent in the CPU kernel, in the fastest of several steps."""
    inside = 0.0

    def timed(function: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(struct: Any) -> None:
            nonlocal inside
            begin = time.perf_counter()
            function(struct)
            inside += time.perf_counter() - begin

        return call

    steps = []
    functions = native_backend.functions()
    with mock.patch.dict(functions, {name: timed(function) for name, function in functions.items()}):
        for _ in range(STEPS):
            inside, begin = 0.0, time.perf_counter()
            subject.step()
            steps.append((time.perf_counter() - begin, inside))
    seconds, seconds_inside = min(steps)
    return seconds_inside / seconds


if __name__ == "__main__":
    main()
