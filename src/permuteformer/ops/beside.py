"""Tensors that lie side by side in one, and whose gradients do too: three projections as one product, forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of ``x`` of these sizes of its last dimension. Where their gradients come side by side, that of ``x`` takes no copy.

    >>> q, k = split(torch.arange(6.0).view(1, 6), [2, 4])
    >>> k
    tensor([[2., 3., 4., 5.]])
    """
    parts: tuple[Tensor, ...] = _Split.apply(x, tuple(sizes))
    return parts


def empty_beside(parts: Sequence[Tensor]) -> list[Tensor]:
    """New memory for tensors like these, heads ``b h l d``: side by side, where these are so as heads of a ``split``."""
    rows = [x.transpose(1, 2) for x in parts]  # b l h d
    if not all(x.stride(2) == x.shape[3] for x in rows) or _whole([x.flatten(2) for x in rows]) is None:
        return [torch.empty_like(x) for x in parts]
    sizes = [x.shape[2] * x.shape[3] for x in rows]
    new = rows[0].new_empty(*rows[0].shape[:2], sum(sizes)).split(sizes, dim=-1)
    return [y.unflatten(-1, x.shape[2:]).transpose(1, 2) for x, y in zip(rows, new, strict=True)]


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these are a split along the last dimension, if they lie in memory so."""
    first, width = parts[0], sum(x.shape[-1] for x in parts)
    strides = [1]
    for size in (width, *first.shape[-2:0:-1]):
        strides.insert(0, strides[0] * size)
    place = first.storage_offset()
    for x in parts:
        if x.storage_offset() != place or list(x.stride()) != strides or x.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        place += x.shape[-1]
    return first.as_strided((*first.shape[:-1], width), strides)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = x.split(sizes, dim=-1)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = (
            None if torch.is_grad_enabled() else _whole(gradients)
        )  # a view of the first would hide the others from a second backward pass
        return torch.cat(gradients, dim=-1) if whole is None else whole, None
