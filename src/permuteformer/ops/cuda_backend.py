"""Linear attention on a GPU: features by a Triton kernel, then batched products, or fla's chunked scan where causal.

Sums of weights come from the same products as the output: a column of ones stands beside the values. Everything is in float32, and
features in the absolute frame, as a permutation is exact at any position.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from permuteformer.ops.backend import MAPS, Work
from permuteformer.ops.gpu import needs_gates
from permuteformer.ops.triton_features import features, turns_of, values

MULTIPLE = 16
"""Features, and values with their ones, are filled up to a multiple of this: rows begin where wide loads may."""
OPERATORS = {
    "chunked": "(Tensor q, Tensor k, Tensor v, Tensor state, Tensor? gates, Tensor? log_decay) -> (Tensor, Tensor)",
    "chunked_back": (
        "(Tensor q, Tensor k, Tensor v, Tensor state, Tensor? gates, Tensor? log_decay, Tensor d_out, Tensor d_after)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
}

_library = torch.library.Library("permuteformer", "FRAGMENT")
for _name, _schema in OPERATORS.items():
    _library.define(_name + _schema)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    z: Tensor,
    work: Work,
    segments: Tensor | None = None,
    first_segment: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``Work`` says, of tensors of any strides, float32 or less. Where tokens are hidden, positions are to be given.

    Args:
        segments: ``b l``, where causal: see one's own only.
        first_segment: ``b``: the segment that the carry is of.
    """
    m, size = q.shape[-1], v.shape[-1]
    width, wide = _up(m), _up(size + 1)
    causal, shown, log_decay = work.causal, work.shown, work.log_decay
    turns, map = turns_of(work.rotation, work.start, work.positions), MAPS[work.feature_map]
    make = partial(features, rotation=work.rotation, turns=turns, shown=shown, map=map, width=width, tokens_first=causal)
    v, bad = values(v, shown, wide, causal, finite=causal)  # b h l wide
    carry = F.pad(torch.cat([kv, z.unsqueeze(-1)], dim=-1), (0, wide - size - 1, 0, width - m))
    if causal:
        q, k = make(q), make(k)  # b h l width
        out, carry = _scan(q, k, v, carry, _gates(log_decay, shown, q, segments), log_decay, segments, first_segment)
    else:
        out, carry = _total(q, k, v, carry, make)
    out, total = out[..., :size], out[..., size : size + 1]
    kv, z = carry[..., :m, :size], carry[..., :m, size]
    if causal:
        spoilt = _spoilt(bad, segments)
        kv = kv.masked_fill(spoilt[..., -1, None, None], torch.nan)
        out = out.masked_fill(spoilt.unsqueeze(-1), torch.nan)
    if work.normalize:
        out = out / total.masked_fill(total == 0, 1)
    return out, kv, z


