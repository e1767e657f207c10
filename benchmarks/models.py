"""What whole models cost.

    python benchmarks/models.py long    memory of one training step of an encoder at 131,072 tokens, and of encoding in blocks

Results go to results/models/PART.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

PRESET, LENGTH = "permuteformer-retrieval", 131_072
KINDS = ("forward + backward", "forward", "encode in blocks")


def long() -> list[dict[str, Any]]:
    """A process for each kind, because a process's peak never goes down again."""
    rows = []
    for kind in KINDS:
        command = [sys.executable, __file__, "long-cell", "--kind", kind]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return rows


def long_cell(kind: str) -> dict[str, Any]:
    """Peak bytes of the process, and seconds, of one call."""
    from permuteformer import PermuteFormerConfig, PermuteFormerModel
    from permuteformer.models.streaming import encode_in_blocks

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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"preset": PRESET, "length": LENGTH, "kind": kind, "peak_bytes": peak, "seconds": seconds}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["long", "long-cell"])
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("results/models"), help="folder of the JSON lines (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.part == "long-cell":
        print(json.dumps(long_cell(arguments.kind)))
        return
    rows = long()
    table = Table("kind", "peak (GiB)", "seconds", title=f"{PRESET}, {LENGTH:,} tokens")
    for row in rows:
        table.add_row(row["kind"], f"{row['peak_bytes'] / 2**30:.2f}", f"{row['seconds']:.1f}")
    Console().print(table)
    setting = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "long.jsonl"
    path.write_text("".join(json.dumps({**row, "command": "python benchmarks/models.py long", **setting}) + "\n" for row in rows))
    Console().print(f"written to {path}")


if __name__ == "__main__":
    main()
