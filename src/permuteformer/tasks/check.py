"""A look over a task's data: counts, labels, lengths, what is in two splits, and what cannot be read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from permuteformer.tasks.base import SPLITS, Classification, Task
from permuteformer.tasks.prepare import Items

QUANTILES = (0, 10, 50, 90, 100)


@dataclass(frozen=True)
class SplitReport:
    """One split."""

    items: int
    """For language models: tokens."""
    labels: dict[str, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens of an item: hundredths of items to the length that so many do not exceed."""
    cut: int = 0
    """Items of which something is cut off."""
    repeated: int = 0
    """Items that are the same as an earlier one of the split."""
    baselines: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What ``check`` found."""

    title: str
    notes: list[str]
    splits: dict[str, SplitReport]
    shared: dict[tuple[str, str], int]
    """Different items that two splits have in common."""
    problems: int
    shown: list[str]
    """The first of the problems."""


def check(task: Task, progress: Callable[[int], None] | None = None) -> Report:
    """Read all of a task's data, leaving out what cannot be read, and say what is there and what was left out."""
    task.skip_bad = True
    prepared = task.prepare(progress)
    splits: dict[str, SplitReport] = {}
    hashes: dict[str, np.ndarray] = {}
    for split in SPLITS:
        if split not in prepared.info["splits"]:
            continue
        items = prepared.open(split)
        if not isinstance(task, Classification):
            splits[split] = SplitReport(len(items))
            continue
        found = _hashes(items)
        hashes[split] = np.unique(found)
        splits[split] = _look(task, split, items, len(found) - len(hashes[split]))
    shared = {(a, b): len(np.intersect1d(hashes[a], hashes[b], assume_unique=True)) for a, b in combinations(hashes, 2)}
    problems = prepared.info["problems"]
    return Report(task.source().title, task.notes(), splits, shared, problems["count"], problems["shown"])


def _look(task: Classification, split: str, items: Items, repeated: int) -> SplitReport:
    numbers = np.bincount(items.column("label"), minlength=task.num_labels)
    names = task.prepare().info.get("labels", task.labels)  # as they are stored
    counts = {name: int(count) for name, count in zip(names, numbers, strict=True)}
    lengths = task.lengths(split)
    longest = {q: int(length) for q, length in zip(QUANTILES, np.percentile(lengths, QUANTILES, method="inverted_cdf"), strict=True)}
    sizes = np.max([items.byte_lengths(name) for name, kind in task.columns.items() if kind == "binary"], axis=0)
    cut = int((sizes + task.input.alphabet.specials > task.max_length).sum())
    return SplitReport(len(items), {name: counts[name] for name in task.labels}, longest, cut, repeated, task.baselines(split))


def _hashes(items: Items) -> np.ndarray:
    """Eight bytes for each item's content, without its label: of a million items two differing ones agree with a chance of 1 in 10⁷."""
    found = np.empty(len(items), dtype=np.uint64)
    for start in range(0, len(items), 1000):
        for n, item in enumerate(items[start : start + 1000], start):
            digest = hashlib.blake2b(digest_size=8)
            for value in item.values():
                if isinstance(value, bytes):
                    digest.update(len(value).to_bytes(8, "little") + value)
            found[n] = int.from_bytes(digest.digest(), "little")
    return found
