"""Jobs: the work of cells, each once, and how far it has come."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from permuteformer.experiments import Cell, Experiment, Plan
from permuteformer.experiments.base import differing
from permuteformer.experiments.layout import EXPERIMENT, METRICS, RESULT
from permuteformer.folders import read_json

DONE = ("finished", "out of memory", "not finite")
"""Ways to end that are results. What failed otherwise is run again."""


@dataclass(frozen=True)
class Job:
    """One piece of work, and the cells whose number it gives."""

    cell: Cell
    folder: Path
    """Of all runs together."""
    also: list[Cell] = field(default_factory=list)
    """Further cells with the very same work."""

    @property
    def is_training(self) -> bool:
        """Or else it is a measurement."""
        return isinstance(self.cell.work, Experiment)

    @property
    def path(self) -> Path:
        """The run folder, or the file of a measurement."""
        return self.folder / (self.cell.name if self.is_training else f"{self.cell.name}.json")

    @property
    def result(self) -> dict[str, Any]:
        """What came of it; empty if nothing has yet."""
        content = read_json(self.path / RESULT) if self.is_training else read_json(self.path).get("result", {})
        return content if content.get("status") in DONE and self._is_this_work() else {}

    @property
    def progress(self) -> dict[str, Any]:
        """The last line that a run recorded about training."""
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

    def _is_this_work(self) -> bool:
        there = read_json(self.path / EXPERIMENT).get("experiment") if self.is_training else read_json(self.path).get("measurement")
        return not differing(there, self.cell.work.to_json())


def jobs_of(cells: Iterable[Cell], folder: Path) -> list[Job]:
    """Every piece of work once, in order."""
    jobs: dict[str, Job] = {}
    for cell in cells:
        if cell.key in jobs:
            jobs[cell.key].also.append(cell)
        else:
            jobs[cell.key] = Job(cell, folder)
    return list(jobs.values())


def all_jobs(plan: Plan, folder: Path) -> list[Job]:
    """Every job of a plan, with as many seeds as there are runs of in the folder."""
    found = (re.search(r"-seed(\d+)$", path.parent.name) for path in folder.glob(f"table*/*/*/{EXPERIMENT}"))
    seeds = max((int(match[1]) + 1 for match in found if match), default=1)
    return jobs_of(plan.cells(seeds=seeds), folder)
