"""Carrying out a sweep: a line of results a case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from permuteformer.bench.apart import Apart, measure_in_turns
from permuteformer.bench.case import BLANK, Case
from permuteformer.bench.sweeps import Group

FORMAT = 1
NOT_RUN = "not run"
LEAST_TURNS = 3
"""Of what takes so long that not all turns are taken."""

Progress = Callable[[str, int], None]
"""What is being done, and how many steps were made since the last call."""


def side_by_side(
    sweep: str, groups: Sequence[Group], *, turns: int, progress: Progress = lambda what, steps: None, **how: Any
) -> Iterator[dict[str, Any]]:
    """Groups one after another, the cases of each in turns; ``how`` as of ``measure_in_turns``."""
    for group in groups:
        step = partial(progress, f"{sweep}, {group.name}")
        step(0)
        results = measure_in_turns(list(group.cases.values()), turns, progress=partial(step, 1), **how)
        for (name, case), result in zip(group.cases.items(), results, strict=True):
            yield line(sweep, group.name, name, case, result)


def by_length(
    sweep: str,
    curves: Mapping[str, Mapping[str, Mapping[int, Case]]],
    *,
    turns: int,
    limit_seconds: float,
    turn_seconds: float = 0.2,
    progress: Progress = lambda what, steps: None,
    **how: Any,
) -> Iterator[dict[str, Any]]:
    """Curves of time by length. One ends where memory does, or where the next length would take more than ``limit_seconds``.

    Each length takes turns with the next, since how much more time that takes is what is looked at.
    """
    for group, rows in curves.items():
        for row, cases in rows.items():
            to_come = partial(progress, f"{sweep}, {group}, {row}")
            results = _curve(cases, turns, limit_seconds, to_come, {**how, "turn_seconds": turn_seconds})
            for (length, case), result in zip(sorted(cases.items()), results, strict=False):
                yield line(sweep, group, row, case, result, length=length)


def _curve(
    cases: Mapping[int, Case], turns: int, limit_seconds: float, to_come: Callable[[int], None], how: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Results by length, the shortest first, to the first that did not finish."""
    before: dict[int, float] = {}
    shorter: Apart | None = None
    with ExitStack() as opened:
        for length, case in sorted(cases.items()):
            to_come(1)
            expected = foretold(before, length)
            process = None
            if expected is None or expected <= limit_seconds:
                process = opened.enter_context(Apart(case, **how))
                best = _take_turns(process, shorter, turns, limit_seconds)
            if shorter is not None:
                yield shorter.end()
            if process is None:
                message = f"by the lengths before, it would take {expected:.0f} s a call, and the limit is {limit_seconds:g} s"
                yield {**BLANK, "status": NOT_RUN, "message": message}
                return
            if best is None and shorter is not None:  # once more, without the other one in memory
                process = opened.enter_context(Apart(case, **how))
                best = _take_turns(process, None, turns, limit_seconds)
            if best is None:
                yield process.end()
                return
            before[length], shorter = best, process
        if shorter is not None:
            yield shorter.end()


def _take_turns(process: Apart, other: Apart | None, turns: int, limit_seconds: float) -> float | None:
    """The best time of the first of two that take turns; none where it failed."""
    best = None
    for turn in range(turns):
        if best is not None and turn >= LEAST_TURNS and best * turns > 4 * limit_seconds:
            break  # the best of fewer
        if other is not None:
            other.turn()
        best = process.turn()
        if best is None:
            break
    return best


def foretold(before: Mapping[int, float], length: int) -> float | None:
    """Seconds at a length, from the two longest lengths before it.

    >>> foretold({1: 1.0, 2: 4.0}, 4)
    16.0
    """
    if len(before) < 2:
        return None
    (shorter, less), (longer, more) = sorted(before.items())[-2:]
    power = math.log(more / less) / math.log(longer / shorter)
    return float(more * (length / longer) ** power)


def line(sweep: str, group: str, row: str, case: Case, result: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    """A line of a results file."""
    environment = result.pop("environment", {})
    return {
        "format": FORMAT,
        "kind": "benchmark",
        "sweep": sweep,
        "group": group,
        "row": row,
        "length": length,
        "case": case.to_json(),
        "result": result,
        "environment": environment,
    }
