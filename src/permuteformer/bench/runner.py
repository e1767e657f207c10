"""Runs cases, each in its own process, so that running out of memory is a result. This module does not import torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from permuteformer.bench.sweeps import Case, Curves, Groups
from permuteformer.machine import available_memory, is_out_of_memory, malloc_settings

FORMAT = 1
OUT_OF_MEMORY, FAILED, NOT_RUN = "out of memory", "failed", "not run"
FIELDS = (
    *("status", "message", "seconds_best", "seconds_median", "seconds_spread", "peak_memory_bytes", "memory_is", "repeats"),
    *("seconds_per_epoch", "estimated", "idle_memory_bytes", "ready_memory_bytes", "parameters", "flops", "device", "threads", "malloc"),
)
BLANK: Mapping[str, Any] = {**dict.fromkeys(FIELDS), "estimated": False}
"""The fields of every result."""

CALL_SECONDS = 3600.0
"""A case fails if its process does not reply for this long: it hangs."""
MIN_TURNS = 3
"""Turns of a case that is too slow for all of them."""

Progress = Callable[[str, int], None]
"""Called with a description, and the steps since the last call."""


class CaseProcess:
    """A process that times one case; ``start_process`` starts it."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Any, settings: Mapping[str, Any], call_seconds: float) -> None:
        self._process, self._errors, self._settings, self._call_seconds = process, errors, settings, call_seconds
        self._failure: dict[str, Any] | None = None
        self._reply()  # it is ready

    def turn(self) -> float | None:
        """Time a turn. Return the best time so far, or ``None`` after a failure."""
        return self._ask(b"t").get("seconds_best")

    def result(self) -> dict[str, Any]:
        """End the process and return its result.

        ``status`` is ``"finished"``, ``"out of memory"`` or ``"failed"``; ``message`` is the last line that a failed process printed.
        """
        found = {name: value for name, value in self._ask(b"e").items() if value is not None}
        return {**BLANK, **self._settings, **found}

    def _ask(self, request: bytes) -> dict[str, Any]:
        if self._failure is not None:
            return self._failure
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no reply
            self._process.stdin.write(request)
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._call_seconds)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
            content = {"status": FAILED, "message": f"no reply within {self._call_seconds:g} seconds"}
        elif reply := self._process.stdout.readline():
            content = json.loads(reply)
        else:
            self._errors.seek(0)
            content = failure(self._process.wait(), self._errors.read().decode(errors="replace"))
        if content["status"] in (OUT_OF_MEMORY, FAILED):
            self._failure = content
        return content


@contextmanager
def start_process(
    case: Case,
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    device: str | None = None,
    turn_seconds: float = 0.0,
    call_seconds: float = CALL_SECONDS,
    worker: Sequence[str] = ("-m", "permuteformer.bench.worker"),
    variables: Mapping[str, str] | None = None,
) -> Iterator[CaseProcess]:
    """Start a process that times ``case``, and kill it at the end of the block. It does not outlive this process either.

    Args:
        case: what to time.
        threads: threads of the CPU; default: torch's.
        memory_bytes: largest memory of the process; default: nine tenths of the free memory.
        device: cpu or cuda; default: a GPU if there is one.
        turn_seconds: length of a turn, which has at least one call.
        call_seconds: a case fails if the process does not reply within this time after preparing it, or after a turn.
        worker: arguments of Python that start ``bench.worker``.
        variables: further environment variables.
    """
    if memory_bytes is None and (free := available_memory()) is not None:
        memory_bytes = free * 9 // 10
    settings = {"case": case.to_json(), "turn_seconds": turn_seconds, "threads": threads, "memory_bytes": memory_bytes, "device": device}
    openmp = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    recorded = {"threads": threads, "malloc": malloc_settings(), "memory_limit_bytes": memory_bytes}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, *worker, json.dumps(settings)],
            bufsize=0,
            stdin=subprocess.PIPE,  # the process ends when this is closed
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **openmp, **(variables or {})},
            start_new_session=True,  # so that its children can be killed with it
        ) as process,
    ):
        try:
            yield CaseProcess(process, errors, recorded, call_seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def failure(code: int, output: str) -> dict[str, Any]:
    """Return the result of a process that ended with an exit code instead of a reply."""
    if code == -signal.SIGKILL:
        return {"status": OUT_OF_MEMORY, "message": "the process was killed, as the system does when memory runs out"}
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), f"exit code {code}, without output")
    return {"status": OUT_OF_MEMORY if is_out_of_memory(last) else FAILED, "message": last}


