"""Reformer (Kitaev et al., 2020): softmax attention among the tokens that a random hash puts together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from permuteformer.attention.base import ATTENTIONS, Attention
from permuteformer.ops.checks import check_whole
from permuteformer.ops.lsh import hash_buckets, lsh_attention
from permuteformer.positions.base import Copy, PositionEncoding


@ATTENTIONS.register("reformer")
class ReformerAttention(Attention):
    """Tokens are hashed by random rotations, sorted by bucket, and see their bucket in their own and the last chunk.

    Queries are keys too, all of one length: ``mix`` does not look at ``k``. A token sees itself only where it sees nothing
    else. Linear in the length; see ``ops.lsh`` for the rule, and for what a causal token sees.

    Args:
        num_heads: heads.
        head_size: size of a head's values.
        causal: queries see no key after them.
        position: none with a hook in attention; positions belong in the embeddings.
        num_hashes: rounds of hashing; a token sees what it meets in any of them.
        num_buckets: buckets a round, an even number whatever the length, or 1 for no hashing: then a token sees the
            tokens near it.
        chunk_size: tokens a chunk of the sorted sequence.
        seed: what the rotations are drawn from; layers with the same seed share them.

    >>> attention = ReformerAttention(2, 4, num_buckets=8, chunk_size=16)
    >>> q = v = torch.randn(1, 2, 50, 4)
    >>> attention.mix(q, q, v, positions=None, key_mask=None, segments=None, state=None)[0].shape
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
        check_whole(0, seed=seed)
        check_whole(num_hashes=num_hashes, chunk_size=chunk_size)
        if not isinstance(num_buckets, int) or num_buckets < 1 or (num_buckets > 1 and num_buckets % 2):
            raise ValueError(
                f"num_buckets must be an even number, a bucket for each random direction and one for its opposite, or 1 for no hashing; "
                f"it is {num_buckets!r}"
            )
        self.chunk_size = chunk_size
        self.register_buffer("rotations", torch.empty(num_heads, num_hashes, head_size, num_buckets // 2, dtype=torch.float32))
        self.seed = seed
        self.reset()

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        self.redraw(torch.Generator().manual_seed(self.seed), copy)

    def redraw(self, generator: torch.Generator | None = None, copy: Copy = Tensor.copy_) -> None:
        """Draw new rotations. It never happens by itself."""
        if self.rotations.is_meta:  # nothing of them would be kept
            return
        copy(self.rotations, torch.randn(self.rotations.shape, generator=generator, device="cpu"))

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None, key_mask: Tensor | None, segments: Tensor | None, state: Any
    ) -> tuple[Tensor, None]:
        self.require_for(segments=segments, state=state)
        return lsh_attention(q, v, self._buckets(q), chunk_size=self.chunk_size, causal=self.causal, key_mask=key_mask), None

    def _buckets(self, q: Tensor) -> Tensor:
        b, h, length, _ = q.shape
        _, rounds, _, directions = self.rotations.shape
        if directions == 0:
            return torch.zeros(b, h, rounds, length, dtype=torch.int64, device=q.device)
        return hash_buckets(q, self.rotations)

    def extra_repr(self) -> str:
        _, rounds, _, directions = self.rotations.shape
        return f"num_hashes={rounds}, num_buckets={max(1, 2 * directions)}, chunk_size={self.chunk_size}"
