"""Angles that grow with the position, exact at every integer, for rotary and sinusoidal encodings."""

from __future__ import annotations

import decimal
import math

import torch
from torch import Tensor

TWO_PI = decimal.Decimal("6.283185307179586476925286766559005768394338798750211641949889")


def geometric_turns(size: int, base: float) -> Tensor:
    """Return base^(-2t/size) / 2 pi for t < size/2, in turns per token, as ``angles`` expects: int64 ``2 t``.

    >>> geometric_turns(4, 10_000.0)[0] * 2.0**-64
    tensor([0.1592, 0.0016])
    """
    if not 0 < base < math.inf:
        raise ValueError(f"base must be a positive number, got {base}")
    with decimal.localcontext(decimal.Context(prec=60)):
        exponents = [decimal.Decimal(-2 * t) / size for t in range((size + 1) // 2)]
        units = [int((decimal.Decimal(base) ** exponent / TWO_PI * 2**128).to_integral_value()) for exponent in exponents]
    whole = [(unit + 2**63) >> 64 for unit in units]
    rest = [unit - (part << 64) for unit, part in zip(units, whole, strict=True)]
    return torch.tensor([[(part + 2**63) % 2**64 - 2**63 for part in whole], rest])


def angles(positions: Tensor, turns: Tensor, rest: Tensor | None = None) -> Tensor:
    """Return 2 pi × position × turns modulo 2 pi, in float64 and exact to its last digits at every int64 position.

    ``turns``: int64, in units of 2^-64 of a turn; ``rest``: int64, a correction in units of 2^-128. A floating-point product would lose a
    digit for every digit of the position. The integer product wraps around at 2^64 units, which is one turn, and is exact, so that angles
    at i and j add up to the angle at i + j.
    """
    turned = (positions * turns).double()
    if rest is not None:
        turned = turned + positions.double() * rest.double() * 2.0**-64
    return turned * (2 * math.pi * 2.0**-64)
