"""What can be timed, as plain data. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from permuteformer.experiments.base import Measurement

OUT_OF_MEMORY = "out of memory"

BLANK: Mapping[str, Any] = {
    "status": None,
    "message": None,
    "seconds_best": None,
    "seconds_median": None,
    "seconds_spread": None,
    "peak_memory_bytes": None,
    "memory_is": None,
    "repeats": None,
    "seconds_per_epoch": None,
    "estimated": False,
    "idle_memory_bytes": None,
    "ready_memory_bytes": None,
    "parameters": None,
    "flops": None,
    "device": None,
    "threads": None,
    "malloc": None,
}
"""Fields that every result has."""


@dataclass(frozen=True)
class Case:
    """One thing to be timed, in a process of its own.

    >>> Case("op", {"method": "sdpa", "length": 512}).to_json()
    {'subject': 'op', 'options': {'method': 'sdpa', 'length': 512}}
    """

    subject: str
    """What makes it: a file of ``bench.subjects``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of that."""

    @classmethod
    def of(cls, measurement: Measurement) -> Case:
        """A measurement of a model, as the experiments name it."""
        return cls("model", measurement.to_json())

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)
