"""Data and cache folders, atomic files and folders, JSON files."""

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

from permuteformer.formatting import printable

SYNC_FILES = 1000
"""Above this number of files, one ``sync`` of the disk is faster than an ``fsync`` per file."""

MAX_FILE_BYTES = 256 << 20
"""Size limit of a file that is read into memory."""


def data_folder(data: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of sources and downloads: ``data``, else ``PERMUTEFORMER_DATA``, else ``data`` in the user's cache."""
    chosen = data or os.environ.get("PERMUTEFORMER_DATA")
    return Path(chosen).expanduser() if chosen else user_cache() / "data"


def prepared_folder() -> Path:
    """Return the cache of tokenised data: ``PERMUTEFORMER_CACHE``, else ``prepared`` in the user's cache. It can be deleted."""
    chosen = os.environ.get("PERMUTEFORMER_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache() / "prepared"


def user_cache() -> Path:
    """Return the user's cache folder: ``XDG_CACHE_HOME``, else ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "permuteformer"


def folder_lock(path: Path) -> FileLock:
    """Return the lock that a process holds while it writes the folder ``path``."""
    return FileLock(path.with_name(f".{path.name}.lock"))


NO_SPACE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit is reached (ulimit -f)",
}
READ_ONLY = {errno.EROFS: "its disk is read-only", errno.EACCES: "permission denied", errno.EPERM: "permission denied"}


class WriteError(OSError):
    """A file or folder could not be written; the message says why and what to do."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def readable_disk_errors(path: Path, elsewhere: str = "choose another folder") -> Iterator[None]:
    """Raise ``WriteError`` if the disk is full while ``path`` is written, or its folder is not writable."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        if error.errno in NO_SPACE:
            message = f"{NO_SPACE[error.errno]}: {path} was not written; free some space, or {elsewhere}"
            raise WriteError(error.errno, message, str(path)) from error
        if error.errno in READ_ONLY and concerns(error, path.parent):
            raise WriteError(error.errno, f"{path} cannot be written, {READ_ONLY[error.errno]}: {elsewhere}", str(path)) from error
        raise


def concerns(error: OSError, folder: Path) -> bool:
    """Return whether the error names a file in ``folder``, the folder itself, or one of its parents."""
    if not isinstance(error.filename, (str, os.PathLike)):
        return False
    file, place = (Path(os.path.abspath(name)) for name in (error.filename, folder))
    return file.is_relative_to(place) or place.is_relative_to(file)


class FolderExists(FileExistsError):
    """The folder to create already exists."""


@contextmanager
def new_folder(path: Path, elsewhere: str = "choose another folder") -> Iterator[Path]:
    """Yield a folder to fill. It is renamed to ``path`` when the block ends without an exception.

    Processes that create the same folder wait for each other; the second raises ``FolderExists``. Leftovers of a killed process are
    removed by the next one. ``elsewhere`` is the advice in the message for a full disk.
    """
    lock = folder_lock(path)
    with readable_disk_errors(path, elsewhere):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        if path.exists():
            raise FolderExists(f"{path} already exists; delete it or move it away")
        with atomic_folder(path, elsewhere) as partial:
            yield partial
    finally:
        lock.release()


@contextmanager
def atomic_folder(path: Path, elsewhere: str = "choose another folder") -> Iterator[Path]:
    """Do the same without a lock, for a single process."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with readable_disk_errors(path, elsewhere):
            partial.mkdir(parents=True)
            yield partial
            _fsync_all(partial)
            partial.rename(path)
            fsync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder. It is renamed first, so that no process reads a part of it."""
    removed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    if path.exists():
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def fsync(path: Path) -> None:
    """Write a file or folder to disk, so that it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_all(folder: Path) -> None:
    files = list(folder.rglob("*"))
    if len(files) > SYNC_FILES and hasattr(os, "sync"):
        os.sync()
        return
    for file in [*files, folder]:
        fsync(file)


def read_json(path: Path) -> Any:
    """Parse a JSON file, which may be untrusted.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not JSON, too large, or not a regular file (reading a pipe could block).
    """
    return parse_json(read_bytes(path), path.name)


def read_own_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object that this library wrote; return ``{}`` if the file is missing or damaged."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_bytes(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{printable(path.name)} is not a regular file")
    if path.stat().st_size > limit:
        raise ValueError(f"{printable(path.name)} has more than {limit:,} bytes, which is the limit")
    return path.read_bytes()


def parse_json(content: bytes, name: str) -> Any:
    """Parse JSON; ``name`` is used in error messages."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(f"{printable(name)} is not usable JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{printable(name)} is not JSON ({printable(str(error))})") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    atomic_write(path, json.dumps(content).encode())


def atomic_write(path: Path, content: bytes) -> None:
    """Write a file, or leave the previous one unchanged."""
    partial = path.with_name(f"{path.name}.new")
    try:
        partial.write_bytes(content)
        fsync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
