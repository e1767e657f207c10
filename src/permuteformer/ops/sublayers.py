"""The two halves of a block of a model by the CPU kernel: attention, and the feed-forward network, each with its norm, dropout and sum.

What is wider than the model (queries, keys, features, what is between the two linear maps of a feed-forward network) exists for a few
tokens at a time in the cache of a core, and is found again for the gradients: kept for them is what goes in, and what attention mixed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from permuteformer.ops import memory
from permuteformer.ops.backend import MAPS, Work
from permuteformer.ops.native import Kernel, load
from permuteformer.ops.native_backend import Shared, fields_of, place

ALIGNED = 16
"""Sizes of linear maps must be multiples of this."""
ACTIVATIONS = {"gelu": 0, "relu": 1}
"""What may stand in a feed-forward network, and its number in ``native/activation.h``."""

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
    """Dropout: a seed, and how many of 2^32 numbers are dropped."""

    seed: int = 0
    dropped: int = 0


NOTHING = Chance()


def drop(x: Tensor, chance: Chance) -> Tensor:
    """Dropout: some numbers zero, the others larger. Noise is a hash of the seed and of each number's place, and is kept nowhere.

    >>> isinstance(load(), str) or sorted({float(each) for each in drop(torch.ones(99), Chance(7, 2**31))})
    [0.0, 2.0]
    """
    y: Tensor = _Drop.apply(x, chance)
    return y


def feed_forward(x: Tensor, norm: Norm, expand: Linear, contract: Linear, activation: str, chance: Chance = NOTHING) -> Tensor:
    """``x + dropout(contract(activation(expand(norm(x)))))`` of ``… d``, in float32.

    >>> x, norm = torch.randn(2, 5, 16), Norm(torch.ones(16), torch.zeros(16), 1e-5)
    >>> expand, contract = Linear(torch.randn(32, 16), None), Linear(torch.zeros(16, 32), torch.ones(16))
    >>> isinstance(load(), str) or torch.equal(feed_forward(x, norm, expand, contract, "gelu"), x + 1)
    True
    """
    given = (norm.weight, norm.bias, *expand, *contract)
    settings = (norm.epsilon, ACTIVATIONS[activation], chance)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *given)):
        y: Tensor = _FeedForward.apply(x, settings, *given)
        return y
    return _feed_forward(x.contiguous(), settings, given)


def attend(
    x: Tensor,
    queries: Tensor | None,
    norm: Norm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: int,
    work: Work,
    chance: Chance = NOTHING,
) -> Tensor:
    """``queries + dropout(output(attention(norm(queries), norm(x))))`` of ``b n d`` and ``b l d``, in float32.

    Without queries, they are ``x``. ``work`` says what attention does; it is bidirectional, and begins with no carry.

    >>> x, norm = torch.randn(2, 5, 16), Norm(torch.ones(16), torch.zeros(16), 1e-5)
    >>> wide, narrow = Linear(torch.randn(32, 16), None), Linear(torch.zeros(16, 16), torch.ones(16))
    >>> work = Work(None, None, None, None, "relu_eps", normalize=True, causal=False)
    >>> isinstance(load(), str) or torch.equal(attend(x, None, norm, wide, wide, narrow, narrow, 2, work), x + 1)
    True
    """
    given = (norm.weight, norm.bias, *query, *key, *value, *output)
    settings = (norm.epsilon, heads, work, chance)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, queries, *given)):
        y: Tensor = _Attend.apply(x, queries, settings, work.positions, work.query_positions, work.shown, *given)
        return y
    return _attend(x.contiguous(), None if queries is None else queries.contiguous(), settings, given, keep=False)[0]


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chance: Chance) -> Tensor:
        ctx.chance = chance
        x = x.contiguous()
        y = memory.empty_like(x)
        width = x.shape[-1] if x.dim() and x.numel() else 1
        _call("dropout", [x.data_ptr(), y.data_ptr(), x.numel() // width, width, *chance, torch.get_num_threads()])
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        return _Drop.apply(d_y, ctx.chance), None


def _feed_forward(x: Tensor, settings: tuple[Any, ...], given: Weights) -> Tensor:
    y = memory.empty_like(x)
    _call("feed", _feed_fields(x, y, settings, given))
    return y


def _feed_fields(x: Tensor, y: Tensor | None, settings: tuple[Any, ...], given: Weights, *gradients: Tensor) -> list[int]:
    """``struct Feed`` of ``native/call.h``."""
    epsilon, activation, chance = settings
    width, hidden = x.shape[-1], given[2].shape[0]  # type: ignore[union-attr]
    return [
        *(x.numel() // width, width, hidden, activation, torch.get_num_threads(), place(x), place(y)),
        *_weights(epsilon, given),
        *chance,
        *(map(place, gradients) if gradients else [0] * 3),
    ]


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: tuple[Any, ...], *given: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *given)
        ctx.settings = settings
        return _feed_forward(x.contiguous(), settings, given)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, *given = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated in its turn
            d_x, *d_given = _differentiable_gradients(_feed_forward_by_torch(x, ctx.settings, given), [x, *given], d_y)
            return d_x, None, *d_given
        x, d_y = x.contiguous(), d_y.contiguous()  # they must be there until the kernel is done, which knows their places only
        d_x, (gradients, parts) = memory.empty_like(x), _side_by_side(given, (2, 3, 4, 5, 0, 1))
        _call("feed_back", _feed_fields(x, None, ctx.settings, given, d_y, d_x, gradients))
        *linear, norm, norm_bias = parts
        return d_x, None, norm, norm_bias, *linear


def _feed_forward_by_torch(x: Tensor, settings: tuple[Any, ...], given: Weights) -> Tensor:
    epsilon, activation, chance = settings
    normed = F.layer_norm(x, x.shape[-1:], given[0], given[1], epsilon)
    y = F.linear((F.gelu, F.relu)[activation](F.linear(normed, given[2], given[3])), given[4], given[5])  # type: ignore[arg-type]
    return x + (drop(y, chance) if chance.dropped else y)


def _differentiable_gradients(y: Tensor, inputs: Weights, d_y: Tensor) -> list[Tensor | None]:
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, d_y, create_graph=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


def _attend(x: Tensor, queries: Tensor | None, settings: tuple[Any, ...], given: Weights, keep: bool) -> tuple[Tensor, ...]:
    """The output; and the carry of all keys and what was mixed, to be kept."""
    _, heads, *_ = settings
    queries = x if queries is None else queries
    features, values = given[2].shape[0] // heads, given[6].shape[0] // heads  # type: ignore[union-attr]
    y, mixed = memory.empty_like(queries), memory.empty(*queries.shape[:2], heads * values, device=x.device) if keep else None
    kv, z = x.new_zeros(x.shape[0], heads, features, values), x.new_zeros(x.shape[0], heads, features)
    _call_attend("attend", x, queries, y, mixed, kv, z, settings, given)
    return y, kv, z, mixed  # type: ignore[return-value]


def _call_attend(
    name: str,
    x: Tensor,
    queries: Tensor,
    y: Tensor | None,
    mixed: Tensor | None,
    kv: Tensor,
    z: Tensor,
    settings: tuple[Any, ...],
    given: Weights,
    carries: tuple[Tensor, ...] = (),
    gradients: tuple[Tensor, ...] = (),
) -> None:
    """``struct Attend`` of ``native/call.h``."""
    epsilon, _, work, chance = settings
    cycles, of_head = (None, None) if work.rotation is None else (work.rotation.cycles, work.rotation.of_head)
    shared = Shared(cycles, of_head, work.start, work.positions, work.query_positions, work.shown, MAPS[work.feature_map], work.normalize)
    b, h, m, d = kv.shape
    fields, kept_alive = fields_of((b, h, x.shape[1], queries.shape[1], m, d), (), kv, z, shared, carries=carries)
    fields += [
        *(x.shape[-1], place(x), place(queries), place(y), place(mixed)),
        *_weights(epsilon, given),
        *chance,
        *(map(place, gradients) if gradients else [0] * 5),
    ]
    _call(name, fields)
    del kept_alive


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, queries: Tensor | None, settings: tuple[Any, ...], *rest: Tensor | None) -> Tensor:
        x, queries = x.contiguous(), None if queries is None else queries.contiguous()
        y, *kept = _attend(x, queries, settings, rest[3:], keep=True)
        ctx.save_for_backward(x, queries, *kept, *rest)
        ctx.settings = settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, queries, kv, z, mixed, *rest = ctx.saved_tensors
        given = rest[3:]
        d_x = memory.empty_like(x)
        d_queries = d_x if queries is None else memory.empty_like(queries)
        reading, (d_query, d_query_bias, d_output, d_output_bias, d_norm, d_norm_bias) = _side_by_side(given, (2, 3, 8, 9, 0, 1))
        keys, (d_key, d_key_bias, d_value, d_value_bias, more, more_bias) = _side_by_side(given, (4, 5, 6, 7, 0, 1))
        carries, gradients = (torch.zeros_like(kv), torch.zeros_like(z)), (d_y.contiguous(), d_x, d_queries, reading, keys)
        _call_attend("attend_back", x, x if queries is None else queries, None, mixed, kv, z, ctx.settings, given, carries, gradients)
        of_norm = (d_norm + more, d_norm_bias + more_bias)  # type: ignore[operator]
        of_linear = (d_query, d_query_bias, d_key, d_key_bias, d_value, d_value_bias, d_output, d_output_bias)
        return d_x, None if queries is None else d_queries, *(None,) * 4, *of_norm, *of_linear


def _weights(epsilon: float, given: Weights) -> list[int]:
    """A norm's weight, bias and epsilon, a double; and linear maps."""
    bits = struct.unpack("q", struct.pack("d", epsilon))[0]
    return [place(given[0]), place(given[1]), bits, *map(place, given[2:])]


def _side_by_side(given: Weights, order: Sequence[int]) -> tuple[Tensor, list[Tensor | None]]:
    """Zeros for the gradients of these, which are biases and others in turn, one after the other; and each where it is.

    There is room for the gradient of a bias that is not there, too.
    """
    shapes = [(given[n] if given[n] is not None else given[n - 1][:, 0]).shape for n in order]  # type: ignore[index,union-attr]
    whole = given[0].new_zeros(sum(shape.numel() for shape in shapes))  # type: ignore[union-attr]
    parts = whole.split([shape.numel() for shape in shapes])
    return whole, [None if given[n] is None else part.view(shape) for n, part, shape in zip(order, parts, shapes, strict=True)]


def _call(name: str, fields: list[int]) -> None:
    kernel = load()
    assert isinstance(kernel, Kernel), kernel
    kernel(name, fields)
