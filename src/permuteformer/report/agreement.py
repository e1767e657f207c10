"""Whether rows stand in the paper's order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from permuteformer.experiments.published import Number

SHOWN = 3
"""Pairs that the sentence names."""


@dataclass(frozen=True)
class Standing:
    """A row in a column: our number and the paper's."""

    column: str
    row: str
    ours: Number
    paper: Number


@dataclass(frozen=True)
class Agreement:
    """Pairs of rows in one column, by how our order compares with the paper's."""

    same: int
    ties: int
    """Closer than one joint standard deviation, in our numbers or in the paper's; of one seed, the standard error of its test items."""
    reversed_pairs: tuple[str, ...]
    """A sentence for each pair that stands the other way round."""

    @property
    def pairs(self) -> int:
        """All of them."""
        return self.same + self.ties + len(self.reversed_pairs)

    @property
    def sentence(self) -> str:
        """In words."""
        if self.same == self.pairs:
            return f"The order of rows is the paper's: {_all(self.pairs)} {_stand(self.pairs)} as there."
        parts = [f"Of {self.pairs} pair{'s' if self.pairs > 1 else ''} of rows {self.same} {_stand(self.same)} in the paper's order"]
        if self.ties:
            parts.append(f"{self.ties} {'are ties' if self.ties > 1 else 'is a tie'} (within one joint standard deviation, here or there)")
        count = len(self.reversed_pairs)
        if count:
            more = f"; and {count - SHOWN} more" if count > SHOWN else ""
            named = "; ".join(self.reversed_pairs[:SHOWN])
            parts.append(f"{count} {_stand(count)} the other way round: {named}{more}")
        return (parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]) + "."


def compare(standings: Iterable[Standing]) -> Agreement | None:
    """Compare all pairs of rows within each column; None where there is no pair."""
    columns: dict[str, list[Standing]] = {}
    for standing in standings:
        columns.setdefault(standing.column, []).append(standing)
    same = ties = 0
    reversed_pairs = []
    for of_it in columns.values():
        for one, other in combinations(of_it, 2):
            if is_tie(one.ours, other.ours) or is_tie(one.paper, other.paper):
                ties += 1
            elif (one.ours[0] > other.ours[0]) == (one.paper[0] > other.paper[0]):
                same += 1
            else:
                reversed_pairs.append(_words(one, other, named=len(columns) > 1))
    agreement = Agreement(same, ties, tuple(reversed_pairs))
    return agreement if agreement.pairs else None


def is_tie(one: Number, other: Number) -> bool:
    """Whether two numbers are within one joint standard deviation; without deviations, whether they are equal.

    >>> is_tie((43.08, 1.74), (43.02, 0.52)), is_tie((36.87, None), (32.49, None))
    (True, False)
    """
    return abs(one[0] - other[0]) <= math.hypot(one[1] or 0.0, other[1] or 0.0)


def _words(one: Standing, other: Standing, *, named: bool) -> str:
    higher, lower = (one, other) if one.ours[0] > other.ours[0] else (other, one)
    column = f"{higher.column}: " if named else ""
    numbers = f"{_plain(higher.ours)} and {_plain(lower.ours)}, in the paper {_plain(higher.paper)} and {_plain(lower.paper)}"
    return f"{column}{higher.row} is higher than {lower.row} ({numbers})"


def _plain(number: Number) -> str:
    return f"{number[0]:.4g}"


def _all(count: int) -> str:
    return f"all {count} pairs" if count > 1 else "the one pair"


def _stand(count: int) -> str:
    return "stands" if count == 1 else "stand"
