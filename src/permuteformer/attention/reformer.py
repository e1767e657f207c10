"""Reformer (Kitaev et al., 2020): softmax attention among the tokens that a random hash puts together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from permuteformer.attention.base import ATTENTIONS, Attention
from permuteformer.ops.call import Tokens
from permuteformer.ops.checks import check_integer, without_autocast
from permuteformer.positions.base import Copy, PositionEncoding

SELF_SCORE = -1e5
"""The score of a token for itself (the paper's appendix): it counts only where the token sees nothing else."""


@ATTENTIONS.register("reformer")
class ReformerAttention(Attention):
    """Hashes tokens by random rotations, sorts them by bucket, and attends within the bucket, in the own chunk and the one before.

    Queries are keys too, all of one length, so ``mix`` ignores ``k``. A token sees itself only where it sees nothing else. Linear in the
    length; see ``lsh_attention`` for the rule, and for what a causal token sees. Other arguments are those of ``Attention``.

    Args:
        num_hashes: rounds of hashing; a token sees the tokens that it meets in any of them.
        num_buckets: buckets per round, an even number whatever the length, or 1 for no hashing: then a token sees its neighbours.
        chunk_size: tokens per chunk of the sorted sequence.
        seed: seed of the rotations; layers with the same seed share them.

    >>> attention = ReformerAttention(2, 4, num_buckets=8, chunk_size=16)
    >>> q = v = torch.randn(1, 2, 50, 4)
    >>> attention.mix(q, q, v, Tokens(), None)[0].shape
    torch.Size([1, 2, 50, 4])
    """

    modes = frozenset({"bidirectional", "causal"})
    shared_query_key = True
    exact = ("rotations",)
    rotations: Tensor
    """``h r d n``: random directions of each head and round, for 2 n buckets."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        causal: bool = False,
        position: PositionEncoding | None = None,
        num_hashes: int = 2,
        num_buckets: int = 64,
        chunk_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, head_size, causal, position)
        check_integer(0, seed=seed)
        check_integer(num_hashes=num_hashes, chunk_size=chunk_size)
        if not isinstance(num_buckets, int) or num_buckets < 1 or (num_buckets > 1 and num_buckets % 2):
            raise ValueError(
                "num_buckets must be even, one bucket per random direction and one for its opposite, or 1 for no hashing, got "
                f"{num_buckets!r}"
            )
        self.chunk_size = chunk_size
        self.register_buffer("rotations", torch.empty(num_heads, num_hashes, head_size, num_buckets // 2, dtype=torch.float32))
        self.seed = seed
        self.reset()

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        self.redraw(torch.Generator().manual_seed(self.seed), copy)

    def redraw(self, generator: torch.Generator | None = None, copy: Copy = Tensor.copy_) -> None:
        """Draw new rotations. Nothing else calls it."""
        if not self.rotations.is_meta:
            copy(self.rotations, torch.randn(self.rotations.shape, generator=generator, device="cpu"))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: Any) -> tuple[Tensor, None]:
        _, rounds, _, directions = self.rotations.shape
        one_bucket = torch.zeros(*q.shape[:2], rounds, q.shape[2], dtype=torch.int64, device=q.device)
        buckets = hash_buckets(q, self.rotations) if directions else one_bucket
        return lsh_attention(q, v, buckets, chunk_size=self.chunk_size, causal=self.causal, mask=tokens.mask), None

    def extra_repr(self) -> str:
        _, rounds, _, directions = self.rotations.shape
        return f"num_hashes={rounds}, num_buckets={max(1, 2 * directions)}, chunk_size={self.chunk_size}"


def lsh_attention(q: Tensor, v: Tensor, buckets: Tensor, *, chunk_size: int, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """Attend from each token to the tokens of its bucket nearby, in at least one round of hashing.

    In each round tokens are sorted by bucket, then by index, masked ones last, and cut into chunks. A token sees the tokens of its bucket
    in its own chunk and in the one before; the first chunk has none before. A causal token sees instead the ``chunk_size`` tokens of its
    bucket before it, because where chunks begin depends on the tokens after it. The result is the softmax of q_i·k_j / sqrt d, with
    k_j = q_j scaled to length sqrt d, over all tokens seen in any round.

    Args:
        q: queries ``b h l d``, which are keys too, any strides.
        v: values ``b h l v``.
        buckets: ``b h r l`` int64, at least 0: the bucket of each token in each of r rounds.
        chunk_size: tokens per chunk, c.
        causal: tokens see no token after them.
        mask: ``b l`` bool, false for tokens that no token sees; their own output is zero.

    Returns:
        ``b h l v`` in the dtype of v.

    >>> q, v = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 4)
    >>> rotations = torch.randn(2, 3, 8, 4)                           # 3 rounds of 8 buckets
    >>> lsh_attention(q, v, hash_buckets(q, rotations), chunk_size=16).shape
    torch.Size([1, 2, 100, 4])
    """
    length, dtype = q.shape[2], v.dtype
    q, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, v))  # normalised keys need the precision
    chunk = min(chunk_size, length)
    extra = -length % chunk
    if mask is None:
        mask = torch.ones(1, length, dtype=torch.bool, device=q.device)
    else:
        hidden = ~mask[:, None, :, None]
        q, v = q.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    q, v = F.pad(q, (0, 0, 0, extra)), F.pad(v, (0, 0, 0, extra))
    buckets = _separate_masked(F.pad(buckets, (0, extra)), F.pad(mask, (0, extra)))
    order = buckets.argsort(dim=-1, stable=True)  # b h r l
    rank = order.argsort(-1)
    first, last = (x.gather(-1, rank) for x in _visible_ranks(buckets.gather(-1, order), chunk, causal))
    with without_autocast(q.device):
        out, total = _attend(q, v, order, (rank.int(), first, last), chunk)
    out, total = _take(out, rank), total.gather(-1, rank)
    weight = total.softmax(2)  # the weight of each round
    return (out * weight.unsqueeze(-1)).sum(2)[:, :, :length].to(dtype)


def hash_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """Return the bucket of each vector of ``x`` (``b h l d``) in each round, ``b h r l``: the paper's argmax([x R; -x R]).

    ``rotations``: ``h r d n``, R of each head and round, for 2 n buckets.

    >>> hash_buckets(torch.tensor([[[[1.0, 0.1], [-1.0, 0.1]]]]), torch.eye(2).view(1, 1, 2, 2))
    tensor([[[[0, 2]]]])
    """
    dtype = torch.promote_types(x.dtype, torch.float32)  # rounding must not choose the bucket
    with without_autocast(x.device):
        rotated = torch.einsum("bhld,hrdn->bhrln", x.detach().to(dtype), rotations.detach().to(dtype))
    return torch.cat([rotated, -rotated], dim=-1).argmax(-1)


def _separate_masked(buckets: Tensor, mask: Tensor) -> Tensor:
    """Give every masked token a bucket of its own, after all others: it is sorted last, and only it sees itself."""
    most = buckets.amax() if buckets.numel() else 0
    own = most + 1 + torch.arange(buckets.shape[-1], device=buckets.device)
    return torch.where(mask[:, None, None, :], buckets, own)


def _visible_ranks(buckets: Tensor, chunk: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The first and the last rank that each token of a sorted sequence sees, int32 ``b h r l``, from its sorted buckets."""
    rank = torch.arange(buckets.shape[-1], dtype=torch.int32, device=buckets.device)
    start = torch.searchsorted(buckets, buckets, out_int32=True)
    if causal:  # at most a chunk back, which the chunk before covers wherever chunks begin
        return torch.maximum(start, rank - chunk), rank.expand_as(start)
    end = torch.searchsorted(buckets, buckets, out_int32=True, right=True) - 1
    chunk_start = rank - rank % chunk
    return torch.maximum(start, chunk_start - chunk), torch.minimum(end, chunk_start + chunk - 1)


