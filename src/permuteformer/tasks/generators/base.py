"""What to generate, and the result of a generator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from permuteformer.registry import unknown


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How data is generated.

    >>> GenerateOptions(counts={"train": 96}, seed=1).sizes({"train": 200, "test": 100})
    {'train': 96, 'test': 100}
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    """Items of each split; default: as many as the official data has."""
    seed: int = 0
    """The same seed gives the same data, whatever the number of processes."""
    processes: int | None = None
    """Default: one per core."""
    documents: Path | None = None
    """Articles to generate from, for tasks that need them."""
    progress: Callable[[int], None] = lambda count: None
    """Receives the number of items that were just written."""

    def __post_init__(self) -> None:
        check_integer(0, seed=self.seed)
        check_integer(1, processes=1 if self.processes is None else self.processes, **self.counts)

    def sizes(self, official: Mapping[str, int]) -> dict[str, int]:
        """Return the number of items of every split: ``counts``, and the ``official`` numbers of splits that it does not name."""
        for split in self.counts:
            if split not in official:
                raise ValueError(unknown("split in counts:", split, official))
        return {**official, **self.counts}

    def process_count(self, useful: int) -> int:
        """Return how many processes to start, at most ``useful``."""
        return min(self.processes or os.cpu_count() or 1, useful)


@dataclass(frozen=True)
class Generated:
    """A folder of generated data, and statistics of the data in it."""

    folder: Path
    statistics: dict[str, Any]


def check_integer(least: int, **arguments: Any) -> None:
    """Raise unless every argument is an integer of at least ``least``.

    >>> check_integer(0, seed=-1)
    Traceback (most recent call last):
    ValueError: seed must be an integer of at least 0, got -1
    """
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r:.100}")
