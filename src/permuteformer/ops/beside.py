"""Tensors that lie side by side in one, and whose gradients do too: several projections as one product, forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from permuteformer.ops import memory

LARGEST_BYTES = 2**25
"""glibc's malloc takes what is larger from the system every time."""


def project(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """What each of these weights, ``d_n d``, makes of ``x``, ``… d``: one product of all, of which ``… d_n`` are views.

    Where the gradients of the views come side by side, backwards there is one product too, and no copy.

    >>> x, first, second = torch.randn(2, 5, 4), torch.randn(3, 4), torch.randn(6, 4)
    >>> q, k = project(x, [first, second])
    >>> torch.allclose(k, x @ second.T, atol=1e-5)
    True
    """
    is_kept = torch.is_grad_enabled() and any(given.requires_grad for given in (x, *weights, *biases))
    parts: tuple[Tensor, ...] = _Project.apply(x, is_kept, len(weights), *weights, *biases)
    return parts


def empty_beside(parts: Sequence[Tensor]) -> list[Tensor]:
    """New memory for tensors like these, heads ``b h l d``: side by side, where these are so as heads of what ``project`` gives."""
    rows = [x.transpose(1, 2) for x in parts]  # b l h d
    if not all(x.stride(2) == x.shape[3] for x in rows) or _whole([x.flatten(2) for x in rows]) is None:
        return [memory.empty_like(x) for x in parts]
    sizes = [x.shape[2] * x.shape[3] for x in rows]
    b, length, *_ = rows[0].shape
    new = memory.empty(b, length, sum(sizes), device=rows[0].device, dtype=rows[0].dtype).split(sizes, dim=-1)
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


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, is_kept: bool, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        weights, biases = given[:count], given[count:]
        ctx.save_for_backward(x, *weights)
        ctx.has_biases = bool(biases)
        weight, rows = torch.cat(weights), x.reshape(-1, x.shape[-1])
        # What is not kept for a backward pass comes from malloc, whose last block is still in the cache; unless it is too large for it.
        make = memory.empty if is_kept or len(rows) * len(weight) * x.itemsize > LARGEST_BYTES else torch.empty
        out = make(len(rows), len(weight), device=x.device, dtype=x.dtype)
        if biases:
            torch.addmm(torch.cat(biases), rows, weight.t(), out=out)
        else:
            torch.mm(rows, weight.t(), out=out)
        parts: tuple[Tensor, ...] = out.view(*x.shape[:-1], -1).split([len(w) for w in weights], dim=-1)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        sizes = [len(w) for w in weights]
        # A view of the first would hide the others from a second backward pass.
        whole = None if torch.is_grad_enabled() else _whole(gradients)
        d = (torch.cat(gradients, dim=-1) if whole is None else whole).reshape(-1, sum(sizes))
        d_x = d_weights = d_biases = None
        if ctx.needs_input_grad[0]:
            d_x = (d @ torch.cat(weights)).view(x.shape)
        if any(ctx.needs_input_grad[3 : 3 + len(weights)]):
            d_weights = (d.t() @ x.reshape(-1, x.shape[-1])).split(sizes)
        if ctx.has_biases and any(ctx.needs_input_grad[3 + len(weights) :]):
            d_biases = d.sum(0).split(sizes)
        nothing = (None,) * len(weights)
        return d_x, None, None, *(d_weights or nothing), *((d_biases or nothing) if ctx.has_biases else ())
