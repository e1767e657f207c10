"""Runs as reports see them, read from run folders and results files."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from permuteformer.experiments.layout import ATTENTION_MAPS, ENVIRONMENT, EXPERIMENT, FORMAT, METRICS, RESULT, RESULTS_MAPS, RUN_FORMAT
from permuteformer.formatting import printable
from permuteformer.storage import read_bytes, read_json

FINISHED, UNFINISHED = "finished", "not finished"
KINDS = ("training", "measurement")
MAX_LOSSES = 200
MAX_TEXT = 10_000
MAX_DEPTH = 50
INPUTS = "give run folders, folders of run folders, or .jsonl results files"

_FIELDS: dict[str, type] = {
    **dict.fromkeys(("run", "kind", "table", "row", "column", "preset", "command"), str),
    **dict.fromkeys(("experiment", "measurement", "task", "config", "environment", "result"), dict),
    **dict.fromkeys(("seed", "parameters"), int),
    **dict.fromkeys(("evaluations", "losses"), list),
}
_REQUIRED = ("run", "kind", "result")
_TYPE_NAMES = {str: "a string", int: "an integer", dict: "an object", list: "a list"}

Losses = tuple[tuple[float, float, float | None], ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run or a measurement. All texts are printable: control characters are escaped."""

    name: str
    """For a cell of a table ``table4/lm/permuteformer-lm-seed0``."""
    kind: str = "training"
    """``"training"`` or ``"measurement"``."""
    table: str | None = None
    """``"1"`` to ``"4"``, another table's name, or None for a run that belongs to no table."""
    row: str | None = None
    column: str | None = None
    preset: str | None = None
    seed: int = 0
    command: str = ""
    work: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the experiment, or of the measurement."""
    task: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Events ``evaluation``, ``test`` and ``length``, in order."""
    losses: Losses = ()
    """(step, loss, seconds), at most 200 of them, rounded."""
    maps: Mapping[str, Any] | None = None
    """Attention maps."""
    path: str = ""
    """Folder, or file and line, that it was read from."""

    @property
    def status(self) -> str:
        """``"finished"``, ``"not finished"``, or how it failed."""
        return str(self.result.get("status") or UNFINISHED)

    @property
    def metric(self) -> str:
        """Name of the task's metric."""
        return str(self.task.get("metric") or self.result.get("metric") or "value")

    @property
    def greater_is_better(self) -> bool:
        """Whether a greater metric is better."""
        return bool(self.task.get("greater_is_better", self.metric == "accuracy"))

    @property
    def started(self) -> str:
        """Start as ISO 8601, or an empty string."""
        return str(self.environment.get("started") or "")

    def to_json(self) -> dict[str, Any]:
        """Return a line of a results file; attention maps have their own file."""
        return {
            "format": FORMAT,
            "run": self.name,
            **{name: getattr(self, name) for name in ("table", "row", "column", "seed", "preset", "kind", "command", "parameters")},
            "experiment" if self.kind == "training" else "measurement": dict(self.work),
            **{name: dict(getattr(self, name)) for name in ("task", "config", "environment", "result")},
            "evaluations": [dict(event) for event in self.evaluations],
            "losses": [list(point) for point in self.losses],
        }

    @classmethod
    def from_json(cls, content: Any, path: str = "") -> Run:
        """Parse a line of a results file.

        >>> Run.from_json({"format": 1, "run": "mine", "kind": "training", "result": {"status": "finished"}}).status
        'finished'
        """
        content = printable_data(content)
        _check_format(content, FORMAT)
        values = {name: _field(content, name, kind) for name, kind in _FIELDS.items()}
        if values["kind"] not in KINDS:
            raise ValueError(f"kind of a record must be {' or '.join(KINDS)}, got {_brief(values['kind'])}")
        if not isinstance(values["result"].get("status"), str):
            raise ValueError(f"result of a record must have a 'status', got {_brief(values['result'])}")
        missing = [name for name in ("table", "row", "column") if values[name] is None]
        if len(missing) in (1, 2):
            raise ValueError(f"a record must have table, row and column, or none of them; {', '.join(missing)} is missing")
        values["work"] = values["experiment" if values["kind"] == "training" else "measurement"]
        values["evaluations"] = tuple(event for event in values["evaluations"] if isinstance(event, dict))
        values["losses"] = _losses(values["losses"])
        own = {name: value for name, value in values.items() if name not in ("run", "experiment", "measurement")}
        return cls(name=values["run"], path=path, **own)

    def with_maps(self, maps: Any) -> Run:
        """Return a copy with attention maps, unless they have another format."""
        return replace(self, maps=printable_data(maps) if isinstance(maps, dict) and maps.get("format") == FORMAT else None)


