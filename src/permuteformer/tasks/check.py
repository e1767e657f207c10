"""A look over a task's data: counts, labels, lengths, what is in two splits, and what cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from permuteformer.tasks.base import SPLITS, Classification, Task
from permuteformer.tasks.language import LanguageModelling
from permuteformer.tasks.prepare import Items
from permuteformer.tasks.splits import content_hash
from permuteformer.tokens import EOS_ID

BLOCK = 2**20
LONG_LINE = 30
"""Shorter lines may well be in two texts."""

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
    windows: int = 0
    """Of language models."""


@dataclass(frozen=True)
class Report:
    """What ``check`` found."""

    title: str
    notes: list[str]
    splits: dict[str, SplitReport]
    shared: dict[tuple[str, str], int]
    """Different items that two splits have in common; of language models lines of ``LONG_LINE`` tokens and more."""
    problems: int
    shown: list[str]
    """The first of the problems."""


def check(task: Task, progress: Callable[[int], None] | None = None) -> Report:
    """Read all of a task's data, leaving out what cannot be read, and say what is there and what was left out.

    >>> from permuteformer.tasks import TASKS
    >>> check(TASKS["digits"]()).splits["test"].items
    360
    """
    asked, task.skip_bad = task.skip_bad, True
    try:
        prepared = task.prepare(progress)
    finally:
        task.skip_bad = asked
    splits: dict[str, SplitReport] = {}
    hashes: dict[str, np.ndarray] = {}
    for split in SPLITS:
        if split not in prepared.info["splits"]:
            continue
        items = prepared.open(split)
        if isinstance(task, LanguageModelling):
            hashes[split] = np.unique(_line_hashes(task, items))
            splits[split] = SplitReport(len(items), windows=len(task.dataset(split)))
            continue
        assert isinstance(task, Classification)
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


def _line_hashes(task: LanguageModelling, items: Items) -> np.ndarray:
    end = ord("\n") if task.unit == "bytes" else EOS_ID
    found: list[np.ndarray] = []
    rest = np.zeros(0, dtype=items.column("token", 0, 1).dtype)
    for start in range(0, len(items), BLOCK):
        tokens = np.concatenate([rest, items.column("token", start, start + BLOCK)])
        lines = np.split(tokens, np.flatnonzero(tokens == end) + 1)
        rest = lines.pop()
        found.append(np.array([content_hash({"line": line.tobytes()}) for line in lines if len(line) > LONG_LINE], dtype=np.uint64))
    return np.concatenate(found) if found else np.zeros(0, dtype=np.uint64)


def _hashes(items: Items) -> np.ndarray:
    found = np.empty(len(items), dtype=np.uint64)
    for start in range(0, len(items), 1000):
        for n, item in enumerate(items[start : start + 1000], start):
            found[n] = content_hash(item)
    return found
