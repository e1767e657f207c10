"""Checks of arguments: each message names the argument, what it is, what it may be, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_whole(least: int = 1, **arguments: Any) -> None:
    """Raise unless every argument is a whole number of at least ``least``.

    >>> check_whole(num_heads=2.0)
    Traceback (most recent call last):
    ValueError: num_heads must be a whole number, at least 1; it is 2.0
    """
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number, at least {least}; it is {value!r:.100}")


def check_flag(**arguments: Any) -> None:
    """Raise unless every argument is True or False."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False; it is {value!r:.100}")


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    causal: bool = False,
    log_decay: Tensor | None = None,
    two_sided: bool = False,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> None:
    """Raise unless these go together in a call of ``linear_attention``."""
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3] or q.shape[2] == 0:
        raise ValueError(
            "q and k must have one shape (batch, heads, length, size), and v the same but for its size, with a length of at "
            f"least 1; they have {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise TypeError(f"q, k and v must be of a floating-point dtype; they are {q.dtype}, {k.dtype}, {v.dtype}")
    b, h, length, _ = q.shape
    given = {"k": k, "v": v, "positions": positions, "log_decay": log_decay, "key_mask": key_mask, "segments": segments}
    check_devices(q.device, "q", given)
    if positions is not None:
        check_positions(positions, b, length)
    if log_decay is not None:
        if log_decay.shape != (h,):
            raise ValueError(f"log_decay must have shape ({h},), one number a head; it has {tuple(log_decay.shape)}")
        if can_look_at(log_decay) and not ((log_decay <= 0) & log_decay.isfinite()).all():
            raise ValueError(f"log_decay must be log r of r in (0, 1], so 0 or below; it is {log_decay.tolist()}")
        if not causal and not two_sided:
            raise ValueError(
                "a decay r^(i-j) grows without bound for keys after the query: with causal=False pass two_sided=True, for r^|i-j|"
            )
    if two_sided and causal:
        raise ValueError("two_sided=True is for bidirectional attention; with causal=True leave it False")
    if key_mask is not None:
        check_key_mask(key_mask, b, length)
    if segments is not None:
        check_segments(segments, b, length)


def check_positions(positions: Tensor, batch: int, length: int, axes: int | None = None) -> None:
    """Raise unless ``positions`` is int64 ``b l a`` for this batch, or ``1 l a``; any number of axes if it is not given."""
    if positions.dtype != torch.int64:
        raise TypeError(f"positions must be int64, not {positions.dtype}; convert them with .long()")
    wrong = positions.dim() != 3 or positions.shape[0] not in (1, batch) or positions.shape[1] != length
    if wrong or positions.shape[2] != (axes or positions.shape[2]):
        raise ValueError(
            f"positions must have shape (batch, length, axes) = ({batch}, {length}, {axes or 'axes'}), or batch 1 for all rows alike; "
            f"they have {tuple(positions.shape)}"
        )


def check_key_mask(key_mask: Tensor, batch: int, length: int) -> None:
    """Raise unless ``key_mask`` is bool ``b l``."""
    if key_mask.dtype != torch.bool or key_mask.shape != (batch, length):
        raise ValueError(
            f"key_mask must be bool of shape (batch, length) = ({batch}, {length}), true for real tokens; it is {key_mask.dtype} of "
            f"shape {tuple(key_mask.shape)}"
        )


def check_segments(segments: Tensor, batch: int, length: int) -> None:
    """Raise unless ``segments`` is int64 ``b l``, not decreasing along a row."""
    if segments.dtype != torch.int64 or segments.shape != (batch, length):
        raise ValueError(
            f"segments must be int64 of shape (batch, length) = ({batch}, {length}); they are {segments.dtype} of shape "
            f"{tuple(segments.shape)}"
        )
    if can_look_at(segments) and (segments.diff(dim=1) < 0).any():
        raise ValueError("segments must not decrease along a row: number the packed sequences of a row 0, 1, 2, … in their order")


def check_chosen(chosen: Tensor, batch: int, length: int) -> None:
    """Raise unless ``chosen`` is int64 ``b n`` of places in rows of this length."""
    if chosen.dtype != torch.int64 or chosen.dim() != 2 or len(chosen) != batch or chosen.shape[1] == 0:
        raise ValueError(
            f"chosen must be int64 of shape (batch, tokens) = ({batch}, 1 or more); it is {chosen.dtype} of shape {tuple(chosen.shape)}"
        )
    if can_look_at(chosen) and not bool(((chosen >= 0) & (chosen < length)).all()):
        raise ValueError(f"chosen must be places in rows of {length} tokens, from 0 to {length - 1}; it is {chosen.tolist()!r:.100}")


def check_devices(device: torch.device, of: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless all ``tensors`` are on ``device``, which is that ``of`` another."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, {of} on {device}: move it there with .to({of}.device)")


def can_look_at(tensor: Tensor) -> bool:
    """Whether a decision may depend on values here: not where it is looked through, not without values, and not at the price of a wait."""
    return tensor.device.type == "cpu" and not is_looked_through()


def is_looked_through() -> bool:
    """Whether every operation must be one of torch's own: a compiler, a tracer, ``torch.func`` or forward-mode follows them."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or is_transformed()


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation follows the operations; neither would see what a kernel does."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Sums that autocast must not round."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def is_eager() -> bool:
    """Whether operations are carried out one by one, in the types of their tensors, and nobody counts them or listens to all modules."""
    if is_looked_through() or torch._C._len_torch_dispatch_stack():
        return False
    return not (torch.is_autocast_enabled("cpu") or torch.nn.modules.module._has_any_global_hook())
