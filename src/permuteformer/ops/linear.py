"""Linear attention: phi(Q) (phi(K)^T V), bidirectional, causal, two-sided, or one token at a time.

``linear_attention`` is the one entrance. It checks what it is given, chooses the pass, and keeps the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from permuteformer.ops import cuda_backend, native_backend, torch_backend
from permuteformer.ops.backend import Call, Work, choose
from permuteformer.ops.blocks import Blocks, Carry, Transform, decay_powers, transport
from permuteformer.ops.checks import (
    can_look_at,
    check_devices,
    check_key_mask,
    check_positions,
    check_segments,
    check_whole,
    without_autocast,
)


class LinearState(NamedTuple):
    """All that linear attention has to remember of the tokens so far, whatever their number: float32 at least.

    Keys stand in it permuted by their own positions (the absolute frame), so going on needs the next position only.

    >>> q = k = v = torch.randn(1, 2, 100, 8)
    >>> _, state = linear_attention(q, k, v, feature_map=torch.exp, causal=True)
    >>> state.kv.shape, state.z.shape, state.next_position    # b h m v, b h m, b
    (torch.Size([1, 2, 8, 8]), torch.Size([1, 2, 8]), tensor([100]))
    """

    kv: Tensor
    """``b h m v``: sum of f(k_j) v_j^T, decayed to the last token."""
    z: Tensor
    """``b h m``: sum of f(k_j), decayed alike: the normaliser."""
    next_position: Tensor
    """``b`` int64: the position of the next token, where consecutive ones are not given."""
    segment: Tensor | None = None
    """``b``: the segment of the last token, where rows hold several."""

    def detach(self) -> LinearState:
        """The same without its history: gradients stop here."""
        return LinearState(*(None if x is None else x.detach() for x in self))  # type: ignore[arg-type]

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
        after: with ``two_sided`` or segments, what later tokens left, decayed to the first of them: see ``absorb_keys``. With its segment.
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
    _check(q, k, v, positions, causal, log_decay, two_sided, key_mask, segments, state)
    if after is not None and (causal or not (two_sided or segments is not None)):
        raise ValueError("after is what tokens on the right left: it is for two_sided=True, or segments that are not causal; leave it out")
    if chunk_size is not None:
        check_whole(chunk_size=chunk_size)
    b, h, length, _ = q.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    with without_autocast(q.device):
        size = feature_map(q[:, :, :1].to(dtype), *parameters).shape[-1]
        carry = _carry(state, (b, h, size, v.shape[-1]), q.device, dtype)
        right = None if after is None else _carry(after, (b, h, size, v.shape[-1]), q.device, dtype)
        start = torch.zeros(b, dtype=torch.int64, device=q.device) if state is None else state.next_position
        ends = None if key_mask is None else torch.where(key_mask, torch.arange(1, length + 1, device=q.device), 0).amax(-1)
        if segments is not None:
            segments = _continued(segments, ends, state)
        next_position = _next_position(start, length, positions, key_mask, ends)
        rotation = None if transform is None else transform.rotation(q.device)
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
                out, kv, z = cuda_backend.attend(q, k, v, *before, work, segments, _first_segment(segments, state))
            return out.to(v.dtype), LinearState(kv, z, next_position, _last_segment(segments, state))

        relative = positions is None and not one_step and transform is not None and transform.is_group and _is_one_run(key_mask)
        if positions is None and transform is not None and not relative:
            positions = count_positions(start, length, key_mask)
        # Where a row's tokens are one run, positions are this and the place in the row.
        origin = start if key_mask is None else start - key_mask.long().argmax(-1)
        blocks = Blocks(
            length=length,
            chunk=chunk_size or _chunk(b * h, size, v.shape[-1], causal),
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
    return out, LinearState(carry.kv.transpose(-1, -2), carry.z.squeeze(-2), next_position, _last_segment(segments, state))


def attend_to_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Callable[..., Tensor],
    parameters: Sequence[Tensor] = (),
    transform: Transform | None = None,
    positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    normalize: bool = True,
    plain_normalizer: bool = False,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Every query sees every key, without a decay: the output of ``linear_attention``, and no state.

    Arguments as there. Queries ``b h n d`` may be of other tokens than the keys, and then stand at ``query_positions``, ``b n a``;
    none of them is hidden.

    >>> q = k = v = torch.randn(1, 2, 6, 4)
    >>> out, _ = linear_attention(q, k, v, feature_map=torch.exp)
    >>> last = attend_to_all(q[:, :, 5:], k, v, feature_map=torch.exp, query_positions=torch.tensor([[[5]]]))
    >>> torch.allclose(last, out[:, :, 5:], atol=1e-5)
    True
    """
    rotation = None if transform is None else transform.rotation(k.device)
    call = Call(v, feature_map, transform, rotation, plain_normalizer=plain_normalizer, chunk_size=chunk_size is not None)
    features: dict[str, Any] = {
        "feature_map": feature_map,
        "parameters": parameters,
        "transform": transform,
        "plain_normalizer": plain_normalizer,
    }
    if choose(backend, call) == "native":
        _check(k if query_positions is not None else q, k, v, positions, key_mask=key_mask)
        work = Work(rotation, None, positions, key_mask, feature_map.__name__, normalize, causal=False, query_positions=query_positions)
        if query_positions is not None:
            _check_queries(q, k, query_positions)
        out, _, _ = native_backend.attend(q.float(), k.float(), v.float(), None, None, work)
        return out.to(v.dtype)
    if query_positions is None:
        arguments: dict[str, Any] = {"positions": positions, "key_mask": key_mask, "normalize": normalize, "chunk_size": chunk_size}
        return linear_attention(q, k, v, backend=backend, **arguments, **features)[0]
    _check(k, k, v, positions, key_mask=key_mask)
    _check_queries(q, k, query_positions)
    if positions is None:
        positions = count_positions(torch.zeros(len(k), dtype=torch.int64, device=k.device), k.shape[2], key_mask)
    state = absorb_keys(k, v, positions=positions, key_mask=key_mask, **features)
    return read_state(q, state, positions=query_positions, normalize=normalize, **features)


