"""What is timed, a kind a file: each makes, of its options, a step that can be called again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from permuteformer.registry import unknown

SUBJECTS = ("decode", "formula", "model", "op", "peer")


@dataclass(frozen=True)
class Subject:
    """Something that is ready to be timed."""

    step: Callable[[], object]
    """One call of it."""
    parameters: int = 0
    """Numbers that are trained."""
    flops: float | None = None
    """Multiplications and additions that a call cannot do without, where that is known."""
    calls_per_epoch: int | None = None
    """Calls that make an epoch, where it is to be said what one takes."""


def make(subject: str, options: dict[str, Any], device: str) -> Subject:
    """What ``options`` describe, on ``device``."""
    if subject not in SUBJECTS:
        raise ValueError(unknown("subject", subject, SUBJECTS))
    made: Subject = import_module(f"{__name__}.{subject}").make(device=device, **options)
    return made
