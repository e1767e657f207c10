"""A parallel map with results in order."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def parallel_map(function: Callable[[int], T], numbers: Iterable[int], processes: int) -> Generator[T, None, None]:
    """Yield ``function(number)`` for every number, in order, computed by ``processes`` processes.

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
