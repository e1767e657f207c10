"""Cases in processes of their own, so that running out of memory is a result; one, or several that take turns. No torch in this process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from permuteformer.bench.case import BLANK, OUT_OF_MEMORY, Case
from permuteformer.experiments.base import Measurement

SIGNS = (
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "outofmemoryerror",
    "memoryerror",
    "bad_alloc",
    "unable to allocate",
    "thread creation failed",
    "can't start new thread",
)
"""What is said where memory ran out: by torch on a CPU and on a GPU, by Python, C++ and numpy, and where there is none for a stack."""


def measure_apart(
    measurement: Measurement,
    threads: int | None = None,
    memory_bytes: int | None = None,
    *,
    device: str | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """What a measurement comes to, in a process of its own.

    ``status`` is ``"finished"``; ``"out of memory"``, where it asked for more than ``memory_bytes``, or was killed; or ``"failed"``,
    with the last line of what it said as ``message``. The process does not outlive this call, nor this process.

    Args:
        measurement: what to measure.
        threads: threads of the CPU; torch decides unless told.
        memory_bytes: memory that it may have; nine tenths of what is free unless told.
        device: where; a GPU if there is one.
        timeout: seconds after which it has failed; none unless told.
    """
    with Apart(Case.of(measurement), threads=threads, memory_bytes=memory_bytes, device=device, timeout=timeout) as process:
        for _ in range(measurement.repeats):
            process.turn()
        return process.end()


def measure_in_turns(
    cases: Sequence[Case],
    turns: int,
    *,
    turn_seconds: float = 0.2,
    threads: int | None = None,
    device: str | None = None,
    timeout: float | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """The results of cases that are to be compared: all are made ready, and then take turns, so that a slow minute is slow for all.

    Only one computes at a time. One that runs out of memory or fails leaves the others to go on.
    """
    with ExitStack() as opened:
        processes = []
        for case in cases:
            options: dict[str, Any] = {"threads": threads, "device": device, "timeout": timeout, "turn_seconds": turn_seconds}
            processes.append(opened.enter_context(Apart(case, **options)))
            progress()
        for _ in range(turns):
            for process in processes:
                process.turn()
                progress()
        return [process.end() for process in processes]


class Apart:
    """A process that times one case: made ready on entering, and gone on leaving.

    Args:
        case: what it times.
        threads: threads of the CPU; torch decides unless told.
        memory_bytes: memory that it may have; nine tenths of what is free unless told.
        device: where; a GPU if there is one.
        timeout: seconds after which it has failed; none unless told.
        turn_seconds: how long a turn goes on; one call at least.
    """

    def __init__(
        self,
        case: Case,
        *,
        threads: int | None = None,
        memory_bytes: int | None = None,
        device: str | None = None,
        timeout: float | None = None,
        turn_seconds: float = 0.0,
    ) -> None:
        for name, value in {"threads": threads, "memory_bytes": memory_bytes}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number, at least 1, or None; it is {value!r}")
        if memory_bytes is None:
            available = available_memory()
            memory_bytes = None if available is None else available * 9 // 10
        self.asked = {"threads": threads, "malloc": malloc_settings(), "memory_limit_bytes": memory_bytes}
        self.command = [sys.executable, "-m", "permuteformer.bench.measure", json.dumps(case.to_json())]
        options = {"--turn-seconds": turn_seconds, "--threads": threads, "--memory-bytes": memory_bytes, "--device": device}
        self.command += [text for option, value in options.items() if value is not None for text in (option, str(value))]
        self.environment = {**os.environ, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
        self.timeout, self.until = timeout, float("inf")
        self.failure: dict[str, Any] | None = None

    def __enter__(self) -> Apart:
        self.until = float("inf") if self.timeout is None else time.monotonic() + self.timeout
        self.said = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,  # the process ends when nobody holds this any more
            stdout=subprocess.PIPE,
            stderr=self.said,
            env=self.environment,
            start_new_session=True,  # a group of its own, which can be ended as a whole
        )
        try:
            self._reply()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.said):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]

    def turn(self) -> float | None:
        """Have it take a turn. Returns the best of its times so far; none where it has failed."""
        return self._ask(b"t").get("seconds_best")

    def end(self) -> dict[str, Any]:
        """Its result."""
        result = self._ask(b"e")
        return {**BLANK, **self.asked, **{name: value for name, value in result.items() if value is not None}}

    def _ask(self, what: bytes) -> dict[str, Any]:
        if self.failure is None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, as the reply will tell
                self.process.stdin.write(what)
                self.process.stdin.flush()
            return self._reply()
        return self.failure

    def _reply(self) -> dict[str, Any]:
        """The line that it answers with; where there is none, or it is that memory ran out, the failure."""
        stream = self.process.stdout
        assert stream is not None
        left = None if self.timeout is None else max(self.until - time.monotonic(), 0)
        if not select.select([stream], [], [], left)[0]:
            self.failure = {"status": "failed", "message": f"it took more than {self.timeout:g} seconds"}
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.failure
        line = stream.readline()
        if not line:
            self.said.seek(0)
            self.failure = _failure(self.process.wait(), self.said.read().decode(errors="replace"))
            return self.failure
        content: dict[str, Any] = json.loads(line)
        if content["status"] == OUT_OF_MEMORY:
            self.failure = content
        return content


def available_memory() -> int | None:
    """Bytes that a process can have: of the machine, and of the group of processes (container) where that has a limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(free)) if free else None


def malloc_settings() -> dict[str, str]:
    """Settings of the C library's allocator in the environment: they decide how much memory goes back, and when."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"}


def ran_out_of_memory(text: str) -> bool:
    """Whether an error tells of memory.

    >>> ran_out_of_memory("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")
    True
    >>> ran_out_of_memory("ValueError: length must be 1026")
    False
    """
    return any(sign in text.lower() for sign in SIGNS)


def _failure(code: int, said: str) -> dict[str, Any]:
    """What a process came to that ended with ``code`` before it replied, from what it said."""
    if code == -signal.SIGKILL:
        return {"status": OUT_OF_MEMORY, "message": "the process was killed, as a machine without memory does"}
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), f"it ended with {code} and said nothing")
    return {"status": OUT_OF_MEMORY if ran_out_of_memory(last) else "failed", "message": last}
