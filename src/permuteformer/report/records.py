"""One run as a report sees it: what a line of a results file says, or a run folder."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from permuteformer.experiments.layout import FORMAT
from permuteformer.texts import printable

FINISHED, UNFINISHED = "finished", "not finished"
KINDS = ("training", "measurement")
MOST_LOSSES = 200
LONGEST_TEXT = 10_000
DEEPEST = 50

Losses = tuple[tuple[float, float, float | None], ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One training run or one measurement.

    All texts are printable: control characters of what was read are escaped.
    """

    run: str
    """Its name; for a cell of a table ``table4/lm/permuteformer-lm-seed0``."""
    kind: str = "training"
    """``"training"`` or ``"measurement"``."""
    table: str | None = None
    """``"1"`` to ``"4"``, another table's name, or None for a run that is in no table."""
    row: str | None = None
    column: str | None = None
    preset: str | None = None
    seed: int = 0
    command: str = ""
    work: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the experiment, or of the measurement."""
    task: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Events ``evaluation``, ``test`` and ``length``, in order."""
    losses: Losses = ()
    """(step, loss, seconds), at most 200 of them."""
    looks: Mapping[str, Any] | None = None
    """Position kernels and attention maps."""
    path: str = ""
    """Where it was read."""

    @property
    def status(self) -> str:
        """``"finished"``, ``"not finished"``, or how it failed."""
        status = self.result.get("status", UNFINISHED)
        return status if isinstance(status, str) and status else UNFINISHED

    @property
    def metric(self) -> str:
        """What the task is judged by."""
        return str(self.task.get("metric") or self.result.get("metric") or "value")

    @property
    def greater_is_better(self) -> bool:
        """Of the metric."""
        return bool(self.task.get("greater_is_better", self.metric == "accuracy"))

    @property
    def started(self) -> str:
        """When, as ISO 8601; empty where it is not known."""
        return str(self.environment.get("started") or "")

    def to_json(self) -> dict[str, Any]:
        """As a line of a results file; looks have a file of their own."""
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in ("table", "row", "column", "seed", "preset", "kind", "command", "run")},
            "experiment" if self.kind == "training" else "measurement": dict(self.work),
            **{name: dict(getattr(self, name)) for name in ("task", "config", "environment", "result")},
            "parameters": self.parameters,
            "evaluations": [dict(event) for event in self.evaluations],
            "losses": [list(point) for point in self.losses],
        }

    @classmethod
    def from_json(cls, content: Any, path: str = "") -> Record:
        """From a line of a results file.

        >>> Record.from_json({"format": 1, "run": "mine", "kind": "training", "result": {"status": "finished"}}).status
        'finished'
        """
        content = printable_data(content)
        if not isinstance(content, dict):
            raise ValueError(f"a record must be a JSON object; it is {_brief(content)}")
        check_format(content)
        kind = _get(content, "kind", str, required=True)
        if kind not in KINDS:
            raise ValueError(f"kind of a record must be {' or '.join(KINDS)}; it is {_brief(kind)}")
        place = {name: _get(content, name, str) for name in ("table", "row", "column")}
        if None in place.values() and any(place.values()):
            missing = ", ".join(name for name, value in place.items() if value is None)
            raise ValueError(f"a record has table, row and column, or none of them; {missing} is missing")
        result = _get(content, "result", dict, required=True)
        _get(result, "status", str, required=True)
        seed = _get(content, "seed", int)
        return cls(
            run=_get(content, "run", str, required=True),
            kind=kind,
            **place,
            preset=_get(content, "preset", str),
            seed=seed or 0,
            command=_get(content, "command", str) or "",
            work=_get(content, "experiment" if kind == "training" else "measurement", dict) or {},
            task=_get(content, "task", dict) or {},
            config=_get(content, "config", dict) or {},
            parameters=_get(content, "parameters", int),
            environment=_get(content, "environment", dict) or {},
            result=result,
            evaluations=tuple(event for event in _get(content, "evaluations", list) or [] if isinstance(event, dict)),
            losses=_losses(_get(content, "losses", list) or []),
            path=path,
        )

    def with_looks(self, looks: Any) -> Record:
        """The same, with position kernels and attention maps; those of another format are not taken."""
        return replace(self, looks=looks if isinstance(looks, dict) and looks.get("format") == FORMAT else None)


def check_format(content: Mapping[str, Any]) -> None:
    """Raise unless the content is of the format that is read here."""
    if content.get("format") != FORMAT:
        version = content.get("version")
        written = f" (written by version {printable(str(version), 50)})" if version else ""
        raise ValueError(
            f"it is of format {_brief(content.get('format'))}{written}, and this version reads format {FORMAT}: "
            "make the report with the version that wrote it"
        )


def number(value: Any) -> float | None:
    """A finite number, or None for everything else.

    >>> number(3), number(float("nan")), number("3"), number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean, and the standard deviation of the sample where there are two values or more."""
    if not values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def thinned(points: Sequence[Any], most: int = MOST_LOSSES) -> list[Any]:
    """At most so many points, evenly chosen, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def printable_data(content: Any, depth: int = 0) -> Any:
    """JSON data whose texts can be shown anywhere: control characters are escaped, white space is spaces, very long texts are cut.

    >>> printable_data({"label": "red \\x1b[31m"})
    {'label': 'red \\\\x1b[31m'}
    """
    if isinstance(content, str):
        return printable(content if content.isprintable() else re.sub(r"\s", " ", content), LONGEST_TEXT)
    if isinstance(content, (dict, list, tuple)) and depth == DEEPEST:
        raise ValueError(f"lists and objects are nested more than {DEEPEST} deep, which is the limit")
    if isinstance(content, dict):
        return {printable_data(key): printable_data(value, depth + 1) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [printable_data(value, depth + 1) for value in content]
    return content


def _losses(points: Iterable[Any]) -> Losses:
    """Those that can be drawn."""
    kept = []
    for point in points:
        if not isinstance(point, (list, tuple)) or len(point) < 2:
            continue
        step, loss = number(point[0]), number(point[1])
        if step is not None and loss is not None:
            kept.append((step, loss, number(point[2]) if len(point) > 2 else None))
    return tuple(thinned(kept))


def _get(content: Mapping[str, Any], name: str, kind: type, *, required: bool = False) -> Any:
    value = content.get(name)
    if value is None:
        if required:
            raise ValueError(f"a record must have the field {name!r}, and it has {_brief(sorted(content))}")
        return None
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = {str: "text", int: "a whole number", dict: "an object", list: "a list"}[kind]
        raise ValueError(f"{name} of a record must be {expected}; it is {_brief(value)}")
    return value


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
