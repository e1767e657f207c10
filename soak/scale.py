"""A share of many cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def share(cases: Sequence[T], scale: float) -> list[T]:
    """As many of the cases as ``scale`` says, all at 1 or more, spread evenly over them; one at least.

    >>> share("abcdefghij", 0.3)
    ['b', 'f', 'i']
    """
    count = min(max(round(len(cases) * scale), 1), len(cases))
    return [cases[int((n + 0.5) * len(cases) / count)] for n in range(count)]