def run_case(case: Case, turns: int, **options: Any) -> dict[str, Any]:
    """Return the result of one case; ``options`` are those of ``start_process``."""
    with start_process(case, **options) as process:
        for _ in range(turns):
            process.turn()
        return process.result()


def run_groups(sweep: str, groups: Groups, turns: int, progress: Progress, **options: Any) -> Iterator[dict[str, Any]]:
    """Run the cases of each group alternately, so that a slow minute is slow for all, and yield a line per case.

    All cases of a group are prepared first, and one at a time computes. A case that fails does not stop the others.
    """
    for group, cases in groups.items():
        advance = partial(progress, f"{sweep}, {group}")
        advance(0)
        with ExitStack() as stack:
            processes = []
            for case in cases.values():
                processes.append(stack.enter_context(start_process(case, **options)))
                advance(1)
            for _ in range(turns):
                for process in processes:
                    process.turn()
                    advance(1)
            results = [process.result() for process in processes]
        for (row, case), result in zip(cases.items(), results, strict=True):
            yield line(sweep, group, row, case, result)


def run_curves(
    sweep: str, curves: Curves, turns: int, limit_seconds: float, progress: Progress, **options: Any
) -> Iterator[dict[str, Any]]:
    """Run cases by length, shortest first, and yield a line per case.

    A curve ends where memory runs out, or where a call would take more than ``limit_seconds``. Each length alternates with the next.
    """
    for group, rows in curves.items():
        for row, cases in rows.items():
            advance = partial(progress, f"{sweep}, {group}, {row}", 1)
            results = _run_curve(cases, turns, limit_seconds, advance, options)
            for (length, case), result in zip(sorted(cases.items()), results, strict=False):
                yield line(sweep, group, row, case, result, length)


def _run_curve(
    cases: Mapping[int, Case], turns: int, limit_seconds: float, advance: Callable[[], None], options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    best: dict[int, float] = {}
    shorter: CaseProcess | None = None
    with ExitStack() as stack:
        for length, case in sorted(cases.items()):
            advance()
            expected = extrapolate(best, length)
            if shorter is not None and expected is not None and expected > limit_seconds:
                yield shorter.result()
                message = f"a call would take {expected:.0f} s, judging by the shorter lengths; the limit is {limit_seconds:g} s"
                yield {**BLANK, "status": NOT_RUN, "message": message}
                return
            process = stack.enter_context(start_process(case, **options))
            seconds = _alternate(process, shorter, turns, limit_seconds)
            if shorter is not None:
                yield shorter.result()
                if seconds is None:  # again, with the memory that the shorter case has freed
                    process = stack.enter_context(start_process(case, **options))
                    seconds = _alternate(process, None, turns, limit_seconds)
            if seconds is None:
                yield process.result()
                return
            best[length], shorter = seconds, process
        if shorter is not None:
            yield shorter.result()


def _alternate(process: CaseProcess, other: CaseProcess | None, turns: int, limit_seconds: float) -> float | None:
    """Return the best time of ``process``, ``None`` if it failed."""
    best = None
    for turn in range(turns):
        if best is not None and turn >= MIN_TURNS and best * turns > 4 * limit_seconds:
            break
        if other is not None:
            other.turn()
        best = process.turn()
        if best is None:
            break
    return best


def extrapolate(best: Mapping[int, float], length: int) -> float | None:
    """Return the seconds to expect at a length, from the two longest shorter lengths.

    >>> extrapolate({1: 1.0, 2: 4.0}, 4)
    16.0
    """
    if len(best) < 2:
        return None
    (shorter, less), (longer, more) = sorted(best.items())[-2:]
    power = math.log(more / less) / math.log(longer / shorter)
    return float(more * (length / longer) ** power)


def line(sweep: str, group: str, row: str, case: Case, result: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    """Return a line of a results file."""
    environment = result.pop("environment", {})
    place = {"sweep": sweep, "group": group, "row": row, "length": length}
    return {"format": FORMAT, "kind": "benchmark", **place, "case": case.to_json(), "result": result, "environment": environment}
