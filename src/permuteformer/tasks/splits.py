"""Splits where the source has none: seeded, with the same share of every label, in one pass."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

WATCHED = 4_000_000
"""Items that are kept in mind: about 100 bytes each."""


class Splitter:
    """Says of one item after another which split it goes to.

    The items of each label are dealt out in hands: of ten in a row, with shares of 0.8, 0.1 and 0.1, eight go to the first split, one to
    the second and one to the third, in an order that the seed and the label decide. So splits have the shares of the labels whatever the
    order of the source. The first item of a label goes to the first split. What was there before, whatever its label, goes to the split
    of its first: no text is both trained and tested on. That is watched over the first four million items.

    >>> splitter = Splitter({"train": 0.5, "test": 0.5}, seed=0)
    >>> [splitter.split_of("yes") for _ in range(6)]
    ['train', 'test', 'train', 'test', 'train', 'test']
    """

    def __init__(self, shares: Mapping[str, float], seed: int) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number from 0 on; it is {seed!r}")
        exact = {split: Fraction(share).limit_denominator(1000) for split, share in shares.items()}
        if any(share < 0 for share in exact.values()) or sum(exact.values()) != 1 or not next(iter(exact.values())):
            raise ValueError(
                f"shares of the splits must be 0 or more, to three digits, and add up to 1, the first above 0; they are {dict(shares)}"
            )
        hand = lcm(*(share.denominator for share in exact.values()))
        self.seed = seed
        self._hand = [split for split, share in exact.items() for _ in range(int(share * hand))]
        self._dealt: dict[Hashable, int] = {}
        self._before: dict[int, str] = {}
        self._orders: dict[Hashable, tuple[np.random.Generator, np.ndarray]] = {}

    def split_of(self, label: Hashable, row: Mapping[str, Any] | None = None) -> str:
        """The split of the next item that has this label, and whose content is in ``row``."""
        if row is None:
            return self._deal(label)
        content = content_hash(row)
        split = self._before.get(content) or self._deal(label)
        if len(self._before) < WATCHED:
            self._before[content] = split
        return split

    def _deal(self, label: Hashable) -> str:
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
        yield splitter.split_of(row["label"], row) if split == "train" else split, row


def content_hash(row: Mapping[str, Any]) -> int:
    """Eight bytes for the texts or pixels of an item, without its label: of a million items two agree by chance once in 10⁷ times."""
    digest = hashlib.blake2b(digest_size=8)
    for value in row.values():
        if isinstance(value, bytes):
            digest.update(len(value).to_bytes(8, "little") + value)
    return int.from_bytes(digest.digest(), "little")
