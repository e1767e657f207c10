"""Where the time of whole models goes, and the least they could take: the matrix products alone, at this machine's rate.

    python benchmarks/shares.py --output results/bench

Times are best ones, of ours, the formula and the matrix product in turns. Products are those of our model's forward pass, counted as
PyTorch does them one by one, and for training those of their two gradients; what the kernel finds again for the backward pass is not
among them. What is not spent in calls of the kernel is Python's, torch's operators', and in training the optimizer's.
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
from permuteformer.bench.steps import work
from permuteformer.bench.subjects import Subject, make
from permuteformer.experiments.lra import LENGTHS
from permuteformer.folders import write_whole
from permuteformer.ops import linear, native_backend
from permuteformer.train.environment import environment

OURS = "permuteformer"
TASKS = ("retrieval", "image", "pathfinder")
TURNS = {"training": 8, "inference": 60}
STEPS = 20


def main() -> None:
    """Measure all, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/bench"), help="folder of shares.jsonl")
    output = parser.parse_args().output
    lines = []
    for task in TASKS:
        for kind in ("training", "inference"):
            lines.append(measure(task, kind))
            print(json.dumps({name: value for name, value in lines[-1].items() if name != "environment"}))
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "shares.jsonl", "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode())


def measure(task: str, kind: str) -> dict[str, Any]:
    """One task: how long a step is, what it is made of, and what its products would take."""
    batch = sweeps.BATCHES[task] if kind == "training" else 1
    subjects = {row: _subject(row, task, kind, batch) for row in (OURS, sweeps.FORMULA)}
    subjects["matmul"] = make("op", {"method": "matmul"}, "cpu")
    best = dict.fromkeys(subjects, float("inf"))
    for _ in range(TURNS[kind]):
        for row, subject in subjects.items():
            best[row] = min(best[row], _seconds(subject))
    flops, rate = work(kind, products(task, batch)), (subjects["matmul"].flops or 0) / best["matmul"]
    return {
        "task": task,
        "kind": kind,
        "seconds": best[OURS],
        "formula_seconds": best[sweeps.FORMULA],
        "kernel_share": in_kernel(subjects[OURS]),
        "product_flops": flops,
        "flops_per_second": rate,
        "product_seconds": flops / rate,
        "environment": {**environment(), "command": ["python", "benchmarks/shares.py"]},
    }


def products(task: str, batch: int) -> float:
    """Multiplications and additions of the matrix products of a forward pass, counted as PyTorch does them one by one."""
    linear.DEFAULT_BACKEND = "torch"
    try:
        subject = _subject(OURS, task, "inference", batch)
        with FlopCounterMode(display=False) as counter:
            subject.step()
    finally:
        linear.DEFAULT_BACKEND = "auto"
    return float(counter.get_total_flops())


def in_kernel(subject: Subject) -> float:
    """The share of a step's time that is spent in calls of the CPU kernel: of the quickest of several steps."""
    inside = 0.0

    def timed(function: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(struct: Any) -> None:
            nonlocal inside
            began = time.perf_counter()
            function(struct)
            inside += time.perf_counter() - began

        return call

    found = []
    functions = native_backend.functions()
    with mock.patch.dict(functions, {name: timed(function) for name, function in functions.items()}):
        for _ in range(STEPS):
            inside, began = 0.0, time.perf_counter()
            subject.step()
            found.append((time.perf_counter() - began, inside))
    seconds, of_it = min(found)
    return of_it / seconds


def _subject(row: str, task: str, kind: str, batch: int) -> Subject:
    case = sweeps.model(row, task, kind, LENGTHS[task], batch)
    return make(case.subject, dict(case.options), "cpu")


def _seconds(subject: Subject) -> float:
    subject.step()  # after another case its memory is cold
    began = time.perf_counter()
    subject.step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