def _attend(q: Tensor, v: Tensor, order: Tensor, ranks: tuple[Tensor, Tensor, Tensor], chunk: int) -> tuple[Tensor, Tensor]:
    """The output of each round, ``b h r l v``, and the logarithm of its sum of weights, ``b h r l``, both in sorted order.

    ``ranks``: of each token, its own, and the first and the last that it sees.
    """
    rounds = order.shape[2]
    k = F.normalize(q, dim=-1, eps=1e-6)
    query, key, value = (_chunks(x.unsqueeze(2).expand(-1, -1, rounds, -1, -1), order, chunk) for x in (q, k, v))  # b h r n c d
    scores = _bias(order, ranks, chunk, q.dtype) + query @ _with_chunk_before(key, 0).transpose(-1, -2)  # b h r n c 2c
    # In place: these are the largest tensors here.
    largest = scores.detach().amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = weights @ _with_chunk_before(value, 0) / total
    return out.flatten(3, 4), (largest + total.log()).flatten(3)


def _bias(order: Tensor, ranks: tuple[Tensor, Tensor, Tensor], chunk: int, dtype: torch.dtype) -> Tensor:
    """The paper's -m_ij, ``b h r n c 2c``: -inf for what is not seen, and -log N_ij for what is seen in N_ij rounds."""
    seen = _seen(order, ranks, chunk)
    count = torch.ones_like(seen, dtype=torch.int16)
    for shift in range(1, order.shape[2]):
        count += _seen(order, tuple(x.roll(shift, 2) for x in ranks), chunk)
    bias = count.to(dtype).log_().neg_().masked_fill_(seen.logical_not_(), -torch.inf)
    bias.diagonal(chunk, -2, -1).fill_(SELF_SCORE)
    return bias


def _seen(order: Tensor, ranks: tuple[Tensor, ...], chunk: int) -> Tensor:
    """Which of the keys in its two chunks each query sees by ``ranks``: bool ``b h r n c 2c``."""
    rank, first, last = (_chunks(x.unsqueeze(-1), order, chunk) for x in ranks)  # b h r n c 1
    rank = _with_chunk_before(rank, -1).transpose(-1, -2)
    return (rank >= first) & (rank <= last)


def _chunks(x: Tensor, order: Tensor, chunk: int) -> Tensor:
    """The tokens of ``x`` (``b h r l d``) sorted and cut: ``b h r n c d``."""
    chunks: Tensor = _take(x, order).unflatten(3, (-1, chunk))
    return chunks


def _take(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of ``x`` (``b h r l d``) in the order of ``index`` (``b h r l``)."""
    return x.gather(3, index.unsqueeze(-1).expand(-1, -1, -1, -1, x.shape[-1]))


def _with_chunk_before(x: Tensor, fill: int) -> Tensor:
    """The chunk before and the chunk itself, ``b h r n 2c …`` of ``b h r n c …``; the first has ``fill`` before it."""
    before = torch.cat([torch.full_like(x[:, :, :, :1], fill), x[:, :, :, :-1]], dim=3)
    return torch.cat([before, x], dim=4)
