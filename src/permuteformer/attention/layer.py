"""A layer of attention: projections around any attention, and the ready-made PermuteFormer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from permuteformer.attention.base import ATTENTIONS, Attention, of_tokens
from permuteformer.attention.linear import LinearAttention
from permuteformer.ops.beside import project
from permuteformer.ops.checks import (
    can_look_at,
    check_chosen,
    check_devices,
    check_key_mask,
    check_positions,
    check_segments,
    check_whole,
    is_eager,
)
from permuteformer.positions.base import POSITIONS, Compose, PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Of a module: who listens to its calls."""


class MultiHeadAttention(nn.Module):
    """Projects ``b l hidden_size`` to queries, keys and values, mixes them, and projects back.

    Args:
        hidden_size: width of the input and the output; the heads share it out.
        attention: what mixes; see ``build`` for making one by name.
        axes: numbers in a position.
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
        check_whole(axes=axes)
        for encoding in attention.encodings:
            if encoding.axes not in (None, axes):
                name = POSITIONS.name_of(type(encoding))
                raise ValueError(
                    f"position encoding {name!r} was made for axes={encoding.axes}, the layer for axes={axes}: make both alike"
                )
        self.hidden_size = hidden_size
        self.axes = axes
        self.attention = attention
        self.query = nn.Linear(hidden_size, heads * attention.query_key_size, bias=bias)
        self.key = None if attention.shared_query_key else nn.Linear(hidden_size, heads * attention.query_key_size, bias=bias)
        self.value = nn.Linear(hidden_size, heads * attention.head_size, bias=bias)
        self.output = nn.Linear(heads * attention.head_size, hidden_size, bias=bias)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        segments: Tensor | None = None,
        state: Any = None,
        chosen: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Attend within ``x``.

        Args:
            x: ``b l hidden_size``.
            positions: ``b l axes`` int64. ``None`` counts on from the state, or from 0; with several axes they must be given.
            key_mask: ``b l`` bool, true for real tokens, false for padding, which no token sees.
            segments: ``b l`` int64 for packed rows: 0 for the first sequence of a row, 1 for the next, …
            state: what an earlier call of a causal layer returned, to go on from there.
            chosen: ``b n`` int64, places of the tokens whose output is wanted; ``None`` for all of them.

        Returns:
            ``b l hidden_size`` (``b n hidden_size`` of those chosen), and the state after the last token (``None`` where the layer is not
            causal).
        """
        self.attention.position.check(self.check(x, positions, key_mask, segments, state, chosen))
        if chosen is not None and self.attention.chooses and segments is None:
            q = self.heads(self.query(of_tokens(x, chosen)))
            k, v = map(self.heads, self._together(x, [self.key, self.value]))  # type: ignore[list-item]
            return self.merge(self.attention.mix_chosen(q, k, v, chosen=chosen, positions=positions, key_mask=key_mask)), None
        q, k, v = map(self.heads, self.project(x))
        out, state = self.attention.mix(q, k, v, positions=positions, key_mask=key_mask, segments=segments, state=state)
        if chosen is not None:
            out = of_tokens(out.transpose(1, 2), chosen).transpose(1, 2)
        return self.merge(out), state if self.attention.causal else None

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, ``b l h*d``."""
        if self.key is None:
            shared, values = self._together(x, [self.query, self.value])
            return [shared, shared, values]
        return self._together(x, [self.query, self.key, self.value])

    def _together(self, x: Tensor, parts: list[nn.Linear]) -> list[Tensor]:
        """What several projections make of ``x``: on a CPU by one product, where the copy of the weights is small beside it."""
        # Eager is asked first: a graph is to be for any length.
        if not (is_eager() and x.device.type == "cpu" and all(map(_is_plain, parts))):
            return [part(x) for part in parts]
        if 4 * x.shape[0] * x.shape[1] < sum(part.out_features for part in parts):
            return [part(x) for part in parts]
        biases = [part.bias for part in parts if part.bias is not None]
        if len(biases) not in (0, len(parts)):
            return [part(x) for part in parts]
        return list(project(x, [part.weight for part in parts], biases))

    def merge(self, out: Tensor) -> Tensor:
        """Heads ``b h l v`` put side by side and projected: ``b l hidden_size``."""
        y: Tensor = self.output(out.transpose(1, 2).flatten(2))
        return y

    def heads(self, x: Tensor) -> Tensor:
        """A projection ``b l h*d`` as heads, ``b h l d``."""
        heads: Tensor = x.unflatten(-1, (self.attention.num_heads, -1))  # b l h d
        return heads.transpose(1, 2)

    def check(
        self,
        x: Tensor,
        positions: Tensor | None,
        key_mask: Tensor | None,
        segments: Tensor | None,
        state: Any,
        chosen: Tensor | None,
    ) -> list[int]:
        """Raise unless these go together in a call. Returns how far tokens are apart on each axis, or nothing where that is not known."""
        if x.dim() != 3 or x.shape[-1] != self.hidden_size or x.shape[1] == 0:
            raise ValueError(f"x must have shape (batch, length, {self.hidden_size}) with a length of at least 1; it has {tuple(x.shape)}")
        batch, length, _ = x.shape
        check_devices(x.device, "x", {"positions": positions, "key_mask": key_mask, "segments": segments, "chosen": chosen})
        if positions is not None:
            check_positions(positions, batch, length, self.axes)
        elif self.axes > 1:
            raise ValueError(f"positions must be given where there are several axes: int64 of shape ({batch}, {length}, {self.axes})")
        if key_mask is not None:
            check_key_mask(key_mask, batch, length)
        if segments is not None:
            check_segments(segments, batch, length)
        if chosen is not None:
            check_chosen(chosen, batch, length)
        if state is not None and not self.attention.causal:
            raise ValueError("state is for causal attention: a bidirectional layer sees its whole sequence in one call")
        self.attention.require_for(segments=segments, state=state)
        return self._reach(positions, segments, state, length) if can_look_at(x) and x.numel() else []

    def _reach(self, positions: Tensor | None, segments: Tensor | None, state: Any, length: int) -> list[int]:
        """The longest distance on each axis between tokens of this call, and of the calls before, which started at 0."""
        if positions is not None:
            lowest, highest = positions.aminmax(dim=1)
            reach: list[int] = (highest - lowest if state is None else highest).amax(0).tolist()
            return reach
        if segments is not None:
            starts = torch.nn.functional.pad(segments.diff(dim=1) != 0, (1, 1), value=True).nonzero()[:, 1]
            return [int(starts.diff().max()) - 1]
        if self.attention.sequence is not None:
            length *= self.attention.sequence.size  # about: the stretches of a row are mostly alike
        return [length - 1 if state is None else int(getattr(state, "next_position", torch.zeros(1)).max()) + length - 1]


class PermuteFormerAttention(MultiHeadAttention):
    """The paper's attention: linear in the length, with relative positions by permutation.

    Args:
        hidden_size: width of the input and the output.
        num_heads: heads; each has its own permutation and its own r.
        causal: a token sees itself and what came before, and calls can go on from a state.
        axes: numbers in a position: 1 for text, 2 for images (then ``positions`` are to be given).
        feature_multiplier: features a head, in units of its size: 4 in the paper's LRA models, 1 in its language model.
        feature_map: phi, a name from ``ops.feature_map.FEATURE_MAPS``.
        permutation: ``"random"``, ``"max_order"``, an int64 tensor (heads, features), or ``None`` for none.
        decay: ``"auto"`` (the paper's r where ``causal``, else none), r as a number or a tensor (heads), a ``Decay``, or ``None``.
        seed: what the permutations are drawn from; layers with the same seed share them.

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
            if decay != "auto":
                raise ValueError(f"decay must be 'auto', a number or a tensor in (0, 1], a Decay, or None; it is {decay!r}")
            decay = Decay(num_heads) if causal else None
        if decay is not None:
            encodings.append(decay if isinstance(decay, Decay) else Decay(num_heads, decay))  # a Decay says more: learnable, two-sided
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
    """A layer by names: an attention with its ``arguments``, and position encodings, by name or with theirs.

    >>> layer = build("linear", ["permute", ("decay", {"learnable": True})], hidden_size=32, num_heads=4, causal=True)
    >>> layer(torch.randn(1, 5, 32))[0].shape
    torch.Size([1, 5, 32])
    """
    size = head_size(hidden_size, num_heads)
    if isinstance(positions, (str, Mapping)):
        raise TypeError(f"positions must be a list of names, or of names and their arguments, such as ['permute']; it is {positions!r}")
    ATTENTIONS.check(attention, arguments, ("num_heads", "head_size", "causal", "position"))
    features = ATTENTIONS[attention].feature_size(size, arguments)
    specified = [(entry, {}) if isinstance(entry, str) else entry for entry in positions]
    structure: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "feature_size": features,
        "axes": axes,
        "causal": causal,
    }
    encodings = Compose([POSITIONS.build(name, options, structure) for name, options in specified])
    structure = {"num_heads": num_heads, "head_size": size, "causal": causal, "position": encodings}
    return MultiHeadAttention(hidden_size, ATTENTIONS.build(attention, arguments, structure), axes)


def _is_plain(module: nn.Module) -> bool:
    """Whether calling it is nothing but its product: it is not replaced (LoRA), parametrised, sharded or hooked."""
    is_called_plainly = "forward" not in vars(module) and not any(getattr(module, name) for name in HOOKS)
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and is_called_plainly


def head_size(hidden_size: int, num_heads: int) -> int:
    """The size of a head; raises where the heads do not divide the width."""
    check_whole(hidden_size=hidden_size, num_heads=num_heads)
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_heads, so that heads are of one size; they are {hidden_size} and {num_heads}"
        )
    return hidden_size // num_heads
