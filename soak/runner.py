"""Parts, two at a time, each in a process of its own; a file of JSON lines a part comes of it."""

from __future__ import annotations

import ast
import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import permuteformer
from permuteformer.folders import write_whole

HERE = Path(__file__).parent
AT_ONCE = 2
"""Parts under way together."""

PACKAGES = ("torch", "transformers", "accelerate", "pyarrow", "safetensors", "numpy")

SPAWN = multiprocessing.get_context("spawn")


def parts() -> dict[str, str]:
    """Names of the parts to what each proves: files of this folder that have a function ``run``."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


@dataclass
class Running:
    """A part under way."""

    name: str
    process: SpawnProcess
    lines_come: Connection
    bar: Any
    started: float = field(default_factory=time.monotonic)
    lines: list[dict[str, object]] = field(default_factory=list)


def soak(names: Sequence[str], scale: float, seed: int, output: Path, console: Console) -> list[str]:
    """Run parts and write their results. Returns what was not ok, a sentence a case."""
    proves, failures = parts(), list[str]()
    waiting, running = _longest_first(names, output), list[Running]()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[told]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        whole = progress.add_task("parts", total=len(names), told="")
        try:
            while waiting or running:
                while waiting and len(running) < AT_ONCE:
                    running.append(_start(waiting.pop(0), scale, seed, progress))
                wait([one.lines_come for one in running], timeout=1)
                for one in list(running):
                    known = len(one.lines)
                    ended = _take(one)
                    for line in one.lines[known:]:
                        if not line["ok"]:
                            failures.append(f"{one.name}: {json.dumps(line)}")
                            console.print(failures[-1], style="red", markup=False, highlight=False, soft_wrap=True)
                    wrong = sum(not line["ok"] for line in one.lines)
                    progress.update(one.bar, told=f"{len(one.lines)} cases" + (f", {wrong} NOT OK" if wrong else ""))
                    if ended:
                        running.remove(one)
                        progress.update(one.bar, total=1, completed=1)
                        progress.advance(whole)
                        _write(one, proves[one.name], scale, seed, output)
                        console.print(f"{one.name}: {len(one.lines)} cases, {wrong} not ok, {time.monotonic() - one.started:.0f} s")
        finally:
            for one in running:
                one.process.terminate()
    return failures


def _longest_first(names: Sequence[str], output: Path) -> list[str]:
    """By the times of an earlier soak, so that no long part is left to the end alone; those that are not known first."""

    def seconds(name: str) -> float:
        with contextlib.suppress(OSError, ValueError, KeyError), (output / f"{name}.jsonl").open(encoding="utf-8") as file:
            return float(json.loads(file.readline())["seconds"])
        return float("inf")

    return sorted(names, key=seconds, reverse=True)


def _start(name: str, scale: float, seed: int, progress: Progress) -> Running:
    lines_come, lines_go = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_part, args=(name, scale, seed, lines_go), name=name)
    process.start()
    lines_go.close()
    return Running(name, process, lines_come, progress.add_task(name, total=None, told=""))


def _part(name: str, scale: float, seed: int, lines_go: Connection) -> None:
    """In a process of its own: a line a case, and where the part itself fails one about that."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and the folder goes too
    with tempfile.TemporaryDirectory(prefix=f"soak-{name}-") as folder:
        try:
            for line in importlib.import_module(f"soak.{name}").run(scale, Path(folder), seed):
                lines_go.send({**line, "ok": bool(line["ok"])})
        except Exception:
            lines_go.send({"what": "the part itself", "ok": False, "error": traceback.format_exc()})


def _take(one: Running) -> bool:
    """Take the lines that have come. Returns whether it was the last one."""
    try:
        while one.lines_come.poll():
            one.lines.append(one.lines_come.recv())
    except EOFError:
        one.process.join()
        if one.process.exitcode or not one.lines:
            one.lines.append({"what": "the part itself", "ok": False, "error": f"it ended with {one.process.exitcode}"})
        return True
    return False


def _write(one: Running, proves: str, scale: float, seed: int, output: Path) -> None:
    header = {
        "part": one.name,
        "proves": proves,
        "command": f"python -m soak {one.name} --scale {scale:g} --seed {seed}",
        "seed": seed,
        "scale": scale,
        "seconds": round(time.monotonic() - one.started, 1),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "versions": {"permuteformer": permuteformer.__version__, **{name: version(name) for name in PACKAGES}},
    }
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / f"{one.name}.jsonl", "".join(json.dumps(line) + "\n" for line in [header, *one.lines]).encode())
