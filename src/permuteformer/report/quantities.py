"""What a number of a table is: where it stands in a record, its unit, and how it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from permuteformer.report.records import FINISHED, Record, number
from permuteformer.words import duration, size_in_words


@dataclass(frozen=True)
class Quantity:
    """One kind of number."""

    name: str
    unit: str
    """Empty for plain numbers."""
    read: Callable[[Record], float | None]
    """Its value, in the unit; None where there is none."""
    show: Callable[[float], str]
    """As people read it, without the unit."""
    greater_is_better: bool = False
    varies: bool = True
    """Whether its deviation over seeds is of interest."""

    @property
    def title(self) -> str:
        """With its unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


def fixed(value: float) -> str:
    """Two digits after the point, while that is sensible.

    >>> fixed(65.954), fixed(12345.6), fixed(4.5e9)
    ('65.95', '12,346', '4.5e+09')
    """
    return f"{value:.2f}" if abs(value) < 1e3 else f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.2g}"


def significant(value: float) -> str:
    """Three digits.

    >>> significant(0.0123456), significant(72.03), significant(28585.2), significant(0)
    ('0.0123', '72.0', '28,585', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def metric_quantity(record: Record) -> Quantity:
    """What the record's task is judged by, on the test split; accuracy in percent."""
    metric = record.metric
    percent = metric == "accuracy"

    def read(one: Record) -> float | None:
        value = number(one.result.get("value"))
        return None if value is None or one.status != FINISHED else value * (100 if percent else 1)

    unit = {"bytes": " of a byte", "words": " of a word"}.get(str(record.task.get("unit")), "") if metric == "perplexity" else ""
    return Quantity(metric.replace("_", " ") + unit, "%" if percent else "", read, fixed, record.greater_is_better)


def metric_of(record: Record, metrics: object) -> float | None:
    """The metric of the record's task out of an event's metrics, accuracy in percent."""
    value = number(metrics.get(record.metric)) if isinstance(metrics, dict) else None
    return value if value is None or record.metric != "accuracy" else 100 * value


def _measured(name: str, factor: float = 1.0, *, each: bool = False) -> Callable[[Record], float | None]:
    def read(record: Record) -> float | None:
        value = number(record.result.get(name))
        if value is None or record.status != FINISHED:
            return None
        batch = number(record.work.get("batch_size")) or 1
        return value * factor / (batch if each else 1)

    return read


def _validation(record: Record) -> float | None:
    return metric_of(record, record.result.get("validation"))


def _a_token(record: Record) -> float | None:
    """Microseconds a token: batches of different sizes and lengths can be compared."""
    sequence, length = _measured("seconds_best", 1e6, each=True)(record), number(record.work.get("length"))
    return None if sequence is None or not length else sequence / length


EPOCH = Quantity("training time an epoch", "s", _measured("seconds_per_epoch"), significant)
LATENCY = Quantity("latency a sample", "ms", _measured("seconds_best", 1e3, each=True), significant)
TOKEN = Quantity("time a token", "µs", _a_token, significant)
MEMORY = Quantity("peak memory", "MB", _measured("peak_memory_bytes", 1e-6), significant)
PARAMETERS = Quantity("parameters", "", lambda record: number(record.parameters), lambda value: f"{value:,.0f}", varies=False)
TRAINING_TIME = Quantity("training time", "", _measured("seconds"), duration, varies=False)
TRAINING_MEMORY = Quantity("peak memory", "", _measured("peak_memory_bytes"), lambda value: size_in_words(int(value)), varies=False)
VALIDATION = Quantity("validation", "", _validation, fixed)
