"""Cells of tables: groups of runs that differ in their seed, quantities, means and deviations."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from permuteformer.experiments.published import COLUMN_TITLES, Number
from permuteformer.formatting import format_bytes, format_duration
from permuteformer.presets import ROW_TITLES
from permuteformer.report.runs import FINISHED, Run, number

OWN = "own"
"""Table of the runs that belong to no table."""
NOT_FINITE, NO_VALUE = "not finite", "no value"
Item = TypeVar("Item")


@dataclass(frozen=True)
class Group:
    """Runs of the same work with different seeds, in the order of seeds."""

    table: str
    preset: str
    row: str
    column: str
    runs: tuple[Run, ...]
    anchor: str
    """Id of its runs in the page."""
    settings: str = ""
    """Fields that distinguish runs of the same model on the same task, for runs without a table."""

    @property
    def first(self) -> Run:
        """The run of the lowest seed."""
        return self.runs[0]

    @property
    def row_title(self) -> str:
        """Name of the model."""
        return shorten(ROW_TITLES.get(self.row, self.row))

    @property
    def column_title(self) -> str:
        """Name of the task."""
        return shorten(COLUMN_TITLES.get(self.column, self.column))

    @property
    def title(self) -> str:
        """Table, preset, task and model."""
        place = {OWN: "Own run"}.get(self.table, f"Table {self.table}" if self.table.isdigit() else self.table.capitalize())
        return " · ".join(part for part in (place, self.preset, self.column_title, self.row_title) if part)


@dataclass(frozen=True)
class Quantity:
    """A number of a run: its name, unit and format, and how to read it."""

    name: str
    unit: str
    """Empty for plain numbers."""
    read: Callable[[Run], float | None]
    show: Callable[[float], str]
    """Format a value, without the unit."""
    greater_is_better: bool = False
    varies: bool = True
    """Whether to show the deviation over seeds."""

    @property
    def title(self) -> str:
        """Name and unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def show_mean(self, mean: float, deviation: float | None) -> str:
        """Format a mean and its deviation."""
        return self.show(mean) if deviation is None or not self.varies else f"{self.show(mean)} ± {self.show(deviation)}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The content of a table at one row and column."""

    text: str = ""
    """Mean and deviation, or how the runs failed; empty if nothing was run."""
    mean: float | None = None
    deviation: float | None = None
    """Over seeds; None for one seed."""
    count: int = 0
    """Number of seeds with a value."""
    remark: str = ""
    """``estimated``, or how many seeds failed."""
    ratio: float | None = None
    """To the Transformer."""
    paper: Number | None = None
    paper_text: str = ""
    paper_ratio: float | None = None
    best: bool = False
    """Best of its column, as it is displayed."""
    anchor: str = ""
    """Id of its runs in the page."""
    counted: bool = False
    """Whether to show the number of seeds."""

    @property
    def detail(self) -> str:
        """The ratio to the Transformer or the number of seeds, in parentheses."""
        if self.ratio is not None:
            return f"({times(self.ratio)})"
        return f"({self.count})" if self.counted and self.count else ""

    @property
    def paper_shown(self) -> str:
        """The paper's number and its ratio."""
        return self.paper_text + (f" ({times(self.paper_ratio)})" if self.paper_ratio is not None else "")

    @property
    def under(self) -> list[str]:
        """Lines below the number: the remark and the paper's number."""
        return [*([self.remark] if self.remark else []), *([f"paper {self.paper_shown}"] if self.paper_text else [])]


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs by cell, in the paper's order of tables, columns and rows; others follow by name."""
    runs = list(runs)
    varying = _varying_fields([run for run in runs if run.table is None])
    key: tuple[str, ...]
    found: dict[tuple[str, ...], list[Run]] = {}
    settings: dict[tuple[str, ...], str] = {}
    for run in runs:
        if run.table is None:
            task, model = _own_key(run)
            shown = ", ".join(f"{name}={_as_text(run.work.get(name))}" for name in varying[task, model])
            key = (OWN, "", f"{model} ({shown})" if shown else model, task, "")
            settings[key] = shown
        else:
            measured = str(run.work.get("kind", "")) if run.kind == "measurement" and not run.table.isdigit() else ""
            key = (run.table, run.preset or "", run.row or "", run.column or "", measured)
        found.setdefault(key, []).append(run)
    anchors: set[str] = set()
    groups = []
    for key in sorted(found, key=_group_order):
        ordered = sorted(found[key], key=lambda run: (run.seed, run.name, run.path))
        table, preset, row, column = key[:4]
        groups.append(Group(table, preset, row, column, tuple(ordered), unique(slug("runs", *key), anchors), settings.get(key, "")))
    return groups


