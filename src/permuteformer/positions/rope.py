"""Rotary position embedding (Su et al., 2021): pairs of features are rotated by angles that grow with the position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from permuteformer.ops.checks import check_integer
from permuteformer.ops.permutation import axis_sizes
from permuteformer.positions.angles import angles, geometric_turns
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("rope")
class Rope(PositionEncoding):
    """Rotates features t and t + m/2 together, by position × base^(-2t/m): the layout of Llama.

    With several axes, each axis rotates its own part of the features in this way. Features become negative, so linear attention computes
    its normaliser from the features before the rotation: this is the paper's RoFormer on Performer.

    Args:
        feature_size: features per head, m; the part of each axis must be even.
        axes: numbers per position: 1 for text, 2 for images.
        base: the slowest pair rotates once in about 2 pi × base tokens.

    >>> encoding = Rope(feature_size=4)
    >>> tables = encoding.tables(torch.tensor([[[0], [1], [10**12]]]))
    >>> encoding.transform(torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 1, 3, 4), tables)[0, 0, 1]
    tensor([0.5403, 0.0000, 0.8415, 0.0000])
    """

    keeps_sign = False
    is_group = True
    feature_size: int
    turns: Tensor
    """``2 m/2``: the angle of each pair per position, see ``angles``."""
    axis: Tensor
    """``m/2``: the axis of positions that rotates each pair."""
    pair: Tensor
    """``m``: the pair of each feature."""

    def __init__(self, feature_size: int, axes: int = 1, base: float = 10_000.0) -> None:
        super().__init__()
        check_integer(feature_size=feature_size, axes=axes)
        self.feature_size, self.axes, self.base = feature_size, axes, base
        self.sizes = axis_sizes(feature_size, axes)
        if any(size % 2 for size in self.sizes):
            raise ValueError(
                f"feature_size must be even on each axis, got feature_size={feature_size} with axes={axes}: use a multiple of {2 * axes}"
            )
        for name, shape in {"turns": (2, feature_size // 2), "axis": (feature_size // 2,), "pair": (feature_size,)}.items():
            self.register_buffer(name, torch.empty(shape, dtype=torch.int64), persistent=False)
        self.reset()

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        with torch.device("cpu"):
            pairs = torch.arange(self.feature_size // 2).split([size // 2 for size in self.sizes])  # of each axis
            copy(self.turns, torch.cat([geometric_turns(size, self.base) for size in self.sizes], dim=-1))
            copy(self.axis, torch.cat([torch.full_like(part, axis) for axis, part in enumerate(pairs)]))
            copy(self.pair, torch.cat([part.repeat(2) for part in pairs]))

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = angles(positions.index_select(-1, self.axis), *self.turns)  # b l m/2
        cos, sin = (table.index_select(-1, self.pair).unsqueeze(1) for table in (angle.cos(), angle.sin()))
        return cos, sin  # b 1 l m

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        cos, sin = (table.to(x.dtype) for table in tables)
        halves = (part.chunk(2, dim=-1) for part in x.split(self.sizes, dim=-1))
        quarter_turn = torch.cat([half for first, second in halves for half in (-second, first)], dim=-1)
        rotated: Tensor = x * cos + quarter_turn * sin
        return rotated

    def extra_repr(self) -> str:
        return f"features={'+'.join(map(str, self.sizes))}, base={self.base:g}"
