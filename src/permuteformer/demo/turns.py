"""Who may use the model now: one after another in the order they came, and no more waiting than can be served."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

PLACES = 64
"""Requests that are under way or wait, at most."""


class Busy(RuntimeError):
    """There is no place to wait."""


class Stopping(RuntimeError):
    """The page is being closed."""


class Turns:
    """Places to wait in, and turns in the order of asking: a long text does not keep others from theirs.

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
        """Set when the page is closed: what is under way ends at its next step."""

    @contextmanager
    def place(self) -> Iterator[None]:
        """Room for a request; raises ``Busy`` if there is none."""
        if not self._places.acquire(blocking=False):
            raise Busy
        try:
            yield
        finally:
            self._places.release()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Nobody else has one meanwhile."""
        self._take()
        try:
            self.check()
            yield
        finally:
            self._give()

    def check(self, *_: object) -> None:
        """Raise where the page is being closed."""
        if self.stopping.is_set():
            raise Stopping

    def stop(self, seconds: float = 2.0) -> None:
        """Let what is under way come to an end, for so long."""
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
