"""Limits of a process that another one started: memory, so that running out of it is an error, and a life no longer than the other's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path


def limit_memory(memory_bytes: int | None) -> None:
    """Refuse this process more memory than that; and where the machine runs out, this process is the one to go."""
    if memory_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return


def when_parent_ends(act: Callable[[], None], heard: Callable[[bytes], None] = lambda byte: None) -> None:
    """Do something when standard input ends: the one who started this process holds its other end, and lets go however they end.

    What comes on it before is ``heard``, byte by byte.
    """

    def watch() -> None:
        while byte := os.read(0, 1):  # not sys.stdin, whose lock this thread would still hold when the process wants to end by itself
            heard(byte)
        act()

    threading.Thread(target=watch, daemon=True).start()