@dataclass(frozen=True)
class Loaded:
    """Runs that were read."""

    runs: tuple[Run, ...]
    skipped: tuple[str, ...]
    """A message for each thing that was found and not used."""


def load_runs(inputs: Sequence[str | os.PathLike[str]]) -> Loaded:
    """Read run folders, results files (``.jsonl``), and folders that contain those at any depth.

    An input that cannot be read raises; files inside an input folder that cannot be read are skipped with a message.
    """
    if not inputs:
        raise ValueError("no runs were given: permuteformer report FOLDER… --output DIR")
    found: list[Run] = []
    skipped: list[str] = []
    for given in dict.fromkeys(map(Path, inputs)):
        if not given.exists():
            raise FileNotFoundError(f"{given} does not exist: {INPUTS}")
        runs = list(_read(given, skipped))
        if not runs:
            reasons = "".join(f"; {reason}" for reason in skipped[:3])
            raise ValueError(f"no runs in {given}: a run folder has {EXPERIMENT}, a results file is named *.jsonl{reasons}")
        found += runs
    return Loaded(tuple(_without_duplicates(found, skipped)), tuple(dict.fromkeys(map(printable_data, skipped))))


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read a run folder, also of an unfinished run. The name is that of its cell; default: the folder's."""
    content = _read_object(folder / EXPERIMENT)
    try:
        _check_format(content, RUN_FORMAT)
        cell, experiment = content.get("cell") or {}, content.get("experiment") or {}
        environment = _read_object(folder / ENVIRONMENT, default={})
        result = _read_object(folder / RESULT, default={"status": UNFINISHED})
        events = [event for _, event in _read_lines(folder / METRICS, [])] if (folder / METRICS).exists() else []
        command = environment.get("command", "")
        line = {
            "format": FORMAT,
            **{key: content.get(key) for key in ("experiment", "task", "config")},
            **{key: cell.get(key) for key in ("table", "row", "column", "preset")},
            "kind": "training",
            "seed": cell.get("seed", experiment.get("seed")),
            "run": f"table{cell['table']}/{cell['column']}/{cell['row']}-seed{cell['seed']}" if cell else name or folder.name,
            "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
            "parameters": result.get("parameters"),
            "environment": environment,
            "result": result,
            "evaluations": [event for event in events if event.get("event") in ("evaluation", "test", "length")],
            "losses": [[event.get(key) for key in ("step", "loss", "seconds")] for event in events if event.get("event") == "train"],
        }
        run = Run.from_json(line, path=str(folder))
    except KeyError as error:
        raise ValueError(f"{folder} is not a usable run folder: its cell has no {error}") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder} is not a usable run folder: {error}") from None
    return run.with_maps(_read_object(folder / ATTENTION_MAPS, default={}))


