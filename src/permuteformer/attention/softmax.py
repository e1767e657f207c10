"""Softmax attention by PyTorch's scaled_dot_product_attention: the Transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from permuteformer.attention.base import ATTENTIONS, Attention, KVState, append, finite, poison, positions_of, select_tokens, visible
from permuteformer.ops.call import Tokens

BLOCK = 1024
"""Tokens whose position tables exist at a time."""


@ATTENTIONS.register("softmax")
class SoftmaxAttention(Attention):
    """softmax(q k^T / sqrt d) v, quadratic in the length. Its state keeps every key and value.

    >>> attention = SoftmaxAttention(num_heads=2, head_size=4, causal=True)
    >>> q = k = v = torch.randn(1, 2, 10, 4)    # b h l d
    >>> out, state = attention.mix(q, k, v, Tokens(), None)
    >>> out.shape, state.k.shape    # b h l v; b h s m: all keys
    (torch.Size([1, 2, 10, 4]), torch.Size([1, 2, 10, 4]))
    """

    hooks = frozenset({"transform", "bias"})
    modes = frozenset({"bidirectional", "causal", "segments", "state"})

    def mix(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: Any) -> tuple[Tensor, KVState]:
        length, positions, queries = k.shape[2], positions_of(tokens, state, k), tokens.queries
        at = positions if queries is None else select_tokens(positions, queries)
        if "transform" in self.position.hooks:
            q, k = self._transform(at, q), self._transform(positions, k)
        if tokens.mask is not None:  # a weight of zero would not hide a NaN in the padding
            hidden = ~tokens.mask
            k, v = k.masked_fill(hidden[:, None, :, None], 0), v.masked_fill(hidden[:, None, :, None], 0)
            q = q.masked_fill((hidden if queries is None else select_tokens(hidden, queries))[:, None, :, None], 0)
        has_mask = tokens.mask is not None or tokens.segments is not None or state is not None
        state = append(state, k, v, positions, tokens)
        hides_keys = tokens.segments is not None or (self.causal and length > 1)
        k, v, bad = finite(state.k, state.v) if hides_keys else (state.k, state.v, None)
        has_bias = "bias" in self.position.hooks
        if not has_mask and not has_bias and bad is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal), state
        mask = visible(state, length, self.causal)
        mask = mask if queries is None else mask[:, :, :1].expand(-1, -1, q.shape[2], -1)
        bias = self.position.bias(at, state.positions).to(q.dtype).masked_fill(~mask, -torch.inf) if has_bias else mask
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).masked_fill(~mask.any(-1, keepdim=True), 0)
        return out if bad is None else poison(out, mask, bad), state

    def can_select(self, tokens: Tokens) -> bool:
        return not self.causal and tokens.segments is None

    def _transform(self, positions: Tensor, x: Tensor) -> Tensor:
        """Transform queries or keys by their positions, block by block, so that no table is as long as the sequence."""
        parts = [
            self.position.transform(x[:, :, start : start + BLOCK], self.position.tables(positions[:, start : start + BLOCK]))
            for start in range(0, positions.shape[1], BLOCK)
        ]
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
