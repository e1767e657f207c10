"""Measure what each part of the CPU path adds to a training step: the fused attention and feed-forward halves of a block, and dropout.

    python benchmarks/ablation.py --output results/bench

Every variant runs in its own process; the variants of a task alternate, and the best time of each counts. A ratio above 1 is what a
training step loses without the part. The record also has two parts that were deleted because they gave less than 5 %: a memory pool, and
one matrix product for q, k and v.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from permuteformer.bench import sweeps
from permuteformer.bench.apart import Apart
from permuteformer.bench.case import Case
from permuteformer.experiments.lra import LENGTHS
from permuteformer.folders import write_whole

KEEP_MEMORY = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1073741824:glibc.malloc.mmap_threshold=1073741824"}
"""Make glibc's malloc keep freed memory."""


def no_fused_attention() -> None:
    """Run the attention half of a block as modules."""
    from permuteformer.models import fused

    fused.attend = lambda *_: None


def no_fused_feed_forward() -> None:
    """Run the feed-forward half of a block as modules."""
    from permuteformer.models import fused

    fused.feed_forward = lambda *_: None


def torch_dropout() -> None:
    """Use PyTorch's dropout outside the fused block."""
    from torch import nn

    from permuteformer.ops.modules import Dropout

    Dropout.forward = nn.Dropout.forward  # type: ignore[method-assign]


REFERENCE = "everything"
Patches = tuple[Callable[[], None], ...]
PLAIN: Patches = (no_fused_attention, no_fused_feed_forward, torch_dropout)
VARIANTS: dict[str, tuple[Patches, dict[str, str]]] = {
    REFERENCE: ((), {}),
    "no fused attention": ((no_fused_attention,), {}),
    "no fused feed-forward": ((no_fused_feed_forward,), {}),
    "no fused block": ((no_fused_attention, no_fused_feed_forward), {}),
    "attention kernel alone": (PLAIN, {}),
    "attention kernel alone, malloc keeps memory": (PLAIN, KEEP_MEMORY),
}


def cases() -> dict[str, Case]:
    """A training step of each task at the paper's sizes, and of a language model."""
    found = {task: sweeps.model("permuteformer", task, "training", LENGTHS[task], sweeps.BATCHES[task]) for task in sweeps.TASKS}
    options: dict[str, Any] = {"task": "wikitext-103", "task_options": {}, "kind": "training", "length": 512, "batch_size": 4}
    return {**found, "lm": Case("model", {**options, "model": "permuteformer-lm", "model_fields": {"vocab_size": 8192}})}


class Variant(Apart):
    """A process that times one case after applying a variant's patches."""

    def __init__(self, name: str, case: Case, **options: Any) -> None:
        super().__init__(case, **options)
        _, environment = VARIANTS[name]
        self.command = [sys.executable, __file__, "--variant", name, *self.command[3:]]
        self.environment |= environment


def main() -> None:
    """Measure all variants of all tasks, or serve one variant."""
    if sys.argv[1:2] == ["--variant"]:
        name = sys.argv[2]
        for patch in VARIANTS[name][0]:
            patch()
        sys.argv[1:] = sys.argv[3:]
        runpy.run_module("permuteformer.bench.measure", run_name="__main__")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/bench"), help="folder of ablation.jsonl")
    parser.add_argument("--turns", type=int, default=12, help="how often each variant is timed")
    parser.add_argument("--tasks", nargs="+", default=list(cases()), choices=list(cases()))
    arguments = parser.parse_args()
    lines = []
    for task in arguments.tasks:
        with ExitStack() as opened:
            running = {name: opened.enter_context(Variant(name, cases()[task], turn_seconds=0.5)) for name in VARIANTS}
            for _ in range(arguments.turns):
                for process in running.values():
                    process.turn()
            results = {name: process.end() for name, process in running.items()}
        for name, result in results.items():
            result["environment"]["command"] = ["python", "benchmarks/ablation.py"]
            ratio = result["seconds_best"] / results[REFERENCE]["seconds_best"]
            extra = result["peak_memory_bytes"] - result["ready_memory_bytes"]
            lines.append({"task": task, "variant": name, "ratio": ratio, "extra_memory_bytes": extra, **result})
            print(f"{task:12} {name:45} {result['seconds_best'] * 1000:8.1f} ms  {ratio:5.2f}x  {extra / 1e6:7.1f} MB extra", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.output / "ablation.jsonl", "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    main()
