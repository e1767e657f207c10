"""Whatever a file or a command line holds: it is taken, or refused in a sentence; no other error, hang, crash, memory or effect.

Every target gets 100,000 inputs at scale 1, made from good ones by changes that are drawn from a seed: two processes a target, each input
with a limit of time, of memory and of place (``fuzzing/judge.py``). One that ends its process is known by its number, and the rest goes on.
``again`` makes an input once more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from soak.fuzzing.judge import judged
from soak.fuzzing.shard import TOLD, draw, target_named, targets

INPUTS = 100_000
"""Of every target, at scale 1."""

SHARES = 2
"""Processes of a target."""

HOMES = ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "PERMUTEFORMER_DATA", "PERMUTEFORMER_CACHE")

STALLED = 120.0
"""Seconds without a further input, in code that no signal reaches."""

CRASHES = 10
"""After so many of one process the rest of its inputs is given up."""


def run(scale: float, folder: Path, seed: int, names: Sequence[str] = ()) -> Iterator[dict[str, object]]:
    """A line a target."""
    for name in names or targets():
        yield fuzz(name, max(int(INPUTS * scale), SHARES), folder / name.replace(" ", "-"), seed)


def fuzz(name: str, inputs: int, folder: Path, seed: int) -> dict[str, object]:
    """Give a target so many inputs."""
    begun = time.monotonic()
    shares = [Share(name, seed, place, inputs, folder / str(place)) for place in range(SHARES)]
    while [share for share in shares if not share.ended()]:
        time.sleep(0.05)
    told = [part for share in shares for part in share.told]
    total = {key: sum(part[key] for part in told) for key in ("inputs", "taken", "wrong")}
    findings = [finding for part in told for finding in part["findings"]]
    return {
        "what": name,
        "ok": not findings and total["inputs"] == inputs,
        "inputs": total["inputs"],
        "taken": total["taken"],
        "refused": total["inputs"] - total["taken"] - total["wrong"],
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_seconds": round(sum(part["cpu_seconds"] for part in told), 1),
        "peak_megabytes": max(part["peak_kb"] for part in told) // 1024,
        "findings": findings,
    }


class Share:
    """Every ``SHARES``-th input of a target, in a process that is started again after one that ended it."""

    def __init__(self, name: str, seed: int, place: int, end: int, folder: Path) -> None:
        self.name, self.seed, self.end, self.folder = name, seed, end, folder
        self.told: list[dict[str, Any]] = []
        self.first, self.crashes = place, 0
        self.number, self.since, self.place = -1, 0.0, folder
        self.process = self._start()

    def ended(self) -> bool:
        """Whether all inputs were given."""
        if self.first >= self.end or self.crashes == CRASHES:
            return True
        number = self._number()
        if number != self.number:
            self.number, self.since = number, time.monotonic()
        if self.process.poll() is None:
            if time.monotonic() - self.since > STALLED:
                self.process.kill()
            return False
        if self.process.returncode == 0:
            self.told += map(json.loads, (self.place / TOLD).read_text().splitlines())
            self.first = self.end
            return True
        self._note_crash(number)
        if self.first < self.end and self.crashes < CRASHES:
            self.process = self._start()
        return False

    def _note_crash(self, number: int) -> None:
        code, complaints = self.process.returncode, (self.folder / "complaint").read_text(errors="replace").strip().splitlines()
        why = "hang" if code == -signal.SIGKILL else "crash"
        finding = {"input": number, "error": f"{why} ({code}) {' '.join(complaints[-1:])}"[:300], "why": why, "where": ""}
        done = (number - self.first) // SHARES + 1 if number >= self.first else 0
        self.told.append({"inputs": done, "taken": 0, "wrong": 1, "findings": [finding], "peak_kb": 0, "cpu_seconds": 0.0})
        self.first, self.crashes = max(number, self.first) + SHARES, self.crashes + 1

    def _start(self) -> subprocess.Popen[bytes]:
        self.number, self.since = -1, time.monotonic()
        self.place = self.folder / f"from-{self.first}"
        self.place.mkdir(parents=True)
        numbers = map(str, (self.seed, self.first, self.end, SHARES))
        command = [sys.executable, "-m", "soak.fuzzing.shard", self.name, *numbers, str(self.place)]
        with (self.folder / "complaint").open("wb") as said:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=surroundings(self.place))

    def _number(self) -> int:
        """Of the input under way."""
        try:
            return int((self.place / "number").read_text() or -1)
        except (OSError, ValueError):
            return -1


def surroundings(place: Path) -> dict[str, str]:
    """Of a process that is fuzzed: one thread, no network, and a home of its own."""
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DEACTIVATE_ASYNC_LOAD": "1",
        "PYTHONWARNINGS": "ignore",
        "COLUMNS": "200",
        **{name: str(place / name.lower()) for name in HOMES},
    }


def again(name: str, number: int, folder: Path, seed: int = 0) -> tuple[bool, dict[str, str] | None]:
    """One input once more, in this process: whether it was taken, and what is wrong about it."""
    target = target_named(name)(folder)  # type: ignore[call-arg]
    return judged(target, draw(name, seed, number), [])
