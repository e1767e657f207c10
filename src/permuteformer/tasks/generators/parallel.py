"""Work in numbered pieces over processes, with results in order."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def pieces(work: Callable[[int], T], count: int, processes: int | None = None) -> Generator[T, None, None]:
    """``work(0)`` … ``work(count - 1)``, in this order, computed by ``processes`` (all cores unless told).

    A piece must take its randomness from its own number, as ``numpy.random.default_rng([seed, number])`` does: then results do not
    depend on how many processes there are. ``work`` is sent to them: a function of a module, or a ``functools.partial`` of one.

    >>> list(pieces(abs, 3, processes=1))
    [0, 1, 2]
    """
    processes = min(processes or os.cpu_count() or 1, count)
    if processes <= 1:
        yield from map(work, range(count))
        return
    # Not forked: the caller may have threads (torch's), which a forked child would wait for in vain.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for number in range(count):
                waiting.append(pool.submit(work, number))
                if len(waiting) > 2 * processes:  # results that nobody has asked for yet take memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
