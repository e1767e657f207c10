"""Where data is, and how folders come into being: whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


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


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name ``path`` when the block ends without an exception.

    Two processes that make the same folder wait for each other; the second finds it there and gets ``FileExistsError``. What a killed
    process left behind is removed by the next one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():
            raise FileExistsError(f"{path} is there already; delete it, or choose another name")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            for file in partial.rglob("*"):
                _flush(file)
            _flush(partial)
            partial.rename(path)
            _flush(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have the disk hold it, so that a power cut does not leave a named folder of empty files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
