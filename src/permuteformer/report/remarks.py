"""Remarks on a table: its agreement with the paper's order of rows, and notes on tasks, training and measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from permuteformer.experiments.published import Number
from permuteformer.presets import ROW_TITLES
from permuteformer.report.cells import Group, baselines_of, fixed
from permuteformer.report.runs import Run, number

NAMED_PAIRS = 3
"""Reversed pairs that the sentence names."""


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
    """Closer than one joint standard deviation, in our numbers or in the paper's."""
    reversed_pairs: tuple[str, ...]
    """A message per pair in the reverse order."""

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return self.same + self.ties + len(self.reversed_pairs)

    @property
    def sentence(self) -> str:
        """The counts, and the first reversed pairs."""
        pairs = f"{self.pairs} pair{'s' if self.pairs > 1 else ''} of rows"
        if self.same == self.pairs:
            return f"All rows are in the paper's order ({pairs})."
        counts = f"Of {pairs}, {self.same} in the paper's order, {len(self.reversed_pairs)} reversed, {self.ties} tied"
        tied = " (within one joint standard deviation, here or in the paper)" if self.ties else ""
        more = len(self.reversed_pairs) - NAMED_PAIRS
        named = [*self.reversed_pairs[:NAMED_PAIRS], *([f"{more} more"] if more > 0 else [])]
        return f"{counts}{tied}{'. Reversed: ' + '; '.join(named) if named else ''}."


def compare(standings: Iterable[Standing]) -> Agreement | None:
    """Compare all pairs of rows within each column; return None if there are no pairs."""
    columns: dict[str, list[Standing]] = {}
    for standing in standings:
        columns.setdefault(standing.column, []).append(standing)
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
    """Return whether two numbers are within one joint standard deviation; without deviations, whether they are equal.

    >>> is_tie((43.08, 1.74), (43.02, 0.52)), is_tie((36.87, None), (32.49, None))
    (True, False)
    """
    return abs(one[0] - other[0]) <= deviations * math.hypot(one[1] or 0.0, other[1] or 0.0)


def task_notes(groups: Iterable[Group]) -> list[str]:
    """Return the task of each column and its notes; a note that holds for all columns is given once."""
    titles: dict[str, list[str]] = {}
    columns_of: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            names = [str(word) for key in ("name", "title") if (word := run.task.get(key)) and word != group.column_title]
            if run.task.get("name"):
                _add(titles, group.column_title, ", ".join(dict.fromkeys(names)) or group.column_title)
            notes = run.task.get("notes")
            for note in notes if isinstance(notes, list) else []:
                if isinstance(note, str):
                    _add(columns_of, note, group.column_title)
    result = [f"{column}: {'; '.join(tasks)}" for column, tasks in titles.items()]
    for note, columns in columns_of.items():
        everywhere = len(titles) > 1 and len(columns) == len(titles)
        result.append(note if everywhere else f"{', '.join(columns)}: {note}")
    return [note if note.endswith((".", "?", "!")) else f"{note}." for note in result]


def training_notes(groups: Iterable[Group]) -> list[str]:
    """Return the size of the models of each column and the length of training; rows that differ are listed."""
    return [f"{column}: {'; or '.join(ways)}." for column, ways in _by_column(groups, _training).items()]


def baseline_notes(groups: Iterable[Group]) -> list[str]:
    """Return the results on each column's task without a model."""

    def shown(run: Run) -> list[str]:
        percent = run.metric == "accuracy"
        return [f"{name} {f'{value:.1f} %' if percent else fixed(value)}" for name, value in baselines_of(run).items()]

    return [f"{column}, without a model: {', '.join(baselines)}." for column, baselines in _by_column(groups, shown).items()]


def measurement_notes(groups: Iterable[Group]) -> list[str]:
    """Return how each column was measured; rows that differ are listed."""
    measured = [group for group in groups if group.first.kind == "measurement"]
    return [f"{column}: {' or '.join(ways)}." for column, ways in _by_column(measured, _measurement).items()]


def speed_notes(groups: Sequence[Group]) -> list[str]:
    """Return batches and devices of measurements at several lengths."""
    sizes = set()
    for group in groups:
        batch, length = number(group.first.work.get("batch_size")), number(group.first.work.get("length"))
        if batch and length:
            sizes.add((int(length), int(batch)))
    batches = ", ".join(f"{batch:,} × {length:,}" for length, batch in sorted(sizes))
    devices = " and ".join(sorted({str(device) for group in groups if (device := group.first.environment.get("device"))}))
    parts = [f"batches of {batches} tokens" if batches else "", f"on {devices}" if devices else ""]
    return [f"Best of the repeats; {', '.join(filter(None, parts))}."] if any(parts) else []


def missing_rows(groups: Iterable[Group], published: Mapping[str, Any]) -> list[str]:
    """Return the paper's rows that were not run."""
    rows = {group.row for group in groups}
    missing = [ROW_TITLES.get(row, row) for row in published if row not in rows]
    return [f"Rows of the paper that were not run: {', '.join(missing)}."] if missing else []


def _training(run: Run) -> list[str]:
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


def _measurement(run: Run) -> list[str]:
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


def _by_column(groups: Iterable[Group], texts_of: Any) -> dict[str, list[str]]:
    """Return the distinct texts of the runs of each column."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            for text in texts_of(run):
                _add(found, group.column_title, text)
    return found


def _add(found: dict[str, list[str]], key: str, text: str) -> None:
    texts = found.setdefault(key, [])
    if text not in texts:
        texts.append(text)
