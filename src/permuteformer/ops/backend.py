"""Which code computes linear attention: the kernels of a CPU or a GPU where they can, PyTorch in blocks everywhere."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from permuteformer.ops import gpu
from permuteformer.ops.checks import is_transformed
from permuteformer.ops.feature_map import FEATURE_MAPS
from permuteformer.ops.native import load
from permuteformer.ops.permutation import Rotation

VARIABLE = "PERMUTEFORMER_BACKEND"
BACKENDS = ("auto", "native", "cuda", "torch")
MAPS = {"relu_eps": 0, "relu": 1, "squared_relu": 2}
"""Feature maps that the kernels have, and their numbers in ``native/phi.h`` and ``triton_kernels.py``."""


class Call(NamedTuple):
    """What of a call decides who computes it."""

    v: Tensor
    feature_map: Callable[..., Tensor]
    transform: Any
    rotation: Rotation | None
    causal: bool = False
    log_decay: Tensor | None = None
    key_mask: bool = False
    segments: bool = False
    two_sided: bool = False
    plain_normalizer: bool = False
    chunk_size: bool = False


class Work(NamedTuple):
    """What a kernel computes of q, k ``b h l m``, v ``b h l v`` and the carry before the first token, ``b h m v`` and ``b h m``.

    Where not causal, queries may be of other tokens than the keys, ``b h n m``; and of none, where only the carry is wanted.

    It returns the output, ``b h l v``, and the carry after the last token; all of them float32.
    """

    rotation: Rotation | None
    """Of a permutation whose cycles are contiguous, on the device of q."""
    start: Tensor | None
    """``b``: where positions begin that are not given; ``None`` for 0."""
    positions: Tensor | None
    """``b l a`` or ``1 l a``, where they are given."""
    shown: Tensor | None
    """``b l`` bool, of keys and of queries that are of the same tokens."""
    feature_map: str
    """A name of ``MAPS``."""
    normalize: bool
    """Divide by the sum of weights."""
    causal: bool
    """See no key after the query."""
    log_decay: Tensor | None = None
    """``h``; where causal."""
    query_positions: Tensor | None = None
    """``b n a`` or ``1 n a``: of queries that are of other tokens."""


def asked(backend: str | None) -> str:
    """What was asked for: by the argument, else by the environment, else ``"auto"``."""
    wanted, where = (backend, "backend") if backend is not None else (os.environ.get(VARIABLE) or "auto", VARIABLE)
    if wanted not in BACKENDS:
        raise ValueError(f"{where} must be one of {', '.join(BACKENDS)}; it is {wanted!r}")
    return wanted


def in_use(device: str = "cpu") -> str:
    """What computes linear attention on a device wherever it can: ``"native avx2"``, ``"cuda"``, or ``"torch"``."""
    wanted = asked(None)
    if device == "cuda" and wanted in ("auto", "cuda"):
        return "torch" if gpu.why_not(torch.device(device), torch.bfloat16, causal=False, gated=False) else "cuda"
    kernel = load()
    if device != "cpu" or wanted not in ("auto", "native") or isinstance(kernel, str):
        return "torch"
    return f"native {kernel.instruction_set}"


def choose(backend: str | None, call: Call) -> str:
    """Who computes a call: ``"native"``, ``"cuda"`` or ``"torch"``. Where one was asked for by name and cannot, raises."""
    wanted = asked(backend)
    reasons = {"native": why_not_native, "cuda": why_not_cuda}
    if wanted in reasons:
        if why_not := reasons[wanted](call):
            raise ValueError(f"backend {wanted!r} cannot be used here: {why_not}; use 'auto' or 'torch'")
        return wanted
    kind = "cuda" if call.v.device.type == "cuda" else "native"
    if wanted == "torch":
        return wanted
    why_not = reasons[kind](call)
    if why_not and why_not == load() and not torch.compiler.is_compiling():
        # One text and one place, so that Python's own filter shows it once.
        warnings.warn(
            f"the CPU kernel is not in use: {why_not}. Linear attention goes on in PyTorch: the same numbers, several times slower",
            RuntimeWarning,
            stacklevel=1,
        )
    return "torch" if why_not else kind


def why_not_native(call: Call) -> str:
    """Why the kernel for the CPU cannot compute a call; nothing where it can."""
    if call.v.device.type != "cpu":
        return f"it is for the CPU, and tensors are on {call.v.device.type}"
    if why_not := _why_not(call, two_sided=call.two_sided, segments=call.segments):
        return why_not
    found = load()
    return found if isinstance(found, str) else ""


def why_not_cuda(call: Call) -> str:
    """Why the kernels for a GPU cannot compute a call; nothing where they can: on the CPU, in Triton's interpreter only."""
    device = call.v.device
    if device.type != "cuda" and not (device.type == "cpu" and gpu.look().interpreted):
        return f"it is for CUDA, and tensors are on {device.type}"
    if why_not := _why_not(call, two_sided=call.two_sided, segments=call.segments and not call.causal):
        return why_not
    if call.segments and torch.compiler.is_compiling():
        return "how many segments there are cannot be asked in a compiled graph"
    gated = gpu.needs_gates(call.log_decay, call.v.shape[2], call.key_mask, call.segments) and torch.is_grad_enabled()
    return gpu.why_not(device, call.v.dtype, call.causal, gated)


def _why_not(call: Call, **unknown: bool) -> str:
    """What neither can. ``unknown``: what one does not know, and whether the call asks for it."""
    if is_transformed():
        return "torch.func and forward-mode differentiation do not see what it does"
    name = getattr(call.feature_map, "__name__", "")
    if call.v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes in float32, and tensors are {call.v.dtype}"
    if FEATURE_MAPS.get(name) is not call.feature_map or name not in MAPS:
        return f"it has the feature maps {', '.join(MAPS)}, and this is {name or repr(call.feature_map)}"
    if call.transform is not None and call.rotation is None:
        return "of encodings it has permutations whose cycles are contiguous"
    for argument, is_asked in {**unknown, "plain_normalizer": call.plain_normalizer, "chunk_size": call.chunk_size}.items():
        if is_asked:
            return f"it does not know {argument}"
    return ""