def group_by(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Return lists of items by key, in order of appearance.

    >>> group_by(["a", "bc", "d"], len)
    {1: ['a', 'd'], 2: ['bc']}
    """
    found: dict[Any, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def cell_of(group: Group, quantity: Quantity, paper: Number | None = None, paper_digits: int = 2) -> Cell:
    """Return the cell of a group: the mean over its runs, or how they failed."""
    cell = cell_of_values([(quantity.read(run), _failure(run)) for run in group.runs], quantity)
    estimated = "estimated" if any(run.result.get("estimated") is True for run in group.runs) else ""
    return replace(
        cell,
        remark=", ".join(filter(None, (cell.remark, estimated))),
        anchor=group.anchor,
        counted=quantity.varies and group.first.kind == "training",
        paper=paper,
        paper_text="" if paper is None else paper_number(paper, paper_digits),
    )


def cell_of_values(values: Sequence[tuple[float | None, str]], quantity: Quantity) -> Cell:
    """Return the cell of values; each comes with the text that replaces it if it is None."""
    found = [value for value, _ in values if value is not None]
    failed = Counter(text for value, text in values if value is None)
    if not found:
        return Cell(text=", ".join(text if len(failed) == 1 else f"{text} ({count})" for text, count in failed.items()))
    mean, deviation = statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None
    remark = ", ".join(f"{count} of {len(values)} {text}" for text, count in failed.items())
    return Cell(text=quantity.show_mean(mean, deviation), mean=mean, deviation=deviation, count=len(found), remark=remark)


def uncertainty(cell: Cell, run: Run) -> float | None:
    """Return the deviation over seeds; for one seed, the standard error of an accuracy in percent, given the number of test items."""
    if cell.deviation is not None:
        return cell.deviation
    items = number(run.work.get("test_items"))
    if run.metric != "accuracy" or not items or cell.mean is None or not 0 <= cell.mean <= 100:
        return None
    return math.sqrt(cell.mean * (100 - cell.mean) / items)


def paper_number(value: Number, digits: int) -> str:
    """Format a number as the paper prints it."""
    mean, deviation = value
    return f"{mean:,.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def fixed(value: float) -> str:
    """Format a number with two decimals, as long as that is sensible.

    >>> fixed(65.954), fixed(12345.6), fixed(4.5e9)
    ('65.95', '12,346', '4.5e+09')
    """
    return f"{value:.2f}" if abs(value) < 1e3 else f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.2g}"


def significant(value: float) -> str:
    """Format a number with three significant digits.

    >>> significant(0.0123456), significant(72.03), significant(28585.2), significant(0)
    ('0.0123', '72.0', '28,585', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def times(ratio: float) -> str:
    """Format a ratio.

    >>> times(0.5782), times(45.96), times(142.2)
    ('0.58×', '46.0×', '142×')
    """
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×" if ratio < 100 else f"{ratio:,.0f}×"


def slug(*parts: str) -> str:
    """Return a name for files and ids, of letters, digits and hyphens.

    >>> slug("Table 1", "<script>")
    'table-1-script'
    """
    return "-".join(part for part in (re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] for text in parts) if part) or "unnamed"


def unique(name: str, taken: set[str]) -> str:
    """Return the name, with a number if it is taken, and add it to the names that are taken."""
    chosen, i = name, 2
    while chosen in taken:
        chosen, i = f"{name}-{i}", i + 1
    taken.add(chosen)
    return chosen


def shorten(text: str, most: int = 60) -> str:
    """Cut a text to this number of characters.

    >>> shorten("a" * 100, 5)
    'aaaa…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def metric_quantity(run: Run) -> Quantity:
    """Return the metric of the run's task on the test split; accuracy in percent."""

    def read(one: Run) -> float | None:
        return _scaled(run, one.result.get("value")) if one.status == FINISHED else None

    unit = {"bytes": " per byte", "words": " per word"}.get(str(run.task.get("unit")), "") if run.metric == "perplexity" else ""
    return Quantity(run.metric.replace("_", " ") + unit, "%" if run.metric == "accuracy" else "", read, fixed, run.greater_is_better)


def metric_of(run: Run, metrics: object) -> float | None:
    """Return the metric of the run's task from the metrics of an event; accuracy in percent."""
    return _scaled(run, metrics.get(run.metric)) if isinstance(metrics, dict) else None


def baselines_of(run: Run) -> dict[str, float]:
    """Return the metric of predictors without a model, such as the most frequent label; accuracy in percent."""
    given = run.task.get("baselines")
    values = {str(name): _scaled(run, value) for name, value in given.items()} if isinstance(given, dict) else {}
    return {name: value for name, value in values.items() if value is not None}


def _scaled(run: Run, metric: Any) -> float | None:
    value = number(metric)
    return value if value is None or run.metric != "accuracy" else 100 * value


def show_baseline(run: Run, value: float) -> str:
    """Format the metric of a predictor without a model."""
    return f"{value:.1f} %" if run.metric == "accuracy" else fixed(value)


def _measured(name: str, factor: float = 1.0, *divisors: str) -> Callable[[Run], float | None]:
    """Return a function that reads a result and divides it by fields of the measurement."""

    def read(run: Run) -> float | None:
        value = number(run.result.get(name))
        if value is None or run.status != FINISHED:
            return None
        value *= factor
        for field in divisors:
            divisor = number(run.work.get(field)) or (1.0 if field == "batch_size" else None)
            if divisor is None:
                return None
            value /= divisor
        return value

    return read


EPOCH = Quantity("training time per epoch", "s", _measured("seconds_per_epoch"), significant)
LATENCY = Quantity("latency per sample", "ms", _measured("seconds_best", 1e3, "batch_size"), significant)
TOKEN = Quantity("time per token", "µs", _measured("seconds_best", 1e6, "batch_size", "length"), significant)
MEMORY = Quantity("peak memory", "MB", _measured("peak_memory_bytes", 1e-6), significant)
PARAMETERS = Quantity("parameters", "", lambda run: number(run.parameters), lambda value: f"{value:,.0f}", varies=False)
TRAINING_TIME = Quantity("training time", "", _measured("seconds"), format_duration, varies=False)
TRAINING_MEMORY = Quantity("peak memory", "", _measured("peak_memory_bytes"), lambda value: format_bytes(int(value)), varies=False)
VALIDATION = Quantity("validation", "", lambda run: metric_of(run, run.result.get("validation")), fixed)


def row_order(row: str) -> tuple[int, str]:
    """Sort rows in the paper's order, others after them by name."""
    return _place(row, list(ROW_TITLES))


def column_order(column: str) -> tuple[int, int, str]:
    """Sort columns in the paper's order, then numbers by value, then others by name."""
    place, name = _place(column, list(COLUMN_TITLES))
    return place, int(column) if column.isdecimal() and len(column) < 19 else -1, name


def _group_order(key: tuple[str, ...]) -> tuple[Any, ...]:
    table, preset, row, column, measured = key
    return (table == OWN, not table.isdigit(), table, preset, measured, column_order(column), row_order(row))


def _place(name: str, known: Sequence[str]) -> tuple[int, str]:
    return (known.index(name), "") if name in known else (len(known), name)


def _failure(run: Run) -> str:
    """Return the text for a run without a value."""
    if run.status != FINISHED:
        return run.status
    infinite = any(isinstance(value, float) and not math.isfinite(value) for value in run.result.values())
    return NOT_FINITE if infinite else NO_VALUE


def _own_key(run: Run) -> tuple[str, str]:
    """Return task and model of a run without a table."""
    return str(run.work.get("task") or run.task.get("name") or "?"), str(run.work.get("model", "?"))


def _varying_fields(runs: Sequence[Run]) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Return, by task and model, the fields besides the seed in which runs differ."""
    varying = {}
    for key, members in group_by(runs, _own_key).items():
        names = sorted({name for run in members for name in run.work} - {"seed", "task", "model"})
        varying[key] = tuple(name for name in names if len({_as_text(run.work.get(name)) for run in members}) > 1)
    return varying


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
