"""Running jobs: training as many at a time as told, then measurements one by one, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from permuteformer.bench.apart import available_memory, measure_apart, ran_out_of_memory
from permuteformer.bench.case import OUT_OF_MEMORY
from permuteformer.experiments import Experiment, Measurement
from permuteformer.experiments.layout import EXPERIMENT, FORMAT, RESULT
from permuteformer.folders import write_json
from permuteformer.reproduce.devices import environment_of, gpus
from permuteformer.reproduce.jobs import Job
from permuteformer.terminal import described

POLL_SECONDS = 0.5
SAID = "stderr.txt"
"""What a run said, in its folder's place beside it."""


MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**26)}
"""For training: glibc keeps large blocks, where it would ask the system for fresh pages at every step. Measurements are without."""


@dataclass
class Running:
    """A training job under way."""

    job: Job
    process: subprocess.Popen[bytes]
    bar: Any
    slot: int
    """Which of those under way together it is."""
    killed_before: int
    """Processes that the machine had killed for want of memory when it began."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: what was under way has been saved."""


def run(jobs: Sequence[Job], *, preset: str, command: str, at_once: int, data: str | None, console: Console) -> dict[str, str]:
    """Run what has no result yet. Returns what went wrong otherwise than by memory or numbers: names to messages.

    ``command`` is kept with the runs, as what made them.
    """
    left = [job for job in jobs if not job.result]
    failures: dict[str, str] = {}
    columns = (
        described(),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}", markup=False),
        TimeElapsedColumn(),
    )
    with _interruptible(), Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        whole = progress.add_task("all", total=len(jobs), completed=len(jobs) - len(left), told="")
        made_by = {"preset": preset, "command": command}
        _train([job for job in left if job.is_training], made_by, at_once, data, progress, whole, failures)
        for job in [job for job in left if not job.is_training]:
            progress.update(whole, told=job.cell.name)
            _announce(progress, f"measuring {job.cell.name}")
            _measure(job, made_by, failures)
            progress.advance(whole)
    return failures


def _train(
    jobs: list[Job], made_by: dict[str, str], at_once: int, data: str | None, progress: Progress, whole: Any, failures: dict[str, str]
) -> None:
    devices = gpus()
    waiting, running = list(jobs), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                _announce(progress, f"training {job.cell.name}")
                bar = progress.add_task(job.cell.name, total=None, told="")
                slot = next(slot for slot in range(at_once) if all(one.slot != slot for one in running))
                process = _start(job, made_by, at_once, data, environment_of(slot, devices))
                running.append(Running(job, process, bar, slot, _killed_for_memory()))
            time.sleep(POLL_SECONDS)
            for one in list(running):
                _show(one, progress)
                if one.process.poll() is not None:
                    running.remove(one)
                    progress.remove_task(one.bar)
                    progress.advance(whole)
                    _wait(one)
                    _ended(one, failures)
    finally:
        for one in running:
            one.process.send_signal(signal.SIGTERM)  # it saves, and ends
        for one in running:
            _wait(one)


def _wait(one: Running) -> None:
    one.process.wait()
    assert one.process.stdin is not None
    one.process.stdin.close()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM as one exception, which comes when what was under way has ended."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(job: Job, made_by: dict[str, str], at_once: int, data: str | None, share: Mapping[str, str]) -> subprocess.Popen[bytes]:
    path = job.path
    path.parent.mkdir(parents=True, exist_ok=True)
    order = path.with_name(f"{path.name}.job.json")
    cell = {"table": job.cell.table, "row": job.cell.row, "column": job.cell.column, "seed": job.cell.seed, **made_by}
    assert isinstance(job.cell.work, Experiment)
    free = available_memory()
    memory = None if free is None else free * 9 // 10 // at_once
    threads = max((os.cpu_count() or 1) // at_once, 1)  # unless the caller's environment says how many
    write_json(order, {"experiment": job.cell.work.to_json(), "folder": str(path), "cell": cell, "memory_bytes": memory})
    command = [sys.executable, "-m", "permuteformer", "run-cell", str(order), *(["--data", data] if data else [])]
    environment = {**MALLOC, "OMP_NUM_THREADS": str(threads), **os.environ, **share, "TOKENIZERS_PARALLELISM": "false"}
    with path.with_name(f"{path.name}.{SAID}").open("wb") as said:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # nothing goes through it: it ends with this process, however that ends
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which tells the others
        )


def _show(one: Running, progress: Progress) -> None:
    now = one.job.progress
    if now:
        total = round(now["step"] * _epochs(one.job) / now["epoch"]) if _epochs(one.job) else one.job.cell.work.steps  # type: ignore[union-attr]
        progress.update(one.bar, completed=now["step"], total=total, told=f"loss {now['loss']:.3f}")


def _epochs(job: Job) -> float | None:
    assert isinstance(job.cell.work, Experiment)
    return job.cell.work.epochs


def _ended(one: Running, failures: dict[str, str]) -> None:
    """Sort out how a run ended; out of memory is written down as its result."""
    path, code = one.job.path, one.process.returncode
    path.with_name(f"{path.name}.job.json").unlink(missing_ok=True)
    said_file = path.with_name(f"{path.name}.{SAID}")
    said = said_file.read_text(errors="replace").strip().splitlines()
    last = said[-1] if said else f"it ended with {code} and said nothing"
    if one.job.result:
        said_file.unlink()
    elif (path / EXPERIMENT).exists() and (ran_out_of_memory(last) or _was_killed_for_memory(one)):
        write_json(path / RESULT, {"status": OUT_OF_MEMORY, "message": last, "value": None})
    else:  # it is begun again, or gone on with, by the next call
        failures[one.job.cell.name] = f"{last} ({said_file})"


def _was_killed_for_memory(one: Running) -> bool:
    """Whether the machine did it, and not a person."""
    return one.process.returncode == -signal.SIGKILL and _killed_for_memory() > one.killed_before


def _killed_for_memory() -> int:
    """How many processes this machine has killed for want of memory, as far as it tells."""
    try:
        words = Path("/proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _measure(job: Job, made_by: dict[str, str], failures: dict[str, str]) -> None:
    work = job.cell.work
    assert isinstance(work, Measurement)
    result = measure_apart(work)
    if result["status"] == "failed":
        failures[job.cell.name] = str(result["message"])
        return
    job.path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "table": job.cell.table,
        "row": job.cell.row,
        "column": job.cell.column,
        "seed": 0,
        **made_by,
        "kind": "measurement",
        "run": job.cell.name,
        "measurement": json.loads(json.dumps(work.to_json())),
        "environment": result.pop("environment", {}),
        "result": result,
    }
    write_json(job.path, content)


def _announce(progress: Progress, text: str) -> None:
    """Where there is no terminal there are no bars: a line a job."""
    if progress.disable:
        progress.console.print(text, markup=False, highlight=False)
