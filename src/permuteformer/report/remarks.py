"""Remarks on a table: its agreement with the paper's order of rows, and notes on tasks, training and measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from permuteformer.experiments.published import Number
from permuteformer.presets import ROW_TITLES
from permuteformer.report.cells import Group, baselines_of, group_by, show_baseline
from permuteformer.report.runs import Run, number

NAMED_PAIRS = 3
"""Reversed pairs that are named beside the counts."""


@dataclass(frozen=True)
class Standing:
    """A row in a column: our number and the paper's."""

    column: str
    row: str
    ours: Number
    paper: Number


@dataclass(frozen=True)
class Agreement:
    """Pairs of rows within a column, by how our order compares with the paper's."""

    same: int
    ties: int
    """Within one joint standard deviation, in our numbers or in the paper's."""
    reversed_pairs: tuple[str, ...]
    """A message per pair in the reverse order."""

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return self.same + self.ties + len(self.reversed_pairs)

    @property
    def sentence(self) -> str:
        """The counts."""
        pairs = f"{self.pairs} pair{'s' if self.pairs > 1 else ''} of rows"
        if self.same == self.pairs:
            return f"All rows are in the paper's order ({pairs})."
        tied = " (within one joint standard deviation, here or in the paper)" if self.ties else ""
        return f"Of {pairs}, {self.same} in the paper's order, {len(self.reversed_pairs)} reversed, {self.ties} tied{tied}."

    @property
    def details(self) -> str:
        """The counts and the first reversed pairs."""
        more = len(self.reversed_pairs) - NAMED_PAIRS
        named = [*self.reversed_pairs[:NAMED_PAIRS], *([f"{more} more"] if more > 0 else [])]
        return f"{self.sentence} Reversed: {'; '.join(named)}." if named else self.sentence


def compare(standings: Iterable[Standing]) -> Agreement | None:
    """Compare all pairs of rows within each column; return None if there are no pairs."""
    columns = group_by(standings, lambda standing: standing.column)
    same = ties = 0
    reversed_pairs = []
    for members in columns.values():
        for one, other in combinations(members, 2):
            if is_tie(one.ours, other.ours) or is_tie(one.paper, other.paper):
                ties += 1
            elif (one.ours[0] > other.ours[0]) == (one.paper[0] > other.paper[0]):
                same += 1
            else:
                high, low = (one, other) if one.ours[0] > other.ours[0] else (other, one)
                numbers = f"{high.ours[0]:.4g} and {low.ours[0]:.4g}, in the paper {high.paper[0]:.4g} and {low.paper[0]:.4g}"
                column = f"{high.column}: " if len(columns) > 1 else ""
                reversed_pairs.append(f"{column}{high.row} is higher than {low.row} ({numbers})")
    agreement = Agreement(same, ties, tuple(reversed_pairs))
    return agreement if agreement.pairs else None


def is_tie(one: Number, other: Number, deviations: float = 1.0) -> bool:
    """Return whether two means differ by at most ``deviations`` joint standard deviations; missing ones count as 0.

    >>> is_tie((43.08, 1.74), (43.02, 0.52)), is_tie((36.87, None), (32.49, None))
    (True, False)
    """
    return abs(one[0] - other[0]) <= deviations * math.hypot(one[1] or 0.0, other[1] or 0.0)


def task_notes(groups: Sequence[Group]) -> list[str]:
    """Return the task of each column and its notes; a note that holds for all columns is given once."""
    titles, columns_of = _distinct(groups, _task), _distinct(groups, _notes, texts_first=True)
    result = [f"{column}: {'; '.join(tasks)}" for column, tasks in titles.items()]
    for note, columns in columns_of.items():
        everywhere = len(titles) > 1 and len(columns) == len(titles)
        result.append(note if everywhere else f"{', '.join(columns)}: {note}")
    return [note if note.endswith((".", "?", "!")) else f"{note}." for note in result]


