"""Attention of all queries to all keys, and its two halves: a state absorbs the keys, then queries read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from permuteformer.ops import native_backend, torch_backend
from permuteformer.ops.backend import Call, Work, choose
from permuteformer.ops.blocks import Blocks, Carry, Transform, block_length
from permuteformer.ops.checks import check_attention, check_devices, check_positions, without_autocast
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.state import LinearState, as_carry, count_positions


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
        check_attention(k if query_positions is not None else q, k, v, positions, key_mask=key_mask)
        work = Work(rotation, None, positions, key_mask, feature_map.__name__, normalize, causal=False, query_positions=query_positions)
        if query_positions is not None:
            _check_queries(q, k, query_positions)
        if rotation is not None:
            rotation.check(k.shape[1], k.shape[3], positions, positions if query_positions is None else query_positions)
        out, _, _ = native_backend.attend(q.float(), k.float(), v.float(), None, None, work)
        return out.to(v.dtype)
    if query_positions is None:
        arguments: dict[str, Any] = {"positions": positions, "key_mask": key_mask, "normalize": normalize, "chunk_size": chunk_size}
        return linear_attention(q, k, v, backend=backend, **arguments, **features)[0]
    check_attention(k, k, v, positions, key_mask=key_mask)
    _check_queries(q, k, query_positions)
    if positions is None:
        positions = count_positions(torch.zeros(len(k), dtype=torch.int64, device=k.device), k.shape[2], key_mask)
    state = absorb_keys(k, v, positions=positions, key_mask=key_mask, backend=backend, **features)
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
    backend: str | None = None,
) -> LinearState:
    """The first half of bidirectional attention: the state with these keys in it, to be read by ``read_state``.

    Arguments as of ``linear_attention``. With it a sequence can be gone through twice, piece by piece, and nothing is as long as it.
    Each key is decayed by its own number of ``steps``, ``b l``, where there is a decay: so many as to the last token, it is the state that
    goes on there. With ``backend="torch"`` no kernel is asked; else the CPU's, where it can.

    >>> k = v = torch.randn(1, 2, 6, 8)
    >>> positions = torch.arange(6).view(1, 6, 1)
    >>> state = absorb_keys(k[:, :, :4], v[:, :, :4], feature_map=torch.exp, positions=positions[:, :4])
    >>> state = absorb_keys(k[:, :, 4:], v[:, :, 4:], feature_map=torch.exp, positions=positions[:, 4:], state=state)
    >>> torch.allclose(state.z, k.exp().sum(2), atol=1e-5)
    True
    """
    check_attention(k, k, v, positions, key_mask=key_mask)
    blocks, carry = _whole(k, v.shape[-1], feature_map, parameters, transform, positions, key_mask, plain_normalizer, True, state)
    next_position = positions[:, -1, 0].expand(len(k)) + 1
    rotation = None if transform is None else transform.rotation(k.device)
    call = Call(v, feature_map, transform, rotation, key_mask=key_mask is not None, plain_normalizer=plain_normalizer)
    with without_autocast(k.device):
        is_known = log_decay is None and blocks.dtype == torch.float32 and backend != "torch"
        if is_known and choose(None, call) == "native":
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
    carry = as_carry(state, (b, h, size, values), x.device, dtype)
    if transform is not None and (rotation := transform.rotation(x.device)) is not None:
        rotation.check(h, size, positions)
    blocks = Blocks(
        length=length,
        chunk=block_length(b * h, size, values, causal=False),
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


def _check_queries(q: Tensor, k: Tensor, query_positions: Tensor) -> None:
    """Raise unless queries fit keys of other tokens, and have positions."""
    b, h, _, d = k.shape
    if q.dim() != 4 or (*q.shape[:2], q.shape[3]) != (b, h, d):
        raise ValueError(f"q must have shape (batch, heads, queries, size) = ({b}, {h}, queries, {d}), as k has; it has {tuple(q.shape)}")
    check_devices(k.device, "k", {"q": q, "query_positions": query_positions})
    check_positions(query_positions, b, q.shape[2])
