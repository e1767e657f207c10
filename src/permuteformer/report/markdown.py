"""The report as Markdown, with its figures as files beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from permuteformer.report.content import TITLE, Report, environments, relative, run_line
from permuteformer.report.groups import Group
from permuteformer.report.records import LONGEST_TEXT
from permuteformer.report.table import Cell, Table
from permuteformer.texts import for_markdown, printable


def markdown(report: Report, output: str | os.PathLike[str]) -> str:
    """The whole report. ``output`` is the folder where it will stand: paths of runs are told from there."""
    return "\n".join(_lines(report, output)) + "\n"


def _lines(report: Report, output: str | os.PathLike[str]) -> Iterator[str]:
    yield f"# {for_markdown(TITLE)}\n"
    yield for_markdown(report.summary) + "\n"
    yield from (f"- {for_markdown(sentence)}" for sentence in report.left_out)
    for section in report.sections:
        yield f'\n<a id="{section.anchor}"></a>\n\n## {for_markdown(section.title)}\n'
        if section.table is not None:
            yield from _table(section.table)
        for figure in section.figures:
            title, caption = for_markdown(figure.title), for_markdown(figure.caption)
            yield f"\n![{title}](figures/{figure.name}.svg)\n\n**{title}.** {caption}"
    yield "\n## Environments\n"
    yield from (f"- {count} run{'s' if count > 1 else ''}: {for_markdown(where)}" for where, count in environments(report.records))
    yield "\n## Runs"
    yield from _runs(report.groups, output)


def _table(table: Table) -> Iterator[str]:
    yield for_markdown(table.caption) + "\n"
    titles = [*table.leads, *(column.title for column in table.columns)]
    yield f"| {' | '.join(map(for_markdown, titles))} |"
    yield f"|{'---|' * len(table.leads)}{'---:|' * len(table.columns)}"
    for row in table.rows:
        cells = [*map(for_markdown, row.leads), *(_cell(table.cell(row, column)) for column in table.columns)]
        yield f"| {' | '.join(cells)} |"
    if table.agreement is not None:
        yield f"\n{for_markdown(table.agreement.sentence)}"
    if table.notes:
        yield ""
        yield from (f"- {for_markdown(note)}" for note in table.notes)


def _cell(cell: Cell) -> str:
    if not cell.text and not cell.paper_text:
        return "–"
    shown = for_markdown(cell.text) or "–"
    shown = f"**{shown}**" if cell.best else shown
    shown = f"[{shown}](#{cell.anchor})" if cell.anchor else shown
    shown += f" {for_markdown(cell.detail)}" if cell.detail else ""
    return "<br>".join([shown, *map(for_markdown, cell.under)])


def _runs(groups: Sequence[Group], output: str | os.PathLike[str]) -> Iterator[str]:
    for group in groups:
        yield f'\n<a id="{group.anchor}"></a>\n\n### {for_markdown(group.title)}\n'
        for record in group.records:
            command = f"; `{record.command.replace('`', ' ')}`" if record.command else ""
            where = printable(relative(record.path, output), LONGEST_TEXT)
            yield f"- {for_markdown(run_line(record))}; {for_markdown(record.run)}, {for_markdown(where)}{command}"
