"""Features and values for a GPU by Triton kernels, as operators of torch: with gradients, and known to torch.compile.

Triton is imported when a kernel is called. With TRITON_INTERPRET=1 they run on tensors of the CPU, slowly: for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from permuteformer.ops.permutation import Rotation

TILE = 2048
"""Elements that a program has in registers: tokens times features."""
SHARED = "Tensor? turns, Tensor? cycles, Tensor? of_feature, Tensor? shown, int map"
OPERATORS = {
    "features": f"(Tensor x, {SHARED}, int width, bool tokens_first) -> Tensor",
    "features_back": f"(Tensor x, Tensor d_out, {SHARED}) -> Tensor",
    "values": "(Tensor v, Tensor? shown, int width, bool tokens_first, bool finite) -> (Tensor, Tensor)",
}

_library = torch.library.Library("permuteformer", "FRAGMENT")
for _name, _schema in OPERATORS.items():
    _library.define(_name + _schema)


def features(
    x: Tensor, rotation: Rotation | None, turns: Tensor | None, shown: Tensor | None, map: int, width: int, tokens_first: bool
) -> Tensor:
    """phi of queries or keys ``b h l m``, each token's permuted by its position: ``b h l width`` in float32, zeros after m.

    Args:
        x: queries or keys, any strides.
        rotation: of a permutation, on the device of x; nothing for none.
        turns: of the tokens, from ``turns_of``.
        shown: ``b l`` bool; the features of a hidden token are zero, whatever is in it.
        map: a number of ``backend.MAPS``.
        width: how many features to write, at least m.
        tokens_first: lay it out as ``b l h width``.
    """
    cycles, of_feature = (None, None) if rotation is None else (rotation.cycles, rotation.of_feature)
    return torch.ops.permuteformer.features(x, turns, cycles, of_feature, shown, map, width, tokens_first)  # type: ignore[no-any-return]


def turns_of(rotation: Rotation | None, start: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """By how much each cycle is turned, int32: of every token, ``b l n``, or of the first in each row, ``b n``, where positions count on.

    One remainder a cycle and not a feature; the kernel is left with small numbers.
    """
    if rotation is None:
        return None
    size = rotation.cycles[:, 1].long()
    if positions is None:
        assert start is not None
        return start.unsqueeze(-1).remainder(size).int()
    if positions.shape[-1] > 1:
        positions = positions.index_select(-1, rotation.cycles[:, 2])
    return positions.remainder(size).int()


def values(v: Tensor, shown: Tensor | None, width: int, tokens_first: bool, finite: bool) -> tuple[Tensor, Tensor]:
    """``b h l v`` with a one after it and zeros up to ``width``, in float32, zero where hidden: the one sums up the weights.

    With ``finite``, what is not is zero, and the second result, ``b h l`` int8, says of which tokens. (Weights of zero do not hide it.)
    """
    return torch.ops.permuteformer.values(v, shown, width, tokens_first, finite)  # type: ignore[no-any-return]


def _features(
    x: Tensor,
    turns: Tensor | None,
    cycles: Tensor | None,
    of_feature: Tensor | None,
    shown: Tensor | None,
    map: int,
    width: int,
    tokens_first: bool,
) -> Tensor:
    from permuteformer.ops.triton_kernels import features_kernel

    out = _room(x, width, tokens_first)
    grid, tile = _tiles(x, width)
    given = (*_turned(x, turns, cycles, of_feature), *_hidden(x, shown), *_sizes(x), width)
    with torch.cuda.device_of(x):
        features_kernel[grid](x, *x.stride(), out, *out.stride()[:3], *given, **_kind(turns, shown, map), **tile)
    return out


def _features_back(
    x: Tensor, d_out: Tensor, turns: Tensor | None, cycles: Tensor | None, of_feature: Tensor | None, shown: Tensor | None, map: int
) -> Tensor:
    from permuteformer.ops.triton_kernels import features_back_kernel

    d_x = torch.empty_like(x)
    grid, tile = _tiles(x, x.shape[3])
    tensors = (x, *x.stride(), d_out, *d_out.stride(), d_x, *d_x.stride())
    given = (*_turned(x, turns, cycles, of_feature), *_hidden(x, shown), *_sizes(x))
    with torch.cuda.device_of(x):
        features_back_kernel[grid](*tensors, *given, **_kind(turns, shown, map), **tile)
    return d_x


def _values(v: Tensor, shown: Tensor | None, width: int, tokens_first: bool, finite: bool) -> tuple[Tensor, Tensor]:
    from permuteformer.ops.triton_kernels import values_kernel

    out, bad = _room(v, width, tokens_first), _flags(v, tokens_first, finite)
    grid, tile = _tiles(v, width)
    tensors = (v, *v.stride(), out, *out.stride()[:3], bad, *bad.stride())
    with torch.cuda.device_of(v):
        values_kernel[grid](*tensors, *_hidden(v, shown), *_sizes(v), width, MASKED=shown is not None, FINITE=finite, **tile)
    return out, bad


def _room(x: Tensor, width: int, tokens_first: bool) -> Tensor:
    """``b h l width``, in one of two layouts."""
    b, h, length, _ = x.shape
    if tokens_first:
        return x.new_empty(b, length, h, width, dtype=torch.float32).transpose(1, 2)
    return x.new_empty(b, h, length, width, dtype=torch.float32)


def _flags(v: Tensor, tokens_first: bool, finite: bool) -> Tensor:
    """``b h l`` int8, laid out as the values; nothing where it is not asked for."""
    b, h, length, _ = v.shape
    if not finite:
        return v.new_empty(0, 0, 0, dtype=torch.int8)
    return v.new_empty(b, length, h, dtype=torch.int8).transpose(1, 2) if tokens_first else v.new_empty(b, h, length, dtype=torch.int8)


def _tiles(x: Tensor, width: int) -> tuple[tuple[int], dict[str, int]]:
    """How many programs there are, and the sizes of a tile: powers of two."""
    b, h, length, _ = x.shape
    features = 1 << (width - 1).bit_length()
    tokens = max(1, min(TILE // features, 1 << (length - 1).bit_length()))
    return (b * h * -(-length // tokens),), {"TOKENS": tokens, "FEATURES": features}


def _turned(x: Tensor, turns: Tensor | None, cycles: Tensor | None, of_feature: Tensor | None) -> tuple[Any, ...]:
    """A permutation as arguments of a kernel; where there is none, some tensor that is not looked at."""
    if turns is None:
        return x, 0, 0, x, x
    row = turns.stride(0) if len(turns) == len(x) else 0
    return turns, row, 0 if turns.dim() == 2 else turns.stride(1), cycles, of_feature


def _hidden(x: Tensor, shown: Tensor | None) -> tuple[Any, ...]:
    return (x, 0, 0) if shown is None else (shown.view(torch.int8), *shown.stride())


def _sizes(x: Tensor) -> tuple[int, int, int]:
    _, h, length, size = x.shape
    return length, h, size


def _kind(turns: Tensor | None, shown: Tensor | None, map: int) -> dict[str, Any]:
    """What a kernel is compiled for."""
    counted = turns is not None and turns.dim() == 2
    return {"MAP": map, "TURNED": turns is not None, "COUNTED": counted, "MASKED": shown is not None}


def _fake_features(x: Tensor, *rest: Any) -> Tensor:
    return _room(x, *rest[-2:])


def _fake_features_back(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_values(v: Tensor, shown: Tensor | None, width: int, tokens_first: bool, finite: bool) -> tuple[Tensor, Tensor]:
    return _room(v, width, tokens_first), _flags(v, tokens_first, finite)


def _keep_features(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.map, _, _ = inputs
    ctx.save_for_backward(*tensors)


@once_differentiable
def _back_features(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    x, *shared = ctx.saved_tensors
    return torch.ops.permuteformer.features_back(x, d_out, *shared, ctx.map), *(None,) * 7


def _keep_values(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    v, shown = inputs[:2]
    ctx.size, ctx.dtype = v.shape[-1], v.dtype
    ctx.save_for_backward(shown)
    ctx.mark_non_differentiable(output[1])


@once_differentiable
def _back_values(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (shown,) = ctx.saved_tensors
    d_v = d_out[..., : ctx.size].to(ctx.dtype)
    if shown is not None:
        d_v = d_v.masked_fill(~shown[:, None, :, None], 0)
    return d_v, None, None, None, None


for _name, _real, _fake in (
    ("features", _features, _fake_features),
    ("features_back", _features_back, _fake_features_back),
    ("values", _values, _fake_values),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _real, _device)
    torch.library.register_fake(f"permuteformer::{_name}", _fake, lib=_library)
torch.library.register_autograd("permuteformer::features", _back_features, setup_context=_keep_features, lib=_library)
torch.library.register_autograd("permuteformer::values", _back_values, setup_context=_keep_values, lib=_library)
