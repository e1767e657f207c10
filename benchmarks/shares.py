"""Where the time of whole models goes, and the least they could take: the matrix products alone, at this machine's rate.

    python benchmarks/shares.py --output results/bench

Times are best ones, of ours, the formula and the matrix product in turns; shares are of the profiler's own times of a step. Products are
those that a step does, counted as it does them; those of attention are counted on their own too: all else could stay as it is, and
attention take no more than these.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode

from permuteformer.bench import sweeps
from permuteformer.bench.case import Case
from permuteformer.bench.steps import BACKWARD
from permuteformer.bench.subjects import Subject, make
from permuteformer.experiments.lra import LENGTHS
from permuteformer.folders import write_whole
from permuteformer.train.environment import environment

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
TASKS = ("retrieval", "image", "pathfinder")
TURNS = 8
STEPS = 5


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
    cases = {row: sweeps.model(row, task, kind, LENGTHS[task], batch) for row in ("permuteformer", sweeps.FORMULA)}
    cases["matmul"] = Case("op", {"method": "matmul"})
    subjects = {row: make(case.subject, dict(case.options), "cpu") for row, case in cases.items()}
    best = dict.fromkeys(subjects, float("inf"))
    for _ in range(TURNS):
        for row, subject in subjects.items():
            best[row] = min(best[row], _seconds(subject))
    ours = subjects["permuteformer"]
    (flops, of_attention), rate = products(ours), (subjects["matmul"].flops or 0) / best["matmul"]
    return {
        "task": task,
        "kind": kind,
        "seconds": best["permuteformer"],
        "formula_seconds": best[sweeps.FORMULA],
        "shares": shares(ours),
        "product_flops": flops,
        "flops_per_second": rate,
        "product_seconds": flops / rate,
        "attention_product_seconds": of_attention / rate,
        "environment": {**environment(), "command": ["python", "benchmarks/shares.py"]},
    }


def products(subject: Subject) -> tuple[float, float]:
    """Multiplications and additions of the matrix products of a step, and of those that are linear attention's."""
    ops = torch.ops.permuteformer
    counted = {ops.total: _of_total, ops.total_back: _of_total_back}
    with FlopCounterMode(display=False, custom_mapping=counted) as counter:
        subject.step()
    found = counter.get_flop_counts()["Global"]
    return sum(found.values()), sum(found.get(op, 0) for op in counted)


def _of_total(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    """Keys are multiplied with values, and queries with what comes of it."""
    return 2 * math.prod(k[:2]) * k[3] * v[3] * (k[2] + q[2])


def _of_total_back(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    return BACKWARD * _of_total(q, k, v)


def shares(subject: Subject) -> dict[str, float]:
    """Of the time of a step: matrix products, linear attention, the rest."""
    # The first steps that are profiled take longer.
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=2, active=STEPS), acc_events=True) as profiled:
        for _ in range(2 + STEPS):
            subject.step()
            profiled.step()
    found = {"matrix products": 0.0, "linear attention": 0.0, "the rest": 0.0}
    for entry in profiled.key_averages():
        part = "matrix products" if entry.key in PRODUCTS else "linear attention" if "permuteformer" in entry.key else "the rest"
        found[part] += entry.self_cpu_time_total
    return {part: value / sum(found.values()) for part, value in found.items()}


def _seconds(subject: Subject) -> float:
    subject.step()  # after another case its memory is cold
    began = time.perf_counter()
    subject.step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
