"""Runs jobs: several trainings at a time, then measurements one by one, each in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from permuteformer.bench.runner import OUT_OF_MEMORY, run_case
from permuteformer.bench.sweeps import Case
from permuteformer.console import description_column
from permuteformer.experiments import Measurement
from permuteformer.experiments.layout import EXPERIMENT, FORMAT, RESULT
from permuteformer.machine import available_memory, is_out_of_memory
from permuteformer.reproduce.jobs import Job
from permuteformer.storage import write_json

POLL_SECONDS = 0.5
OUTPUT = "stderr.txt"
"""Ending of the file with the output of a run, beside its folder."""

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**26)}
"""Environment of training: glibc keeps large blocks instead of asking for fresh pages at every step. Measurements run without it."""


@dataclass
class Running:
    """A training job that is running."""

    job: Job
    process: subprocess.Popen[bytes]
    bar: Any
    slot: int
    """Its number among the running jobs."""
    killed_before: int
    """Processes that the system had killed for lack of memory when it started."""


def run(jobs: Sequence[Job], *, preset: str, command: str, at_once: int, data: str | None, console: Console) -> dict[str, str]:
    """Run the jobs without a result. Return the names and messages of those that failed other than by memory or numbers.

    ``command`` is recorded with the runs. After Ctrl-C or SIGTERM, ``KeyboardInterrupt`` is raised when running jobs have saved and ended.
    """
    left = [job for job in jobs if not job.result]
    failures: dict[str, str] = {}
    columns = (
        description_column(),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
    )
    made_by = {"preset": preset, "command": command}
    with _sigterm_interrupts(), Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        whole = progress.add_task("all", total=len(jobs), completed=len(jobs) - len(left), note="")
        with closing(_train([job for job in left if job.is_training], made_by, at_once, data, progress)) as ended:
            for one in ended:
                _record(one, failures)
                progress.advance(whole)
        for job in left:
            if not job.is_training:
                progress.update(whole, note=job.cell.name)
                _announce(progress, f"measuring {job.cell.name}")
                _measure(job, made_by, failures)
                progress.advance(whole)
    return failures


def _train(jobs: list[Job], made_by: dict[str, str], at_once: int, data: str | None, progress: Progress) -> Generator[Running, None, None]:
    """Run training jobs, several at a time; yield each when it has ended."""
    gpus = visible_gpus()
    waiting, running = list(jobs), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                _announce(progress, f"training {job.cell.name}")
                bar = progress.add_task(job.cell.name, total=None, note="")
                slot = min({*range(at_once)} - {one.slot for one in running})
                process = _start(job, made_by, at_once, data, gpu_of(slot, gpus))
                running.append(Running(job, process, bar, slot, _killed_for_memory()))
            time.sleep(POLL_SECONDS)
            for one in list(running):
                _show(one, progress)
                if one.process.poll() is not None:
                    running.remove(one)
                    progress.remove_task(one.bar)
                    one.process.communicate()  # closes its standard input
                    yield one
    finally:
        for one in running:
            one.process.send_signal(signal.SIGTERM)  # it saves and ends
        for one in running:
            one.process.communicate()


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(job: Job, made_by: dict[str, str], at_once: int, data: str | None, share: Mapping[str, str]) -> subprocess.Popen[bytes]:
    path = job.path
    path.parent.mkdir(parents=True, exist_ok=True)
    job_file = path.with_name(f"{path.name}.job.json")
    free = available_memory()
    memory = None if free is None else free * 9 // 10 // at_once
    threads = max((os.cpu_count() or 1) // at_once, 1)
    cell = {**job.cell.place, **made_by}
    write_json(job_file, {"experiment": job.cell.work.to_json(), "folder": str(path), "cell": cell, "memory_bytes": memory})
    command = [sys.executable, "-m", "permuteformer", "run-cell", str(job_file), *(["--data", data] if data else [])]
    environment = {**MALLOC, "OMP_NUM_THREADS": str(threads), **os.environ, **share, "TOKENIZERS_PARALLELISM": "false"}
    with path.with_name(f"{path.name}.{OUTPUT}").open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # it closes when this process ends, however it ends
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which stops the others
        )


def _show(one: Running, progress: Progress) -> None:
    if now := one.job.progress:
        work: Any = one.job.cell.work
        total = work.steps or round(now["step"] * work.epochs / now["epoch"])
        progress.update(one.bar, completed=now["step"], total=total, note=f"loss {now['loss']:.3f}")


def _record(one: Running, failures: dict[str, str]) -> None:
    """Handle the end of a run; lack of memory is recorded as its result."""
    path, code = one.job.path, one.process.returncode
    path.with_name(f"{path.name}.job.json").unlink(missing_ok=True)
    output = path.with_name(f"{path.name}.{OUTPUT}")
    lines = output.read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"it ended with exit code {code} and no message"
    if one.job.result:
        output.unlink()
    elif (path / EXPERIMENT).exists() and (is_out_of_memory(last) or _was_killed_for_memory(one)):
        write_json(path / RESULT, {"status": OUT_OF_MEMORY, "message": last, "value": None})
    else:  # the next call starts or resumes it
        failures[one.job.cell.name] = f"{last} ({output})"


def _was_killed_for_memory(one: Running) -> bool:
    """Return whether the system killed it, not a user."""
    return one.process.returncode == -signal.SIGKILL and _killed_for_memory() > one.killed_before


def _killed_for_memory() -> int:
    """Return how many processes the system has killed for lack of memory."""
    try:
        words = Path("/proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _measure(job: Job, made_by: dict[str, str], failures: dict[str, str]) -> None:
    work = job.cell.work
    assert isinstance(work, Measurement)
    result = run_case(Case("model", work.to_json()), work.repeats)
    if result["status"] == "failed":
        failures[job.cell.name] = str(result["message"])
        return
    job.path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        **job.cell.place,
        **made_by,
        "kind": "measurement",
        "run": job.cell.name,
        "measurement": work.to_json(),
        "environment": result.pop("environment", {}),
        "result": result,
    }
    write_json(job.path, content)


def _announce(progress: Progress, text: str) -> None:
    """Print a line per job if there is no terminal for bars."""
    if progress.disable:
        progress.console.print(text, markup=False, highlight=False)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def gpu_of(slot: int, gpus: Sequence[str]) -> Mapping[str, str]:
    """Return the environment variable that assigns a GPU to a running job.

    >>> [gpu_of(slot, ["0", "3"]) for slot in range(3)], gpu_of(5, [])
    ([{'CUDA_VISIBLE_DEVICES': '0'}, {'CUDA_VISIBLE_DEVICES': '3'}, {'CUDA_VISIBLE_DEVICES': '0'}], {})
    """
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
