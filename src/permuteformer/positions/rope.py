"""Rotary position embedding (Su et al., 2021): pairs of features are rotated by angles that grow with the position."""

from __future__ import annotations

import decimal
import math
from typing import Any

import torch
from torch import Tensor

from permuteformer.ops.permutation import axis_sizes
from permuteformer.positions.base import POSITIONS, PositionEncoding

TWO_PI = decimal.Decimal("6.283185307179586476925286766559005768394338798750211641949889")


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
        self.sizes = axis_sizes(feature_size, axes)
        if any(size % 2 for size in self.sizes):
            raise ValueError(
                f"feature_size={feature_size} with axes={axes} gives the axes {self.sizes} features, but rope rotates pairs: make "
                f"feature_size a multiple of {2 * axes}"
            )
        self.base = base
        pairs = [size // 2 for size in self.sizes]
        starts = [sum(pairs[:axis]) for axis in range(axes)]
        of_share = [torch.arange(count).repeat(2) + start for count, start in zip(pairs, starts, strict=True)]
        self.register_buffer("turns", torch.cat([geometric_turns(size, base) for size in self.sizes], dim=-1), persistent=False)
        self.register_buffer("axis", torch.arange(axes).repeat_interleave(torch.tensor(pairs)), persistent=False)
        self.register_buffer("pair", torch.cat(of_share), persistent=False)

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


def geometric_turns(size: int, base: float) -> Tensor:
    """base^(-2t/size) / 2 pi for t below size/2, in turns a token, as ``angles`` takes them: int64 ``2 t``.

    >>> geometric_turns(4, 10_000.0)[0] * 2.0**-64
    tensor([0.1592, 0.0016])
    """
    if not base > 0:
        raise ValueError(f"base must be above 0; it is {base}")
    with decimal.localcontext(decimal.Context(prec=60)):
        exponents = [decimal.Decimal(-2 * t) / size for t in range((size + 1) // 2)]
        units = [int((decimal.Decimal(base) ** exponent / TWO_PI * 2**128).to_integral_value()) for exponent in exponents]
    whole = [(unit + 2**63) >> 64 for unit in units]
    rest = [unit - (part << 64) for unit, part in zip(units, whole, strict=True)]
    return torch.tensor([[(part + 2**63) % 2**64 - 2**63 for part in whole], rest])


def angles(positions: Tensor, turns: Tensor, rest: Tensor | None = None) -> Tensor:
    """2 pi × position × turns, less whole turns, in float64 and right to its last digits at every int64 position.

    ``turns``: int64, in units of 2^-64 of a turn; ``rest``: int64, a correction in units of 2^-128. A product in floating
    point would lose a digit for every digit of the position; this integer product wraps around at 2^64 units, that is,
    at whole turns, and what it keeps is exact. So angles at i and at j add up to the one at i + j, however large.
    """
    turned = (positions * turns).double()
    if rest is not None:
        turned = turned + positions.double() * rest.double() * 2.0**-64
    return turned * (2 * math.pi * 2.0**-64)
