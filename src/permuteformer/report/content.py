"""The content of a report, before it is written as HTML, Markdown or anything else."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from permuteformer.report.cells import TRAINING_TIME, Group, group_runs, metric_quantity, unique
from permuteformer.report.figure import Figure
from permuteformer.report.runs import Run, load_runs
from permuteformer.report.summary import finding, overview
from permuteformer.report.tables import Table, build_tables


@dataclass(frozen=True)
class Section:
    """A table with what it says and its figures; or figures alone."""

    anchor: str
    title: str
    table: Table | None = None
    finding: str = ""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything that a report shows."""

    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    sections: tuple[Section, ...]
    skipped: tuple[str, ...]
    """A message for each thing that was found and not used."""

    @property
    def overview(self) -> list[str]:
        """The runs in a few sentences."""
        return overview(self.runs, self.groups)

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables."""
        return tuple(section.table for section in self.sections if section.table is not None)

    @property
    def main(self) -> Section | None:
        """The section to read first: the first one that compares with the paper, or else the first table."""
        found = [section for section in self.sections if section.table is not None]
        return next((section for section in found if section.table and section.table.agreement), found[0] if found else None)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All figures."""
        return tuple(figure for section in self.sections for figure in section.figures)

    @property
    def environments(self) -> list[tuple[str, int]]:
        """Machines and versions, each with its number of runs."""
        return Counter(_environment(run) for run in self.runs).most_common()


def build_report(inputs: Sequence[str | os.PathLike[str]], progress: Callable[[str], None] = lambda what: None) -> Report:
    """Read runs, fill tables and draw figures. ``progress`` receives what comes next."""
    from permuteformer.report.curves import length_figures, training_figures
    from permuteformer.report.maps import map_figures

    progress("reading runs")
    loaded = load_runs(inputs)
    skipped, names, groups = list(loaded.skipped), set[str](), group_runs(loaded.runs)
    sections = []
    for table in build_tables(groups):
        progress(f"drawing {table.title}")
        figures = length_figures(table) if table.lengths else training_figures(table)
        sections.append(Section(table.name, table.title, table, finding(table), _unique_names(figures, names)))
    progress("drawing attention maps")
    if maps := map_figures(groups, skipped):
        sections.append(Section("maps", "Attention maps", figures=_unique_names(maps, names)))
    return Report(loaded.runs, tuple(groups), tuple(sections), tuple(skipped))


def run_line(run: Run) -> str:
    """Return a run in one line: seed, status, result."""
    parts = [f"seed {run.seed}" if run.kind == "training" else "measurement", run.status]
    quantity = metric_quantity(run)
    if (value := quantity.read(run)) is not None:
        parts.append(f"test {quantity.name} {quantity.show(value)}{' %' if quantity.unit == '%' else ''}")
    if (seconds := TRAINING_TIME.read(run)) is not None:
        parts.append(TRAINING_TIME.show(seconds))
    if isinstance(message := run.result.get("message"), str) and message:
        parts.append(message)
    return " · ".join(parts)


def _unique_names(figures: Sequence[Figure], taken: set[str]) -> tuple[Figure, ...]:
    """Rename figures whose name is taken: names are those of files and ids."""
    renamed = []
    for figure in figures:
        name = unique(figure.name, taken)
        renamed.append(replace(figure, name=name, svg=figure.svg.replace(f"{figure.name}--", f"{name}--")))
    return tuple(renamed)


def _environment(run: Run) -> str:
    found = run.environment
    versions = found.get("versions")
    parts = [str(found[name]) for name in ("device", "cpu", "platform") if found.get(name)]
    for one, many in (("core", "cores"), ("thread", "threads"), ("process", "processes")):
        if count := found.get(many):
            parts.append(f"{count} {one if count == 1 else many}")
    parts += [f"Python {found['python']}"] if found.get("python") else []
    parts += [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    parts += [f"revision {str(found['revision'])[:12]}"] if found.get("revision") else []
    return ", ".join(parts) or "not recorded"
