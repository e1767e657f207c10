"""Causal and two-sided linear attention on a GPU: features by PyTorch, sums by the chunked scan of fla (flash-linear-attention).

Sums of weights come from the same scan as the output: a column of ones beside the values. Sums are float32. With TRITON_INTERPRET=1 the
scan runs on CPU tensors in Triton's interpreter, which is how it is tested; nothing here was run on a GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from permuteformer.ops.call import LinearCall, LinearState
from permuteformer.ops.checks import is_traced, without_autocast
from permuteformer.ops.global_tokens import with_global_tokens

CHUNK = 64
"""Tokens per chunk of fla."""
MULTIPLE = 16
"""Values and their column of ones are padded to a multiple of this, for aligned loads."""
INSTALL = "install it with: pip install 'permuteformer[cuda]'"


def unsupported(call: LinearCall) -> str | None:
    """Return why this backend cannot run a call, or ``None``."""
    device, length = call.v.device, call.k.shape[2]
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        return f"it runs on CUDA, and the tensors are on {device.type}"
    if is_traced():
        return "torch.compile, torch.func and forward-mode differentiation cannot trace fla"
    if not call.scans or length == 1 or call.q.shape[2] != length:
        return "one matrix product does it: it runs causal and two-sided attention of several tokens"
    if call.v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes in float32, and the values are {call.v.dtype}"
    for field, is_used in (("plain_normalizer", call.normalizer == "plain"), ("chunk_size", call.chunk_size is not None)):
        if is_used:
            return f"it has no {field}"
    return missing(device, call.v.dtype, _needs_gates(call) and torch.is_grad_enabled())


def missing(device: torch.device, dtype: torch.dtype, gates: bool = False) -> str | None:
    """Return what fla lacks on this machine for a dtype, or ``None``. ``gates``: gradients of a decay per token are needed."""
    triton = _triton_version()
    if triton is None or not _has_fla():
        return f"{'triton' if triton is None else 'fla'} is not installed; {INSTALL}"
    matmul = torch.backends.cuda.matmul
    tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)
    if dtype == torch.float32 and not (tf32 or os.environ.get("TRITON_F32_DEFAULT") == "ieee" or is_interpreted()):
        return (
            "fla rounds float32 products to TF32, which torch's setting forbids: use bfloat16, "
            "torch.set_float32_matmul_precision('high') or the variable TRITON_F32_DEFAULT=ieee"
        )
    if gates and (3, 4) <= triton < (3, 7, 1) and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return "fla's gradients of a decay per token are wrong with Triton 3.4 to 3.7.0 on Hopper: use another version of Triton"
    return None


def is_interpreted() -> bool:
    """Return whether Triton kernels run in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_version() -> tuple[int, ...] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    version = importlib.metadata.version("triton").split("+")[0]
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


@functools.cache
def _has_fla() -> bool:
    return importlib.util.find_spec("fla") is not None


