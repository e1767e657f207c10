"""The opening of a report: what was run, and what the numbers of each table mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from permuteformer.report.cells import OWN, Cell, Group, Quantity, baselines_of, metric_quantity, show_baseline, times, uncertainty
from permuteformer.report.remarks import is_tie
from permuteformer.report.runs import Run
from permuteformer.report.tables import Table, by_column

CERTAIN = 2.0
"""Standard deviations by which a model must beat a baseline."""


@dataclass(frozen=True)
class Contest:
    """Models on the same task, or at the same length: the cells are ordered from best to worst."""

    where: str
    quantity: Quantity
    entries: tuple[tuple[str, Cell], ...]
    groups: tuple[Group, ...] = ()

    def shown(self, place: int) -> str:
        """Name and number of the model at this place."""
        name, cell = self.entries[place]
        unit = f" {self.quantity.unit}" if self.quantity.unit else ""
        ratio = f", {times(cell.ratio)} the Transformer's" if cell.ratio is not None else ""
        return f"{name} ({cell.text}{unit}{ratio})"


def overview(runs: Sequence[Run], groups: Sequence[Group]) -> list[str]:
    """Return how many runs there are and how they ended, and which models were run on which tasks."""
    days = sorted({run.started[:10] for run in runs if run.started})
    when = f" of {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else ""
    outcomes = ", ".join(f"{count} {status}" for status, count in Counter(run.status for run in runs).most_common())
    lines = [f"{_count(len(runs), 'run')}{when}: {outcomes}."]
    for kind, verb in (("training", "Trained"), ("measurement", "Measured")):
        parts = []
        for (table, _), members in groupby(groups, key=lambda group: (group.table, group.preset)):
            chosen = [group for group in members if group.first.kind == kind]
            if chosen:
                models = {str(group.first.work.get("model")) if table == OWN else group.row for group in chosen}
                seeds = max(len(group.runs) for group in chosen)
                columns = dict.fromkeys(group.column_title for group in chosen)
                parts.append(f"{_count(len(models), 'model')} on {_listed(columns)}" + (f" with {seeds} seeds" if seeds > 1 else ""))
        if parts:
            lines.append(f"{verb}: {'; '.join(dict.fromkeys(parts))}.")
    return lines


def finding(table: Table) -> str:
    """Return what a table says: the best model, and comparisons with baselines and with the paper."""
    contests = list(_contests(table))
    agreement = table.agreement.sentence if table.agreement else ""
    return " ".join(filter(None, (_best(contests), _against_baselines(contests), agreement)))


def _contests(table: Table) -> Iterator[Contest]:
    """Yield the last column with numbers of a table over lengths, the average if there is one, else every task."""
    if table.lengths or any(column.name == "average" for column in table.columns):
        for column in reversed(table.columns):
            entries = [(row.leads[0], cell) for row in table.rows if (cell := table.cell(row, column)).mean is not None]
            if entries:
                where = f"at {column.title}" if table.lengths else "on average"
                yield Contest(where, column.quantity, _ranked(entries, column.quantity))
                break
    if not table.lengths:
        for members in by_column(table.groups).values():
            entries = [(group.row_title, cell) for group in members if (cell := table.cell_of_group(group)).mean is not None]
            first = members[0].first
            quantity = metric_quantity(first) if first.kind == "training" else table.columns[0].quantity
            if entries:
                yield Contest(f"on {members[0].column_title}", quantity, _ranked(entries, quantity), tuple(members))


def _ranked(entries: list[tuple[str, Cell]], quantity: Quantity) -> tuple[tuple[str, Cell], ...]:
    return tuple(sorted(entries, key=lambda entry: entry[1].mean or 0.0, reverse=quantity.greater_is_better))


def _best(contests: Sequence[Contest]) -> str:
    if not contests:
        return "No run has a value."
    if len(contests) > 1 and contests[0].where != "on average":
        return f"Best: {'; '.join(f'{contest.where} {contest.shown(0)}' for contest in contests)}."
    contest = contests[0]
    if len(contest.entries) == 1:
        return f"{contest.shown(0)} is the only model {contest.where} with a value."
    (_, one), (_, other) = contest.entries[:2]
    what = f"{contest.shown(0)} has the best {contest.quantity.name} {contest.where}"
    if is_tie((one.mean or 0.0, one.deviation), (other.mean or 0.0, other.deviation)):
        return f"{what}; {contest.shown(1)} is within one joint standard deviation."
    return f"{what}, ahead of {contest.shown(1)}."


def _against_baselines(contests: Sequence[Contest]) -> str:
    """Compare the best model of each task with the best predictor without a model."""
    better: list[str] = []
    not_better: list[str] = []
    for contest in contests:
        baselines = baselines_of(contest.groups[0].first) if contest.groups else {}
        if not baselines:
            continue
        sign = 1 if contest.quantity.greater_is_better else -1
        name, value = max(baselines.items(), key=lambda baseline: sign * baseline[1])
        title, cell = contest.entries[0]
        run = next(group.first for group in contest.groups if group.row_title == title)
        mean = cell.mean or 0.0
        certain = not is_tie((mean, uncertainty(cell, run)), (value, None), CERTAIN)
        words = f"{contest.where.removeprefix('on ')} ({name} {show_baseline(run, value)})"
        (better if certain and sign * (mean - value) > 0 else not_better).append(words)
    parts = [f"The best model beats the best predictor without a model on {_listed(better)}."] if better else []
    if not_better:
        parts.append(
            f"No model beats it on {_listed(not_better)}: nothing was learned there."
            if better
            else f"No model beats the best predictor without a model, on {_listed(not_better)}: nothing was learned."
        )
    return " ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str] | dict[str, None]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