def absorb_keys(
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Callable[..., Tensor],
    parameters: Sequence[Tensor] = (),
    transform: Transform | None = None,
    positions: Tensor,
    key_mask: Tensor | None = None,
    plain_normalizer: bool = False,
    state: LinearState | None = None,
    log_decay: Tensor | None = None,
    steps: Tensor | None = None,
) -> LinearState:
    """The first half of bidirectional attention: the state with these keys in it, to be read by ``read_state``.

    Arguments as of ``linear_attention``. With it a sequence can be gone through twice, piece by piece, and nothing is as long as it.
    Each key is decayed by its own number of ``steps``, ``b l``, where there is a decay: so many as to the last token, it is the state that
    goes on there.

    >>> k = v = torch.randn(1, 2, 6, 8)
    >>> positions = torch.arange(6).view(1, 6, 1)
    >>> state = absorb_keys(k[:, :, :4], v[:, :, :4], feature_map=torch.exp, positions=positions[:, :4])
    >>> state = absorb_keys(k[:, :, 4:], v[:, :, 4:], feature_map=torch.exp, positions=positions[:, 4:], state=state)
    >>> torch.allclose(state.z, k.exp().sum(2), atol=1e-5)
    True
    """
    blocks, carry = _whole(k, v.shape[-1], feature_map, parameters, transform, positions, key_mask, plain_normalizer, True, state)
    next_position = positions[:, -1, 0].expand(len(k)) + 1
    rotation = None if transform is None else transform.rotation(k.device)
    call = Call(v, feature_map, transform, rotation, key_mask=key_mask is not None, plain_normalizer=plain_normalizer)
    with without_autocast(k.device):
        if log_decay is None and choose(None, call) == "native":
            work = Work(rotation, next_position, positions, key_mask, feature_map.__name__, normalize=False, causal=False, log_decay=None)
            before = carry.kv.transpose(-1, -2), carry.z.squeeze(-2)
            k, v = k.to(blocks.dtype), v.to(blocks.dtype)
            return LinearState(*native_backend.attend(k[:, :, :0], k, v, *before, work)[1:], next_position)
        own = torch_backend.key_sum(blocks, k, v, log_decay, steps, parameters)
        kv, z = carry.kv + own.kv, carry.z + own.z
    return LinearState(kv.transpose(-1, -2), z.squeeze(-2), next_position)


