"""A measurement in a process of its own, so that running out of memory is a result. No torch in this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from permuteformer.experiments.base import Measurement

OUT_OF_MEMORY = "out of memory"

BLANK: Mapping[str, Any] = {
    "status": None,
    "message": None,
    "seconds_best": None,
    "seconds_median": None,
    "seconds_spread": None,
    "peak_memory_bytes": None,
    "memory_is": None,
    "repeats": None,
    "seconds_per_epoch": None,
    "estimated": False,
    "idle_memory_bytes": None,
    "parameters": None,
    "device": None,
    "threads": None,
    "malloc": None,
}
"""Fields that every result has."""

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
    """The result of ``bench.measure.measure``, run in a process of its own.

    ``status`` is ``"finished"``; ``"out of memory"``, where it asked for more than ``memory_bytes``, or was killed; or ``"failed"``,
    with the last line of what it said as ``message``. The process does not outlive this call, nor this process.

    Args:
        measurement: what to measure.
        threads: threads of the CPU; torch decides unless told.
        memory_bytes: memory that it may have; nine tenths of what is free unless told.
        device: where; a GPU if there is one.
        timeout: seconds after which it has failed; none unless told.
    """
    for name, value in {"threads": threads, "memory_bytes": memory_bytes}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number, at least 1, or None; it is {value!r}")
    if memory_bytes is None:
        available = available_memory()
        memory_bytes = None if available is None else available * 9 // 10
    command = [sys.executable, "-m", "permuteformer.bench.measure", "--with-parent", json.dumps(measurement.to_json())]
    options = {"--threads": threads, "--memory-bytes": memory_bytes, "--device": device}
    command += [text for option, value in options.items() if value is not None for text in (option, str(value))]
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    result = _run(command, environment, timeout)
    asked = {"repeats": measurement.repeats, "threads": threads, "malloc": malloc_settings(), "memory_limit_bytes": memory_bytes}
    return {**BLANK, **asked, **{name: value for name, value in result.items() if value is not None}}


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


def _run(command: list[str], environment: dict[str, str], timeout: float | None) -> dict[str, Any]:
    watched, held = os.pipe()  # the process ends when nobody holds this any more
    try:
        process = subprocess.Popen(
            command,
            stdin=watched,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # a group of its own, which can be ended as a whole
        )
        try:
            out, said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"status": "failed", "message": f"it took more than {timeout:g} seconds"}
        finally:
            _end(process)
    finally:
        os.close(watched)
        os.close(held)
    return _result(process.returncode, out, said)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _result(code: int, out: str, said: str) -> dict[str, Any]:
    """What a process that ended with ``code`` came to, from its output and what it said beside it."""
    if code == 0:
        try:
            result: dict[str, Any] = json.loads(out.splitlines()[-1])
            return result
        except (IndexError, ValueError):
            return {"status": "failed", "message": f"its last line must be JSON; its output is {out[-200:]!r}"}
    if code == -signal.SIGKILL:
        return {"status": OUT_OF_MEMORY, "message": "the process was killed, as a machine without memory does"}
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), f"it ended with {code} and said nothing")
    return {"status": OUT_OF_MEMORY if ran_out_of_memory(last) else "failed", "message": last}
