"""The folder of a run: what it is, what happened, and one process at a time."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

import permuteformer
from permuteformer.experiments.base import Experiment, differing
from permuteformer.experiments.layout import CHECKPOINTS, ENVIRONMENT, EXPERIMENT, FORMAT, LOG, METRICS, RESULT
from permuteformer.folders import flush, read_json, write_json
from permuteformer.texts import for_terminal, printable

UNBEGUN = (".lock", f"{EXPERIMENT}.new")
"""What a process leaves that is killed before it has begun."""


class Run:
    """A run folder, in use by this process as long as the context lasts.

    A folder that has this experiment already is gone on with; one of another experiment, or that is no run folder, is refused.

    Args:
        path: the folder.
        experiment: what is run.
        about: what else is kept in ``experiment.json``: the task, the configuration, the cell of a table.
    """

    def __init__(self, path: Path, experiment: Experiment, about: Mapping[str, Any]) -> None:
        self.path, self.experiment, self.about = path, experiment, dict(about)
        self._lock = FileLock(path / ".lock", timeout=0)

    def __enter__(self) -> Run:
        check_folder(self.path, self.experiment)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise BlockingIOError(
                f"{self.path} is in use by another process: wait for it to end, or choose another folder with --output"
            ) from None
        try:
            self._begin()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _begin(self) -> None:
        check_folder(self.path, self.experiment)  # once more, now that nobody else can change it
        if not (self.path / EXPERIMENT).exists():
            content = {"format": FORMAT, "version": permuteformer.__version__, "experiment": self.experiment.to_json(), **self.about}
            write_json(self.path / EXPERIMENT, content)
        self.checkpoints.mkdir(exist_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / CHECKPOINTS

    @property
    def result(self) -> dict[str, Any]:
        """What came of it; empty while it is not finished."""
        return read_json(self.path / RESULT)

    def record(self, event: str, **values: Any) -> None:
        """Add a line to the metrics."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    def recorded(self) -> int:
        """Bytes of the metrics, which the disk has when this returns."""
        path = self.path / METRICS
        if not path.exists():
            return 0
        flush(path)
        return path.stat().st_size

    def rewind(self, recorded: int) -> None:
        """Forget what was recorded after so many bytes: it will happen again."""
        path = self.path / METRICS
        if path.exists() and path.stat().st_size > recorded:
            os.truncate(path, recorded)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of the folder, whole or not at all."""
        write_json(self.path / name, dict(content))

    def go_on(self, environment: Mapping[str, Any]) -> None:
        """Note where the run is carried on. What came of it before does not hold any more."""
        (self.path / RESULT).unlink(missing_ok=True)
        self.write(ENVIRONMENT, environment)

    def log(self, text: str) -> None:
        """Add a line to the log."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{now} {os.getpid()} {for_terminal(text)}\n")


def check_folder(path: Path, experiment: Experiment) -> None:
    """Raise unless ``path`` is free, or a run of this very experiment, begun by this version."""
    if not path.exists() or (path.is_dir() and not any(entry.name not in UNBEGUN for entry in path.iterdir())):
        return
    if not (path / EXPERIMENT).exists():
        raise FileExistsError(f"{path} is there and is no run folder: choose another one with --output")
    content = read_run(path)
    there, wanted = content.get("experiment"), experiment.to_json()
    if wrong := differing(there, wanted):
        there = there if isinstance(there, dict) else {}
        words = "; ".join(f"{printable(name)} is {there.get(name)!r:.200} there and {wanted.get(name)!r:.200} here" for name in wrong[:5])
        raise ValueError(f"{path} is of another experiment: {words}. Choose another folder with --output")


def finished(path: Path, experiment: Experiment) -> dict[str, Any]:
    """The result of this experiment in ``path``, if it came to its end; else nothing. Raises as ``check_folder``."""
    check_folder(path, experiment)
    result = read_json(path / RESULT)
    return result if result.get("status") == "finished" else {}


def read_run(path: Path) -> dict[str, Any]:
    """What the ``experiment.json`` of a run folder says, which this version can go on with."""
    if not (path / EXPERIMENT).exists():
        raise FileNotFoundError(f"{path} is no run folder: it has no {EXPERIMENT}; `permuteformer train` makes one")
    content = read_json(path / EXPERIMENT)
    if not content:
        raise ValueError(f"{path / EXPERIMENT} is damaged: begin anew in another folder")
    if content.get("format") != FORMAT or content.get("version") != permuteformer.__version__:
        raise ValueError(
            f"{path} was begun by version {content.get('version')!r:.50} (format {content.get('format')!r:.50}), and this is "
            f"{permuteformer.__version__} (format {FORMAT}): go on with that version, or choose another folder with --output"
        )
    return content
