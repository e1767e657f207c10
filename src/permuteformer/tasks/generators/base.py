"""Options and results of generators, and a parallel map."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from permuteformer.registry import unknown

T = TypeVar("T")


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
        for name, value in {**self.counts, "processes": 1 if self.processes is None else self.processes, "seed": self.seed}.items():
            least = 0 if name == "seed" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r:.100}")

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


def parallel_map(function: Callable[[int], T], numbers: Iterable[int], processes: int) -> Generator[T, None, None]:
    """Yield ``function(number)`` of every number, in order, computed by ``processes`` processes.

    The function must take its randomness from the number, so that results do not depend on ``processes``. It is pickled: pass a function
    of a module, or a ``functools.partial`` of one.

    >>> list(parallel_map(abs, range(3), processes=1))
    [0, 1, 2]
    """
    if processes == 1:
        yield from map(function, numbers)
        return
    # Spawn, not fork: a forked child of a process with threads, such as torch's, can hang.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        waiting: deque[Future[T]] = deque()
        for number in numbers:
            waiting.append(pool.submit(function, number))
            if len(waiting) > 2 * processes:  # no further ahead: results wait in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
