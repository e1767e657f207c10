"""What a report contains, before it is written as a page, as Markdown or as anything else."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from permuteformer.report.figure import Figure
from permuteformer.report.groups import Group, group, unique
from permuteformer.report.load import Loaded, load
from permuteformer.report.records import Record
from permuteformer.report.table import Table
from permuteformer.report.tables import build_tables

TITLE = "PermuteFormer: report"

_COUNTED = {"cores": "core", "threads": "thread", "processes": "process"}


@dataclass(frozen=True)
class Section:
    """A table with its figures, or figures alone."""

    anchor: str
    title: str
    table: Table | None
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Report:
    """All of it."""

    records: tuple[Record, ...]
    groups: tuple[Group, ...]
    sections: tuple[Section, ...]
    left_out: tuple[str, ...]

    @property
    def tables(self) -> tuple[Table, ...]:
        """In order."""
        return tuple(section.table for section in self.sections if section.table is not None)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """In order."""
        return tuple(figure for section in self.sections for figure in section.figures)

    @property
    def summary(self) -> str:
        """How many runs, how they ended, and when they were."""
        count = len(self.records)
        ends = ", ".join(f"{number} {status}" for status, number in Counter(record.status for record in self.records).most_common())
        days = sorted({record.started[:10] for record in self.records if record.started})
        when = "" if not days else f", of {days[0]}" if len(days) == 1 else f", from {days[0]} to {days[-1]}"
        return f"{count} run{'s' if count != 1 else ''}{when}: {ends}."


def build_report(inputs: Sequence[str | os.PathLike[str]], progress: Callable[[str], None] = lambda what: None) -> Report:
    """Read the runs, fill the tables, draw the figures. ``progress`` is told what comes next."""
    progress("reading runs")
    return report_of(load(inputs), progress)


def report_of(loaded: Loaded, progress: Callable[[str], None] = lambda what: None) -> Report:
    """The report of what was read."""
    from permuteformer.report.pictures import figures_of_looks
    from permuteformer.report.plots import figures_by_length, figures_of_runs

    left_out, taken = list(loaded.left_out), set[str]()
    groups = group(loaded.records)
    sections = []
    for table in build_tables(groups):
        progress(f"drawing {table.title}")
        figures = figures_by_length(table) if table.lengths else figures_of_runs(table)
        sections.append(Section(table.name, table.title, table, _named(figures, taken)))
    progress("drawing position kernels")
    looks = figures_of_looks(groups, left_out)
    if looks:
        sections.append(Section("inside", "Inside the models", None, _named(looks, taken)))
    return Report(loaded.records, tuple(groups), tuple(sections), tuple(left_out))


def _named(figures: Sequence[Figure], taken: set[str]) -> tuple[Figure, ...]:
    """Names of figures are names of files: no two are the same."""
    return tuple(figure if (name := unique(figure.name, taken)) == figure.name else figure.renamed(name) for figure in figures)


def environments(records: Sequence[Record]) -> list[tuple[str, int]]:
    """Where runs took place, in words, and how many there."""
    return Counter(_where(record) for record in records).most_common()


def run_line(record: Record) -> str:
    """A run in one line: its seed and how it ended."""
    from permuteformer.report.quantities import TRAINING_TIME, metric_quantity

    parts = [f"seed {record.seed}" if record.kind == "training" else "measurement", record.status]
    quantity = metric_quantity(record)
    value = quantity.read(record)
    if value is not None:
        parts.append(f"test {quantity.name} {quantity.show(value)}{' %' if quantity.unit == '%' else ''}")
    seconds = TRAINING_TIME.read(record)
    if seconds is not None:
        parts.append(TRAINING_TIME.show(seconds))
    message = record.result.get("message")
    if isinstance(message, str) and message:
        parts.append(message)
    return " · ".join(parts)


def relative(path: str, output: str | os.PathLike[str]) -> str:
    """Where a run is, seen from the report; a line of a file is told by its number. A name may have bytes that are no text."""
    try:
        return os.path.relpath(path, output).replace(os.sep, "/")
    except ValueError:  # another drive
        return path


def _where(record: Record) -> str:
    told = record.environment
    versions = told.get("versions")
    parts = [str(told[name]) for name in ("device", "cpu", "platform") if told.get(name)]
    parts += [f"{told[name]} {word if told[name] == 1 else name}" for name, word in _COUNTED.items() if told.get(name)]
    parts += [f"Python {told['python']}"] if told.get("python") else []
    parts += [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    return ", ".join(parts) or "not told"
