"""The kernels for a GPU: what compiling them says, which needs none, and what they cost, which does.

    python benchmarks/gpu.py compile    registers, spills and shared memory on sm_80 and sm_90, compiled ahead of time
    python benchmarks/gpu.py time       the op of benchmarks/core.py speed on this machine's GPU, by backend and dtype

Both need the extra: pip install 'permuteformer[cuda]'. Results go to results/gpu/PART.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from permuteformer.ops.backend import MAPS
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.triton_features import TILE
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute

Row = dict[str, Any]

HEADS, VALUES = 8, 64
ARCHITECTURES = (80, 90)
FEATURES = (32, 64, 128, 256)
POINTERS = {"turns": "*i32", "cycles": "*i32", "of_feature": "*i32", "shown": "*i8", "bad": "*i8", "out": "*fp32", "d_out": "*fp32"}
"""Types of a kernel's pointers; those that are not here are of the inputs' dtype, and numbers are 32 bits."""
INPUTS = ("x", "d_x", "v")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SHAPES = (("bidirectional", 4096, 256), ("causal with decay", 8192, 64))
"""Those of results/core/speed.jsonl."""


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


def time_ops() -> list[Row]:
    """Milliseconds, median of repeats: the op by each backend, with and without the permutation, and SDPA."""
    rows = []
    torch.set_float32_matmul_precision("high")
    for kind, length, features in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for name, call in track(cases(kind, length, features, dtype, "cuda").items(), description=kind, transient=True):
                with torch.no_grad():
                    forward = _median(call)
                both = _median(partial(_backward, call))
                case = {"kind": kind, "length": length, "heads": HEADS, "features": features, "values": VALUES, "dtype": str(dtype)}
                rows.append({**case, "case": name, "forward_ms": forward, "forward_backward_ms": both})
    return rows


def cases(kind: str, length: int, features: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Tensor]]:
    """What is timed: calls that give an output."""
    causal = kind.startswith("causal")
    q, k, v = (
        torch.randn(1, length, HEADS, size, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for size in (features, features, VALUES)
    )
    encoding = Permute(HEADS, features).to(device)
    log_decay = Decay(HEADS).to(device).log_decay() if causal else None
    arguments: dict[str, Any] = {"feature_map": relu_eps, "causal": causal, "log_decay": log_decay}

    def ours(**more: Any) -> Callable[[], Tensor]:
        return lambda: linear_attention(q, k, v, **arguments, **more)[0]

    return {
        "PermuteFormer": ours(transform=encoding, backend="cuda" if device == "cuda" else "auto"),
        "Performer": ours(backend="cuda" if device == "cuda" else "auto"),
        "PermuteFormer, PyTorch in blocks": ours(transform=encoding, backend="torch"),
        "SDPA": lambda: F.scaled_dot_product_attention(q[..., :VALUES], k[..., :VALUES], v, is_causal=causal),
    }


def _backward(call: Callable[[], Tensor]) -> None:
    out = call()
    out.backward(torch.ones_like(out))


def _median(call: Callable[[], object], repeats: int = 20) -> float:
    """Milliseconds on the GPU, by its own clock; compiling and tuning are over before."""
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(float(begin.elapsed_time(end)) for begin, end in events)[repeats // 2]


def _table(rows: list[Row]) -> Table:
    """The fields in which rows differ; what they have in common stands under the table."""
    common = [field for field in rows[0] if all(row[field] == rows[0][field] for row in rows)]
    fields = [field for field in rows[0] if field not in common]
    table = Table(*fields, caption=", ".join(f"{field} {rows[0][field]}" for field in common) or None)
    for row in rows:
        table.add_row(*(f"{row[field]:.3g}" if isinstance(row[field], float) else str(row[field]) for field in fields))
    return table


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["compile", "time"])
    parser.add_argument("--features", type=int, nargs="+", default=list(FEATURES), help="sizes to compile for (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder of the JSON lines (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.part == "time" and not torch.cuda.is_available():
        sys.exit("time needs a GPU that torch sees (torch.cuda.is_available()), and here is none; compile needs none")
    rows = compile_kernels(arguments.features) if arguments.part == "compile" else time_ops()
    setting = {"triton": version("triton"), "torch": torch.__version__, "python": platform.python_version()}
    if arguments.part == "time":
        setting |= {"fla": version("fla-core"), "gpu": torch.cuda.get_device_name()}
    Console().print(_table(rows))
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{arguments.part}.jsonl"
    command = f"python benchmarks/gpu.py {arguments.part}"
    path.write_text("".join(json.dumps({**row, "command": command, **setting}) + "\n" for row in rows))
    Console().print(f"written to {path}")


if __name__ == "__main__":
    main()
