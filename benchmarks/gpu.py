"""Registers, spills and shared memory of the kernels for a GPU, compiled ahead of time for sm_80 and sm_90: it needs no GPU.

    python benchmarks/gpu.py    writes results/gpu/compile.jsonl

It needs the extra: pip install 'permuteformer[cuda]'. What they cost on a GPU is what `permuteformer bench ops --device cuda` measures.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from permuteformer.ops.backend import MAPS
from permuteformer.ops.triton_features import TILE

Row = dict[str, Any]

ARCHITECTURES = (80, 90)
FEATURES = (32, 64, 128, 256)
POINTERS = {"turns": "*i32", "cycles": "*i32", "of_feature": "*i32", "shown": "*i8", "bad": "*i8", "out": "*fp32", "d_out": "*fp32"}
"""Types of a kernel's pointers; those that are not here are of the inputs' dtype, and numbers are 32 bits."""
INPUTS = ("x", "d_x", "v")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def compile_kernels(features: list[int]) -> list[Row]:
    """Every kernel for every size and architecture, consecutive positions and none hidden, and the other way round."""
    wanted = [
        (name, size, dtype, positions, architecture)
        for architecture in ARCHITECTURES
        for size in features
        for dtype in ("fp32", "bf16")
        for name, positions in (
            ("features", "counted"),
            ("features", "given, masked"),
            ("features_back", "counted"),
            ("features_back", "given, masked"),
            ("values", "masked"),
        )
    ]
    return [_compiled(*case) for case in track(wanted, description="compile", transient=True)]


def _compiled(name: str, size: int, dtype: str, positions: str, architecture: int) -> Row:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from permuteformer.ops import triton_kernels

    kernel = getattr(triton_kernels, f"{name}_kernel")
    masked = positions.endswith("masked")
    width = size + 16 if name == "values" else size
    tile = 1 << (width - 1).bit_length()
    constants: dict[str, Any] = {"TOKENS": TILE // tile, "FEATURES": tile, "MASKED": masked}
    if name == "values":
        constants |= {"FINITE": True, "v_value": 1}
    else:
        constants |= {"MAP": MAPS["relu_eps"], "TURNED": True, "COUNTED": not masked, "x_feature": 1}
    constants |= {key: 1 for key in ("d_x_feature", "d_out_feature") if key in kernel.arg_names}
    types = {key: "constexpr" if key in constants else _type(key, dtype) for key in kernel.arg_names}
    # As a launch finds out: tensors begin at multiples of 16, and so do their rows.
    sixteen = {(place,): [["tt.divisibility", 16]] for place, key in enumerate(kernel.arg_names) if key not in constants}
    made = triton.compile(ASTSource(kernel, types, constants, sixteen), target=GPUTarget("cuda", architecture, 32))
    case = {"kernel": name, "size": size, "dtype": dtype, "positions": positions, "architecture": f"sm_{architecture}"}
    return {**case, **_resources(made.asm["ptx"], architecture), "shared_bytes": made.metadata.shared, "warps": made.metadata.num_warps}


def _type(name: str, dtype: str) -> str:
    return f"*{dtype}" if name in INPUTS else POINTERS.get(name, "i32")


def _resources(ptx: str, architecture: int) -> Row:
    """What ptxas, which comes with triton, says of a kernel, with the options that triton gives it."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        tool = get_ptxas(architecture).path
        command = [tool, "-v", "--regAllocOptLevel=2", f"--gpu-name={target[1]}", source, "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", said), SPILLS.search(said)
    assert registers is not None, said
    assert spills is not None, said
    return {"registers": int(registers[1]), "spill_stores_bytes": int(spills[2]), "spill_loads_bytes": int(spills[3])}


def _table(rows: list[Row]) -> Table:
    """The fields in which rows differ; what they have in common stands under the table."""
    common = [field for field in rows[0] if all(row[field] == rows[0][field] for row in rows)]
    fields = [field for field in rows[0] if field not in common]
    table = Table(*fields, caption=", ".join(f"{field} {rows[0][field]}" for field in common) or None)
    for row in rows:
        table.add_row(*(f"{row[field]:.3g}" if isinstance(row[field], float) else str(row[field]) for field in fields))
    return table


def main() -> None:
    """Compile all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, nargs="+", default=list(FEATURES), help="sizes to compile for (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder of the JSON lines (default: %(default)s)")
    arguments = parser.parse_args()
    rows = compile_kernels(arguments.features)
    setting = {"triton": version("triton"), "torch": torch.__version__, "python": platform.python_version()}
    Console().print(_table(rows))
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "compile.jsonl"
    path.write_text("".join(json.dumps({**row, "command": "python benchmarks/gpu.py", **setting}) + "\n" for row in rows))
    Console().print(f"written to {path}")


if __name__ == "__main__":
    main()
