"""Jobs: the work of cells, each once, and the results of all of them as files to keep."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from permuteformer.experiments import Cell, Experiment, Plan
from permuteformer.experiments.experiment import differing_fields
from permuteformer.experiments.layout import EXPERIMENT, METRICS, RESULT, RESULTS, RESULTS_MAPS
from permuteformer.report.runs import Run, read_run
from permuteformer.storage import atomic_write, read_own_json

DONE = ("finished", "out of memory", "not finite")
"""Outcomes that are results. Other failures are run again."""


@dataclass(frozen=True)
class Job:
    """A piece of work, and the cells whose number it gives."""

    cell: Cell
    folder: Path
    """Folder of all runs."""
    also: list[Cell] = field(default_factory=list)
    """Further cells with the same work."""

    @property
    def is_training(self) -> bool:
        """Whether it is a training run, not a measurement."""
        return isinstance(self.cell.work, Experiment)

    @property
    def path(self) -> Path:
        """Run folder, or the file of a measurement."""
        return self.folder / (self.cell.name if self.is_training else f"{self.cell.name}.json")

    @property
    def result(self) -> dict[str, Any]:
        """The result; empty if there is none yet."""
        content = read_own_json(self.path / EXPERIMENT if self.is_training else self.path)
        result = read_own_json(self.path / RESULT) if self.is_training else content.get("result", {})
        work = content.get("experiment" if self.is_training else "measurement")
        return result if result.get("status") in DONE and not differing_fields(work, self.cell.work.to_json()) else {}

    @property
    def progress(self) -> dict[str, Any]:
        """The last recorded line on training."""
        try:
            lines = (self.path / METRICS).read_bytes().splitlines()
        except OSError:
            return {}
        for line in reversed(lines):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == "train":
                return dict(event)
        return {}


def jobs_of(cells: Iterable[Cell], folder: Path) -> list[Job]:
    """Return every piece of work once, in order."""
    jobs: dict[str, Job] = {}
    for cell in cells:
        if cell.key in jobs:
            jobs[cell.key].also.append(cell)
        else:
            jobs[cell.key] = Job(cell, folder)
    return list(jobs.values())


def all_jobs(plan: Plan, folder: Path) -> list[Job]:
    """Return every job of a plan, with as many seeds as the folder has runs of."""
    found = (re.search(r"-seed(\d+)$", path.parent.name) for path in folder.glob(f"table*/*/*/{EXPERIMENT}"))
    seeds = max((int(match[1]) + 1 for match in found if match), default=1)
    return jobs_of(plan.cells(seeds=seeds), folder)


def collect(jobs: Iterable[Job], folder: Path, preset: str, command: str) -> list[Run]:
    """Write the results of all jobs to ``results.jsonl``, and the attention maps of the first seed to ``attention_maps.jsonl``.

    ``command`` is recorded for runs that do not record their own.
    """
    runs: list[Run] = []
    maps: list[dict[str, Any]] = []
    for job in jobs:
        if not job.result:
            continue
        if job.is_training:
            cell = read_own_json(job.path / EXPERIMENT).get("cell") or {}
            run = replace(read_run(job.path), preset=preset, command=cell.get("command", command))
        else:
            run = Run.from_json({"command": command, **read_own_json(job.path), "preset": preset})
        runs += [replace(run, table=cell.table, row=cell.row, column=cell.column, name=cell.name) for cell in (job.cell, *job.also)]
        if run.maps and job.cell.seed == 0:
            maps.append({"run": job.cell.name, "row": job.cell.row, "column": job.cell.column, "attention_maps": run.maps})
    for name, lines in ((RESULTS, [run.to_json() for run in runs]), (RESULTS_MAPS, maps)):
        atomic_write(folder / name, "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode())
    return runs
