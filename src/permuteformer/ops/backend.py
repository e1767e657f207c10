"""Which code computes linear attention: the CPU kernel where it can, PyTorch in blocks everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from permuteformer.ops.feature_map import FEATURE_MAPS
from permuteformer.ops.native import load

VARIABLE = "PERMUTEFORMER_BACKEND"
BACKENDS = ("auto", "native", "torch")
MAPS = {"relu_eps": 0, "relu": 1, "squared_relu": 2}
"""Feature maps that the kernel has, and their numbers in ``native/phi.h``."""


def asked(backend: str | None) -> str:
    """What was asked for: by the argument, else by the environment, else ``"auto"``."""
    wanted, where = (backend, "backend") if backend is not None else (os.environ.get(VARIABLE) or "auto", VARIABLE)
    if wanted not in BACKENDS:
        raise ValueError(f"{where} must be one of {', '.join(BACKENDS)}; it is {wanted!r}")
    return wanted


def in_use() -> str:
    """What computes linear attention on the CPU wherever it can: ``"native avx2"``, or ``"torch"``."""
    kernel = load()
    return "torch" if isinstance(kernel, str) or asked(None) == "torch" else f"native {kernel.instruction_set}"


def use_native(backend: str | None, why_not: str) -> bool:
    """Whether the kernel computes a call, given why it cannot (``why_not_native``). Where it was asked for and cannot, raises."""
    wanted = asked(backend)
    if why_not and wanted == "native":
        raise ValueError(f"backend 'native' cannot be used here: {why_not}; use 'auto' or 'torch'")
    return not why_not and wanted != "torch"


def why_not_native(
    v: Tensor, feature_map: Callable[..., Tensor], transform: Any, rotation: tuple[Tensor, Tensor] | None, **unknown: bool
) -> str:
    """Why the kernel cannot compute a call; nothing where it can. ``unknown``: what it does not know, and whether the call asks for it."""
    name = getattr(feature_map, "__name__", "")
    if v.device.type != "cpu":
        return f"it is for the CPU, and tensors are on {v.device.type}"
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes in float32, and tensors are {v.dtype}"
    if FEATURE_MAPS.get(name) is not feature_map or name not in MAPS:
        return f"it has the feature maps {', '.join(MAPS)}, and this is {name or repr(feature_map)}"
    if transform is not None and rotation is None:
        return "of encodings it has permutations whose cycles are contiguous"
    for argument, is_asked in unknown.items():
        if is_asked:
            return f"it does not know {argument}"
    found = load()
    return found if isinstance(found, str) else ""
