"""Argument checks shared by the package, and how PyTorch is running the code: eager, traced or transformed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_integer(least: int = 1, **arguments: Any) -> None:
    """Raise unless every argument is an integer of at least ``least``.

    >>> check_integer(num_heads=2.0)
    Traceback (most recent call last):
    ValueError: num_heads must be an integer of at least 1, got 2.0
    """
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r:.100}")


def check_flag(**arguments: Any) -> None:
    """Raise unless every argument is True or False."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r:.100}")


def check_shape(name: str, x: Tensor, dtype: torch.dtype, **sizes: int) -> None:
    """Raise unless ``x`` has this dtype and these sizes, in order; the keywords name the dimensions, and -1 is any size.

    >>> check_shape("mask", torch.ones(2, 3), torch.bool, batch=2, length=3)
    Traceback (most recent call last):
    ValueError: mask must be torch.bool of shape (batch, length) = (2, 3), got torch.float32 of shape (2, 3)
    """
    if x.dtype == dtype and x.dim() == len(sizes) and all(want in (-1, n) for want, n in zip(sizes.values(), x.shape, strict=True)):
        return
    wanted = ", ".join(str(size) if size >= 0 else key for key, size in sizes.items())
    raise ValueError(f"{name} must be {dtype} of shape ({', '.join(sizes)}) = ({wanted}), got {x.dtype} of shape {tuple(x.shape)}")


def check_devices(device: torch.device, of: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless all ``tensors`` are on ``device``, the device of the tensor named ``of``."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} but {of} is on {device}: move it with .to({of}.device)")


def can_read_values(tensor: Tensor) -> bool:
    """Return whether control flow may depend on the values of ``tensor``: not in a traced graph, and not where reading waits for a GPU."""
    return tensor.device.type == "cpu" and not is_traced()


def is_traced() -> bool:
    """Return whether torch.compile, a tracer, ``torch.func`` or forward-mode differentiation follows each operation."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or is_transformed()


def is_transformed() -> bool:
    """Return whether ``torch.func`` or forward-mode differentiation is active: neither sees what a kernel computes."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def is_eager() -> bool:
    """Return whether operations run one by one, with no tracer, dispatch mode, autocast or global module hook around them."""
    if is_traced() or torch._C._len_torch_dispatch_stack():
        return False
    return not (torch.is_autocast_enabled("cpu") or torch.nn.modules.module._has_any_global_hook())


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast, for sums that need full precision."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
