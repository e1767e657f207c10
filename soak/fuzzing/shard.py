"""One process of fuzzing: every so many inputs of a target, by their numbers, which decide them. ``soak/fuzz.py`` starts it.

The number of the input under way stands in a file, so that one that ends the process is known.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from random import Random

from soak.fuzzing.judge import Target, judged, limit_memory, peak_kilobytes, watch

MODULES = ("readers", "runs", "models", "commands")
WARM = 20
TOLD = "told.jsonl"

SHOWN = 20
"""Findings that are told word by word."""


def targets() -> dict[str, type[Target]]:
    """By their names."""
    return {name: target for module in MODULES for name, target in _of(module).items()}


def target_named(name: str) -> type[Target]:
    """One of them; modules are imported until it is found, since some take long."""
    return next(found[name] for module in MODULES if name in (found := _of(module)))


def _of(module: str) -> dict[str, type[Target]]:
    found: dict[str, type[Target]] = importlib.import_module(f"soak.fuzzing.{module}").TARGETS
    return found


def draw(name: str, seed: int, number: int) -> Random:
    """What decides an input."""
    return Random(f"{name} {seed} {number}")


def main() -> None:
    """Names, with commas between them; seed, first input, their end, step, folder. Counts come into a file there, a line a target."""
    names, (seed, first, end, step), folder = sys.argv[1].split(","), map(int, sys.argv[2:6]), Path(sys.argv[6])
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    place = os.open(folder / "number", os.O_WRONLY | os.O_CREAT)
    made: dict[str, Target] = {}
    for name in names:
        own = folder / name.replace(" ", "-")
        own.mkdir()
        made[name] = target_named(name)(own)  # type: ignore[call-arg]
        os.chdir(own)
        for number in range(-WARM, 0):  # so that what is imported late is there before memory is counted and places are watched
            judged(made[name], draw(name, seed, number), [])
    effects = watch(folder)
    limit_memory()
    for name, target in made.items():
        os.chdir(folder / name.replace(" ", "-"))
        told = give(name, target, seed, range(first, end, step), effects, place)
        with (folder / TOLD).open("a") as file:
            file.write(json.dumps(told) + "\n")
    os._exit(0)


def give(name: str, target: Target, seed: int, numbers: range, effects: list[str], place: int) -> dict[str, object]:
    """Give a target its inputs. What came of them, in numbers, and the first findings of each kind."""
    counts = {"inputs": 0, "taken": 0, "wrong": 0}
    findings: dict[tuple[str, str], dict[str, object]] = {}
    begun = time.process_time()
    for number in numbers:
        os.pwrite(place, f"{number:20}".encode(), 0)
        taken, finding = judged(target, draw(name, seed, number), effects)
        counts["inputs"] += 1
        counts["taken"] += taken
        if finding is not None:
            counts["wrong"] += 1
            if len(findings) < SHOWN:
                findings.setdefault((finding["where"], finding["why"]), {"input": number, **finding})
    return {
        "what": name,
        **counts,
        "findings": list(findings.values()),
        "peak_kb": peak_kilobytes(),
        "cpu_seconds": time.process_time() - begun,
    }


if __name__ == "__main__":
    main()
