"""Softmax attention, by PyTorch's scaled_dot_product_attention: the Transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from permuteformer.attention.base import ATTENTIONS, Attention, KVState, append, consecutive, finite, of_tokens, poison, visible

BLOCK = 1024
"""Tokens whose positions are looked up at a time."""


@ATTENTIONS.register("softmax")
class SoftmaxAttention(Attention):
    """exp(q·k / sqrt d) over its sum, quadratic in the length. Its state keeps every key and value.

    >>> attention = SoftmaxAttention(num_heads=2, head_size=4, causal=True)
    >>> q = k = v = torch.randn(1, 2, 10, 4)    # b h l d
    >>> out, state = attention.mix(q, k, v, positions=None, key_mask=None, segments=None, state=None)
    >>> out.shape, state.k.shape    # b h l v; b h s m: all keys
    (torch.Size([1, 2, 10, 4]), torch.Size([1, 2, 10, 4]))
    """

    hooks = frozenset({"transform", "bias"})
    modes = frozenset({"bidirectional", "causal", "segments", "state"})

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None, key_mask: Tensor | None, segments: Tensor | None, state: Any
    ) -> tuple[Tensor, KVState]:
        b, _, length, _ = q.shape
        positions = consecutive(state, b, length, q.device, key_mask) if positions is None else positions.expand(b, -1, -1)
        if "transform" in self.position.hooks:
            q, k = self._transform(positions, q, k)
        hides = key_mask is not None or segments is not None or state is not None
        if key_mask is None:
            key_mask = torch.ones(b, length, dtype=torch.bool, device=q.device)
        else:  # a weight of zero would not hide a NaN in the padding
            hidden = ~key_mask[:, None, :, None]
            q, k, v = q.masked_fill(hidden, 0), k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        state = append(state, KVState(k, v, positions, key_mask, segments))
        unseen = segments is not None or (self.causal and length > 1)
        k, v, bad = finite(state.k, state.v) if unseen else (state.k, state.v, None)
        biased = "bias" in self.position.hooks
        if not hides and not biased and bad is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal), state
        mask = visible(state, length, self.causal)
        bias = self.position.bias(positions, state.positions).to(q.dtype).masked_fill(~mask, -torch.inf) if biased else mask
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).masked_fill(~mask.any(-1, keepdim=True), 0)
        return out if bad is None else poison(out, mask, bad), state

    @property
    def chooses(self) -> bool:
        return not self.causal

    def mix_chosen(self, q: Tensor, k: Tensor, v: Tensor, *, chosen: Tensor, positions: Tensor | None, key_mask: Tensor | None) -> Tensor:
        b, _, length, _ = k.shape
        positions = consecutive(None, b, length, k.device, key_mask) if positions is None else positions.expand(b, -1, -1)
        asking = of_tokens(positions, chosen)
        if "transform" in self.position.hooks:
            (q,), (k,) = self._transform(asking, q), self._transform(positions, k)
        bias = self.position.bias(asking, positions).to(q.dtype) if "bias" in self.position.hooks else None
        if key_mask is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        hidden = ~key_mask[:, None, :, None]
        q, k, v = q.masked_fill(~of_tokens(key_mask, chosen)[:, None, :, None], 0), k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        mask = key_mask[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask if bias is None else bias.masked_fill(~mask, -torch.inf))
        return out.masked_fill(~mask.any(-1, keepdim=True), 0)

    def _transform(self, positions: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Queries and keys moved by their positions, block by block, so that no table is as long as the sequence."""
        moved = []
        for start in range(0, positions.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            tables = self.position.tables(positions[:, block])
            moved.append([self.position.transform(x[:, :, block], tables) for x in tensors])
        return [torch.cat(parts, dim=2) if len(parts) > 1 else parts[0] for parts in zip(*moved, strict=True)]
