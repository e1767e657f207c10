"""What a process is doing, seen from outside, so that it can be killed in the middle of it."""

from __future__ import annotations

import functools
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak.processes import UPDATE, find

PHASES = {
    "data preparation": "permuteformer.tasks.base.prepare",
    "training step": UPDATE,
    "checkpoint write": "permuteformer.train.checkpoint.save",
    "evaluation": "permuteformer.train.loop.evaluate",
    "model write": "permuteformer.train.finish._save",
    "report building": "permuteformer.report.write.build_report",
    "report writing": "permuteformer.report.write.write_folder",
}
"""What may be going on, and the function that does it."""

BETWEEN = "between"
"""None of them."""

CHANGES = {"os.rename": 2, "os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.truncate": None}
"""Audit events of changes of folders, and where the number of the folder is that a name is relative to."""


class Board:
    """A file of numbers that a watched process writes and another reads: what goes on, how often and how long, and changes of files."""

    def __init__(self, path: Path) -> None:
        self.path, self._names = path, [BETWEEN, *PHASES]
        if not path.exists():
            path.write_bytes(bytes(8 * (2 * len(self._names) + 2)))
        with path.open("r+b") as file:
            numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        count = len(self._names)
        self._now, self._began, self._nanoseconds = numbers[:2], numbers[2 : 2 + count], numbers[2 + count :]

    @property
    def phase(self) -> str:
        """What goes on, or went on last."""
        return self._names[self._now[0]]

    @phase.setter
    def phase(self, name: str) -> None:
        self._now[0] = self._names.index(name)

    @property
    def changes(self) -> int:
        """Changes of files and folders, before each of which a process can be killed."""
        return int(self._now[1])

    def change(self) -> int:
        """One more; returns how many."""
        self._now[1] += 1
        return self.changes

    def began(self, phase: str) -> int:
        """How often a phase has begun."""
        return int(self._began[self._names.index(phase)])

    def seconds(self, phase: str) -> float:
        """How long a phase took in the mean."""
        return float(self._nanoseconds[self._names.index(phase)] / 1e9 / max(self.began(phase), 1))

    def tell_of(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is a phase."""
        number = self._names.index(phase)

        @functools.wraps(function)
        def told(*given: Any, **named: Any) -> Any:
            before, begun = self.phase, time.perf_counter_ns()
            self._began[number] += 1
            self.phase = phase
            try:
                return function(*given, **named)
            finally:
                self.phase = before
                self._nanoseconds[number] += time.perf_counter_ns() - begun

        return told


def watch(rank: int, board: str, folder: str, change: int | None = None, sent: int = 0) -> None:
    """Have this process tell what it does; and send itself a signal before change number ``change`` of files below ``folder``."""
    there = Board(Path(board))
    for phase, name in PHASES.items():
        holder, attribute = find(name)
        setattr(holder, attribute, there.tell_of(phase, getattr(holder, attribute)))

    def changed() -> None:
        if there.change() == change:
            Path(f"{board}.killed").write_text(there.phase)
            os.kill(os.getpid(), sent)

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = given
            if isinstance(path, (str, os.PathLike)) and _writes(mode, flags) and os.fspath(path).startswith(folder):
                changed()
        elif event in CHANGES:
            place = CHANGES[event]
            if (place is not None and given[place] != -1) or str(given[0]).startswith(folder):
                changed()

    fsync = os.fsync

    def counted(handle: int) -> None:
        changed()
        fsync(handle)

    os.fsync = counted  # type: ignore[assignment]
    sys.addaudithook(audit)


def _writes(mode: str | None, flags: int) -> bool:
    return any(letter in mode for letter in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
