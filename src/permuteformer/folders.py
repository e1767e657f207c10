"""Where data is, and how folders come into being: whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from permuteformer.texts import printable

MANY_FILES = 1000
"""From here on the whole disk is told to write, which is faster than a file at a time."""

MOST_BYTES = 256 << 20
"""Of a file that is read whole."""


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


NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not grow any further (ulimit -f)",
}
READ_ONLY = {errno.EROFS: "its disk is read-only", errno.EACCES: "permission denied", errno.EPERM: "permission denied"}


class NotWritten(OSError):
    """Something could not be written, and this says why and what to do."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def disk_errors_in_words(path: Path, elsewhere: str = "choose another folder") -> Iterator[None]:
    """Where there is no room for ``path``, or its folder may not be written, say so, and that nothing is kept of it."""
    try:
        yield
    except NotWritten:
        raise
    except OSError as error:
        if error.errno in NO_ROOM:
            said = f"{NO_ROOM[error.errno]}, and nothing is kept of {path}: make room, or {elsewhere}"
            raise NotWritten(error.errno, said) from error
        if error.errno in READ_ONLY and is_about(error, path.parent):
            raise NotWritten(error.errno, f"{path} cannot be written, {READ_ONLY[error.errno]}: {elsewhere}") from error
        raise


def is_about(error: OSError, folder: Path) -> bool:
    """Whether it is of a file in a folder, or of the folder or one that it is in."""
    if not isinstance(error.filename, (str, os.PathLike)):
        return False
    file, place = (Path(os.path.abspath(name)) for name in (error.filename, folder))
    return file.is_relative_to(place) or place.is_relative_to(file)


class AlreadyThere(FileExistsError):
    """A folder that was to be made is there."""


@contextmanager
def new_folder(path: Path, elsewhere: str = "choose another folder") -> Iterator[Path]:
    """A folder to fill, which gets its name ``path`` when the block ends without an exception.

    Two processes that make the same folder wait for each other; the second finds it there and gets ``AlreadyThere``. What a killed
    process left behind is removed by the next one. ``elsewhere`` says what to do where the disk is full, besides making room.
    """
    lock = folder_lock(path)
    with disk_errors_in_words(path, elsewhere):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        if path.exists():
            raise AlreadyThere(f"{path} is there already; delete it, or move it away")
        with whole_folder(path, elsewhere) as partial:
            yield partial
    finally:
        lock.release()


@contextmanager
def whole_folder(path: Path, elsewhere: str = "choose another folder") -> Iterator[Path]:
    """The same without a lock, for one process at a time."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_errors_in_words(path, elsewhere):
            partial.mkdir(parents=True)
            yield partial
            _flush_all(partial)
            partial.rename(path)
            flush(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder that others may believe: its name goes first, so that nobody finds half of it."""
    going = path.with_name(f".{path.name}.removed")
    shutil.rmtree(going, ignore_errors=True)
    if path.exists():
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


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
        content = json_of(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def json_of(path: Path) -> Any:
    """What a file of JSON says, whoever wrote it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON, is too large, or is no regular file, which could be waited for in vain.
    """
    return parsed(content_of(path), path.name)


def content_of(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file of at most so many."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{printable(path.name)} is no regular file")
    if path.stat().st_size > most:
        raise ValueError(f"{printable(path.name)} has more than {most:,} bytes, which is the limit")
    return path.read_bytes()


def parsed(content: bytes, name: str) -> Any:
    """JSON as data; ``name`` says in the complaint what it is."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(f"{printable(name)} is no JSON that can be used: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{printable(name)} is no JSON ({printable(str(error))})") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a small file, whole or not at all."""
    write_whole(path, json.dumps(content).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or leave what was there."""
    partial = path.with_name(f"{path.name}.new")
    try:
        partial.write_bytes(content)
        flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
