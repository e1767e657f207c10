"""Linear attention: phi(Q) (phi(K)^T V), bidirectional, causal, two-sided, or one token at a time.

``linear_attention`` is the one entrance. It checks what it is given, chooses the pass, and keeps the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from permuteformer.ops import torch_backend
from permuteformer.ops.blocks import Blocks, Carry, Transform, decay_powers, transport


class LinearState(NamedTuple):
    """All that linear attention has to remember of the tokens so far, whatever their number: float32 at least.

    Keys stand in it permuted by their own positions (the absolute frame), so going on needs the next position only.
    """

    kv: Tensor
    """``b h m v``: sum of f(k_j) v_j^T, decayed to the last token."""
    z: Tensor
    """``b h m``: sum of f(k_j), decayed alike: the normaliser."""
    next_position: Tensor
    """``b`` int64: the position of the next token, where consecutive ones are not given."""
    segment: Tensor | None = None
    """``b``: the segment of the last token, where rows hold several."""

    def select(self, rows: Tensor) -> LinearState:
        """The state of these batch rows, in this order: for beam search."""
        return LinearState(*(None if x is None else x.index_select(0, rows) for x in self))  # type: ignore[arg-type]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Callable[..., Tensor],
    parameters: Sequence[Tensor] = (),
    transform: Transform | None = None,
    positions: Tensor | None = None,
    causal: bool = False,
    log_decay: Tensor | None = None,
    two_sided: bool = False,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    normalize: bool = True,
    plain_normalizer: bool = False,
    state: LinearState | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, LinearState]:
    """Attention in time and memory linear in the length.

    Args:
        q: queries ``b h l d``, any strides.
        k: keys ``b h l d``.
        v: values ``b h l v``.
        feature_map: phi, on ``b h l d``, giving ``b h l m``; see ``ops.feature_map``.
        parameters: tensors passed on to ``feature_map``; gradients reach them.
        transform: what positions do to features; see ``positions``.
        positions: ``b l a`` int64; ``None`` means consecutive, from ``state.next_position`` or 0.
        causal: query i sees keys j <= i only.
        log_decay: log r of each head, ``h``: weights r^(i-j), a step a token.
        two_sided: without ``causal``, weights r^|i-j|. A decay in a bidirectional call must be asked for by this.
        key_mask: ``b l`` bool, false for keys that nobody sees. A query that sees no key gets zero.
        segments: ``b l`` int64, not decreasing along a row: tokens see their own segment only.
        normalize: divide by the sum of weights (equation 2).
        plain_normalizer: take that sum from features before ``transform``.
        state: what earlier tokens left, as returned. Of segments, the first may go on from it.
        chunk_size: tokens a block; changes speed and rounding only.

    Returns:
        Output ``b h l v`` in the dtype of v, and the state after the last token.

    >>> q = k = v = torch.randn(1, 2, 6, 4)
    >>> out, state = linear_attention(q, k, v, feature_map=torch.exp, causal=True)
    >>> head, state = linear_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], feature_map=torch.exp, causal=True)
    >>> last, state = linear_attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], feature_map=torch.exp, causal=True, state=state)
    >>> torch.allclose(out, torch.cat([head, last], dim=2), atol=1e-5)
    True
    """
    _check(q, k, v, positions, causal, log_decay, two_sided, key_mask, segments, chunk_size)
    b, h, length, _ = q.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        size = feature_map(q[:, :, :1].to(dtype), *parameters).shape[-1]
        if state is None:
            carry = Carry(q.new_zeros(b, h, v.shape[-1], size, dtype=dtype), q.new_zeros(b, h, 1, size, dtype=dtype))
            start = torch.zeros(b, dtype=torch.int64, device=q.device)
        else:
            _check_state(state, (b, h, size, v.shape[-1]), q.device)
            carry = Carry(state.kv.to(dtype).transpose(-1, -2), state.z.to(dtype).unsqueeze(-2))
            start = state.next_position

        one_step = causal and length == 1
        relative = positions is None and not one_step and transform is not None and transform.is_group
        if positions is not None:
            end = positions[:, -1, 0].expand(b) + 1
        else:
            end = start + length
            if transform is not None and not relative:
                positions = (start[:, None] + torch.arange(length, device=q.device)).unsqueeze(-1)  # b l 1
        blocks = Blocks(
            length=length,
            chunk=chunk_size or _chunk(b * h * size, causal),
            feature_map=feature_map,
            transform=transform,
            positions=positions,
            key_mask=key_mask,
            segments=segments,
            first_segment=_first_segment(segments, state),
            causal=causal,
            normalize=normalize,
            plain_normalizer=plain_normalizer,
            dtype=dtype,
            device=q.device,
        )
        if relative and transform is not None and state is not None:
            carry = transport(transform, carry, transform.tables(-start.view(-1, 1, 1)), plain_normalizer)
        if one_step:
            out, carry = _step(blocks, q, k, v, carry, log_decay, parameters)
        elif causal or two_sided or segments is not None:
            out, carry = torch_backend.scan(blocks, q, k, v, carry, log_decay, parameters)
        else:
            out, carry = torch_backend.total(blocks, q, k, v, carry, parameters)
        if relative and transform is not None:
            carry = transport(transform, carry, transform.tables(end.view(-1, 1, 1)), plain_normalizer)
    segment = None if segments is None else segments[:, -1]
    return out, LinearState(carry.kv.transpose(-1, -2), carry.z.squeeze(-2), end, segment)


def _step(
    blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, carry: Carry, log_decay: Tensor | None, parameters: Sequence[Tensor]
) -> tuple[Tensor, Carry]:
    """One token: it joins the carry, then reads it. Constant time and memory."""
    tables = blocks.tables(0)
    plain, query = blocks.features(q, tables, parameters)
    decays = None if log_decay is None else decay_powers(log_decay.to(blocks.dtype), 1)
    carry = blocks.write(*blocks.keys(0, k, v, tables, parameters), carry, decays, blocks.reach_left(0))
    out = blocks.divide(*blocks.read(query, plain if blocks.plain_normalizer else query, carry, None, None))
    return out.to(v.dtype), carry


def _first_segment(segments: Tensor | None, state: LinearState | None) -> Tensor | None:
    """The segment that a state is of: the one it says, else the first of the row, which then goes on from it."""
    if segments is None or state is None:
        return None
    return segments[:, 0] if state.segment is None else state.segment


def _chunk(features: int, causal: bool) -> int:
    """Tokens a block, so that a block's features, ``features`` numbers a token, stay in the cache."""
    return max(32, min(128 if causal else 512, 2**19 // features))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    causal: bool,
    log_decay: Tensor | None,
    two_sided: bool,
    key_mask: Tensor | None,
    segments: Tensor | None,
    chunk_size: int | None,
) -> None:
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3] or q.shape[2] == 0:
        raise ValueError(
            "q and k must have one shape (batch, heads, length, size), and v the same but for its size, with a length of at "
            f"least 1; they have {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    b, h, length, _ = q.shape
    given = {"k": k, "v": v, "positions": positions, "log_decay": log_decay, "key_mask": key_mask, "segments": segments}
    for name, tensor in given.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: move it there with .to(q.device)")
    if log_decay is not None:
        if log_decay.shape != (h,):
            raise ValueError(f"log_decay must have shape ({h},), one number a head; it has {tuple(log_decay.shape)}")
        if not causal and not two_sided:
            raise ValueError(
                "a decay r^(i-j) grows without bound for keys after the query: with causal=False pass two_sided=True, for r^|i-j|"
            )
    if two_sided and causal:
        raise ValueError("two_sided=True is for bidirectional attention; with causal=True leave it False")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (b, length)):
        raise ValueError(
            f"key_mask must be bool of shape (batch, length) = ({b}, {length}), true for real tokens; it is {key_mask.dtype} of "
            f"shape {tuple(key_mask.shape)}"
        )
    if segments is not None:
        if segments.dtype != torch.int64 or segments.shape != (b, length):
            raise ValueError(
                f"segments must be int64 of shape (batch, length) = ({b}, {length}); they are {segments.dtype} of shape "
                f"{tuple(segments.shape)}"
            )
        if not torch.compiler.is_compiling() and (segments.diff(dim=1) < 0).any():
            raise ValueError("segments must not decrease along a row: number the packed sequences of a row 0, 1, 2, … in their order")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, or None for one that fits; it is {chunk_size}")


def _check_state(state: LinearState, shape: tuple[int, int, int, int], device: torch.device) -> None:
    if state.kv.shape != shape or state.z.shape != shape[:3] or state.next_position.shape != shape[:1]:
        raise ValueError(
            f"state is of shape {tuple(state.kv.shape)}, but this call needs (batch, heads, features, value size) = {shape}: "
            "pass the state that the same layer returned for the same batch"
        )
    if state.kv.device != device:
        raise ValueError(f"state is on {state.kv.device}, q on {device}: move it there")
