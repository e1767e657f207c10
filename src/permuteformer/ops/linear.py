"""Linear attention: phi(Q) (phi(K)^T V), bidirectional, causal, two-sided, or one token at a time.

``linear_attention`` is the one entrance. It checks what it is given, chooses the pass, and keeps the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from permuteformer.ops import cuda_backend, native_backend, torch_backend
from permuteformer.ops.backend import Call, Work, choose
from permuteformer.ops.blocks import Blocks, Carry, Transform, block_length, decay_powers, transport
from permuteformer.ops.checks import can_look_at, check_attention, check_whole, without_autocast
from permuteformer.ops.state import LinearState, as_carry, continued, count_positions, first_segment, last_segment, position_after


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
    after: LinearState | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
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
        after: with ``two_sided`` or segments, what later tokens left, decayed to the first of them: see ``ops.halves``. With its segment.
        chunk_size: tokens a block; changes speed and rounding only.
        backend: ``"native"`` (CPU), ``"cuda"``, ``"torch"``, or ``"auto"``: the first that can of its device's, as also the variable
            PERMUTEFORMER_BACKEND may say.

    Hidden tokens take no place and no step: consecutive positions and decay count the tokens that are shown, so a padded row is the row
    without its padding, wherever that stands, and can be gone on from. A hidden token's own output means nothing.

    With a decay, keys so far away that their weight underflows (690 tokens at r = 0.88 in float32) are not seen any more. There is no
    second derivative.

    Returns:
        Output ``b h l v`` in the dtype of v, and the state after the last token.

    >>> q = k = v = torch.randn(1, 2, 6, 4)
    >>> out, state = linear_attention(q, k, v, feature_map=torch.exp, causal=True)
    >>> head, state = linear_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], feature_map=torch.exp, causal=True)
    >>> last, state = linear_attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], feature_map=torch.exp, causal=True, state=state)
    >>> torch.allclose(out, torch.cat([head, last], dim=2), atol=1e-5)
    True
    """
    check_attention(q, k, v, positions, causal, log_decay, two_sided, key_mask, segments)
    if after is not None and (causal or not (two_sided or segments is not None)):
        raise ValueError("after is what tokens on the right left: it is for two_sided=True, or segments that are not causal; leave it out")
    if after is not None and segments is not None and after.segment is None:
        raise ValueError("after has no segment: where there are segments, it must say which one it is of, or all would see it")
    if chunk_size is not None:
        check_whole(chunk_size=chunk_size)
    b, h, length, _ = q.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    with without_autocast(q.device):
        size = feature_map(q[:, :, :1].to(dtype), *parameters).shape[-1]
        carry = as_carry(state, (b, h, size, v.shape[-1]), q.device, dtype)
        right = None if after is None else as_carry(after, (b, h, size, v.shape[-1]), q.device, dtype)
        start = torch.zeros(b, dtype=torch.int64, device=q.device) if state is None else state.next_position
        ends = None if key_mask is None else torch.where(key_mask, torch.arange(1, length + 1, device=q.device), 0).amax(-1)
        if segments is not None:
            segments = continued(segments, key_mask, ends, state)
        next_position = position_after(start, length, positions, key_mask, ends)
        rotation = None if transform is None else transform.rotation(q.device)
        if rotation is not None:
            rotation.check(h, size, positions)
        call = Call(
            v=v,
            feature_map=feature_map,
            transform=transform,
            rotation=rotation,
            causal=causal,
            log_decay=log_decay,
            key_mask=key_mask is not None,
            segments=segments is not None,
            two_sided=two_sided,
            plain_normalizer=plain_normalizer,
            chunk_size=chunk_size is not None,
        )
        who = choose(backend, call)
        one_step = causal and length == 1
        if who == "native" or (who == "cuda" and not one_step):
            work = Work(
                rotation=rotation,
                start=start,
                positions=positions,
                shown=key_mask,
                feature_map=feature_map.__name__,
                normalize=normalize,
                causal=causal,
                log_decay=None if log_decay is None else log_decay.to(dtype),
            )
            before = carry.kv.transpose(-1, -2), carry.z.squeeze(-2)
            if who == "native":
                out, kv, z = native_backend.attend(q.to(dtype), k.to(dtype), v.to(dtype), *before, work)
            else:
                if positions is None and key_mask is not None:
                    work = work._replace(positions=count_positions(start, length, key_mask))
                out, kv, z = cuda_backend.attend(q, k, v, *before, work, segments, first_segment(segments, state))
            return out.to(v.dtype), LinearState(kv, z, next_position, last_segment(segments, state))

        relative = positions is None and not one_step and transform is not None and transform.is_group and _is_one_run(key_mask)
        if positions is None and transform is not None and not relative:
            positions = count_positions(start, length, key_mask)
        # Where a row's tokens are one run, positions are this and the place in the row.
        origin = start if key_mask is None else start - key_mask.long().argmax(-1)
        blocks = Blocks(
            length=length,
            chunk=chunk_size or block_length(b * h, size, v.shape[-1], causal),
            feature_map=feature_map,
            transform=transform,
            positions=positions,
            key_mask=key_mask,
            segments=segments,
            first_segment=first_segment(segments, state),
            causal=causal,
            normalize=normalize,
            plain_normalizer=plain_normalizer,
            dtype=dtype,
            device=q.device,
            last_segment=None if after is None else after.segment,
        )
        if relative and transform is not None and state is not None:
            carry = transport(transform, carry, transform.tables(-origin.view(-1, 1, 1)), plain_normalizer)
        if relative and transform is not None and right is not None:
            last = origin + blocks.slices[-1].start
            right = transport(transform, right, transform.tables(-last.view(-1, 1, 1)), plain_normalizer)
        if one_step:
            out, carry = _step(blocks, q, k, v, carry, log_decay, parameters)
        elif causal or two_sided or segments is not None:
            out, carry = torch_backend.scan(blocks, q, k, v, carry, right, log_decay, parameters)
        else:
            out, carry = torch_backend.total(blocks, q, k, v, carry, parameters)
        if relative and transform is not None:
            carry = transport(transform, carry, transform.tables((origin + length).view(-1, 1, 1)), plain_normalizer)
    return out, LinearState(carry.kv.transpose(-1, -2), carry.z.squeeze(-2), next_position, last_segment(segments, state))


def _step(
    blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, carry: Carry, log_decay: Tensor | None, parameters: Sequence[Tensor]
) -> tuple[Tensor, Carry]:
    """One token: it joins the carry, then reads it. Constant time and memory."""
    tables = blocks.tables(0)
    decays = None if log_decay is None else decay_powers(log_decay.to(blocks.dtype), 1)
    keys = blocks.keys(0, k, v, tables, parameters)
    carry = blocks.write(*keys, carry, blocks.decays(0, decays), blocks.reach_left(0))
    out = blocks.divide(*blocks.read(*blocks.queries(0, q, tables, parameters), carry, None, None))
    return out.to(v.dtype), carry


def _is_one_run(key_mask: Tensor | None) -> bool:
    """Whether the tokens shown of every row stand side by side: padding before and after them, but none between."""
    if key_mask is None:
        return True
    begins = torch.nn.functional.pad(key_mask, (1, 0))[:, :-1] < key_mask
    return can_look_at(key_mask) and not bool((begins.sum(-1) > 1).any())
