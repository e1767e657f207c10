"""What there is for a GPU: triton, fla (flash-linear-attention), and whether float32 products may be rounded to TF32.

Nothing is imported here. torch.compile can trace none of the asking: a compiled call keeps the answers of when it was compiled.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of fla's chunks."""
INSTALL = "install it with: pip install 'permuteformer[cuda]'"


class Found(NamedTuple):
    """What a GPU's kernels depend on."""

    triton: tuple[int, ...] | None
    """Its version; nothing where it is not installed."""
    fla: bool
    """Whether fla's operators are installed."""
    tf32: bool
    """Whether the user lets float32 products be rounded to TF32: fla's are, unless TRITON_F32_DEFAULT says ``ieee``."""
    ieee: bool
    """Whether it does."""
    interpreted: bool
    """Whether Triton's kernels are run by its interpreter, on tensors of the CPU: slowly, for tests."""


_found: Found | None = None


def look() -> Found:
    """What there is now; what is installed is asked for once."""
    global _found
    _found = _look(_found)
    return _found


look._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as ``native.load`` is, and says why


def _look(before: Found | None) -> Found:
    triton, fla = (_triton(), importlib.util.find_spec("fla") is not None) if before is None else before[:2]
    matmul = torch.backends.cuda.matmul
    tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)
    ieee, interpreted = os.environ.get("TRITON_F32_DEFAULT") == "ieee", os.environ.get("TRITON_INTERPRET") == "1"
    return Found(triton, fla, tf32, ieee, interpreted)


def _triton() -> tuple[int, ...] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    version = importlib.metadata.version("triton")
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def needs_gates(log_decay: Tensor | None, length: int, masked: bool, packed: bool) -> bool:
    """Whether fla has to be given a decay for each token, because one number a head will not do.

    A hidden token takes no step. One number a head gets no gradient from fla, and where a chunk is not full its powers are raised for the
    tokens that are missing: the state is not finite at r = 0.1 and 65 tokens.
    """
    return log_decay is not None and (log_decay.requires_grad or masked or packed or length % CHUNK != 0)


def why_not(device: torch.device, dtype: torch.dtype, causal: bool, gated: bool) -> str:
    """Why the kernels cannot compute here what they otherwise could; nothing where they can.

    ``gated``: fla is to be given a decay for each token, and may be asked for its gradient.
    """
    found = look()
    if found.triton is None:
        return f"triton is not installed; {INSTALL}"
    if not causal:
        return ""
    if not found.fla:
        return f"fla is not installed; {INSTALL}"
    if dtype == torch.float32 and not (found.tf32 or found.ieee or found.interpreted):
        return (
            "fla rounds products of float32 to TF32, and torch's setting does not: use bfloat16, or "
            "torch.set_float32_matmul_precision('high'), or the variable TRITON_F32_DEFAULT=ieee"
        )
    if gated and (3, 4) <= found.triton < (3, 7, 1) and _is_hopper(device):
        return "with Triton from 3.4 to 3.7.0 on Hopper fla's gradients of gates are wrong: another version of Triton has them right"
    return ""


def _is_hopper(device: torch.device) -> bool:
    """Not asked in a compiled graph, which could not be traced: there fla itself raises, in the backward pass."""
    return device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.get_device_capability(device)[0] == 9
