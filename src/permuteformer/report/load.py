"""From run folders and results files to records: what is there, what was left out, and why."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permuteformer.experiments.layout import ENVIRONMENT, EXPERIMENT, LOOKS, LOOKS_OF_RESULTS, METRICS, RESULT
from permuteformer.folders import content_of, json_of
from permuteformer.report.records import Record, check_format, printable_data


@dataclass(frozen=True)
class Loaded:
    """What was read."""

    records: tuple[Record, ...]
    left_out: tuple[str, ...]
    """A sentence for each thing that was found and not taken."""


def load(inputs: Sequence[str | os.PathLike[str]]) -> Loaded:
    """Read run folders, folders with run folders at any depth, and results files (``.jsonl``), or folders with those.

    What is named and cannot be read is an error; what is found on the way and cannot be read is left out and told.
    """
    if not inputs:
        raise ValueError("name run folders or results files: permuteformer report FOLDER… --output DIR")
    found: list[Record] = []
    left_out: list[str] = []
    for given in dict.fromkeys(map(Path, inputs)):
        if not given.exists():
            raise FileNotFoundError(f"{given} is not there: give run folders, folders with run folders, or .jsonl results files")
        of_it = list(_read(given, left_out))
        if not of_it:
            reasons = "".join(f"; {reason}" for reason in left_out[:3])
            shape = f"a run folder has {EXPERIMENT}, a results file is named *.jsonl and has a record a line"
            raise ValueError(f"there are no runs in {given}: {shape}{reasons}")
        found += of_it
    records = _one_a_run(found, left_out)
    return Loaded(tuple(records), tuple(dict.fromkeys(map(printable_data, left_out))))


def read_run(folder: Path, name: str | None = None) -> Record:
    """A run folder as a record. It is named after its cell; without one by ``name``, or as its folder.

    A run that goes on, or that was broken off, has what it has up to now.
    """
    content = _object(folder / EXPERIMENT)
    try:
        check_format(content)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    cell = content.get("cell") or {}
    environment = _object(folder / ENVIRONMENT, missing={})
    result = _object(folder / RESULT, missing={"status": "not finished"})
    events = list(_lines(folder / METRICS, [])) if (folder / METRICS).exists() else []
    command = environment.get("command", "")
    experiment = content.get("experiment") or {}
    try:
        record = Record.from_json(
            {
                **{key: content.get(key) for key in ("format", "experiment", "task", "config")},
                **{key: cell.get(key) for key in ("table", "row", "column", "preset")},
                "kind": "training",
                "seed": cell.get("seed", experiment.get("seed")),
                "run": f"table{cell['table']}/{cell['column']}/{cell['row']}-seed{cell['seed']}" if cell else name or folder.name,
                "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
                "parameters": result.get("parameters"),
                "environment": environment,
                "result": result,
                "evaluations": [event for _, event in events if event.get("event") in ("evaluation", "test", "length")],
                "losses": [
                    [event.get("step"), event.get("loss"), event.get("seconds")] for _, event in events if event.get("event") == "train"
                ],
            },
            path=str(folder),
        )
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        what = f"its cell has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{folder} cannot be read as a run folder: {what}") from None
    return record.with_looks(printable_data(_object(folder / LOOKS, missing={})) or None)


def read_results(file: Path, left_out: list[str] | None = None) -> list[Record]:
    """The records of a results file. A last line that broke off is left out and told."""
    records = []
    for line, content in _lines(file, left_out if left_out is not None else []):
        try:
            records.append(Record.from_json(content, path=f"{file}:{line}"))
        except ValueError as error:
            raise ValueError(f"{file}, line {line}: {error}") from None
    return records


def _read(given: Path, left_out: list[str]) -> Iterator[Record]:
    if given.is_file():
        if (given.suffix, given.name) in ((".jsonl", METRICS), (".json", EXPERIMENT)):
            raise ValueError(f"{given} is a file of a run folder: give the folder")
        if given.suffix != ".jsonl":
            raise ValueError(f"{given} is no results file: give run folders, folders with run folders, or .jsonl results files")
        if not _is_results(given):
            raise ValueError(f"{given} is no results file: its first line is no record (an object with format, kind, run and result)")
        yield from _with_looks(read_results(given, left_out), given.parent / LOOKS_OF_RESULTS, left_out)
        return
    if _is_run(given):
        yield read_run(given)
        return
    others = 0
    for path in _walk(given):
        try:
            if path.is_dir():
                yield read_run(path, path.relative_to(given).as_posix())
            elif _is_results(path):
                yield from _with_looks(read_results(path, left_out), path.parent / LOOKS_OF_RESULTS, left_out)
            else:
                others += 1
        except ValueError as error:
            left_out.append(f"left out: {error}")
    if others:
        left_out.append(f"left out: {others} .jsonl file{'s' if others > 1 else ''} in {given} with no records of experiments")


def _walk(folder: Path) -> Iterator[Path]:
    """Run folders and .jsonl files, in the order of their names; nothing inside a run folder, nothing hidden, no links to folders."""
    entries = sorted((entry for entry in os.scandir(folder) if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if _is_run(path):
                yield path
            else:
                yield from _walk(path)
        elif path.suffix == ".jsonl" and path.name != LOOKS_OF_RESULTS:
            yield path


def _is_run(folder: Path) -> bool:
    return (folder / EXPERIMENT).is_file()


def _is_results(file: Path) -> bool:
    """Whether the first line looks like a record, also one of another format."""
    first = next((line for line in content_of(file).split(b"\n") if line.strip()), b"")
    try:
        content = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"format", "kind"} <= set(content)


def _with_looks(records: list[Record], file: Path, left_out: list[str]) -> Iterator[Record]:
    """The records, with what the file of looks beside them has of them."""
    looks: dict[Any, Any] = {}
    if file.is_file():
        try:
            looks = {content.get("run"): content.get("looks") for _, content in _lines(file, left_out)}
        except ValueError as error:
            left_out.append(f"left out: {error}")
    for record in records:
        yield record.with_looks(printable_data(looks[record.run])) if record.run in looks else record


def _one_a_run(found: Sequence[Record], left_out: list[str]) -> list[Record]:
    """Of records of the same run the one that was started last; of its folder and its line in a results file the folder, which has more."""
    kept: dict[tuple[Any, ...], Record] = {}
    for record in found:
        key: tuple[Any, ...]
        if record.table is None:
            key = ("own", record.run, record.started, _resolved(record.path) if not record.started else "")
        else:
            key = (record.kind, record.preset, record.table, record.column, record.row, record.seed, record.work.get("kind", ""))
        other = kept.setdefault(key, record)
        if other is record or _resolved(other.path) == _resolved(record.path):
            continue
        older, newer = sorted((other, record), key=_worth)
        kept[key] = newer
        if older.started != newer.started:
            left_out.append(f"left out: {older.path} is an older run of {older.run} than {newer.path}")
        elif older.result != newer.result:
            left_out.append(f"left out: {older.path} and {newer.path} are both of {older.run} and differ; the latter counts")
    return list(kept.values())


def _worth(record: Record) -> tuple[str, bool, bool]:
    return record.started, record.status == "finished", os.path.isdir(record.path)


def _resolved(path: str) -> str:
    return os.path.realpath(path)


def _object(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if missing is not None and not path.exists():
        return dict(missing)
    try:
        content = json_of(path)
    except ValueError as error:
        raise ValueError(f"{path.parent}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object; it is a {type(content).__name__}")
    return content


def _lines(path: Path, left_out: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a file of JSON lines with their line numbers; a last line that broke off is left out."""
    lines = content_of(path).split(b"\n")
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            if i == len(lines) - 1:
                left_out.append(f"left out: the last line of {path}, which broke off")
                return
            raise ValueError(f"{path}, line {i + 1} is no JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path}, line {i + 1} must be a JSON object; it is a {type(content).__name__}")
        yield i + 1, content
