"""A process of several that is lost, in words: what stays, and how to go on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import DistError

from permuteformer.train import checkpoint

SIGNS = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed? ?out", re.IGNORECASE)
"""What torch says in a plain ``RuntimeError`` where another process does not answer."""


class LostProcess(ConnectionError):
    """Another process of the run does not answer any more."""


@contextmanager
def lost_process_in_words(folder: Path, checkpoints: Path) -> Iterator[None]:
    """Where another process of a run in ``folder`` has gone, say so, and which checkpoint stays."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    try:
        yield
    except RuntimeError as error:
        if processes == 1 or not (isinstance(error, DistError) or SIGNS.search(str(error))):
            raise
        there = checkpoint.steps(checkpoints)
        kept = f"the checkpoint of step {there[-1]:,} stays" if there else "there is no checkpoint yet"
        raise LostProcess(
            f"another of the {processes} processes of this run was lost, and training stopped; {kept}. Look at what that process said "
            f"last, then go on with as many: torchrun --nproc-per-node {processes} -m permuteformer resume {folder}"
        ) from error
