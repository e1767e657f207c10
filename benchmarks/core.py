"""Memory, import time and permutation orders of the library. Each part prints rows and writes JSON lines.

    python benchmarks/core.py memory    peak extra memory of forward + backward of attention at 65,536 tokens
    python benchmarks/core.py long      memory and time of an encoder at 131,072 tokens: one training step, and encoding in blocks
    python benchmarks/core.py imports   importing the package and its layer against importing torch
    python benchmarks/core.py orders    orders of random permutations, and the distances that all heads distinguish together

Results go to results/core/PART.jsonl, those of ``long`` to results/models. ``permuteformer bench ops`` measures the time of attention.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from permuteformer import PermuteFormerConfig, PermuteFormerModel
from permuteformer.machine import environment, peak_memory, resident_memory
from permuteformer.models.streaming import encode_in_blocks
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.permutation import decompose, max_order_cycle_lengths, order, random_permutation
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute

Row = dict[str, Any]

HEADS, VALUES = 8, 64
SHAPES = {
    "bidirectional": (1, 65_536, 256),
    "causal with decay": (1, 65_536, 64),
    "two-sided decay": (1, 65_536, 64),
    "bidirectional, batch 8": (8, 8192, 256),
    "causal with decay, batch 8": (8, 8192, 256),
    "two-sided decay, batch 8": (8, 8192, 256),
}
"""Batch, length and features per head of each kind: 256 for LRA text, 64 for the language model."""

PRESET, LENGTH = "permuteformer-retrieval", 131_072


def memory() -> list[Row]:
    """Return the memory of attention for each shape."""
    return [_in_new_process(_memory_of, kind) for kind in SHAPES]


def _memory_of(kind: str) -> Row:
    """Return the peak extra bytes of forward + backward, and the bytes of q, k, v, output and their gradients."""
    batch, length, features = SHAPES[kind]
    _forward_backward(kind, *_tensors(1, 256, features))  # allocates what is allocated once
    q, k, v = _tensors(batch, length, features)
    before = resident_memory() or 0
    out = _forward_backward(kind, q, k, v)
    extra = peak_memory(torch.device("cpu")) - before
    tensors = 2 * sum(x.nbytes for x in (q, k, v, out))
    shape = {"kind": kind, "batch": batch, "length": length, "heads": HEADS, "features": features, "values": VALUES}
    return {**shape, "tensor_bytes": tensors, "extra_bytes": extra, "ratio": extra / tensors}


def _tensors(batch: int, length: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v in the layout of projections: ``b l h d`` seen as ``b h l d``."""
    q, k, v = (torch.randn(batch, length, HEADS, size).transpose(1, 2).requires_grad_() for size in (features, features, VALUES))
    return q, k, v


def _forward_backward(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    causal, two_sided = kind.startswith("causal"), kind.startswith("two-sided")
    log_decay = Decay(HEADS).log_decay() if causal or two_sided else None
    transform = Permute(HEADS, q.shape[-1])
    out, _ = linear_attention(q, k, v, feature_map=relu_eps, transform=transform, causal=causal, log_decay=log_decay, two_sided=two_sided)
    out.backward(torch.ones_like(out))
    return out


def long() -> list[Row]:
    """Return memory and time of an encoder for each kind of call."""
    return [_in_new_process(_long_call, kind) for kind in ("forward + backward", "forward", "encode in blocks")]


def _long_call(kind: str) -> Row:
    torch.manual_seed(0)
    model = PermuteFormerModel(PermuteFormerConfig.preset(PRESET, hidden_dropout=0.0)).eval()
    ids = torch.randint(3, 259, (1, LENGTH))
    begin = time.perf_counter()
    if kind == "forward + backward":
        model(ids).last_hidden_state.square().mean().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    else:
        with torch.no_grad():
            hidden = model(ids).last_hidden_state if kind == "forward" else encode_in_blocks(model, ids)
        assert bool(hidden.isfinite().all())
    seconds = time.perf_counter() - begin
    return {"preset": PRESET, "length": LENGTH, "kind": kind, "peak_bytes": peak_memory(torch.device("cpu")), "seconds": seconds}


def _in_new_process(function: Any, kind: str) -> Row:
    """Call a function in a new process, because the peak memory of a process never falls."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        row: Row = pool.apply(function, (kind,))
    return row


def orders() -> list[Row]:
    """Return orders of 5,000 random permutations of each size, and the least common multiple over the heads of a model."""
    rows = []
    for size in (16, 32, 64, 128, 256):
        found = order(decompose(random_permutation(5000, size, torch.Generator().manual_seed(0))))
        row: Row = {"features": size, "mean": statistics.mean(found), "median": statistics.median(found), "smallest": min(found)}
        for heads in (8, 12, 16):
            together = [math.lcm(*found[start : start + heads]) for start in range(0, 5000 - heads + 1, heads)]
            row[f"lcm_{heads}_heads_median"], row[f"lcm_{heads}_heads_largest"] = statistics.median(together), max(together)
        rows.append({**row, "max_order": math.lcm(*max_order_cycle_lengths(size)), "bound": math.lcm(*range(1, size + 1))})
    return rows


def imports() -> list[Row]:
    """Return seconds to import in a new interpreter: the best of nine, alternating."""
    statements = {
        "torch": "import torch",
        "permuteformer": "import torch, permuteformer",
        "PermuteFormerAttention": "from permuteformer import PermuteFormerAttention",
    }
    best = dict.fromkeys(statements, math.inf)
    for _ in range(9):
        for name, statement in statements.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            best[name] = min(best[name], time.perf_counter() - begin)
    return [{"import": name, "seconds": seconds, "ratio_to_torch": seconds / best["torch"]} for name, seconds in best.items()]


PARTS = {"memory": memory, "long": long, "imports": imports, "orders": orders}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the results (default: %(default)s)")
    arguments = parser.parse_args()
    rows = PARTS[arguments.part]()
    for row in rows:
        print(row)
    path = arguments.output / ("models" if arguments.part == "long" else "core") / f"{arguments.part}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    made_by = {"command": f"python benchmarks/core.py {arguments.part}", "environment": environment()}
    path.write_text("".join(json.dumps({**row, **made_by}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
