"""What is said under a table: of its tasks, of how it was measured, of what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from permuteformer.experiments.published import ROW_TITLES
from permuteformer.report.groups import Group
from permuteformer.report.quantities import fixed
from permuteformer.report.records import Record, number


def notes_of(groups: Iterable[Group]) -> list[str]:
    """What the tasks of each column are, and what is to be known about them; what holds for all columns is said once."""
    titles: dict[str, list[str]] = {}
    told: dict[str, list[str]] = {}
    for group in groups:
        for record in group.records:
            name, title = record.task.get("name"), record.task.get("title")
            if name:
                words = dict.fromkeys(str(word) for word in (name, title) if word and word != group.column_title)
                _add(titles, group.column_title, ", ".join(words) or str(name))
            for note in _texts(record.task.get("notes")):
                _add(told, note, group.column_title)
    notes = [f"{column}: {'; '.join(tasks)}" for column, tasks in titles.items()]
    for note, columns in told.items():
        everywhere = len(titles) > 1 and len(columns) == len(titles)
        notes.append(note if everywhere else f"{', '.join(columns)}: {note}")
    return [note if note.endswith((".", "?", "!")) else f"{note}." for note in notes]


def trained_of(groups: Iterable[Group]) -> list[str]:
    """How large the models of each column are, and how long they were trained; rows that differ are told apart by what differs."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for record in group.records:
            if words := _trained(record):
                _add(found, group.column_title, words)
    return [f"{column}: {'; or '.join(ways)}." for column, ways in found.items()]


def baselines_of(groups: Iterable[Group]) -> list[str]:
    """What needs no model: the baselines of each column's task."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for record in group.records:
            for name, value in _baselines(record).items():
                _add(found, group.column_title, f"{name} {value}")
    return [f"{column}, without a model: {', '.join(baselines)}." for column, baselines in found.items()]


def measurements_of(groups: Iterable[Group]) -> list[str]:
    """How each column was measured; rows that differ are told apart by what differs."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for record in group.records:
            if record.kind == "measurement":
                _add(found, group.column_title, _measured(record))
    return [f"{column}: {' or '.join(ways)}." for column, ways in found.items()]


def not_run(rows: Iterable[str], published: Mapping[str, Any]) -> list[str]:
    """Rows that the paper has and we have not."""
    missing = [ROW_TITLES.get(row, row) for row in published if row not in set(rows)]
    return [f"The paper also has {', '.join(missing)}, not run here."] if missing else []


def _baselines(record: Record) -> dict[str, str]:
    baselines = record.task.get("baselines")
    if not isinstance(baselines, dict):
        return {}
    numbers = {str(name): number(value) for name, value in baselines.items()}
    percent = record.metric == "accuracy"
    return {name: f"{100 * value:.1f} %" if percent else fixed(value) for name, value in numbers.items() if value is not None}


def _trained(record: Record) -> str:
    config, work = record.config, record.work
    width, layers = number(config.get("hidden_size")), number(config.get("num_hidden_layers"))
    steps, batch, rate = number(record.result.get("steps")), number(work.get("batch_size")), number(work.get("learning_rate"))
    parts = [
        f"width {width:,.0f}" if width else "",
        f"{layers:,.0f} layers" if layers else "",
        f"{steps:,.0f} updates" + (f" of {batch:,.0f} items" if batch else "") if steps else "",
        f"learning rate {rate:g}" if rate else "",
    ]
    return ", ".join(part for part in parts if part)


def _measured(record: Record) -> str:
    work, result = record.work, record.result
    length, batch, items = number(work.get("length")), number(work.get("batch_size")), number(work.get("items"))
    repeats, device = number(result.get("repeats")), record.environment.get("device")
    parts = [
        f"{length:,.0f} tokens" if length else "",
        f"batch of {batch:,.0f}" if batch else "",
        f"{items:,.0f} items an epoch" if items else "",
        f"best of {repeats:,.0f}" if repeats else "",
        f"on {device}" if device else "",
    ]
    return ", ".join(part for part in parts if part) or "not said how"


def _texts(value: Any) -> Sequence[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _add(found: dict[str, list[str]], key: str, text: str) -> None:
    texts = found.setdefault(key, [])
    if text not in texts:
        texts.append(text)
