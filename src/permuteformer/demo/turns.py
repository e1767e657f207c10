"""A fair queue for the model: one request at a time, in order of arrival, and a bound on waiting requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

PLACES = 64
"""Requests that run or wait, at most."""


class Busy(RuntimeError):
    """Too many requests are waiting."""


class Stopping(RuntimeError):
    """The server is shutting down."""


class Turns:
    """A bounded queue. A long request takes one turn per step, so that others run in between.

    >>> turns = Turns(places=1)
    >>> with turns.place(), turns.turn():
    ...     pass
    """

    def __init__(self, places: int = PLACES) -> None:
        self._places = threading.BoundedSemaphore(places)
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False
        self.stopping = threading.Event()
        """Set at shutdown: running requests end at their next step."""

    @contextmanager
    def place(self) -> Iterator[None]:
        """Take a place in the queue, or raise ``Busy`` if it is full."""
        if not self._places.acquire(blocking=False):
            raise Busy
        try:
            yield
        finally:
            self._places.release()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the turn, and hold it: only one request does at a time."""
        self._take()
        try:
            self.check()
            yield
        finally:
            self._give()

    def check(self, *_: object) -> None:
        """Raise ``Stopping`` at shutdown."""
        if self.stopping.is_set():
            raise Stopping

    def stop(self, seconds: float = 2.0) -> None:
        """Stop, and wait up to ``seconds`` for running requests."""
        self.stopping.set()
        waiting = threading.Thread(target=self._take, daemon=True)
        waiting.start()
        waiting.join(seconds)

    def _take(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def _give(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False