def read_state(
    q: Tensor,
    state: LinearState,
    *,
    feature_map: Callable[..., Tensor],
    parameters: Sequence[Tensor] = (),
    transform: Transform | None = None,
    positions: Tensor,
    normalize: bool = True,
    plain_normalizer: bool = False,
) -> Tensor:
    """The second half of bidirectional attention: what queries ``b h l d`` get from all the keys in ``state``, ``b h l v``.

    >>> q = k = v = torch.randn(1, 2, 6, 4)
    >>> at = torch.arange(6).view(1, -1, 1)
    >>> out, _ = linear_attention(q, k, v, feature_map=torch.exp)
    >>> halves = read_state(q, absorb_keys(k, v, feature_map=torch.exp, positions=at), feature_map=torch.exp, positions=at)
    >>> torch.allclose(halves, out, atol=1e-5)
    True
    """
    size = state.kv.shape[-1]
    blocks, carry = _whole(q, size, feature_map, parameters, transform, positions, None, plain_normalizer, normalize, state)
    with without_autocast(q.device):
        parts = [blocks.read_block(n, q[:, :, block], carry, parameters).to(q.dtype) for n, block in enumerate(blocks.slices)]
    return torch.cat(parts, dim=2)


def _whole(
    x: Tensor,
    values: int,
    feature_map: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    transform: Transform | None,
    positions: Tensor,
    key_mask: Tensor | None,
    plain_normalizer: bool,
    normalize: bool,
    state: LinearState | None,
) -> tuple[Blocks, Carry]:
    """Blocks in the absolute frame for one half of bidirectional attention, and the carry of the state."""
    b, h, length, _ = x.shape
    check_positions(positions, b, length)
    dtype = torch.promote_types(x.dtype, torch.float32)
    size = feature_map(x[:, :, :1].to(dtype), *parameters).shape[-1]
    carry = _carry(state, (b, h, size, values), x.device, dtype)
    blocks = Blocks(
        length=length,
        chunk=_chunk(b * h, size, values, causal=False),
        feature_map=feature_map,
        transform=transform,
        positions=positions,
        key_mask=key_mask,
        segments=None,
        first_segment=None,
        causal=False,
        normalize=normalize,
        plain_normalizer=plain_normalizer,
        dtype=dtype,
        device=x.device,
    )
    return blocks, carry


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


def count_positions(start: Tensor, length: int, key_mask: Tensor | None) -> Tensor:
    """``b l 1``: consecutive positions from ``start``, ``b``, of the tokens that are shown."""
    steps = torch.arange(length, device=start.device).expand(len(start), -1) if key_mask is None else (key_mask.cumsum(-1) - 1).clamp(min=0)
    return (start[:, None] + steps).unsqueeze(-1)


def _is_one_run(key_mask: Tensor | None) -> bool:
    """Whether the tokens shown of every row stand side by side: padding before and after them, but none between."""
    if key_mask is None:
        return True
    begins = torch.nn.functional.pad(key_mask, (1, 0))[:, :-1] < key_mask
    return can_look_at(key_mask) and not bool((begins.sum(-1) > 1).any())


def _next_position(start: Tensor, length: int, positions: Tensor | None, key_mask: Tensor | None, ends: Tensor | None) -> Tensor:
    """``b``: the position after the last token shown of each row."""
    if positions is None:
        return start + (length if key_mask is None else key_mask.sum(-1))
    first = positions[..., 0].expand(len(start), -1)
    if ends is None:
        return first[:, -1] + 1
    return torch.where(ends > 0, first.gather(1, (ends - 1).clamp(min=0).unsqueeze(1)).squeeze(1) + 1, start)


def _continued(segments: Tensor, ends: Tensor | None, state: LinearState | None) -> Tensor:
    """Segments with hidden tokens at the end of a row counted to the last segment that is shown: they do not begin another."""
    if ends is None:
        return segments
    last = segments.gather(1, (ends - 1).clamp(min=0).unsqueeze(1))  # b 1
    if state is not None and state.segment is not None:
        last = torch.where(ends.unsqueeze(1) > 0, last, state.segment.unsqueeze(1))
    places = torch.arange(segments.shape[1], device=segments.device)
    return torch.where(places < ends.unsqueeze(1), segments, last)


