"""Carrying out a sweep: a line of results a case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from permuteformer.bench.apart import Apart, measure_in_turns
from permuteformer.bench.case import BLANK, Case
from permuteformer.bench.sweeps import Group

FORMAT = 1
NOT_RUN = "not run"

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
    repeats: int,
    limit_seconds: float,
    progress: Progress = lambda what, steps: None,
    **how: Any,
) -> Iterator[dict[str, Any]]:
    """Curves of time by length. One ends where memory does, or where the next length would take more than ``limit_seconds``."""
    for group, rows in curves.items():
        for row, cases in rows.items():
            before: dict[int, float] = {}
            for length, case in sorted(cases.items()):
                progress(f"{sweep}, {group}, {row} at {length:,}", 1)
                result = _one(case, repeats, foretold(before, length), limit_seconds, how)
                if result["status"] == "finished":
                    before[length] = result["seconds_best"]
                yield line(sweep, group, row, case, result, length=length)
                if result["status"] != "finished":
                    break


def _one(case: Case, repeats: int, expected: float | None, limit_seconds: float, how: Mapping[str, Any]) -> dict[str, Any]:
    if expected is not None and expected > limit_seconds:
        message = f"by the lengths before, it would take {expected:.0f} s a call, and the limit is {limit_seconds:g} s"
        return {**BLANK, "status": NOT_RUN, "message": message}
    with Apart(case, **how) as process:
        spent = process.turn() or 0.0
        for _ in range(repeats - 1):
            if spent * repeats > 4 * limit_seconds:
                break  # the best of fewer: it is long enough to be steady
            process.turn()
        return process.end()


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