def run(call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``b h l v``, and the state after the last token, ``b h m v`` and ``b h m``."""
    if call.tokens.global_mask is not None:
        return with_global_tokens(call, run)
    tokens, h, size = call.tokens, call.v.shape[1], call.v.shape[3]
    query_mask = tokens.mask if call.query_mask is None else call.query_mask
    mask, segments = tokens.mask, tokens.segments
    with without_autocast(call.v.device):
        tables = None if call.encoding is None else call.encoding.tables(call.positions())
        q, k = _features(call, call.q, query_mask, tables), _features(call, call.k, mask, tables)
        v = F.pad(call.v.to(call.dtype), (0, 1), value=1)  # b h l v+1
        v = F.pad(v if mask is None else v.masked_fill(~mask[:, None, :, None], 0), (0, -(size + 1) % MULTIPLE))
        order = None
        if tokens.orders is not None:
            order = tokens.orders[torch.arange(h, device=v.device) % len(tokens.orders)].transpose(0, 1).unsqueeze(-1)  # b h l 1
            q, k, v = (x.gather(2, order.expand_as(x)) for x in (q, k, v))
            mask, segments = (None if x is None else x.gather(1, tokens.orders[0]) for x in (mask, segments))
        gates = _gates(call, mask)
        out, state = _scan(call, (q, k, v), _padded(call, call.state, v), gates, segments, call.first_segment)
        if not call.causal:  # the same from the right; both count the diagonal
            flipped = tuple(x.flip(2) for x in (q, k, v))
            last = None if call.after is None else call.after.segment
            after = _padded(call, call.after, v)
            flip_gates, flip_segments = (None if x is None else x.flip(1) for x in (gates, segments))
            right, _ = _scan(call, flipped, after, flip_gates, flip_segments, last)
            out = out + right.flip(2) - (q * k).sum(-1, keepdim=True) * v
        if order is not None:
            out = torch.empty_like(out).scatter(2, order.expand_as(out), out)
        out, total = out[..., :size], out[..., size : size + 1]
        if call.normalizer != "none":
            out = out / total.masked_fill(total == 0, 1)
        return out.to(call.v.dtype), state[..., :size], state[..., size]


def _features(call: LinearCall, x: Tensor, mask: Tensor | None, tables: Any) -> Tensor:
    """phi of queries or keys with their positions, ``b h l m``; zero for masked tokens."""
    hidden = None if mask is None else ~mask[:, None, :, None]
    x = x.to(call.dtype)
    x = call.feature_map(x if hidden is None else x.masked_fill(hidden, 0), *call.parameters)
    x = x if hidden is None else x.masked_fill(hidden, 0)
    return x if call.encoding is None else call.encoding.transform(x, tables)


def _padded(call: LinearCall, state: LinearState | None, v: Tensor) -> Tensor:
    """A state with its sums of weights as a column: ``b h m width``; zeros for none."""
    b, h, _, width = v.shape
    if state is None:
        return v.new_zeros(b, h, call.num_features, width)
    joined = torch.cat([state.kv, state.z.unsqueeze(-1)], dim=-1).to(v.dtype)
    return F.pad(joined, (0, width - joined.shape[-1]))


def _needs_gates(call: LinearCall) -> bool:
    """Return whether fla needs a decay per token instead of one per head.

    A masked token takes no step. fla gives one number per head no gradient, and where a chunk is not full it raises the powers of the
    missing tokens: the state is not finite at r = 0.1 and 65 tokens.
    """
    if call.log_decay is None:
        return False
    uneven = call.tokens.mask is not None or call.tokens.segments is not None or call.k.shape[2] % CHUNK != 0
    return call.log_decay.requires_grad or uneven


def _gates(call: LinearCall, mask: Tensor | None) -> Tensor | None:
    """``b l h``: log r of each token."""
    if call.log_decay is None or not _needs_gates(call):
        return None
    b, h, length, _ = call.k.shape
    gates = call.log_decay.to(call.dtype).expand(b, length, h)
    return gates.contiguous() if mask is None else gates.masked_fill(~mask.unsqueeze(-1), 0)


def _scan(
    call: LinearCall,
    tensors: tuple[Tensor, ...],
    state: Tensor,
    gates: Tensor | None,
    segments: Tensor | None,
    first_segment: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Numerators and weights ``b h l width``, and the state after the last token. Queries that see a value that is not finite get NaN."""
    bad = ~tensors[2].isfinite().all(-1)  # b h l; fla gets zero for it, as a weight of zero would not hide it
    q, k, v = (x.transpose(1, 2).contiguous() for x in (*tensors[:2], tensors[2].masked_fill(bad.unsqueeze(-1), 0)))  # b l h d
    decay = None if gates is not None or call.log_decay is None else call.log_decay.to(call.dtype)
    if segments is None:
        spoilt = bad.cumsum(-1) > 0
        out, state = _Fla.apply(q, k, v, state.contiguous(), gates, decay)
    else:
        # Rows one after another, each segment a sequence; the first of a row may continue the state, the last leaves one.
        b, length = segments.shape
        begins = F.pad(segments.diff(dim=1) != 0, (1, 0), value=True)
        starts = torch.where(begins, torch.arange(length, device=segments.device), 0).cummax(-1).values
        count = bad.cumsum(-1)
        spoilt = count > (count - bad.long()).gather(-1, starts.unsqueeze(1).expand_as(count))
        number = (begins.flatten().cumsum(0) - 1).view(b, length)
        places = begins.flatten().nonzero().flatten()
        if first_segment is not None:
            state = state.masked_fill((segments[:, 0] != first_segment)[:, None, None, None], 0)
        states = state.new_zeros(len(places), *state.shape[1:]).index_copy(0, number[:, 0], state)
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
        gates = None if gates is None else gates.flatten(0, 1).unsqueeze(0)
        out, states = _Fla.apply(q, k, v, states, gates, decay, F.pad(places, (0, 1), value=b * length))
        out, state = out.view(b, length, *out.shape[2:]), states.index_select(0, number[:, -1])
    out = out.transpose(1, 2).masked_fill(spoilt.unsqueeze(-1), torch.nan)
    return out, state.masked_fill(spoilt[..., -1, None, None], torch.nan)


class _Fla(torch.autograd.Function):
    """``chunk_simple_gla`` with a second derivative refused: fla's own backward would omit it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        from fla.ops.simple_gla import chunk_simple_gla

        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            ctx.inside = [x.detach().requires_grad_() if need else x for x, need in zip(inputs, ctx.needs_input_grad, strict=True)]
            q, k, v, state, gates, decay, *ends = ctx.inside
            options = {"initial_state": state, "output_final_state": True, "cu_seqlens": ends[0] if ends else None}
            ctx.outputs = chunk_simple_gla(q, k, v, g=gates, g_gamma=decay, scale=1.0, **options)
        return ctx.outputs[0].detach(), ctx.outputs[1].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [x for x, need in zip(ctx.inside, ctx.needs_input_grad, strict=True) if need]
        found = iter(torch.autograd.grad(ctx.outputs, wanted, gradients, retain_graph=True))
        return tuple(next(found) if need else None for need in ctx.needs_input_grad)
