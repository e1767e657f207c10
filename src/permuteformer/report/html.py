"""The report as one page that needs nothing beside it: styles, script and figures are in it, and nothing is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from permuteformer.report.content import TITLE, Report, Section, environments, relative, run_line
from permuteformer.report.figure import Figure
from permuteformer.report.groups import Group
from permuteformer.report.quantities import fixed
from permuteformer.report.records import LONGEST_TEXT, Record, number
from permuteformer.report.table import Cell, Table
from permuteformer.texts import printable
from permuteformer.version import __version__
from permuteformer.words import duration


def page(report: Report, output: str | os.PathLike[str]) -> str:
    """The whole page. ``output`` is the folder where it will stand: paths of runs are told from there."""
    style, script = (files("permuteformer.report").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The page may run this one script and load nothing: what slips into a text can do no harm.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    links = [(section.anchor, section.title) for section in report.sections] + [("environments", "Environments"), ("runs", "Runs")]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(TITLE)}</title>\n<style>{style}</style>\n</head>\n<body>",
            f'<header><h1>{escape(TITLE)}</h1><button id="theme" type="button" hidden>Dark</button>',
            f"<p>{escape(report.summary)}</p></header>",
            "<main>",
            f'<nav aria-label="Contents"><ul>{"".join(f"<li>{_link(anchor, title)}</li>" for anchor, title in links)}</ul></nav>',
            _left_out(report.left_out),
            *(_section(section) for section in report.sections),
            _environments(report.records),
            _runs(report.groups, output),
            "</main>",
            f"<footer>Made by permuteformer {escape(__version__)}. A number leads to its runs; a header sorts.</footer>",
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _section(section: Section) -> str:
    parts = [f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>']
    if section.table is not None:
        parts.append(_table(section.table))
    if section.figures:
        parts.append(f'<div class="figures">{"".join(map(_figure, section.figures))}</div>')
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    headers = [_header(title) for title in table.leads] + [_header(column.title, "value") for column in table.columns]
    rows = []
    for row in table.rows:
        leads = "".join(f'<th scope="row" class="{"short" if len(lead) <= 20 else ""}">{escape(lead)}</th>' for lead in row.leads)
        rows.append(f"<tr>{leads}{''.join(_cell(table.cell(row, column)) for column in table.columns)}</tr>")
    parts = [
        f'<p class="caption">{escape(table.caption)}</p>',
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table class="sortable">',
        f"<thead><tr>{''.join(headers)}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table></div>",
    ]
    if table.agreement is not None:
        parts.append(f'<p class="verdict">{escape(table.agreement.sentence)}</p>')
        if len(table.agreement.reversed_pairs) > 3:
            pairs = "".join(f"<li>{escape(pair)}</li>" for pair in table.agreement.reversed_pairs)
            parts.append(f"<details><summary>All pairs that stand the other way round</summary><ul>{pairs}</ul></details>")
    if table.notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in table.notes)}</ul>')
    return "\n".join(parts)


def _header(title: str, kind: str = "") -> str:
    return f'<th scope="col" aria-sort="none" class="{kind}"><button type="button">{escape(title)}</button></th>'


def _cell(cell: Cell) -> str:
    kind = "value best" if cell.best else "value failed" if cell.text and cell.mean is None else "value"
    value = "" if cell.mean is None else repr(cell.mean)
    shown = escape(cell.text) or "–"
    parts = [f'<a href="#{cell.anchor}">{shown}</a>' if cell.anchor else f"<span>{shown}</span>"]
    if cell.detail:
        parts.append(f" <small>{escape(cell.detail)}</small>")
    parts += [f'<small class="under">{escape(line)}</small>' for line in cell.under]
    return f'<td class="{kind}" data-value="{value}">{"".join(parts)}</td>'


def _figure(figure: Figure) -> str:
    saved = " ".join(f'<a href="figures/{figure.name}.{kind}">{kind.upper()}</a>' for kind in ("svg", "png"))
    caption = f'<strong>{escape(figure.title)}</strong>{escape(figure.caption)} <span class="files">{saved}</span>'
    return f'<figure id="{figure.name}"><figcaption>{caption}</figcaption>{figure.svg}</figure>'


def _left_out(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return f'<div class="left-out"><ul>{"".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)}</ul></div>'


def _environments(records: Sequence[Record]) -> str:
    items = "".join(f"<li>{count} run{'s' if count > 1 else ''}: {escape(where)}</li>" for where, count in environments(records))
    return f'<section id="environments"><h2>Environments</h2><ul class="notes">{items}</ul></section>'


def _runs(groups: Sequence[Group], output: str | os.PathLike[str]) -> str:
    parts = []
    for group in groups:
        runs = "".join(_run(record, output) for record in group.records)
        parts.append(f'<section id="{group.anchor}"><h3>{escape(group.title)}</h3>{runs}</section>')
    return f'<section id="runs" class="runs"><h2>Runs</h2>{"".join(parts)}</section>'


def _run(record: Record, output: str | os.PathLike[str]) -> str:
    where = relative(record.path, output)
    file = where.rpartition(":")[0] if record.path.rpartition(":")[0].endswith(".jsonl") else where
    parts = [
        f'<p>{escape(record.run)}: <a href="{quote(os.fsencode(file))}"><code>{escape(printable(where, LONGEST_TEXT))}</code></a></p>',
        f"<h4>Command</h4><pre>{escape(record.command)}</pre>" if record.command else "",
        _data("Experiment" if record.kind == "training" else "Measurement", record.work),
        _data("Model", record.config),
        _data("Task", record.task),
        _data("Environment", record.environment),
        _data("Result", record.result),
        _evaluations(record),
    ]
    return f"<details><summary>{escape(run_line(record))}</summary>{''.join(parts)}</details>"


def _data(title: str, content: Mapping[str, Any]) -> str:
    return f"<h4>{title}</h4><pre>{escape(compact(content))}</pre>" if content else ""


def compact(content: Mapping[str, Any]) -> str:
    """One field a line."""
    return "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in content.items())


def _evaluations(record: Record) -> str:
    if not record.evaluations:
        return ""
    metrics = list(dict.fromkeys(str(name) for event in record.evaluations for name in _metrics(event)))
    headers = "".join(f'<th scope="col">{escape(title)}</th>' for title in ("split", "step", "epoch", "time", *metrics))
    rows = "".join(f"<tr>{''.join(_evaluation(event, metrics))}</tr>" for event in record.evaluations)
    return (
        '<h4>Evaluations</h4><div class="scroll" tabindex="0" role="region" aria-label="Evaluations">'
        f"<table><thead><tr>{headers}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _evaluation(event: Mapping[str, Any], metrics: Sequence[str]) -> Iterable[str]:
    step, epoch, seconds, length = (number(event.get(name)) for name in ("step", "epoch", "seconds", "length"))
    split = str(event.get("split") or event.get("event"))
    if event.get("event") == "length" and length is not None:
        split = f"test at {length:,.0f}"
    yield f"<td>{escape(split)}</td>"
    yield f'<td class="value">{"" if step is None else f"{step:,.0f}"}</td>'
    yield f'<td class="value">{"" if epoch is None else f"{epoch:.4g}"}</td>'
    yield f'<td class="value">{"" if seconds is None else duration(seconds)}</td>'
    for name in metrics:
        value = number(_metrics(event).get(name))
        told = "not finite" if name in _metrics(event) else ""
        yield f'<td class="value">{told if value is None else f"{value:.4f}" if abs(value) < 100 else fixed(value)}</td>'


def _metrics(event: Mapping[str, Any]) -> Mapping[str, Any]:
    metrics = event.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def _link(anchor: str, title: str) -> str:
    return f'<a href="#{anchor}">{escape(title)}</a>'
