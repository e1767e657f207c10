"""What the core costs, and how far its permutations reach. Each part prints a table and writes JSON lines.

    python benchmarks/core.py memory    peak extra memory of forward + backward at 65,536 tokens
    python benchmarks/core.py imports   importing the package and its layer against importing torch
    python benchmarks/core.py orders    orders of random permutations, and what the heads of a model tell apart together

Results go to results/core/PART.jsonl. What ops take is what `permuteformer bench ops` measures.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.permutation import decompose, max_order_cycle_lengths, order, random_permutation
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute

Row = dict[str, Any]

HEADS, VALUES = 8, 64
LENGTH = 65_536
CELLS = {
    "bidirectional": (1, LENGTH, 256),
    "causal with decay": (1, LENGTH, 64),
    "two-sided decay": (1, LENGTH, 64),
    "bidirectional, batch 8": (8, LENGTH // 8, 256),
    "causal with decay, batch 8": (8, LENGTH // 8, 256),
    "two-sided decay, batch 8": (8, LENGTH // 8, 256),
}
"""What memory is measured for: the kind, and its batch, length and features a head (LRA text's 256, the language model's 64)."""


def memory() -> list[Row]:
    """A process for each cell, because a process's peak never goes down again."""
    rows = []
    for kind in track(CELLS, description="memory", transient=True):
        command = [sys.executable, __file__, "memory-cell", "--kind", kind]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return rows


def memory_cell(kind: str) -> Row:
    """Peak extra bytes of one forward + backward, against the bytes of q, k, v, output and their gradients."""
    batch, length, features = CELLS[kind]
    arguments = _arguments(kind, features)
    _forward_backward(*_tensors(1, 256, features), arguments)  # loads what is loaded once
    q, k, v = _tensors(batch, length, features)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    out = _forward_backward(q, k, v, arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tensors = 2 * sum(x.nbytes for x in (q, k, v, out))
    return {
        "kind": kind,
        "batch": batch,
        "length": length,
        "heads": HEADS,
        "features": features,
        "values": VALUES,
        "tensor_bytes": tensors,
        "extra_bytes": peak - before,
        "ratio": (peak - before) / tensors,
    }


def orders() -> list[Row]:
    """Orders of 5,000 random permutations of each size, and the least common multiple over the heads of a model."""
    rows: list[Row] = []
    for size in track((16, 32, 64, 128, 256), description="orders", transient=True):
        found = order(decompose(random_permutation(5000, size, torch.Generator().manual_seed(0))))
        row: Row = {"features": size, "mean": statistics.mean(found), "median": statistics.median(found), "smallest": min(found)}
        for heads in (8, 12, 16):
            together = [math.lcm(*found[start : start + heads]) for start in range(0, 5000 - heads + 1, heads)]
            row[f"lcm_{heads}_heads_median"], row[f"lcm_{heads}_heads_largest"] = statistics.median(together), max(together)
        rows.append({**row, "max_order": math.lcm(*max_order_cycle_lengths(size)), "bound": math.lcm(*range(1, size + 1))})
    return rows


def imports() -> list[Row]:
    """Seconds to import in a fresh interpreter, best of nine, taken in turns."""
    statements = {
        "torch": "import torch",
        "permuteformer": "import torch, permuteformer",
        "PermuteFormerAttention": "from permuteformer import PermuteFormerAttention",
    }
    times: dict[str, list[float]] = {name: [] for name in statements}
    for _ in track(range(9), description="imports", transient=True):
        for name, statement in statements.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            times[name].append(time.perf_counter() - begin)
    best = {name: min(found) for name, found in times.items()}
    return [{"import": name, "seconds": seconds, "ratio_to_torch": seconds / best["torch"]} for name, seconds in best.items()]


PARTS = {"memory": memory, "imports": imports, "orders": orders}


def _tensors(batch: int, length: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as projections give them: ``b l h d`` seen as ``b h l d``."""
    q, k, v = (torch.randn(batch, length, HEADS, size).transpose(1, 2).requires_grad_() for size in (features, features, VALUES))
    return q, k, v


def _arguments(kind: str, features: int) -> dict[str, Any]:
    log_decay = None if kind.startswith("bidirectional") else Decay(HEADS).log_decay()
    causal = kind.startswith("causal")
    return {
        "feature_map": relu_eps,
        "transform": Permute(HEADS, features),
        "causal": causal,
        "log_decay": log_decay,
        "two_sided": log_decay is not None and not causal,
    }


def _forward_backward(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
    out = linear_attention(q, k, v, **arguments)[0]
    out.backward(torch.ones_like(out))
    return out


def _table(rows: list[Row]) -> Table:
    """The fields in which rows differ; what they have in common stands under the table. Few rows stand side by side."""
    common = [field for field in rows[0] if all(row[field] == rows[0][field] for row in rows)]
    fields = [field for field in rows[0] if field not in common]
    caption = ", ".join(f"{field} {_short(rows[0][field])}" for field in common) or None
    if len(rows) < len(fields):
        table = Table(show_header=False, caption=caption)
        for field in fields:
            table.add_row(field, *(_short(row[field]) for row in rows))
    else:
        table = Table(*fields, caption=caption)
        for row in rows:
            table.add_row(*(_short(row[field]) for field in fields))
    return table


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) and value < 1e7 else f"{value:.3g}"


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "memory-cell"])
    parser.add_argument("--kind", choices=CELLS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("results/core"), help="folder of the JSON lines (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.part == "memory-cell":
        print(json.dumps(memory_cell(arguments.kind)))
        return
    rows = PARTS[arguments.part]()
    setting = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    Console().print(_table(rows))
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{arguments.part}.jsonl"
    command = f"python benchmarks/core.py {arguments.part}"
    path.write_text("".join(json.dumps({**row, "command": command, **setting}) + "\n" for row in rows))
    Console().print(f"written to {path}")


if __name__ == "__main__":
    main()
