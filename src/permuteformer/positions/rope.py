"""Rotary position embedding (Su et al., 2021): pairs of features are rotated by angles that grow with the position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from permuteformer.ops.angle import angles, geometric_turns
from permuteformer.ops.checks import check_whole
from permuteformer.ops.permutation import axis_sizes
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("rope")
class Rope(PositionEncoding):
    """Feature t and feature t + m/2 are rotated together, by position × base^(-2t/m): the layout of Llama.

    With several axes each rotates its own share of the features in this way. Rotation makes features negative, so
    linear attention takes its normaliser from unrotated ones: with that it is the paper's RoFormer on Performer.

    Args:
        feature_size: features of a head, m; the share of each axis must be even.
        axes: numbers in a position: 1 for text, 2 for images.
        base: the slowest pair turns once in about 2 pi × base tokens.

    >>> encoding = Rope(feature_size=4)
    >>> tables = encoding.tables(torch.tensor([[[0], [1], [10**12]]]))
    >>> encoding.transform(torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 1, 3, 4), tables)[0, 0, 1]
    tensor([0.5403, 0.0000, 0.8415, 0.0000])
    """

    keeps_sign = False
    is_group = True
    turns: Tensor
    axis: Tensor
    pair: Tensor

    def __init__(self, feature_size: int, axes: int = 1, base: float = 10_000.0) -> None:
        super().__init__()
        check_whole(feature_size=feature_size, axes=axes)
        self.feature_size, self.axes = feature_size, axes
        self.sizes = axis_sizes(feature_size, axes)
        if any(size % 2 for size in self.sizes):
            raise ValueError(
                f"feature_size={feature_size} with axes={axes} gives the axes {self.sizes} features, but rope rotates pairs: make "
                f"feature_size a multiple of {2 * axes}"
            )
        self.base = base
        pairs = feature_size // 2
        self.register_buffer("turns", torch.empty(2, pairs, dtype=torch.int64), persistent=False)
        self.register_buffer("axis", torch.empty(pairs, dtype=torch.int64), persistent=False)
        self.register_buffer("pair", torch.empty(feature_size, dtype=torch.int64), persistent=False)
        self.reset()

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        pairs = [size // 2 for size in self.sizes]
        starts = [sum(pairs[:axis]) for axis in range(len(pairs))]
        with torch.device("cpu"):
            copy(self.turns, torch.cat([geometric_turns(size, self.base) for size in self.sizes], dim=-1))
            copy(self.axis, torch.arange(len(pairs)).repeat_interleave(torch.tensor(pairs)))
            copy(self.pair, torch.cat([torch.arange(count).repeat(2) + start for count, start in zip(pairs, starts, strict=True)]))

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = angles(positions.index_select(-1, self.axis), *self.turns)  # b l m/2
        cos, sin = (table.index_select(-1, self.pair).unsqueeze(1) for table in (angle.cos(), angle.sin()))
        return cos, sin  # b 1 l m

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        cos, sin = (table.to(x.dtype) for table in tables)
        turned: Tensor = x * cos + torch.cat([_quarter_turn(share) for share in x.split(self.sizes, dim=-1)], dim=-1) * sin
        return turned

    def extra_repr(self) -> str:
        return f"features={'+'.join(map(str, self.sizes))}, base={self.base:g}"


def _quarter_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