def _total(q: Tensor, k: Tensor, v: Tensor, carry: Tensor, make: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Numerators and sums of weights, ``b h l wide``, and the carry with all the keys."""
    with _made_again(keys := make(k), partial(make, k.detach())):
        carry = carry + keys.transpose(-1, -2) @ v
    with _made_again(queries := make(q), partial(make, q.detach())):
        return queries @ carry, carry


def _made_again(made: Tensor, again: Callable[[], Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Inside, autograd keeps nothing of ``made``: the backward pass calls ``again``. In a compiled graph the compiler decides."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    place = made.untyped_storage().data_ptr()

    def pack(x: Tensor) -> Any:
        return (x.shape, x.stride(), x.storage_offset()) if x.untyped_storage().data_ptr() == place else x

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else again().as_strided(*kept)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _up(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def _gates(log_decay: Tensor | None, shown: Tensor | None, q: Tensor, segments: Tensor | None) -> Tensor | None:
    """``b l h``: log r of each token, where one number a head will not do."""
    b, h, length, _ = q.shape
    if log_decay is None or not needs_gates(log_decay, length, shown is not None, segments is not None):
        return None
    gates = log_decay.expand(b, length, h)
    return gates.contiguous() if shown is None else gates.masked_fill(~shown.unsqueeze(-1), 0)


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    carry: Tensor,
    gates: Tensor | None,
    log_decay: Tensor | None,
    segments: Tensor | None,
    first_segment: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Numerators and sums of weights, ``b h l wide``, and the carry after the last token, by fla, whose tokens come before heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    constant = None if gates is not None or log_decay is None else log_decay.detach()
    if segments is None:
        call = torch.ops.permuteformer.chunked if torch.compiler.is_compiling() else _Fla.apply
        out, carry = call(q, k, v, carry.contiguous(), gates, constant)
        return out.transpose(1, 2), carry
    # Rows one after another, each segment a sequence; the first of a row may go on from the carry, the last leaves one.
    b, length = segments.shape
    begins = F.pad(segments.diff(dim=1) != 0, (1, 0), value=True).flatten()
    number = (begins.cumsum(0) - 1).view(b, length)
    places = begins.nonzero().flatten()
    ends = F.pad(places, (0, 1), value=b * length)
    if first_segment is not None:
        carry = carry.masked_fill((segments[:, 0] != first_segment)[:, None, None, None], 0)
    states = carry.new_zeros(len(places), *carry.shape[1:]).index_copy(0, number[:, 0], carry)
    q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    gates = None if gates is None else gates.flatten(0, 1).unsqueeze(0)
    out, states = _Fla.apply(q, k, v, states, gates, constant, ends)
    return out.view(b, length, *out.shape[2:]).transpose(1, 2), states.index_select(0, number[:, -1])


def _spoilt(bad: Tensor, segments: Tensor | None) -> Tensor:
    """``b h l``: which queries see a value that is not finite. fla is given a zero for it, as a weight of zero would not hide it."""
    count = bad.cumsum(-1, dtype=torch.int32)
    if segments is None:
        return count > 0
    length = segments.shape[-1]
    begins = F.pad(segments.diff(dim=1) != 0, (1, 0), value=True)
    places = torch.where(begins, torch.arange(length, device=segments.device), 0).cummax(-1).values
    before = (count - bad).gather(-1, places.unsqueeze(1).expand(-1, bad.shape[1], -1))
    return count > before


def _fla(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, gates: Tensor | None, log_decay: Tensor | None, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(  # type: ignore[no-any-return]
        q, k, v, g=gates, g_gamma=log_decay, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=ends
    )


class _Fla(torch.autograd.Function):
    """The same, where a second derivative is refused: fla's own backward would leave it out."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            ctx.inside = [x.detach().requires_grad_() if need else x for x, need in zip(inputs, ctx.needs_input_grad, strict=True)]
            ctx.outputs = _fla(*ctx.inside)
        return ctx.outputs[0].detach(), ctx.outputs[1].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [x for x, need in zip(ctx.inside, ctx.needs_input_grad, strict=True) if need]
        found = iter(torch.autograd.grad(ctx.outputs, wanted, gradients, retain_graph=True))
        return tuple(next(found) if need else None for need in ctx.needs_input_grad)


# fla forbids torch.compile to look at its function: for a compiled graph it is an operator, whose backward runs it once more.


def _chunked(q: Tensor, k: Tensor, v: Tensor, state: Tensor, gates: Tensor | None, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return _fla(q, k, v, state, gates, log_decay)


def _chunked_back(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, gates: Tensor | None, log_decay: Tensor | None, d_out: Tensor, d_after: Tensor
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v, state = (x.detach().requires_grad_() for x in (q, k, v, state))
        gates = None if gates is None else gates.detach().requires_grad_()
        outputs = _fla(q, k, v, state, gates, log_decay)
        inputs = (q, k, v, state) if gates is None else (q, k, v, state, gates)
        found = torch.autograd.grad(outputs, inputs, (d_out, d_after))
    return found if gates is not None else (*found, q.new_empty(0))


def _fake_chunked(q: Tensor, k: Tensor, v: Tensor, state: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


def _fake_chunked_back(q: Tensor, k: Tensor, v: Tensor, state: Tensor, gates: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return *(x.new_empty(x.shape) for x in (q, k, v, state)), q.new_empty(0 if gates is None else gates.shape)


def _keep_chunked(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


@once_differentiable
def _back_chunked(ctx: Any, d_out: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
    *d, d_gates = torch.ops.permuteformer.chunked_back(*ctx.saved_tensors, d_out, d_after)
    return *d, None if ctx.saved_tensors[4] is None else d_gates, None


for _name, _real, _fake in (("chunked", _chunked, _fake_chunked), ("chunked_back", _chunked_back, _fake_chunked_back)):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _real, _device)
    torch.library.register_fake(f"permuteformer::{_name}", _fake, lib=_library)
torch.library.register_autograd("permuteformer::chunked", _back_chunked, setup_context=_keep_chunked, lib=_library)
