"""The two halves of a transformer block by the CPU kernel: attention and the feed-forward network, each with norm, dropout and residual.

Everything wider than the model (queries, keys, features, the hidden layer) exists for a few tokens at a time in the cache of a core, and is
computed again for the gradients. Saved for them are the input and the output of attention before its projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from permuteformer.ops.native import TOTAL, Attend, Drop, Feed, Project
from permuteformer.ops.native_backend import MARKS, STATES, functions, struct

ALIGNED = 16
"""Sizes of linear maps must be multiples of this."""
ACTIVATIONS = {"gelu": 0, "relu": 1}
"""Activations of a feed-forward network, and their numbers in ``native/block.h``."""

Weights = Sequence[Tensor | None]


class Norm(NamedTuple):
    """A layer norm."""

    weight: Tensor
    bias: Tensor
    epsilon: float


class Linear(NamedTuple):
    """A linear map as ``torch.nn.Linear`` has it."""

    weight: Tensor
    bias: Tensor | None


class Chance(NamedTuple):
    """Dropout: a seed, and how many of 2^32 hash values drop a number."""

    seed: int = 0
    dropped: int = 0


NO_DROPOUT = Chance()


class Attention(NamedTuple):
    """The attention of a block: bidirectional, without a decay."""

    num_heads: int
    feature_map: int
    """A number of ``native_backend.MAPS``."""
    normalize: bool = True
    cycles: Tensor | None = None
    of_head: Tensor | None = None
    """A permutation; see ``ops.permutation.Rotation``."""
    positions: Tensor | None = None
    query_positions: Tensor | None = None
    mask: Tensor | None = None

    def given(self) -> tuple[Any, ...]:
        """Return the optional tensors and settings of the attention operator."""
        marks = {"cycles": self.cycles, "of_head": self.of_head, "mask": self.mask}
        marks |= {"positions": self.positions, "query_positions": self.query_positions}
        return (*(None,) * len(STATES), *(marks.get(name) for name in MARKS), self.feature_map, int(self.normalize), TOTAL, 0)


def drop(x: Tensor, chance: Chance) -> Tensor:
    """Apply dropout. The noise is a hash of the seed and each number's place, so nothing is saved for the backward pass."""
    y: Tensor = _Drop.apply(x, chance)
    return y


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` for a few rows in float32, without gradients; ``x.shape[-1]`` is a multiple of ``ALIGNED``."""
    (out, size), x, weight = weight.shape, x.contiguous(), weight.contiguous()
    y = x.new_empty(*x.shape[:-1], out)
    linear = (weight.data_ptr(), None if bias is None else (bias := bias.contiguous()).data_ptr())
    functions()["project"](Project(x.data_ptr(), y.data_ptr(), linear, x.numel() // size, size, out, torch.get_num_threads()))
    return y


def feed_forward(x: Tensor, norm: Norm, expand: Linear, contract: Linear, activation: str, chance: Chance = NO_DROPOUT) -> Tensor:
    """Return ``x + dropout(contract(activation(expand(norm(x)))))`` for ``… d`` in float32."""
    weights = (norm.weight, norm.bias, *expand, *contract)
    settings = (norm.epsilon, ACTIVATIONS[activation], chance)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *weights)):
        y: Tensor = _FeedForward.apply(x, settings, *weights)
        return y
    return _feed_forward(x.contiguous(), settings, weights)


def attend(
    x: Tensor,
    queries: Tensor | None,
    norm: Norm,
    maps: tuple[Linear, Linear, Linear, Linear],
    attention: Attention,
    chance: Chance = NO_DROPOUT,
) -> Tensor:
    """Return ``queries + dropout(output(attention(norm(queries), norm(x))))`` for ``b n d`` and ``b l d`` in float32.

    ``maps``: query, key, value and output. Without ``queries`` they are ``x``.
    """
    weights = (norm.weight, norm.bias, *(tensor for each in maps for tensor in each))
    settings = (norm.epsilon, attention, chance)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, queries, *weights)):
        y: Tensor = _Attend.apply(x, queries, settings, attention.positions, attention.query_positions, attention.mask, *weights)
        return y
    return _attend(x.contiguous(), None if queries is None else queries.contiguous(), settings, weights, keep=False)[0]


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chance: Chance) -> Tensor:
        ctx.chance = chance
        x = x.contiguous()
        y = torch.empty_like(x)
        width = x.shape[-1] if x.dim() and x.numel() else 1
        functions()["dropout"](Drop(x.data_ptr(), y.data_ptr(), x.numel() // width, width, tuple(chance), torch.get_num_threads()))
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        return _Drop.apply(d_y, ctx.chance), None


def _feed_forward(x: Tensor, settings: tuple[Any, ...], weights: Weights) -> Tensor:
    y = torch.empty_like(x)
    functions()["feed_forward"](_feed(x, y, settings, weights))
    return y


def _feed(x: Tensor, y: Tensor | None, settings: tuple[Any, ...], weights: Weights, *gradients: Tensor) -> Feed:
    epsilon, activation, chance = settings
    width, hidden = x.shape[-1], weights[2].shape[0]  # type: ignore[union-attr]
    sizes = (x.numel() // width, width, hidden, activation, torch.get_num_threads())
    norm, (expand, contract) = _norm_and_maps(epsilon, weights)
    return Feed(*sizes, x.data_ptr(), _pointer(y), norm, expand, contract, tuple(chance), *map(_pointer, gradients))


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: tuple[Any, ...], *weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.settings = settings
        return _feed_forward(x.contiguous(), settings, weights)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            inputs = [x, *weights]
            wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
            found = iter(torch.autograd.grad(_feed_forward_by_torch(x, ctx.settings, weights), wanted, d_y, create_graph=True))
            d_x, *d_weights = [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]
            return d_x, None, *d_weights
        x, d_y = x.contiguous(), d_y.contiguous()  # alive until the kernel is done, which has their addresses only
        d_x, (sums, parts) = torch.empty_like(x), _gradient_buffer(weights, (2, 3, 4, 5, 0, 1))
        functions()["feed_forward_back"](_feed(x, None, ctx.settings, weights, d_y, d_x, sums))
        *maps, d_norm, d_norm_bias = parts
        return d_x, None, d_norm, d_norm_bias, *maps


def _feed_forward_by_torch(x: Tensor, settings: tuple[Any, ...], weights: Weights) -> Tensor:
    epsilon, activation, chance = settings
    normed = F.layer_norm(x, x.shape[-1:], weights[0], weights[1], epsilon)
    y = F.linear((F.gelu, F.relu)[activation](F.linear(normed, weights[2], weights[3])), weights[4], weights[5])  # type: ignore[arg-type]
    return x + (drop(y, chance) if chance.dropped else y)


def _attend(x: Tensor, queries: Tensor | None, settings: tuple[Any, ...], weights: Weights, keep: bool) -> tuple[Tensor, ...]:
    """Return the output; and the state of all keys and the mixed values, to be saved."""
    heads = settings[1].num_heads
    queries = x if queries is None else queries
    features, values = weights[2].shape[0] // heads, weights[6].shape[0] // heads  # type: ignore[union-attr]
    y, mixed = torch.empty_like(queries), x.new_empty(*queries.shape[:2], heads * values) if keep else None
    kv, z = x.new_zeros(x.shape[0], heads, features, values), x.new_zeros(x.shape[0], heads, features)
    _run_attend("attention_block", x, queries, y, mixed, kv, z, settings, weights)
    return y, kv, z, mixed  # type: ignore[return-value]


def _run_attend(
    name: str,
    x: Tensor,
    queries: Tensor,
    y: Tensor | None,
    mixed: Tensor | None,
    kv: Tensor,
    z: Tensor,
    settings: tuple[Any, ...],
    weights: Weights,
    d_state: tuple[Tensor, ...] = (),
    gradients: tuple[Tensor, ...] = (),
) -> None:
    epsilon, attention, chance = settings
    b, h, m, d = kv.shape
    call, kept = struct((b, h, x.shape[1], queries.shape[1], m, d), (), attention.given(), kv, z, d_states=d_state)
    norm, maps = _norm_and_maps(epsilon, weights)
    places = map(_pointer, (x, queries, y, mixed))
    functions()[name](Attend(call, x.shape[-1], *places, norm, *maps, tuple(chance), *map(_pointer, gradients)))
    del kept


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, queries: Tensor | None, settings: tuple[Any, ...], *rest: Tensor | None) -> Tensor:
        x, queries = x.contiguous(), None if queries is None else queries.contiguous()
        y, *saved = _attend(x, queries, settings, rest[3:], keep=True)
        ctx.save_for_backward(x, queries, *saved, *rest)
        ctx.settings = settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, queries, kv, z, mixed, *rest = ctx.saved_tensors
        weights = rest[3:]
        d_x = torch.empty_like(x)
        d_queries = d_x if queries is None else torch.empty_like(queries)
        reading, (d_query, d_query_bias, d_output, d_output_bias, d_norm, d_norm_bias) = _gradient_buffer(weights, (2, 3, 8, 9, 0, 1))
        keys, (d_key, d_key_bias, d_value, d_value_bias, more, more_bias) = _gradient_buffer(weights, (4, 5, 6, 7, 0, 1))
        d_state, gradients = (torch.zeros_like(kv), torch.zeros_like(z)), (d_y.contiguous(), d_x, d_queries, reading, keys)
        given = (x, x if queries is None else queries, None, mixed, kv, z, ctx.settings, weights)
        _run_attend("attention_block_back", *given, d_state, gradients)
        of_norm = (d_norm + more, d_norm_bias + more_bias)  # type: ignore[operator]
        of_maps = (d_query, d_query_bias, d_key, d_key_bias, d_value, d_value_bias, d_output, d_output_bias)
        return d_x, None if queries is None else d_queries, *(None,) * 4, *of_norm, *of_maps


def _norm_and_maps(epsilon: float, weights: Weights) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """The norm and the linear maps as fields of a struct."""
    weight, bias, *maps = map(_pointer, weights)
    return (weight, bias, epsilon), list(zip(maps[::2], maps[1::2], strict=True))


def _gradient_buffer(weights: Weights, order: Sequence[int]) -> tuple[Tensor, list[Tensor | None]]:
    """Zeros for the gradients of these weights and biases, one after the other, and views of each; a missing bias has room too."""
    shapes = [(weights[n] if weights[n] is not None else weights[n - 1][:, 0]).shape for n in order]  # type: ignore[index,union-attr]
    whole = weights[0].new_zeros(sum(shape.numel() for shape in shapes))  # type: ignore[union-attr]
    parts = whole.split([shape.numel() for shape in shapes])
    return whole, [None if weights[n] is None else part.view(shape) for n, part, shape in zip(order, parts, shapes, strict=True)]


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
