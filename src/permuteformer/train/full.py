"""A full disk, in words: what stays, and how to go on."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from permuteformer.train import checkpoint

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not grow any further (ulimit -f)",
}


class DiskFull(OSError):
    """There is no room for what was to be written."""


@contextmanager
def full_disk_in_words(folder: Path, checkpoints: Path) -> Iterator[None]:
    """Where writing into the run ``folder`` finds no room, say so, and which checkpoint stays."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        words = FULL.get(_number(error) or 0)
        if words is None:
            raise
        there = checkpoint.steps(checkpoints)
        kept = f"the checkpoint of step {there[-1]:,} stays" if there else "there is no checkpoint yet"
        raise DiskFull(f"{words}, and training stopped; {kept}. Make room, then go on with: permuteformer resume {folder}") from error


def _number(error: OSError | SafetensorError) -> int | None:
    """The operating system's number; safetensors has it in its text alone."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None
