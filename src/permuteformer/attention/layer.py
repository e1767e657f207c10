"""A layer of attention: projections around any attention, and the ready-made PermuteFormer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from permuteformer.attention.base import ATTENTIONS, Attention, select_tokens
from permuteformer.attention.linear import LinearAttention
from permuteformer.ops.call import Tokens
from permuteformer.ops.checks import can_read_values, check_integer
from permuteformer.ops.modules import Linear
from permuteformer.positions.base import POSITIONS, Compose, PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute


class MultiHeadAttention(nn.Module):
    """Projects ``b l hidden_size`` to queries, keys and values, mixes them, and projects back.

    Args:
        hidden_size: width of the input and the output, split over the heads.
        attention: the attention; see ``build`` to make one by name.
        axes: numbers per position.
        bias: whether the projections have a bias.

    >>> layer = MultiHeadAttention(32, LinearAttention(num_heads=4, head_size=8))
    >>> y, _ = layer(torch.randn(2, 10, 32))    # b l hidden_size
    >>> y.shape
    torch.Size([2, 10, 32])
    """

    def __init__(self, hidden_size: int, attention: Attention, axes: int = 1, bias: bool = True) -> None:
        super().__init__()
        heads = attention.num_heads
        head_size(hidden_size, heads)
        check_integer(axes=axes)
        for encoding in attention.encodings:
            if encoding.axes not in (None, axes):
                name = POSITIONS.name_of(type(encoding))
                raise ValueError(
                    f"position encoding {name!r} was built for axes={encoding.axes}, the layer for axes={axes}: use one number"
                )
        self.hidden_size = hidden_size
        self.axes = axes
        self.attention = attention
        self.query = Linear(hidden_size, heads * attention.query_key_size, bias=bias)
        self.key = None if attention.shared_query_key else Linear(hidden_size, heads * attention.query_key_size, bias=bias)
        self.value = Linear(hidden_size, heads * attention.head_size, bias=bias)
        self.output = Linear(heads * attention.head_size, hidden_size, bias=bias)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        segments: Tensor | None = None,
        global_mask: Tensor | None = None,
        queries: Tensor | None = None,
        state: Any = None,
        tokens: Tokens | None = None,
    ) -> tuple[Tensor, Any]:
        """Attend within ``x``.

        Args:
            x: ``b l hidden_size``.
            positions: ``b l axes`` int64. Default: numbers of the real tokens, from 0 or continued from ``state``. Several axes need them.
            key_mask: ``b l`` bool, true for real tokens, false for padding, which no token sees.
            segments: ``b l`` int64 for packed rows: 0 for the first sequence of a row, 1 for the next, …
            global_mask: ``b l`` bool, for a two-sided decay: tokens such as CLS with weight 1 in both directions.
            queries: ``b n`` int64, indices of the tokens to compute outputs for; ``None`` for all.
            state: what an earlier call of a causal layer returned, to continue from.
            tokens: replaces the arguments above except ``state``: already checked, for models whose layers share them.

        Returns:
            ``b l hidden_size`` (``b n hidden_size`` of ``queries``), and the state after the last token (``None`` if not causal).
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden_size or x.shape[1] == 0:
            raise ValueError(f"x must have shape (batch, length, {self.hidden_size}) with length >= 1, got {tuple(x.shape)}")
        attention = self.attention
        if state is not None and not attention.causal:
            raise ValueError("state is for causal attention: a bidirectional layer sees its whole sequence in one call")
        if tokens is None:
            if global_mask is not None and not attention.position.two_sided:
                raise ValueError("global_mask is for layers with a two-sided decay: leave it out")
            tokens = Tokens.build(
                *(x.shape[0], x.shape[1], x.device),
                positions=positions,
                mask=key_mask,
                segments=segments,
                global_mask=global_mask,
                queries=queries,
                axes=self.axes,
                ordered=attention.position.decay_axes > 1,
            )
            attention.position.check(self.reach(tokens, x, state))
        if tokens.segments is not None:
            attention.require("segments")
        if state is not None:
            attention.require("state")
        selected = tokens.queries
        if selected is not None and not attention.can_select(tokens):
            tokens = replace(tokens, queries=None)
        q = self.heads(self.query(x if tokens.queries is None else select_tokens(x, tokens.queries)))
        k = q if self.key is None else self.heads(self.key(x))
        out, state = attention.mix(q, k, self.heads(self.value(x)), tokens, state)
        out = out.transpose(1, 2)  # b l h v
        if selected is not None and tokens.queries is None:
            out = select_tokens(out, selected)
        return self.output(out.flatten(2)), state if attention.causal else None

    def heads(self, x: Tensor) -> Tensor:
        """Return a projection ``b l h*d`` as heads, ``b h l d``."""
        b, length, size = x.shape
        return x.reshape(b, length, self.attention.num_heads, size // self.attention.num_heads).transpose(1, 2)

    def reach(self, tokens: Tokens, x: Tensor, state: Any) -> list[int]:
        """Return per axis the longest distance between tokens of this and earlier calls; empty while tracing, when values are unknown."""
        if not can_read_values(x) or not x.numel():
            return []
        if tokens.positions is not None:
            lowest, highest = tokens.positions.aminmax(dim=1)
            reach: list[int] = (highest - lowest if state is None else highest).amax(0).tolist()
            return reach
        length = x.shape[1]
        if tokens.segments is not None:
            starts = torch.nn.functional.pad(tokens.segments.diff(dim=1) != 0, (1, 1), value=True).nonzero()[:, 1]
            return [int(starts.diff().max()) - 1]
        if self.attention.sequence is not None:
            length *= self.attention.sequence.size  # about: shards have similar lengths
        return [length - 1 if state is None else int(getattr(state, "next_position", torch.zeros(1)).max()) + length - 1]


class PermuteFormerAttention(MultiHeadAttention):
    """The paper's attention: linear in the length, with relative positions by permutation.

    Args:
        hidden_size: width of the input and the output.
        num_heads: heads; each has its own permutation and its own r.
        causal: a token sees itself and earlier tokens, and calls can continue from a state.
        axes: numbers per position: 1 for text, 2 for images (which need ``positions``).
        feature_multiplier: features per head divided by its size: 4 in the paper's LRA models, 1 in its language model.
        feature_map: phi, a name of ``ops.feature_map.FEATURE_MAPS``.
        permutation: ``"random"``, ``"max_order"``, an int64 tensor (heads, features), or ``None`` for none.
        decay: ``"auto"`` (the paper's r if ``causal``, else none), ``"two_sided"`` (r^|i-j| in a bidirectional layer), r of a causal
            layer as a number or a tensor (heads), a ``Decay``, or ``None``.
        seed: seed of the permutations; layers with the same seed share them.

    >>> attention = PermuteFormerAttention(32, num_heads=4, causal=True)
    >>> y, state = attention(torch.randn(2, 10, 32))                  # prefill or training
    >>> y, state = attention(torch.randn(2, 1, 32), state=state)      # one more token
    >>> y.shape
    torch.Size([2, 1, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool = False,
        axes: int = 1,
        feature_multiplier: int = 1,
        feature_map: str = "relu_eps",
        permutation: str | Tensor | None = "random",
        decay: str | float | Tensor | Decay | None = "auto",
        seed: int = 0,
    ) -> None:
        size = head_size(hidden_size, num_heads)
        features = LinearAttention.feature_size(size, {"feature_multiplier": feature_multiplier})
        encodings: list[PositionEncoding] = []
        if permutation is not None:
            encodings.append(Permute(num_heads, features, axes, permutation, seed))
        if isinstance(decay, str):
            if decay not in ("auto", "two_sided"):
                raise ValueError(f"decay must be 'auto', 'two_sided', a number or tensor in (0, 1], a Decay, or None, got {decay!r}")
            decay = Decay(num_heads, two_sided=True, axes=axes) if decay == "two_sided" else Decay(num_heads) if causal else None
        if decay is not None:
            encodings.append(decay if isinstance(decay, Decay) else Decay(num_heads, decay))
        attention = LinearAttention(num_heads, size, causal, Compose(encodings), feature_map, feature_multiplier)
        super().__init__(hidden_size, attention, axes)


def build(
    attention: str,
    positions: Sequence[str | tuple[str, Mapping[str, Any]]] = (),
    *,
    hidden_size: int,
    num_heads: int,
    causal: bool = False,
    axes: int = 1,
    **arguments: Any,
) -> MultiHeadAttention:
    """Build a layer by names: an attention with its ``arguments``, and position encodings, by name or with theirs.

    >>> layer = build("linear", ["permute", ("decay", {"learnable": True})], hidden_size=32, num_heads=4, causal=True)
    >>> layer(torch.randn(1, 5, 32))[0].shape
    torch.Size([1, 5, 32])
    """
    size = head_size(hidden_size, num_heads)
    if isinstance(positions, (str, Mapping)):
        raise TypeError(f"positions must be a list of names, or of names and their arguments, such as ['permute'], got {positions!r}")
    ATTENTIONS.check(attention, arguments, ("num_heads", "head_size", "causal", "position"))
    structure: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "feature_size": ATTENTIONS[attention].feature_size(size, arguments),
        "axes": axes,
        "causal": causal,
    }
    specified = [(entry, {}) if isinstance(entry, str) else entry for entry in positions]
    encodings = Compose([POSITIONS.build(name, options, structure) for name, options in specified])
    structure = {"num_heads": num_heads, "head_size": size, "causal": causal, "position": encodings}
    return MultiHeadAttention(hidden_size, ATTENTIONS.build(attention, arguments, structure), axes)


def head_size(hidden_size: int, num_heads: int) -> int:
    """Return the size of a head; raise where the heads do not divide the width."""
    check_integer(hidden_size=hidden_size, num_heads=num_heads)
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size must be a multiple of num_heads, got hidden_size={hidden_size} and num_heads={num_heads}")
    return hidden_size // num_heads
