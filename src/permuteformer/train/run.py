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
from permuteformer.experiments.base import Experiment
from permuteformer.folders import read_json, write_json, write_whole

FORMAT = 1
"""Of run folders. Another number is another layout."""

EXPERIMENT, ENVIRONMENT, METRICS, RESULT, LOOKS, LOG = (
    "experiment.json",
    "environment.json",
    "metrics.jsonl",
    "result.json",
    "looks.json",
    "log.txt",
)


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
            raise BlockingIOError(f"{self.path} is in use by another process: wait for it to end, or choose another folder") from None
        if not (self.path / EXPERIMENT).exists():
            content = {"format": FORMAT, "version": permuteformer.__version__, "experiment": self.experiment.to_json(), **self.about}
            write_json(self.path / EXPERIMENT, content)
        self.checkpoints.mkdir(exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def result(self) -> dict[str, Any]:
        """What came of it; empty while it is not finished."""
        return read_json(self.path / RESULT)

    def record(self, event: str, **values: Any) -> None:
        """Add a line to the metrics, on the disk when this returns."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    @property
    def recorded(self) -> int:
        """Bytes of the metrics."""
        path = self.path / METRICS
        return path.stat().st_size if path.exists() else 0

    def rewind(self, recorded: int) -> None:
        """Forget what was recorded after so many bytes: it will happen again."""
        path = self.path / METRICS
        if path.exists():
            write_whole(path, path.read_bytes()[:recorded])

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of the folder, whole or not at all."""
        write_json(self.path / name, dict(content))

    def log(self, text: str) -> None:
        """Add a line to the log."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{now} {os.getpid()} {text}\n")


def check_folder(path: Path, experiment: Experiment) -> None:
    """Raise unless ``path`` is free, or a run of this very experiment, begun by this version."""
    if not path.exists() or (path.is_dir() and not any(entry.name != ".lock" for entry in path.iterdir())):
        return
    content = read_json(path / EXPERIMENT) if path.is_dir() else {}
    if not content:
        raise FileExistsError(f"{path} is there and is no run folder: choose another one with --output")
    if content.get("format") != FORMAT or content.get("version") != permuteformer.__version__:
        raise ValueError(
            f"{path} was begun by version {content.get('version')} (format {content.get('format')}), and this is {permuteformer.__version__} "
            f"(format {FORMAT}): go on with that version, or choose another folder with --output"
        )
    there, wanted = content.get("experiment", {}), json.loads(json.dumps(experiment.to_json()))
    differing = [name for name in sorted({*there, *wanted}) if there.get(name) != wanted.get(name)]
    if differing:
        words = "; ".join(f"{name} is {there.get(name)!r} there and {wanted.get(name)!r} here" for name in differing)
        raise ValueError(f"{path} is of another experiment: {words}. Choose another folder with --output")


def read_run(path: Path) -> dict[str, Any]:
    """What the ``experiment.json`` of a run folder says."""
    content = read_json(path / EXPERIMENT)
    if not content:
        raise FileNotFoundError(f"{path} is no run folder: it has no {EXPERIMENT}; `permuteformer train` makes one")
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} has format {content.get('format')} (version {content.get('version')}), and this version reads {FORMAT}")
    return content
