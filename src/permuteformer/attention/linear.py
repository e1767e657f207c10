"""Linear attention (Performer): phi(Q) (phi(K)^T V), with any encoding on its features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from permuteformer.attention.base import ATTENTIONS, Attention, KVState, append, consecutive, finite, of_tokens, poison, visible
from permuteformer.ops.checks import check_whole, without_autocast
from permuteformer.ops.feature_map import FEATURE_MAPS, needs_projection, orthogonal_features
from permuteformer.ops.halves import attend_to_all
from permuteformer.ops.linear import linear_attention
from permuteformer.positions.base import Copy, PositionEncoding
from permuteformer.registry import unknown

NORMALIZERS = ("auto", "transformed", "plain", "none")


@ATTENTIONS.register("linear")
class LinearAttention(Attention):
    """Attention in linear time, and a state of constant size.

    Args:
        num_heads: heads.
        head_size: size of a head's values.
        causal: queries see no key after them.
        position: transforms features (permute, rope, orthogonal) or decays weights; a bias makes it quadratic, honestly.
        feature_map: phi, a name from ``ops.feature_map.FEATURE_MAPS``.
        feature_multiplier: features a head, in units of the head size.
        normalizer: what weights are divided by: the sum of ``"transformed"`` products; of ``"plain"`` ones, before the position
            was put in; ``"none"``; or ``"auto"``: transformed where the encoding keeps them positive, else plain.
        chunk_size: tokens a block; ``None`` for one that fits the cache.

    >>> attention = LinearAttention(num_heads=2, head_size=4, causal=True)
    >>> q = k = v = torch.randn(1, 2, 10, 4)    # b h l d
    >>> out, state = attention.mix(q, k, v, positions=None, key_mask=None, segments=None, state=None)
    >>> out.shape, state.kv.shape    # b h l v; b h m v, however many tokens there were
    (torch.Size([1, 2, 10, 4]), torch.Size([1, 2, 4, 4]))
    """

    hooks = frozenset({"transform", "bias", "log_decay"})
    modes = frozenset({"bidirectional", "causal", "segments", "state", "spread"})
    exact = ("projection",)
    projection: Tensor

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        causal: bool = False,
        position: PositionEncoding | None = None,
        feature_map: str = "relu_eps",
        feature_multiplier: int = 1,
        normalizer: str = "auto",
        chunk_size: int | None = None,
    ) -> None:
        num_features = self.feature_size(head_size, {"feature_multiplier": feature_multiplier})
        super().__init__(num_heads, head_size, causal, position, num_features)
        if not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
            raise ValueError(unknown("feature_map", feature_map, FEATURE_MAPS))
        if normalizer not in NORMALIZERS:
            raise ValueError(unknown("normalizer", normalizer, NORMALIZERS))
        self.feature_map = FEATURE_MAPS[feature_map]
        self.has_random_features = needs_projection(self.feature_map)
        self.normalize = normalizer != "none"
        self.plain_normalizer = normalizer == "plain" or (normalizer == "auto" and not self.position.keeps_sign)
        if {"bias", "log_decay"} <= self.position.hooks:
            raise ValueError("a bias and a decay are both a weight for each distance: keep one of them")
        if self.plain_normalizer and "bias" in self.position.hooks:
            raise ValueError(
                f"normalizer={normalizer!r} takes sums of features before the position is put in, which a bias does not leave apart: "
                "use normalizer='transformed' or 'none', or an encoding that keeps features positive"
            )
        if chunk_size is not None:
            check_whole(chunk_size=chunk_size)
        self.chunk_size = chunk_size
        if self.has_random_features:
            self.register_buffer("projection", torch.empty(num_heads, self.num_features, head_size, dtype=torch.float32))
        self.reset()

    @classmethod
    def feature_size(cls, head_size: int, arguments: Mapping[str, Any]) -> int:
        multiplier = arguments.get("feature_multiplier", 1)
        check_whole(head_size=head_size, feature_multiplier=multiplier)
        return head_size * int(multiplier)

    @property
    def query_key_size(self) -> int:
        return self.head_size if self.has_random_features else self.num_features

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        self.redraw(torch.Generator().manual_seed(0), copy)

    def redraw(self, generator: torch.Generator | None = None, copy: Copy = Tensor.copy_) -> None:
        """Draw new random features, for maps that have them. It never happens by itself."""
        if self.has_random_features and not self.projection.is_meta:
            heads, features, size = self.projection.shape
            with torch.device("cpu"):
                copy(self.projection, orthogonal_features(heads, features, size, generator))

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None, key_mask: Tensor | None, segments: Tensor | None, state: Any
    ) -> tuple[Tensor, Any]:
        if "bias" in self.position.hooks:
            return self._mix_with_bias(q, k, v, positions, key_mask, segments, state)
        given: dict[str, Any] = {**self.features, "positions": positions, "key_mask": key_mask, "normalize": self.normalize}
        given["chunk_size"] = self.chunk_size
        if self.chooses and segments is None and state is None:
            return attend_to_all(q, k, v, **given), None
        decay = {"log_decay": self.position.log_decay(), "two_sided": self.position.two_sided}
        given |= {"causal": self.causal, "segments": segments, **decay}
        if self.sequence is None:
            return linear_attention(q, k, v, state=state, **given)
        from permuteformer.ops.sequence_parallel import sequence_parallel_attention

        if state is not None:
            raise ValueError("state must be left out where a row is spread over processes: going on from earlier tokens is for one process")
        return sequence_parallel_attention(q, k, v, self.sequence, **given), None

    @property
    def chooses(self) -> bool:
        return not (self.causal or self.sequence or self.position.hooks & {"bias", "log_decay"})

    def mix_chosen(self, q: Tensor, k: Tensor, v: Tensor, *, chosen: Tensor, positions: Tensor | None, key_mask: Tensor | None) -> Tensor:
        b, _, length, _ = k.shape
        positions = consecutive(None, b, length, k.device, key_mask) if positions is None else positions.expand(b, -1, -1)
        if key_mask is not None:
            q = q.masked_fill(~of_tokens(key_mask, chosen)[:, None, :, None], 0)
        given: dict[str, Any] = {**self.features, "positions": positions, "key_mask": key_mask, "normalize": self.normalize}
        return attend_to_all(q, k, v, query_positions=of_tokens(positions, chosen), **given)

    def check_spread(self) -> None:
        super().check_spread()
        if "bias" in self.position.hooks:
            raise ValueError(
                "a bias is one number for each pair of tokens, and a pair may be on two processes: linear attention with a bias cannot be "
                "spread; take an encoding of features (permute, rope, orthogonal) or a decay"
            )

    @property
    def features(self) -> dict[str, Any]:
        """What makes features of queries and keys, as arguments of the ops."""
        transform = self.position if "transform" in self.position.hooks else None
        return {
            "feature_map": self.feature_map,
            "parameters": self._random_features,
            "transform": transform,
            "plain_normalizer": self.plain_normalizer,
        }

    @property
    def _random_features(self) -> list[Tensor]:
        return [self.projection] if self.has_random_features else []

    def _mix_with_bias(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None,
        key_mask: Tensor | None,
        segments: Tensor | None,
        state: KVState | None,
    ) -> tuple[Tensor, KVState]:
        """Weights phi(q)·phi(k) exp(bias), among whatever else the position does. A bias is one number a pair, so all pairs are formed."""
        b, _, length, _ = q.shape
        dtype = v.dtype
        positions = consecutive(state, b, length, q.device, key_mask) if positions is None else positions.expand(b, -1, -1)
        mask = torch.ones(b, length, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
        hidden = ~mask[:, None, :, None]
        with without_autocast(q.device):
            q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(hidden, 0) for x in (q, k, v))
            q = self.feature_map(q, *self._random_features)
            k = self.feature_map(k, *self._random_features).masked_fill(hidden, 0)
            if "transform" in self.position.hooks:
                tables = self.position.tables(positions)
                q, k = self.position.transform(q, tables), self.position.transform(k, tables)
            state = append(state, KVState(k, v, positions, mask, segments))
            factor = self.position.bias(positions, state.positions).to(q.dtype)
            seen = visible(state, length, self.causal)
            weights = (q @ state.k.transpose(-1, -2) * factor.exp()).masked_fill(~seen, 0)  # b h l s
            _, values, bad = finite(state.k, state.v)
            out = weights @ values
            if self.normalize:
                total = weights.sum(-1, keepdim=True)
                out = out / total.masked_fill(total == 0, 1)
            return (out if bad is None else poison(out, seen, bad)).to(dtype), state