def training_notes(groups: Sequence[Group]) -> list[str]:
    """Return the size of the models of each column and the length of training; different ones are joined by "or"."""
    return [f"{column}: {'; or '.join(ways)}." for column, ways in _distinct(groups, _training).items()]


def baseline_notes(groups: Sequence[Group]) -> list[str]:
    """Return the results on each column's task without a model."""
    return [f"{column}, without a model: {', '.join(found)}." for column, found in _distinct(groups, _baselines).items()]


def measurement_notes(groups: Sequence[Group]) -> list[str]:
    """Return how each column was measured; different ways are joined by "or"."""
    return [f"{column}: {' or '.join(ways)}." for column, ways in _distinct(groups, _measurement).items()]


def speed_notes(groups: Sequence[Group]) -> list[str]:
    """Return batches and devices of measurements at several lengths."""
    sizes = {(number(group.first.work.get("length")), number(group.first.work.get("batch_size"))) for group in groups}
    batches = ", ".join(f"{batch:,.0f} × {length:,.0f}" for length, batch in sorted((n, b) for n, b in sizes if n and b))
    devices = " and ".join(sorted({str(device) for group in groups if (device := group.first.environment.get("device"))}))
    parts = [f"batches of {batches} tokens" if batches else "", f"on {devices}" if devices else ""]
    return [f"Best of the repeats; {', '.join(filter(None, parts))}."] if any(parts) else []


def missing_rows(groups: Sequence[Group], published: Mapping[str, Any]) -> list[str]:
    """Return the paper's rows that were not run."""
    rows = {group.row for group in groups}
    missing = [ROW_TITLES.get(row, row) for row in published if row not in rows]
    return [f"Rows of the paper that were not run: {', '.join(missing)}."] if missing else []


def _task(group: Group, run: Run) -> list[str]:
    names = [str(word) for key in ("name", "title") if (word := run.task.get(key)) and word != group.column_title]
    return [", ".join(dict.fromkeys(names)) or group.column_title] if run.task.get("name") else []


def _notes(group: Group, run: Run) -> list[str]:
    notes = run.task.get("notes")
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _baselines(group: Group, run: Run) -> list[str]:
    return [f"{name} {show_baseline(run, value)}" for name, value in baselines_of(run).items()]


def _training(group: Group, run: Run) -> list[str]:
    config, work = run.config, run.work
    width, layers = number(config.get("hidden_size")), number(config.get("num_hidden_layers"))
    steps, batch, rate = number(run.result.get("steps")), number(work.get("batch_size")), number(work.get("learning_rate"))
    parts = [
        f"width {width:,.0f}" if width else "",
        f"{layers:,.0f} layers" if layers else "",
        f"{steps:,.0f} updates" + (f" of {batch:,.0f} items" if batch else "") if steps else "",
        f"learning rate {rate:g}" if rate else "",
    ]
    return [", ".join(filter(None, parts))] if any(parts) else []


def _measurement(group: Group, run: Run) -> list[str]:
    if run.kind != "measurement":
        return []
    length, batch, items = (number(run.work.get(name)) for name in ("length", "batch_size", "items"))
    repeats, device = number(run.result.get("repeats")), run.environment.get("device")
    parts = [
        f"{length:,.0f} tokens" if length else "",
        f"batch of {batch:,.0f}" if batch else "",
        f"{items:,.0f} items per epoch" if items else "",
        f"best of {repeats:,.0f}" if repeats else "",
        f"on {device}" if device else "",
    ]
    return [", ".join(filter(None, parts)) or "no details recorded"]


def _distinct(groups: Sequence[Group], texts_of: Callable[[Group, Run], list[str]], *, texts_first: bool = False) -> dict[str, list[str]]:
    """Return the distinct texts of the runs of each column, or the columns of each text."""
    pairs = [(group.column_title, text) for group in groups for run in group.runs for text in texts_of(group, run)]
    found: dict[str, dict[str, None]] = {}
    for column, text in pairs:
        key, value = (text, column) if texts_first else (column, text)
        found.setdefault(key, {})[value] = None
    return {key: list(values) for key, values in found.items()}
