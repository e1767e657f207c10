"""A report as one HTML page, as Markdown, and its tables as LaTeX and CSV."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from permuteformer.formatting import escape_cell, escape_markdown, format_duration, printable
from permuteformer.report.cells import Cell, fixed
from permuteformer.report.content import Report, run_line
from permuteformer.report.runs import MAX_TEXT, Run, number
from permuteformer.report.tables import Table
from permuteformer.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

TITLE = "PermuteFormer: report"

_LATEX = {
    **{character: f"\\{character}" for character in "{}$&#%_"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': r"\textquotedbl{}",
    "…": r"\ldots{}",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
    "µ": r"$\mu$",
    "−": "$-$",
    "·": r"$\cdot$",
}

CSV_HEADER = (
    *("row", "column", "quantity", "unit", "mean", "deviation", "seeds", "shown", "remark", "best", "ratio"),
    *("paper_mean", "paper_deviation", "paper_ratio", "runs"),
)


def html_page(report: Report, output: str | os.PathLike[str]) -> str:
    """Return the page, which needs no other file. Paths of runs are relative to ``output``, the folder where it will be."""
    script = template_source("page.js")
    # The browser runs only this script and loads nothing, so that no text of a run can do harm.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{sha256_source(script)}'; img-src data:"
    return (
        environment(autoescape=True)
        .get_template("report.html.j2")
        .render(
            title=TITLE,
            policy=policy,
            style=template_source("page.css"),
            script=script,
            report=report,
            run_line=run_line,
            details=lambda run: _details(run, output),
            evaluations=_evaluations,
            version=__version__,
        )
    )


def markdown_page(report: Report, output: str | os.PathLike[str]) -> str:
    """Return the report as Markdown, with figures as files beside it. Paths of runs are relative to ``output``."""

    def place(run: Run) -> str:
        return printable(os.path.relpath(run.path, output), MAX_TEXT)

    template = environment(finalize=lambda value: escape_markdown(str(value))).get_template("report.md.j2")
    return template.render(title=TITLE, report=report, run_line=run_line, place=place, markdown_cell=_markdown_cell)


def latex_tables(tables: Sequence[Table]) -> str:
    """Return all tables as LaTeX; booktabs is needed."""
    options = {"variable_start_string": "((", "variable_end_string": "))", "block_start_string": "(*", "block_end_string": "*)"}
    templates = environment(finalize=escape_latex, comment_start_string="(#", comment_end_string="#)", **options)
    templates.filters["latex"] = escape_latex
    return templates.get_template("tables.tex.j2").render(tables=[(table, _latex_columns(table)) for table in tables])


def csv_table(table: Table) -> str:
    """Return a table as CSV, one line per cell, with unrounded numbers."""
    runs_of_cell = {group.anchor: [run.name for run in group.runs] for group in table.groups}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for row in table.rows:
        runs_of_row = [run.name for group in table.groups if group.row == row.name for run in group.runs]
        for column in table.columns:
            cell, quantity = table.cell(row, column), column.quantity
            if not cell.text and cell.paper is None:
                continue
            runs = runs_of_row if column.name == "average" else runs_of_cell.get(cell.anchor, [])
            fields = (
                *(row.name, column.name, quantity.name, quantity.unit, cell.mean, cell.deviation, cell.count, cell.text, cell.remark),
                *(cell.best, cell.ratio, *(cell.paper or (None, None)), cell.paper_ratio, "; ".join(runs)),
            )
            writer.writerow(["" if field is None else escape_cell(field) if isinstance(field, str) else field for field in fields])
    return text.getvalue()


def escape_latex(text: object) -> str:
    """Return a text that LaTeX typesets literally. Characters that its fonts lack become their number.

    >>> escape_latex("100% of a_b ± 2")
    '100\\\\% of a\\\\_b $\\\\pm$ 2'
    """
    return "".join(_LATEX.get(c) or (c if ord(c) < 0x180 else rf"\texttt{{U+{ord(c):04X}}}") for c in str(text))


def environment(finalize: Callable[[Any], Any] | None = None, **options: Any) -> Environment:
    """Return the environment of the templates. ``finalize`` escapes values; a value that is marked safe is inserted as it is."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def finish(value: Any) -> Any:
        return value if finalize is None or hasattr(value, "__html__") else finalize(value)

    return Environment(
        loader=PackageLoader("permuteformer.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finish,
        **options,
    )


def template_source(name: str) -> str:
    """Return the content of a file beside the templates."""
    return files("permuteformer.report").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def sha256_source(script: str) -> str:
    """Return the source expression that allows this script in a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _markdown_cell(cell: Cell) -> str:
    if not cell.text and not cell.paper_text:
        return "–"
    shown = escape_markdown(cell.text) or "–"
    shown = f"**{shown}**" if cell.best else shown
    shown = f"[{shown}](#{cell.anchor})" if cell.anchor else shown
    shown += f" {escape_markdown(cell.detail)}" if cell.detail else ""
    return "<br>".join([shown, *map(escape_markdown, cell.under)])


def _latex_columns(table: Table) -> list[dict[str, Any]]:
    """Return the columns of a table with the place of their first number; a column with the paper's numbers has two."""
    columns, place = [], len(table.leads) + 1
    for column in table.columns:
        has_paper = table.has_paper(column)
        columns.append({"column": column, "title": column.title, "has_paper": has_paper, "place": place})
        place += 2 if has_paper else 1
    return columns


def _details(run: Run, output: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the page shows of a run: the link to its file, and one text per part of its record."""
    path = os.path.relpath(run.path, output)
    file = path.rpartition(":")[0] if run.path.rpartition(":")[0].endswith(".jsonl") else path
    parts = {
        "Command": run.command,
        "Experiment" if run.kind == "training" else "Measurement": _fields(run.work),
        "Model": _fields(run.config),
        "Task": _fields(run.task),
        "Environment": _fields(run.environment),
        "Result": _fields(run.result),
    }
    link = quote(os.fsencode(file))
    return {"link": link, "path": printable(path, MAX_TEXT), "parts": {title: text for title, text in parts.items() if text}}


def _fields(content: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in content.items())


def _evaluations(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return names of metrics, and a row of texts for each evaluation: split, step, epoch, time, metrics."""

    def metrics_of(event: Mapping[str, Any]) -> Mapping[str, Any]:
        metrics = event.get("metrics")
        return metrics if isinstance(metrics, dict) else {}

    names = list(dict.fromkeys(str(name) for event in run.evaluations for name in metrics_of(event)))
    rows = []
    for event in run.evaluations:
        step, epoch, seconds, length = (number(event.get(name)) for name in ("step", "epoch", "seconds", "length"))
        split = str(event.get("split") or event.get("event"))
        row = [
            f"test at {length:,.0f}" if event.get("event") == "length" and length is not None else split,
            "" if step is None else f"{step:,.0f}",
            "" if epoch is None else f"{epoch:.4g}",
            "" if seconds is None else format_duration(seconds),
        ]
        metrics = metrics_of(event)
        for name in names:
            value = number(metrics.get(name))
            missing = "not finite" if name in metrics else ""
            row.append(missing if value is None else f"{value:.4f}" if abs(value) < 100 else fixed(value))
        rows.append(row)
    return names, rows
