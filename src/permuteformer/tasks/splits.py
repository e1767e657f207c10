"""Assigns items to splits: seeded, with the same share of every label, in one pass."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

HELD_OUT = {"train": 0.9, "validation": 0.1}
"""Shares if a tenth of the training items becomes the validation split."""

MAX_REMEMBERED = 4_000_000
"""Items whose content is remembered to recognise repetitions: about 100 bytes each."""


class Splitter:
    """Assigns one item after another to a split.

    The items of each label are assigned in blocks: of ten items, with shares of 0.8, 0.1 and 0.1, eight go to the first split, one to the
    second and one to the third, in an order drawn from the seed. So every split has the labels in the proportions of the source. The first
    item of a label goes to the first split. An item with the content of an earlier one goes to the same split, whatever its label, so that
    no text is in two splits; this holds for the first four million items.

    >>> splitter = Splitter({"train": 0.5, "test": 0.5}, seed=0)
    >>> [splitter.split_of("yes", {"value": b"%d" % n}) for n in range(6)]
    ['train', 'test', 'train', 'test', 'train', 'test']
    """

    def __init__(self, shares: Mapping[str, float], seed: int) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
        exact = {split: Fraction(share).limit_denominator(1000) for split, share in shares.items()}
        if any(share < 0 for share in exact.values()) or sum(exact.values()) != 1 or not next(iter(exact.values())):
            raise ValueError(f"shares must be at least 0, have at most three digits and add up to 1, the first above 0, got {dict(shares)}")
        size = lcm(*(share.denominator for share in exact.values()))
        self.seed = seed
        self._block = [split for split, share in exact.items() for _ in range(int(share * size))]
        self._generators: dict[Hashable, np.random.Generator] = {}
        self._waiting: dict[Hashable, list[str]] = {}
        self._seen: dict[int, str] = {}

    def split_of(self, label: Hashable, row: Mapping[str, Any]) -> str:
        """Return the split of the next item of this label."""
        content = content_hash(row)
        split = self._seen.get(content) or self._next(label)
        if len(self._seen) < MAX_REMEMBERED:
            self._seen[content] = split
        return split

    def _next(self, label: Hashable) -> str:
        if not self._waiting.get(label):
            is_new = label not in self._generators
            rng = self._generators.setdefault(label, np.random.default_rng([self.seed, len(self._generators)]))
            order = rng.permutation(len(self._block)).tolist()
            if is_new:  # the first item of a label goes to the first split
                first = order.index(0)
                order[0], order[first] = order[first], order[0]
            self._waiting[label] = [self._block[n] for n in reversed(order)]
        return self._waiting[label].pop()


def assign_splits(
    rows: Iterable[tuple[str | None, dict[str, Any]]], shares: Mapping[str, float], seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows with their splits. Rows of the train split, or of none, are divided by ``shares``; all are for training without it."""
    splitter = Splitter(shares, seed) if shares else None
    for split, row in rows:
        if splitter is not None and split in (None, "train"):
            split = splitter.split_of(row["label"], row)
        yield split or "train", row


def content_hash(row: Mapping[str, Any]) -> int:
    """Return eight bytes of hash of the texts or pixels of an item, without its label."""
    digest = hashlib.blake2b(digest_size=8)
    for value in row.values():
        if isinstance(value, bytes):
            digest.update(len(value).to_bytes(8, "little") + value)
    return int.from_bytes(digest.digest(), "little")
