"""Attention among tokens that hash alike (Kitaev et al., 2020), in time and memory linear in the length."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from permuteformer.ops.checks import check_key_mask, check_whole, without_autocast

SELF_SCORE = -1e5
"""The score of a token for itself (the paper's appendix): it counts where there is nothing else to see, and only there."""


def lsh_attention(
    q: Tensor, v: Tensor, buckets: Tensor, *, chunk_size: int, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Attention of each token to those it shares a bucket with, and a place nearby, in one round of hashing at least.

    In each round tokens are sorted by bucket, then by index, hidden ones last, and cut into chunks. A token sees the
    tokens of its bucket in its own chunk and in the one before; there is none before the first. A causal token sees
    instead the ``chunk_size`` tokens of its bucket that came before it: where chunks begin depends on the tokens after
    it. The result is the softmax of q_i·k_j / sqrt d, with k_j = q_j of length sqrt d, over all the tokens seen in any round.

    Args:
        q: queries ``b h l d``, which are keys too, any strides.
        v: values ``b h l v``.
        buckets: ``b h r l`` int64, at least 0: the bucket of each token in each of r rounds.
        chunk_size: tokens a chunk, c.
        causal: tokens see no token after them.
        key_mask: ``b l`` bool, false for tokens that nobody sees. Their own output is zero.

    Returns:
        ``b h l v`` in the dtype of v.

    >>> q, v = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 4)
    >>> rotations = torch.randn(2, 3, 8, 4)                           # 3 rounds of 8 buckets
    >>> lsh_attention(q, v, hash_buckets(q, rotations), chunk_size=16).shape
    torch.Size([1, 2, 100, 4])
    """
    _check(q, v, buckets, chunk_size, key_mask)
    length, dtype = q.shape[2], v.dtype
    q, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, v))  # keys of one length need digits
    chunk = min(chunk_size, length)
    extra = -length % chunk
    if key_mask is None:
        key_mask = torch.ones(1, length, dtype=torch.bool, device=q.device)
    else:
        hidden = ~key_mask[:, None, :, None]
        q, v = q.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    q, v = F.pad(q, (0, 0, 0, extra)), F.pad(v, (0, 0, 0, extra))
    buckets = _hide(F.pad(buckets, (0, extra)), F.pad(key_mask, (0, extra)))
    order = buckets.argsort(dim=-1, stable=True)  # b h r l
    rank = order.argsort(-1)
    first, last = (x.gather(-1, rank) for x in _visible_ranks(buckets.gather(-1, order), chunk, causal))
    with without_autocast(q.device):
        out, total = _attend(q, v, order, (rank.int(), first, last), chunk)
    out, total = _take(out, rank), total.gather(-1, rank)
    weight = total.softmax(2)  # each round's share of the sum over all
    return (out * weight.unsqueeze(-1)).sum(2)[:, :, :length].to(dtype)


def hash_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """The bucket of each vector of ``x`` (``b h l d``) in each round, ``b h r l``: the paper's argmax([x R; -x R]).

    ``rotations``: ``h r d n``, R of each head and round, for 2 n buckets.

    >>> hash_buckets(torch.tensor([[[[1.0, 0.1], [-1.0, 0.1]]]]), torch.eye(2).view(1, 1, 2, 2))
    tensor([[[[0, 2]]]])
    """
    dtype = torch.promote_types(x.dtype, torch.float32)  # rounding must not choose the bucket
    with without_autocast(x.device):
        rotated = torch.einsum("bhld,hrdn->bhrln", x.detach().to(dtype), rotations.detach().to(dtype))
    return torch.cat([rotated, -rotated], dim=-1).argmax(-1)


def _hide(buckets: Tensor, key_mask: Tensor) -> Tensor:
    """Give every hidden token a bucket of its own, after all others: it is sorted last, and nobody sees it but itself."""
    most = buckets.amax() if buckets.numel() else 0
    own = most + 1 + torch.arange(buckets.shape[-1], device=buckets.device)
    return torch.where(key_mask[:, None, None, :], buckets, own)


def _visible_ranks(buckets: Tensor, chunk: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The first and the last rank that each token of a sorted sequence sees, int32 ``b h r l``, from its sorted buckets."""
    rank = torch.arange(buckets.shape[-1], dtype=torch.int32, device=buckets.device)
    start = torch.searchsorted(buckets, buckets, out_int32=True)
    if causal:  # at most a chunk back, which the chunk before always covers, wherever chunks begin
        return torch.maximum(start, rank - chunk), rank.expand_as(start)
    end = torch.searchsorted(buckets, buckets, out_int32=True, right=True) - 1
    chunk_start = rank - rank % chunk
    return torch.maximum(start, chunk_start - chunk), torch.minimum(end, chunk_start + chunk - 1)


def _attend(q: Tensor, v: Tensor, order: Tensor, ranks: tuple[Tensor, Tensor, Tensor], chunk: int) -> tuple[Tensor, Tensor]:
    """Each round's output ``b h r l v``, and the logarithm of its sum of weights ``b h r l``, both in sorted order.

    ``ranks``: by token, its own rank, and the first and the last that it sees.
    """
    rounds = order.shape[2]
    k = F.normalize(q, dim=-1, eps=1e-6)
    query, key, value = (_chunks(x.unsqueeze(2).expand(-1, -1, rounds, -1, -1), order, chunk) for x in (q, k, v))  # b h r n c d
    bias = _bias(order, ranks, chunk, q.dtype)
    scores = bias + query @ _look_back(key, 0).transpose(-1, -2)  # b h r n c 2c; keys of length 1 have the sqrt d in them
    # In place, for these are the largest tensors here.
    largest = scores.detach().amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = weights @ _look_back(value, 0) / total
    return out.flatten(3, 4), (largest + total.log()).flatten(3)


def _bias(order: Tensor, ranks: tuple[Tensor, Tensor, Tensor], chunk: int, dtype: torch.dtype) -> Tensor:
    """The paper's -m_ij, ``b h r n c 2c``: -inf for what is not seen, and -log N_ij for what is seen in N_ij rounds.

    So a pair that meets in several rounds shares its weight out among them.
    """
    seen = _seen(order, ranks, chunk)
    count = torch.ones_like(seen, dtype=torch.int16)
    for shift in range(1, order.shape[2]):
        count += _seen(order, tuple(x.roll(shift, 2) for x in ranks), chunk)
    bias = count.to(dtype).log_().neg_().masked_fill_(seen.logical_not_(), -torch.inf)
    bias.diagonal(chunk, -2, -1).fill_(SELF_SCORE)
    return bias


def _seen(order: Tensor, ranks: tuple[Tensor, ...], chunk: int) -> Tensor:
    """Which of the keys in the window of its chunk each query sees by ``ranks``: bool ``b h r n c 2c``."""
    rank, first, last = (_chunks(x.unsqueeze(-1), order, chunk) for x in ranks)  # b h r n c 1
    rank = _look_back(rank, -1).transpose(-1, -2)
    return (rank >= first) & (rank <= last)


def _chunks(x: Tensor, order: Tensor, chunk: int) -> Tensor:
    """The tokens of ``x`` (``b h r l d``) sorted and cut: ``b h r n c d``."""
    chunks: Tensor = _take(x, order).unflatten(3, (-1, chunk))
    return chunks


def _take(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of ``x`` (``b h r l d``) in the order of ``index`` (``b h r l``)."""
    return x.gather(3, index.unsqueeze(-1).expand(-1, -1, -1, -1, x.shape[-1]))


def _look_back(x: Tensor, fill: int) -> Tensor:
    """The chunk before and the chunk itself, ``b h r n 2c …`` of ``b h r n c …``; before the first there is ``fill``."""
    before = torch.cat([torch.full_like(x[:, :, :, :1], fill), x[:, :, :, :-1]], dim=3)
    return torch.cat([before, x], dim=4)


def _check(q: Tensor, v: Tensor, buckets: Tensor, chunk_size: int, key_mask: Tensor | None) -> None:
    b, h, length, _ = q.shape
    if length == 0 or v.shape[:3] != (b, h, length):
        raise ValueError(
            "q and v must have shapes (batch, heads, length, …) with the same length, of at least 1; they have "
            f"{tuple(q.shape)} and {tuple(v.shape)}"
        )
    if buckets.dtype != torch.int64 or buckets.dim() != 4 or (buckets.shape[:2], buckets.shape[-1]) != ((b, h), length):
        raise ValueError(
            f"buckets must be int64 of shape (batch, heads, rounds, length) = ({b}, {h}, rounds, {length}), as hash_buckets gives them; "
            f"they are {buckets.dtype} of shape {tuple(buckets.shape)}"
        )
    check_whole(chunk_size=chunk_size)
    if key_mask is not None:
        check_key_mask(key_mask, b, length)
