"""The folder of a run: its experiment, metrics, log and result, used by one process at a time."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from permuteformer.experiments.experiment import Experiment, differing_fields
from permuteformer.experiments.layout import CHECKPOINTS, ENVIRONMENT, EXPERIMENT, LOG, METRICS, RESULT, RUN_FORMAT
from permuteformer.formatting import escape_terminal, printable
from permuteformer.storage import fsync, read_own_json, write_json
from permuteformer.version import __version__

UNUSED = (".lock", f"{EXPERIMENT}.new")
"""Files of a process that was killed before its run started."""


class RunFolder:
    """A run folder, locked by this process within the ``with`` block.

    A folder with this experiment is resumed; a folder with another experiment, other data, or other files is refused.

    Args:
        path: the folder.
        experiment: the experiment that is run in it.
        about: further content of ``experiment.json``: the task, the configuration, the cell of a table.
    """

    def __init__(self, path: Path, experiment: Experiment, about: Mapping[str, Any]) -> None:
        self.path, self.experiment, self.about = path, experiment, dict(about)
        self.checkpoints = path / CHECKPOINTS
        self._lock = FileLock(path / ".lock", timeout=0)

    def __enter__(self) -> RunFolder:
        check_folder(self.path, self.experiment, self.about["task"]["digest"])
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise BlockingIOError(f"{self.path} is in use by another process: wait for it, or use another folder with --output") from None
        try:
            check_folder(self.path, self.experiment, self.about["task"]["digest"])  # again, now that no other process can change it
            if not (self.path / EXPERIMENT).exists():
                content = {"format": RUN_FORMAT, "version": __version__, "experiment": self.experiment.to_json(), **self.about}
                write_json(self.path / EXPERIMENT, content)
            self.checkpoints.mkdir(exist_ok=True)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    def record(self, event: str, **values: Any) -> None:
        """Append a line to the metrics."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    def metrics_bytes(self) -> int:
        """Return the size of the metrics, once they are on disk."""
        path = self.path / METRICS
        if not path.exists():
            return 0
        fsync(path)
        return path.stat().st_size

    def truncate_metrics(self, size: int) -> None:
        """Drop what was recorded after a checkpoint: it will happen again."""
        path = self.path / METRICS
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file atomically."""
        write_json(self.path / name, dict(content))

    def start(self, environment: Mapping[str, Any], resumed: bool) -> int | None:
        """Record the environment, of a resumed run what differs from its start, and drop an earlier result.

        Return the number of threads of the first start if it was another one.
        """
        (self.path / RESULT).unlink(missing_ok=True)
        first = read_own_json(self.path / ENVIRONMENT) if resumed else {}
        differing = {name: value for name, value in environment.items() if first.get(name) != value}
        self.write(ENVIRONMENT, {**first, "resumed": [*first.get("resumed", []), differing]} if first else environment)
        return int(first["threads"]) if "threads" in first and "threads" in differing else None

    def log(self, text: str) -> None:
        """Append a line to the log."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{now} {os.getpid()} {escape_terminal(text)}\n")


def check_folder(path: Path, experiment: Experiment, digest: str | None = None) -> None:
    """Raise unless ``path`` is unused, or has a run of this experiment by this version, on data of this digest."""
    if not path.exists() or (path.is_dir() and all(entry.name in UNUSED for entry in path.iterdir())):
        return
    if not (path / EXPERIMENT).exists():
        raise FileExistsError(f"{path} exists and is not a run folder: use another one with --output")
    content = read_run(path)
    old, new = content.get("experiment"), experiment.to_json()
    if fields := differing_fields(old, new):
        old = old if isinstance(old, dict) else {}
        shown = "; ".join(f"{printable(name)} was {old.get(name)!r:.200}, now {new.get(name)!r:.200}" for name in fields[:5])
        raise ValueError(f"{path} has a run of another experiment: {shown}. Use another folder with --output")
    task = content.get("task")
    recorded = task.get("digest") if isinstance(task, dict) else None
    if digest is not None and recorded != digest:
        raise ValueError(f"the data of {path} has changed since its run was started: restore the data, or use another folder with --output")


def finished_result(path: Path, experiment: Experiment) -> dict[str, Any]:
    """Return the result of this experiment in ``path`` if it is finished, else ``{}``. Raises as ``check_folder``."""
    check_folder(path, experiment)
    result = read_own_json(path / RESULT)
    return result if result.get("status") == "finished" else {}


def read_run(path: Path) -> dict[str, Any]:
    """Return the ``experiment.json`` of a run folder that this version can use."""
    if not path.is_dir():
        raise FileNotFoundError(f"run folder not found: {printable(str(path))}")
    if not (path / EXPERIMENT).is_file():
        raise FileNotFoundError(f"{printable(str(path))} is not a run folder: it has no {EXPERIMENT}; permuteformer train creates one")
    content = read_own_json(path / EXPERIMENT)
    if not content:
        raise ValueError(f"{path / EXPERIMENT} is damaged: copy the folder again, or train in another one")
    if content.get("format") != RUN_FORMAT:
        raise ValueError(
            f"{path} was written by permuteformer {content.get('version')!r:.50} (format {content.get('format')!r:.50}); this is "
            f"{__version__} (format {RUN_FORMAT}): use that version, or train again in another folder"
        )
    return content
