"""Tables and figures of ``permuteformer bench``, from the lines of its results files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import linear_regression
from typing import TYPE_CHECKING, Any, NamedTuple

from permuteformer.presets import ROW_TITLES
from permuteformer.report.cells import group_by, significant, slug, times
from permuteformer.report.figure import INK, Figure, Line, draw, line_figure, log_ticks, style
from permuteformer.report.runs import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Record = Mapping[str, Any]
"""A line of a results file."""
Curve = Mapping[int, Record]
"""Records of a row by length."""

MATMUL = "matmul"
"""The row of a large matrix product, which shows the speed of the machine."""
ROOFLINE = "PermuteFormer at the speed of a matrix product"

TITLES = {
    **ROW_TITLES,
    "permuteformer-torch": "PermuteFormer in PyTorch",
    "formula": "formula, eager",
    "formula-performer": "Performer's formula",
    "sdpa": "softmax (SDPA)",
    MATMUL: "matrix product",
    "hf-nystromformer": "HF Nyströmformer",
    "hf-longformer": "HF Longformer",
    "hf-bigbird": "HF BigBird",
    "hf-modernbert": "HF ModernBERT",
    "hf-gpt2": "HF GPT-2",
}


class PlainTable(NamedTuple):
    """A table of texts."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def title(row: str) -> str:
    """Return the title of a row.

    >>> title("permuteformer"), title("permuteformer at 100")
    ('PermuteFormer', 'PermuteFormer at 100')
    """
    name, at, place = row.partition(" at ")
    return TITLES.get(name, name) + at + place


def comparison_tables(records: Iterable[Record]) -> list[PlainTable]:
    """Return for each group of cases: time of a call, its ratio to the first case, extra memory, share of a matrix product's speed."""
    tables = []
    for group, members in _groups(records).items():
        first, matmul = _seconds(members[0]), flops_per_second(members)
        headers = ("", "best ms", "median", "slowest", "ratio", "extra MB", *(["of matmul"] if matmul else []))
        rows = []
        for record in members:
            result, best, speed = record["result"], _seconds(record), _speed(record)
            cells = [str(result["status"])]
            if best is not None:
                milliseconds = (1e3 * value for value in (best, result["seconds_median"], result["seconds_spread"][1]))
                extra = max((result["peak_memory_bytes"] or 0) - (result["ready_memory_bytes"] or 0), 0) / 1e6
                cells = [*map(significant, milliseconds), times(best / first) if first else "", significant(extra)]
                cells += [f"{speed / matmul:.0%}"] if matmul and speed else []
            rows.append((title(record["row"]), *cells, *[""] * (len(headers) - 1 - len(cells))))
        tables.append(PlainTable(f"{members[0]['sweep']}: {group}", headers, tuple(rows)))
    return tables


def comparison_figures(records: Iterable[Record]) -> list[Figure]:
    """Return a figure of the times of each group of cases."""
    figures = []
    for group, members in _groups(records).items():
        shown = [record for record in members if _seconds(record) is not None and record["row"] != MATMUL]
        if shown:
            figures.append(_comparison_figure(str(members[0]["sweep"]), group, shown, flops_per_second(members)))
    return figures


def length_tables(lines: Iterable[Record]) -> list[PlainTable]:
    """Return for each group of curves a table of times, with the exponent of their growth, and one of memory. Rows are lengths."""
    tables = []
    for group, members in _groups(line for line in lines if line["row"] != MATMUL).items():
        curves = _curves(members)
        headers = ("tokens", *(title(row) for row in curves))
        for what, name, factor in (("best time (ms)", "seconds_best", 1e3), ("peak memory of the process (MB)", "peak_memory_bytes", 1e-6)):
            rows = [
                (f"{length:,}", *(_cell(curve.get(length), name, factor) for curve in curves.values()))
                for length in sorted({line["length"] for line in members})
            ]
            if name == "seconds_best":
                rows.append(("power of the length", *map(_exponent, curves.values())))
            tables.append(PlainTable(f"{group}: {what}", headers, tuple(rows)))
    return tables