def _first_segment(segments: Tensor | None, state: LinearState | None) -> Tensor | None:
    """The segment that a state is of: the one it says, else the first of the row, which then goes on from it."""
    if segments is None or state is None:
        return None
    return segments[:, 0] if state.segment is None else state.segment


def _last_segment(segments: Tensor | None, state: LinearState | None) -> Tensor | None:
    """The segment that the state after a call is of."""
    if segments is not None:
        return segments[:, -1]
    return None if state is None else state.segment


def _chunk(heads: int, features: int, values: int, causal: bool) -> int:
    """Tokens a block: few enough that their features stay in the cache, so many that the carry between blocks is small beside them."""
    cached = min(128 if causal else 512, 2**19 // max(1, heads * features))
    return max(32, cached, -(-features * (values + 1) * 5 // (2 * (features + values))))


def _check_queries(q: Tensor, k: Tensor, query_positions: Tensor) -> None:
    """Raise unless queries fit keys of other tokens, and have positions."""
    b, h, _, d = k.shape
    if q.dim() != 4 or (*q.shape[:2], q.shape[3]) != (b, h, d):
        raise ValueError(f"q must have shape (batch, heads, queries, size) = ({b}, {h}, queries, {d}), as k has; it has {tuple(q.shape)}")
    check_devices(k.device, "k", {"q": q, "query_positions": query_positions})
    check_positions(query_positions, b, q.shape[2])


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    causal: bool = False,
    log_decay: Tensor | None = None,
    two_sided: bool = False,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    state: LinearState | None = None,
) -> None:
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3] or q.shape[2] == 0:
        raise ValueError(
            "q and k must have one shape (batch, heads, length, size), and v the same but for its size, with a length of at "
            f"least 1; they have {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise TypeError(f"q, k and v must be of a floating-point dtype; they are {q.dtype}, {k.dtype}, {v.dtype}")
    b, h, length, _ = q.shape
    given = {"k": k, "v": v, "positions": positions, "log_decay": log_decay, "key_mask": key_mask, "segments": segments}
    check_devices(q.device, "q", given)
    if positions is not None:
        check_positions(positions, b, length)
    if log_decay is not None:
        if log_decay.shape != (h,):
            raise ValueError(f"log_decay must have shape ({h},), one number a head; it has {tuple(log_decay.shape)}")
        if can_look_at(log_decay) and not ((log_decay <= 0) & log_decay.isfinite()).all():
            raise ValueError(f"log_decay must be log r of r in (0, 1], so 0 or below; it is {log_decay.tolist()}")
        if not causal and not two_sided:
            raise ValueError(
                "a decay r^(i-j) grows without bound for keys after the query: with causal=False pass two_sided=True, for r^|i-j|"
            )
    if two_sided and causal:
        raise ValueError("two_sided=True is for bidirectional attention; with causal=True leave it False")
    if key_mask is not None:
        check_key_mask(key_mask, b, length)
    if segments is not None:
        check_segments(segments, b, length)
    if state is not None and not isinstance(state, LinearState):
        raise TypeError(
            f"state must be the LinearState that an earlier call returned, the second of the two it returns; it is {type(state).__name__}"
        )


def _carry(state: LinearState | None, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> Carry:
    """The state as blocks carry it, or nothing yet; ``shape`` is that of its ``kv``."""
    if state is None:
        b, h, m, v = shape
        kv = torch.zeros(b, h, m, v, device=device, dtype=dtype).transpose(-1, -2)  # which the kernel takes without a copy
        return Carry(kv, torch.zeros(b, h, 1, m, device=device, dtype=dtype))
    _check_state(state, shape, device)
    return Carry(state.kv.to(dtype).transpose(-1, -2), state.z.to(dtype).unsqueeze(-2))


def _check_state(state: LinearState, shape: tuple[int, int, int, int], device: torch.device) -> None:
    if state.kv.shape != shape or state.z.shape != shape[:3] or state.next_position.shape != shape[:1]:
        raise ValueError(
            f"state is of shape {tuple(state.kv.shape)}, but this call needs (batch, heads, features, value size) = {shape}: "
            "pass the state that the same layer returned for the same batch"
        )
    if state.next_position.dtype != torch.int64:
        raise TypeError(f"next_position of the state must be int64; it is {state.next_position.dtype}")
    check_devices(device, "q", {f"{name} of the state": x for name, x in state._asdict().items()})
