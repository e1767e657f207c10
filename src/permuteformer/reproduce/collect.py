"""What the runs came to, as two files that can be kept: a record a line, and what the models look at."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from permuteformer.experiments.layout import EXPERIMENT, LOOKS_OF_RESULTS, RESULTS
from permuteformer.folders import read_json, write_whole
from permuteformer.report.load import read_run
from permuteformer.report.records import Record
from permuteformer.reproduce.jobs import Job


def collect(jobs: Iterable[Job], folder: Path, preset: str, command: str) -> list[Record]:
    """Write ``results.jsonl`` and ``looks.jsonl`` of all jobs that have a result. Looks are kept of the first seed.

    ``command`` is that of runs which do not know by which they were made.
    """
    records: list[Record] = []
    looks: list[dict[str, Any]] = []
    for job in jobs:
        if not job.result:
            continue
        record = _record(job, preset, command)
        cells = [job.cell, *job.also]
        records += [replace(record, table=cell.table, row=cell.row, column=cell.column, run=cell.name) for cell in cells]
        if record.looks and job.cell.seed == 0:
            looks.append({"run": job.cell.name, "row": job.cell.row, "column": job.cell.column, "looks": record.looks})
    _write(folder / RESULTS, [record.to_json() for record in records])
    _write(folder / LOOKS_OF_RESULTS, looks)
    return records


def _record(job: Job, preset: str, command: str) -> Record:
    if not job.is_training:
        return Record.from_json({"command": command, **read_json(job.path), "preset": preset})
    cell = read_json(job.path / EXPERIMENT).get("cell") or {}
    return replace(read_run(job.path), preset=preset, command=cell.get("command", command))


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode())