def number(value: Any) -> float | None:
    """Return a finite number as a float, None for everything else.

    >>> number(3), number(float("nan")), number("3"), number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def thinned(points: Sequence[Any], most: int = MAX_LOSSES) -> list[Any]:
    """Return at most this number of points, evenly chosen, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def printable_data(content: Any, depth: int = 0) -> Any:
    """Return JSON data with printable texts: control characters are escaped, white space becomes spaces, long texts are cut.

    >>> printable_data({"label": "red \\x1b[31m"})
    {'label': 'red \\\\x1b[31m'}
    """
    if isinstance(content, str):
        return printable(content if content.isprintable() else re.sub(r"\s", " ", content), MAX_TEXT)
    if isinstance(content, (dict, list, tuple)) and depth == MAX_DEPTH:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep, which is the limit")
    if isinstance(content, dict):
        return {printable_data(key): printable_data(value, depth + 1) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [printable_data(value, depth + 1) for value in content]
    return content


def _check_format(content: Mapping[str, Any], expected: int) -> None:
    if content.get("format") != expected:
        version = content.get("version")
        written = f" (written by version {printable(str(version), 50)})" if version else ""
        advice = f"this version reads format {expected}: make the report with the version that wrote it"
        raise ValueError(f"format {_brief(content.get('format'))}{written} is not supported, {advice}")


def _losses(points: Iterable[Any]) -> Losses:
    """Return the finite points, with losses of five significant digits."""
    kept: list[tuple[float, float, float | None]] = []
    for point in points:
        step, loss, seconds, *_ = (*map(number, point if isinstance(point, (list, tuple)) else ()), None, None, None)
        if step is not None and loss is not None:
            kept.append((step, float(f"{loss:.5g}"), None if seconds is None else round(seconds, 1)))
    return tuple(thinned(kept))


def _field(content: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field of a record; if it is missing, an empty value for objects, lists, the seed and the command."""
    value = content.get(name)
    if value is None:
        if name in _REQUIRED:
            raise ValueError(f"a record must have the field {name!r}, got {_brief(sorted(content))}")
        return kind() if kind in (dict, list) or name in ("seed", "command") else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} of a record must be {_TYPE_NAMES[kind]}, got {_brief(value)}")
    return value


def _brief(value: Any) -> str:
    return printable(repr(value), 80)


def _read(given: Path, skipped: list[str]) -> Iterator[Run]:
    if _is_run(given):
        yield read_run(given)
    elif given.is_dir():
        yield from _read_all(given, skipped)
    elif given.name in (METRICS, EXPERIMENT):
        raise ValueError(f"{given} is part of a run folder: give the folder")
    elif given.suffix != ".jsonl" or not _is_results(given):
        raise ValueError(f"{given} is not a results file, whose lines have format, kind, run and result: {INPUTS}")
    else:
        yield from _read_results(given, skipped)


def _read_all(folder: Path, skipped: list[str]) -> Iterator[Run]:
    """Yield the runs in a folder; those that cannot be read are skipped with a message."""
    others = 0
    for path in _walk(folder):
        try:
            if path.is_dir():
                yield read_run(path, path.relative_to(folder).as_posix())
            elif _is_results(path):
                yield from list(_read_results(path, skipped))  # all of them, or none
            else:
                others += 1
        except ValueError as error:
            skipped.append(f"skipped: {error}")
    if others:
        skipped.append(f"skipped: {others} .jsonl file{'s' if others > 1 else ''} in {folder} without records of runs")


def _walk(folder: Path) -> Iterator[Path]:
    """Yield run folders and .jsonl files sorted by name; nothing inside run folders, nothing hidden, no links to folders."""
    entries = sorted((entry for entry in os.scandir(folder) if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from [path] if _is_run(path) else _walk(path)
        elif path.suffix == ".jsonl" and path.name != RESULTS_MAPS:
            yield path


def _is_run(folder: Path) -> bool:
    return (folder / EXPERIMENT).is_file()


def _is_results(file: Path) -> bool:
    """Return whether the first line looks like a record, of any format."""
    first = next((line for line in read_bytes(file).split(b"\n") if line.strip()), b"")
    try:
        content = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"format", "kind"} <= set(content)


def _read_results(file: Path, skipped: list[str]) -> Iterator[Run]:
    """Yield the runs of a results file with the attention maps of the file beside it."""
    maps: dict[str, Any] = {}
    maps_file = file.parent / RESULTS_MAPS
    if maps_file.is_file():
        try:
            maps = {str(content.get("run")): content.get("attention_maps") for _, content in _read_lines(maps_file, skipped)}
        except ValueError as error:
            skipped.append(f"skipped: {error}")
    for number, content in _read_lines(file, skipped):
        try:
            run = Run.from_json(content, path=f"{file}:{number}")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        yield run.with_maps(maps.get(run.name))


def _without_duplicates(found: Sequence[Run], skipped: list[str]) -> list[Run]:
    """Keep the latest of several records of a run; a run folder is preferred to its line in a results file, which has less."""
    kept: dict[tuple[Any, ...], Run] = {}
    for run in found:
        key: tuple[Any, ...]
        if run.table is None:
            key = ("own", run.name, run.started, "" if run.started else os.path.realpath(run.path))
        else:
            key = (run.kind, run.preset, run.table, run.column, run.row, run.seed, run.work.get("kind", ""))
        other = kept.setdefault(key, run)
        if other is run or os.path.realpath(other.path) == os.path.realpath(run.path):
            continue
        older, newer = sorted((other, run), key=lambda one: (one.started, one.status == FINISHED, os.path.isdir(one.path)))
        kept[key] = newer
        if older.started != newer.started:
            skipped.append(f"skipped: {older.path} is an older run of {older.name} than {newer.path}")
        elif older.result != newer.result:
            skipped.append(f"skipped: {older.path}; {newer.path} is also of {older.name}, differs, and is used")
    return list(kept.values())


def _read_object(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON object; ``default`` if the file is missing."""
    if default is not None and not path.exists():
        return dict(default)
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path.parent}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(content).__name__}")
    return content


def _read_lines(path: Path, skipped: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield line numbers and objects of a file of JSON lines; an incomplete last line is skipped."""
    lines = read_bytes(path).split(b"\n")
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            if i == len(lines) - 1:
                skipped.append(f"skipped: the incomplete last line of {path}")
                return
            raise ValueError(f"{path}, line {i + 1} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path}, line {i + 1} must be a JSON object, got {type(content).__name__}")
        yield i + 1, content
