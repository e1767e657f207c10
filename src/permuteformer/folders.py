"""Where data is, and how folders come into being: whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

MANY_FILES = 1000
"""From here on the whole disk is told to write, which is faster than a file at a time."""


def data_folder(data: str | os.PathLike[str] | None = None) -> Path:
    """Where sources are looked for and downloads go: ``data``, else ``PERMUTEFORMER_DATA``, else ``data`` in the user's cache."""
    chosen = data or os.environ.get("PERMUTEFORMER_DATA")
    return Path(chosen).expanduser() if chosen else user_cache() / "data"


def prepared_folder() -> Path:
    """Where tokenised data is kept: ``PERMUTEFORMER_CACHE``, else ``prepared`` in the user's cache. Deleting it costs time only."""
    chosen = os.environ.get("PERMUTEFORMER_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache() / "prepared"


def user_cache() -> Path:
    """The user's cache: ``XDG_CACHE_HOME``, else ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "permuteformer"


def folder_lock(path: Path) -> FileLock:
    """One process at a time makes or mends the folder ``path``."""
    return FileLock(path.with_name(f".{path.name}.lock"))


class AlreadyThere(FileExistsError):
    """A folder that was to be made is there."""


@contextmanager
def new_folder(path: Path, elsewhere: str = "choose another folder") -> Iterator[Path]:
    """A folder to fill, which gets its name ``path`` when the block ends without an exception.

    Two processes that make the same folder wait for each other; the second finds it there and gets ``AlreadyThere``. What a killed
    process left behind is removed by the next one. ``elsewhere`` says what to do where the disk is full, besides making room.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(path):
        if path.exists():
            raise AlreadyThere(f"{path} is there already; delete it, or move it away")
        with whole_folder(path, elsewhere) as partial:
            yield partial


@contextmanager
def whole_folder(path: Path, elsewhere: str = "choose another folder") -> Iterator[Path]:
    """The same without a lock, for one process at a time."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush_all(partial)
        partial.rename(path)
        flush(path.parent)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(error.errno, f"the disk is full, and nothing is kept of {path}: make room, or {elsewhere}") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def flush(path: Path) -> None:
    """Have the disk hold a file or folder, so that a power cut does not leave a name without its bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush_all(folder: Path) -> None:
    files = list(folder.rglob("*"))
    if len(files) > MANY_FILES and hasattr(os, "sync"):
        os.sync()
        return
    for file in [*files, folder]:
        flush(file)


def read_json(path: Path) -> dict[str, Any]:
    """What a small file of our own says; nothing if it is not there or broke off."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a small file, whole or not at all."""
    write_whole(path, json.dumps(content).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or leave what was there."""
    partial = path.with_name(f"{path.name}.new")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
