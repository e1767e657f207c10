"""The report as Markdown, with its figures as files beside it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from permuteformer.report.content import TITLE, Report, environments, relative, run_line
from permuteformer.report.groups import Group
from permuteformer.report.records import printable
from permuteformer.report.table import Cell, Table


def markdown(report: Report, output: str | os.PathLike[str]) -> str:
    """The whole report. ``output`` is the folder where it will stand: paths of runs are told from there."""
    return "\n".join(_lines(report, output)) + "\n"


def escaped(text: str) -> str:
    """A text that Markdown shows as it is.

    >>> escaped("a|b <script> *c*")
    'a\\\\|b &lt;script&gt; \\\\*c\\\\*'
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$#!])", r"\\\1", text)


def _lines(report: Report, output: str | os.PathLike[str]) -> Iterator[str]:
    yield f"# {escaped(TITLE)}\n"
    yield escaped(report.summary) + "\n"
    yield from (f"- {escaped(sentence)}" for sentence in report.left_out)
    for section in report.sections:
        yield f'\n<a id="{section.anchor}"></a>\n\n## {escaped(section.title)}\n'
        if section.table is not None:
            yield from _table(section.table)
        for figure in section.figures:
            yield f"\n![{escaped(figure.title)}](figures/{figure.name}.svg)\n\n**{escaped(figure.title)}.** {escaped(figure.caption)}"
    yield "\n## Environments\n"
    yield from (f"- {count} run{'s' if count > 1 else ''}: {escaped(where)}" for where, count in environments(report.records))
    yield "\n## Runs"
    yield from _runs(report.groups, output)


def _table(table: Table) -> Iterator[str]:
    yield escaped(table.caption) + "\n"
    titles = [*table.leads, *(column.title for column in table.columns)]
    yield f"| {' | '.join(map(escaped, titles))} |"
    yield f"|{'---|' * len(table.leads)}{'---:|' * len(table.columns)}"
    for row in table.rows:
        cells = [*map(escaped, row.leads), *(_cell(table.cell(row, column)) for column in table.columns)]
        yield f"| {' | '.join(cells)} |"
    if table.agreement is not None:
        yield f"\n{escaped(table.agreement.sentence)}"
    if table.notes:
        yield ""
        yield from (f"- {escaped(note)}" for note in table.notes)


def _cell(cell: Cell) -> str:
    if not cell.text and not cell.paper_text:
        return "–"
    shown = escaped(cell.text) or "–"
    shown = f"**{shown}**" if cell.best else shown
    shown = f"[{shown}](#{cell.anchor})" if cell.anchor else shown
    shown += f" {cell.detail}" if cell.detail else ""
    return "<br>".join([shown, *map(escaped, cell.under)])


def _runs(groups: Sequence[Group], output: str | os.PathLike[str]) -> Iterator[str]:
    for group in groups:
        yield f'\n<a id="{group.anchor}"></a>\n\n### {escaped(group.title)}\n'
        for record in group.records:
            command = f"; `{record.command.replace('`', ' ')}`" if record.command else ""
            yield f"- {escaped(run_line(record))}; {escaped(record.run)}, {escaped(printable(relative(record.path, output)))}{command}"
