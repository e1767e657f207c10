"""A disk that is full or may not be written, in words: what stays, and how to go on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from permuteformer.folders import NO_ROOM, READ_ONLY, is_about
from permuteformer.train import checkpoint


class DiskFull(OSError):
    """There is no room for what was to be written."""


class MayNotWrite(OSError):
    """The run folder may not be written."""


@contextmanager
def full_disk_in_words(folder: Path, checkpoints: Path) -> Iterator[None]:
    """Where writing into the run ``folder`` finds no room, or is not allowed, say so, and which checkpoint stays."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number(error) or 0
        there = checkpoint.steps(checkpoints)
        kept = f"the checkpoint of step {there[-1]:,} stays" if there else "there is no checkpoint yet"
        stopped = f"and training stopped; {kept}."
        if number in NO_ROOM:
            raise DiskFull(f"{NO_ROOM[number]}, {stopped} Make room, then go on with: permuteformer resume {folder}") from error
        if number in READ_ONLY and isinstance(error, OSError) and is_about(_cause(error), folder):
            raise MayNotWrite(
                f"{folder} cannot be written, {READ_ONLY[number]}, {stopped} Make it writable, then give the command again; or choose "
                "another folder with --output"
            ) from error
        raise


def _cause(error: OSError) -> OSError:
    """What the operating system said, which names the file."""
    return error.__cause__ if isinstance(error.__cause__, OSError) else error


def _number(error: OSError | SafetensorError) -> int | None:
    """The operating system's number; safetensors has it in its text alone."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None
