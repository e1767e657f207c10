"""A clock that goes backwards, in a run or between two, changes no number of it, and no file is believed for being new.

The clock of the machine is left alone: the processes are given one, in place of ``time.time``, ``time.time_ns`` and ``datetime.now``, and
files get times of change to match. Libraries that ask the operating system themselves see the true time.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soak.processes import KILL, UPDATE, At, Command, digits, record
from soak.scale import share
from soak.whole import different_run

YEAR = 365 * 86_400.0
WORDS = [*digits(steps=13, evaluate_every=4), "--checkpoint-minutes", "0"]
CASES = {
    "an hour back in the middle of a run": (0.0, 3600.0, 0.0),
    "a second back at every call": (0.0, 0.0, 1.0),
    "thirty years back in the middle of a run": (0.0, 30 * YEAR, 0.0),
    "a year ahead, killed, gone on with a year back": (YEAR, 0.0, 0.0),
}
"""Seconds that the clock is ahead, is put back at step 6, and loses at every call."""


def run(scale: float, folder: Path, seed: int) -> Iterator[dict[str, object]]:
    """A line a way in which the clock is wrong."""
    whole = folder / "whole"
    Command(*WORDS, output=whole).succeed()
    for what, (ahead, back, loses) in share(list(CASES.items()), scale):
        case = folder / "run"
        killed = Command(
            *WORDS, output=case, at=At(UPDATE, 9, KILL), poison=functools.partial(wrong_clock, ahead=ahead, back=back, loses=loses)
        )
        assert killed.wait() == [-KILL], killed.text
        _age(case / "checkpoints")
        resumed = Command("resume", case, "--checkpoint-minutes", "0", poison=functools.partial(wrong_clock, ahead=-ahead, loses=loses))
        resumed.succeed()
        wrong = different_run(case, whole)
        from_last = "going on from step 8 of 13" in resumed.text
        spent = _seconds(case)
        rising = all(0 <= one <= other for one, other in itertools.pairwise(spent))
        same_lines = len(record(case)) == len(spent)
        ok = not wrong and from_last and rising and same_lines
        yield {"what": what, "ok": ok, "from the last checkpoint": from_last, "seconds rise": rising, "wrong": wrong}
        shutil.rmtree(case)


def _age(checkpoints: Path) -> None:
    """Give older checkpoints newer times: who went by them would take the wrong one."""
    now = time.time()
    for number, path in enumerate(sorted(checkpoints.glob("step-*"), reverse=True)):
        for file in (*path.iterdir(), path):
            os.utime(file, (now + 1000 * number, now + 1000 * number))


def _seconds(run: Path) -> list[float]:
    return [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def wrong_clock(rank: int, ahead: float = 0.0, back: float = 0.0, loses: float = 0.0) -> None:
    """Give this process a clock that is ``ahead``, is put ``back`` before update 6, and ``loses`` so many seconds at every call."""
    from permuteformer.train.update import Updater

    with contextlib.suppress(ImportError):  # where it is installed, pyarrow asks for it, and it does not load beside another datetime
        importlib.import_module("pandas")
    true_time, update, off = time.time, Updater.__call__, [ahead]

    def told() -> float:
        off[0] -= loses
        return true_time() + off[0]

    class Wrong(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromtimestamp(told(), tz)

    def updated(self: Any, share: Any, step: int, *rest: Any, **named: Any) -> Any:
        if step == 6:
            off[0] -= back
        return update(self, share, step, *rest, **named)

    time.time = told
    time.time_ns = lambda: int(told() * 1e9)
    datetime.datetime = Wrong  # type: ignore[misc]
    Updater.__call__ = updated  # type: ignore[method-assign]
