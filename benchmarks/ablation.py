"""Measure what each part of the CPU path adds to a training step: the fused attention and feed-forward halves of a block, and dropout.

    python benchmarks/ablation.py    writes results/bench/ablation.jsonl

Every variant runs in its own process; the variants of a task alternate, and the best time of each counts. A ratio above 1 is what a
training step loses without the part. The record also has two parts that were deleted because they gave less than 5 %: a memory pool, and
one matrix product for q, k and v.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from permuteformer.bench import sweeps
from permuteformer.bench.runner import start_process
from permuteformer.bench.sweeps import Case
from permuteformer.experiments.paper import COLUMNS
from permuteformer.presets import TASK_MODELS

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


Patches = tuple[Callable[[], None], ...]
PLAIN: Patches = (no_fused_attention, no_fused_feed_forward, torch_dropout)
REFERENCE = "everything"
VARIANTS: dict[str, tuple[Patches, dict[str, str]]] = {
    REFERENCE: ((), {}),
    "no fused attention": ((no_fused_attention,), {}),
    "no fused feed-forward": ((no_fused_feed_forward,), {}),
    "no fused block": ((no_fused_attention, no_fused_feed_forward), {}),
    "attention kernel alone": (PLAIN, {}),
    "attention kernel alone, malloc keeps memory": (PLAIN, KEEP_MEMORY),
}
"""Patches and environment variables of each variant."""


def cases() -> dict[str, Case]:
    """Return a training step of each task at the paper's sizes, and of a language model."""
    found = {task: sweeps.model("permuteformer", task, "training", TASK_MODELS[task].length, sweeps.BATCHES[task]) for task in COLUMNS}
    lm = {"task": "wikitext-103", "kind": "training", "length": 512, "batch_size": 4, "model": "permuteformer-lm"}
    return {**found, "lm": Case("model", {**lm, "model_fields": {"vocab_size": 8192}})}


def measure(case: Case, turns: int) -> dict[str, dict[str, Any]]:
    """Return the results of the variants, which alternate."""
    with ExitStack() as stack:
        processes = {}
        for name, (_, variables) in VARIANTS.items():
            processes[name] = stack.enter_context(start_process(case, turn_seconds=0.5, worker=(__file__, name), variables=variables))
        for _ in range(turns):
            for process in processes.values():
                process.turn()
        return {name: process.result() for name, process in processes.items()}


def main() -> None:
    """Measure all variants of all tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/bench"), help="folder of ablation.jsonl (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=12, help="how often each variant is timed (default: %(default)s)")
    arguments = parser.parse_args()
    lines = []
    for task, case in cases().items():
        results = measure(case, arguments.turns)
        for name, result in results.items():
            ratio = result["seconds_best"] / results[REFERENCE]["seconds_best"]
            extra = result["peak_memory_bytes"] - result["ready_memory_bytes"]
            lines.append({"task": task, "variant": name, "ratio": ratio, "extra_memory_bytes": extra, **result})
            print(f"{task:12} {name:45} {result['seconds_best'] * 1000:8.1f} ms  {ratio:5.2f}x  {extra / 1e6:7.1f} MB extra", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "ablation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_worker(variant: str) -> None:
    """Apply a variant's patches, and time a case for the process that started this one."""
    from permuteformer.bench import worker

    for patch in VARIANTS[variant][0]:
        patch()
    worker.main()


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in VARIANTS:
        run_worker(sys.argv.pop(1))
    else:
        main()
