"""Linear attention (Performer): phi(Q) (phi(K)^T V), with any encoding of its features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from permuteformer.attention.base import ATTENTIONS, Attention, KVState, append, finite, poison, positions_of, select_tokens, visible
from permuteformer.ops.call import LinearCall, Tokens
from permuteformer.ops.checks import can_read_values, check_integer, without_autocast
from permuteformer.ops.feature_map import FEATURE_MAPS, needs_projection, orthogonal_features
from permuteformer.ops.linear import run
from permuteformer.positions.base import Copy, PositionEncoding
from permuteformer.registry import unknown

NORMALIZERS = ("auto", "transformed", "plain", "none")


@ATTENTIONS.register("linear")
class LinearAttention(Attention):
    """Attention in linear time, with a state of constant size. Other arguments are those of ``Attention``.

    Args:
        position: transforms features (permute, rope, orthogonal) or decays weights. A bias makes it quadratic.
        feature_map: phi, a name of ``ops.feature_map.FEATURE_MAPS``.
        feature_multiplier: features per head, in units of the head size.
        normalizer: the sum to divide by: of ``"transformed"`` products, or of ``"plain"`` ones, before the encoding; ``"none"``; or
            ``"auto"``: transformed where the encoding keeps products positive, else plain.
        chunk_size: tokens per block of the PyTorch backend; default: chosen for the cache.

    >>> attention = LinearAttention(num_heads=2, head_size=4, causal=True)
    >>> q = k = v = torch.randn(1, 2, 10, 4)    # b h l d
    >>> out, state = attention.mix(q, k, v, Tokens(), None)
    >>> out.shape, state.kv.shape    # b h l v; b h m v, whatever the length
    (torch.Size([1, 2, 10, 4]), torch.Size([1, 2, 4, 4]))
    """

    hooks = frozenset({"transform", "bias", "log_decay"})
    modes = frozenset({"bidirectional", "causal", "segments", "state", "sequence_parallel"})
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
        hooks = self.position.hooks
        self.feature_map = FEATURE_MAPS[feature_map]
        self.has_random_features = needs_projection(self.feature_map)
        self.normalizer = normalizer if normalizer != "auto" else "transformed" if self.position.keeps_sign else "plain"
        if {"bias", "log_decay"} <= hooks:
            raise ValueError("a bias and a decay both weigh distances: keep one of them")
        if self.normalizer == "plain" and "bias" in hooks:
            raise ValueError(
                f"normalizer={normalizer!r} sums features before the encoding, which a bias does not allow: use 'transformed', 'none', or "
                "an encoding that keeps features positive"
            )
        if chunk_size is not None:
            check_integer(chunk_size=chunk_size)
        self.chunk_size = chunk_size
        if self.has_random_features:
            self.register_buffer("projection", torch.empty(num_heads, self.num_features, head_size, dtype=torch.float32))
        self.reset()

    @classmethod
    def feature_size(cls, head_size: int, arguments: Mapping[str, Any]) -> int:
        multiplier = arguments.get("feature_multiplier", 1)
        check_integer(head_size=head_size, feature_multiplier=multiplier)
        return head_size * int(multiplier)

    @property
    def query_key_size(self) -> int:
        return self.head_size if self.has_random_features else self.num_features

    @property
    def encoding(self) -> PositionEncoding | None:
        """The encoding of features, if there is one."""
        return self.position if "transform" in self.position.hooks else None

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        self.redraw(torch.Generator().manual_seed(0), copy)

    def redraw(self, generator: torch.Generator | None = None, copy: Copy = Tensor.copy_) -> None:
        """Draw new random features, for maps that have them. Nothing else calls it."""
        if self.has_random_features and not self.projection.is_meta:
            heads, features, size = self.projection.shape
            with torch.device("cpu"):
                copy(self.projection, orthogonal_features(heads, features, size, generator))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: Any) -> tuple[Tensor, Any]:
        if "bias" in self.position.hooks:
            return self._mix_with_bias(q, k, v, tokens, state)
        call = self.call(q, k, v, tokens, state)
        if self.sequence is None:
            return run(call)
        from permuteformer.ops import sequence_parallel

        return sequence_parallel.run(call, self.sequence), None

    def call(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: Any = None) -> LinearCall:
        """Return the call that ``mix`` runs."""
        query_positions, log_decay = None, self.position.log_decay()
        if tokens.queries is not None:  # no decay, or global tokens only: then weights are 1
            query_positions = select_tokens(positions_of(tokens, None, k), tokens.queries)
            if tokens.mask is not None:  # a NaN in a masked query would reach the gradient of every key
                q = q.masked_fill(~select_tokens(tokens.mask, tokens.queries)[:, None, :, None], 0)
            tokens, log_decay = Tokens(tokens.positions, tokens.mask), None
        return LinearCall(
            q,
            k,
            v,
            self.feature_map,
            self.num_features,
            (self.projection,) if self.has_random_features else (),
            self.encoding,
            self.normalizer,
            tokens,
            query_positions,
            causal=self.causal,
            log_decay=log_decay,
            state=state,
            chunk_size=self.chunk_size,
        )

    def can_select(self, tokens: Tokens) -> bool:
        if self.causal or self.sequence is not None or tokens.segments is not None or "bias" in self.position.hooks:
            return False
        if "log_decay" not in self.position.hooks:
            return True
        if tokens.global_mask is None or tokens.queries is None or not can_read_values(tokens.queries):
            return False
        return bool(tokens.global_mask.gather(1, tokens.queries).all())

    def check_sequence_parallel(self) -> None:
        if "bias" in self.position.hooks:
            raise ValueError("a bias needs every pair of tokens on one process: with sequence parallelism use another encoding")
        if self.position.decay_axes > 1:
            raise ValueError(f"a two-sided decay with axes={self.position.decay_axes} orders whole rows: sequence parallelism needs axes=1")

    def _mix_with_bias(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: Any) -> tuple[Tensor, KVState]:
        """Compute weights phi(q)·phi(k) exp(bias) for all pairs."""
        positions, dtype, length = positions_of(tokens, state, k), v.dtype, q.shape[2]
        with without_autocast(q.device):
            q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
            hidden = None if tokens.mask is None else ~tokens.mask[:, None, :, None]
            parameters = (self.projection,) if self.has_random_features else ()

            def features(x: Tensor) -> Tensor:
                x = self.feature_map(x if hidden is None else x.masked_fill(hidden, 0), *parameters)
                return x if hidden is None else x.masked_fill(hidden, 0)

            q, k, v = features(q), features(k), v if hidden is None else v.masked_fill(hidden, 0)
            if self.encoding is not None:
                tables = self.encoding.tables(positions)
                q, k = self.encoding.transform(q, tables), self.encoding.transform(k, tables)
            state = append(state, k, v, positions, tokens)
            factor = self.position.bias(positions, state.positions).to(q.dtype).exp()
            seen = visible(state, length, self.causal)
            weights = (q @ state.k.transpose(-1, -2) * factor).masked_fill(~seen, 0)  # b h l s
            _, values, bad = finite(state.k, state.v)
            out = weights @ values
            if self.normalizer != "none":
                total = weights.sum(-1, keepdim=True)
                out = out / total.masked_fill(total == 0, 1)
            return (out if bad is None else poison(out, seen, bad)).to(dtype), state
