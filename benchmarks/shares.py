"""Where the time of whole models goes, and the least they could take: the matrix products alone, at this machine's rate.

    python benchmarks/shares.py --output results/bench

Times are best ones, of ours, the formula and the matrix product in turns; shares are of the profiler's own times of a step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from permuteformer.bench import sweeps
from permuteformer.bench.case import Case
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
    flops, rate = ours.flops or 0, (subjects["matmul"].flops or 0) / best["matmul"]
    return {
        "task": task,
        "kind": kind,
        "seconds": best["permuteformer"],
        "formula_seconds": best[sweeps.FORMULA],
        "shares": shares(ours),
        "product_flops": flops,
        "flops_per_second": rate,
        "product_seconds": flops / rate,
        "environment": {**environment(), "command": ["python", "benchmarks/shares.py"]},
    }


def shares(subject: Subject) -> dict[str, float]:
    """Of the time of a step: matrix products, linear attention, the rest."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            subject.step()
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