def length_figures(records: Sequence[Record]) -> list[Figure]:
    """Return time against length, and the time that the operations would take at the speed of a matrix product."""
    speed, figures = flops_per_second(records), []
    for group, members in _groups(records).items():
        curves = {row: curve for row, curve in _curves(members).items() if len(_times(curve)) > 1}
        if not curves:
            continue
        lines = [Line(row, title(row), *zip(*_times(curve).items(), strict=True)) for row, curve in curves.items()]
        ours = next(iter(curves.values()))
        limit = {length: flops / speed for length, record in ours.items() if speed and (flops := number(record["result"]["flops"]))}
        if limit:
            lines.append(Line("limit", ROOFLINE, tuple(limit), tuple(limit.values())))
        ends = [
            f"{title(row)} {record['result']['status']} at {length:,}"
            for row, curve in curves.items()
            for length, record in curve.items()
            if not _seconds(record)
        ]
        caption = "Time of one call against length; both axes are logarithmic." + (f" Lines end: {'; '.join(ends)}." if ends else "")
        name, labels = slug("bench", "scaling", group), ("length (tokens)", "best time (s)")
        figures.append(line_figure(name, f"Time by length: {group}", caption, lines, labels, log_x=True, log_y=True))
    return figures


def flops_per_second(lines: Iterable[Record]) -> float | None:
    """Return the speed of the matrix product among the lines."""
    return next((speed for line in lines if line["row"] == MATMUL and (speed := _speed(line))), None)


def growth(seconds: Mapping[int, float]) -> float:
    """Return the exponent of the length with which times grow: the slope of a line through their logarithms.

    >>> round(growth({1000: 1.0, 2000: 4.0, 4000: 16.0}), 6)
    2.0
    """
    return linear_regression([math.log(n) for n in seconds], [math.log(time) for time in seconds.values()]).slope


def _comparison_figure(sweep: str, group: str, lines: Sequence[Record], speed: float | None) -> Figure:
    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for place, line in enumerate(reversed(lines)):
            color, result = style(line["row"].partition(" at ")[0], place).color, line["result"]
            best, slowest = 1e3 * result["seconds_best"], 1e3 * result["seconds_spread"][1]
            axes.plot([best, slowest], [place, place], color=color, linewidth=1)
            axes.plot([best], [place], color=color, marker="o", markersize=8)
            axes.annotate(significant(best), (best, place), (0, 7), textcoords="offset points", ha="center", fontsize=8)
            if speed and result["flops"]:
                limit = 1e3 * result["flops"] / speed
                axes.plot([limit, limit], [place - 0.3, place + 0.3], color=INK, linewidth=1.5)
        axes.set_yticks(range(len(lines)), [title(line["row"]) for line in reversed(lines)])
        axes.set_xlabel("time of a call (ms)")
        axes.set_xscale("log")
        axes.margins(x=0.1, y=0.15)
        log_ticks(axes.xaxis)
        axes.grid(axis="y", visible=False)

    caption = "Dots are the best time of a call, lines go to the slowest."
    caption += " Vertical strokes are the time of the same operations at the speed of a matrix product." if speed else ""
    return draw(slug("bench", sweep, group), f"{sweep}: {group}", caption, paint, 0.9 + 0.42 * len(lines), width=6.4)


def _groups(lines: Iterable[Record]) -> dict[str, list[Record]]:
    return group_by(lines, lambda line: line["group"])


def _curves(lines: Iterable[Record]) -> dict[str, dict[int, Record]]:
    curves: dict[str, dict[int, Record]] = {}
    for line in lines:
        curves.setdefault(line["row"], {})[line["length"]] = line
    return curves


def _times(curve: Curve) -> dict[int, float]:
    return {length: seconds for length, line in curve.items() if (seconds := _seconds(line))}


def _seconds(line: Record) -> float | None:
    return number(line["result"]["seconds_best"])


def _speed(line: Record) -> float | None:
    """Return the floating-point operations per second."""
    flops, seconds = number(line["result"]["flops"]), _seconds(line)
    return flops / seconds if flops and seconds else None


def _cell(line: Record | None, name: str, factor: float) -> str:
    if line is None:
        return "–"
    value = number(line["result"][name])
    return str(line["result"]["status"]) if value is None else significant(value * factor)


def _exponent(curve: Curve) -> str:
    points = list(_times(curve).items())
    longer = points[len(points) // 2 :]  # there, fixed costs matter little
    return f"{growth(dict(longer)):.2f}" if len(longer) > 1 else ""
