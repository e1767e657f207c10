"""Splits where the source has none: seeded, with the same share of every label, in one pass."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np


class Splitter:
    """Says of one item after another which split it goes to.

    The items of each label are dealt out in hands: of ten in a row, with shares of 0.8, 0.1 and 0.1, eight go to the first split, one to
    the second and one to the third, in an order that the seed and the label decide. So splits have the shares of the labels whatever the
    order of the source, and nothing needs to be remembered but a count a label. The first item of a label goes to the first split.

    >>> splitter = Splitter({"train": 0.5, "test": 0.5}, seed=0)
    >>> [splitter.split_of("yes") for _ in range(6)]
    ['train', 'test', 'test', 'train', 'test', 'train']
    """

    def __init__(self, shares: Mapping[str, float], seed: int) -> None:
        exact = {split: Fraction(share).limit_denominator(1000) for split, share in shares.items()}
        if any(share < 0 for share in exact.values()) or sum(exact.values()) != 1 or not next(iter(exact.values())):
            raise ValueError(
                f"shares of the splits must be 0 or more, to three digits, and add up to 1, the first above 0; they are {dict(shares)}"
            )
        hand = lcm(*(share.denominator for share in exact.values()))
        self.seed = seed
        self._hand = [split for split, share in exact.items() for _ in range(int(share * hand))]
        self._dealt: dict[Hashable, int] = {}
        self._orders: dict[Hashable, tuple[np.random.Generator, np.ndarray]] = {}

    def split_of(self, label: Hashable) -> str:
        """The split of the next item that has this label."""
        n = self._dealt.get(label, 0)
        self._dealt[label] = n + 1
        if n % len(self._hand) == 0:
            rng = self._orders[label][0] if n else np.random.default_rng([self.seed, len(self._orders)])
            order = rng.permutation(len(self._hand))
            if not n:  # the card of the first split comes to the top
                top = int(np.argmin(order))
                order[0], order[top] = order[top], order[0]
            self._orders[label] = (rng, order)
        return self._hand[int(self._orders[label][1][n % len(self._hand)])]


def hold_out(items: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The items, with a tenth of every label's training items in the validation split. It is the same tenth for all seeds of training."""
    splitter = Splitter({"train": 0.9, "validation": 0.1}, seed=0)
    for split, row in items:
        yield splitter.split_of(row["label"]) if split == "train" else split, row
