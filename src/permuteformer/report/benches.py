"""Lines of ``permuteformer bench`` as tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from permuteformer.experiments.published import ROW_TITLES
from permuteformer.report.figure import HEIGHT, INK, Figure, draw, legend, legend_height, log_ticks, style
from permuteformer.report.groups import slug
from permuteformer.report.quantities import significant
from permuteformer.report.records import number
from permuteformer.report.table import times

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Line = Mapping[str, Any]

TITLES = {
    **ROW_TITLES,
    "permuteformer-torch": "PermuteFormer in PyTorch",
    "formula": "formula, eager",
    "formula-performer": "Performer's formula",
    "sdpa": "softmax (SDPA)",
    "matmul": "matrix product",
    "hf-nystromformer": "HF Nyströmformer",
    "hf-longformer": "HF Longformer",
    "hf-bigbird": "HF BigBird",
    "hf-modernbert": "HF ModernBERT",
    "hf-gpt2": "HF GPT-2",
}
"""Names of rows for people."""


@dataclass(frozen=True)
class Numbers:
    """A table of plain texts: a title, headers, and rows."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def side_by_side_tables(lines: Iterable[Line]) -> list[Numbers]:
    """A table for each group of cases that took turns.

    Times of a call; their ratio to the first row; the peak of memory above what stood ready; the share of the rate of matrix products.
    """
    return [_compared(f"{lines[0]['sweep']}: {group}", lines) for group, lines in _groups(lines).items()]


def length_tables(lines: Iterable[Line]) -> list[Numbers]:
    """For each group of curves, a row a length: times, and the power of the length that they grow with; and the peaks of memory."""
    tables = []
    for group, of_it in _groups(line for line in lines if line["row"] != "matmul").items():
        lengths = sorted({line["length"] for line in of_it})
        curves = _rows(of_it)
        headers = ("tokens", *(title(row) for row, _ in curves))
        for what, name, factor in (("best time (ms)", "seconds_best", 1e3), ("peak memory of the process (MB)", "peak_memory_bytes", 1e-6)):
            rows = [(f"{length:,}", *(_cell(found.get(length), name, factor) for _, found in curves)) for length in lengths]
            if name == "seconds_best":
                rows.append(("power of the length", *(_exponent(found) for _, found in curves)))
            tables.append(Numbers(f"{group}: {what}", headers, tuple(rows)))
    return tables


def length_figures(lines: Iterable[Line], flops_per_second: float | None = None) -> list[Figure]:
    """Time against length on logarithmic axes; dashed, what the work would take at the machine's rate of matrix products."""
    figures = []
    for group, of_it in _groups(lines).items():
        rows = [(row, found) for row, found in _rows(of_it) if len(_times(found)) > 1]
        if rows:
            figures.append(_by_length(group, rows, flops_per_second))
    return figures


def side_by_side_figures(lines: Iterable[Line]) -> list[Figure]:
    """Best times of the cases of each group, up to the slowest; and where the machine's rate of matrix products would end."""
    figures = []
    for group, of_it in _groups(lines).items():
        shown = [line for line in of_it if number(line["result"]["seconds_best"]) is not None and line["row"] != "matmul"]
        if shown:
            figures.append(_side_by_side(str(of_it[0]["sweep"]), group, shown, rate_of(of_it)))
    return figures


def rate_of(lines: Iterable[Line]) -> float | None:
    """Floating-point operations a second of the matrix product among the lines."""
    return next((rate for line in lines if line["row"] == "matmul" and (rate := _rate(line))), None)


def title(row: str) -> str:
    """A row's name for people.

    >>> title("permuteformer"), title("permuteformer at 100")
    ('PermuteFormer', 'PermuteFormer at 100')
    """
    name, at, place = row.partition(" at ")
    return TITLES.get(name, name) + at + place


def _compared(name: str, lines: Sequence[Line]) -> Numbers:
    first, matmul = _seconds(lines[0]), rate_of(lines)
    headers = ("", "best ms", "median", "slowest", "ratio", "extra MB")
    rows = []
    for line in lines:
        result, best = line["result"], _seconds(line)
        if best is None:
            rows.append((title(line["row"]), str(result["status"]), *[""] * (5 if matmul else 4)))
            continue
        ratio = times(best / first) if first else ""
        extra = max((result["peak_memory_bytes"] or 0) - (result["ready_memory_bytes"] or 0), 0) / 1e6
        seconds = (best, result["seconds_median"], result["seconds_spread"][1])
        row = (title(line["row"]), *(significant(1e3 * value) for value in seconds), ratio, significant(extra))
        rate = _rate(line)
        rows.append((*row, *([f"{rate / matmul:.0%}" if rate else ""] if matmul else [])))
    return Numbers(name, (*headers, *(["of rate"] if matmul else [])), tuple(rows))


def _by_length(group: str, rows: Sequence[tuple[str, Mapping[int, Line]]], flops_per_second: float | None) -> Figure:
    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for place, (row, found) in enumerate(rows):
            points, look = _times(found), style(row, place)
            axes.plot(list(points), list(points.values()), label=title(row), color=look.color, linestyle=look.dashes, marker=look.marker)
        limit = _limit(rows[0][1], flops_per_second)
        if limit:
            axes.plot(list(limit), list(limit.values()), label=ROOFLINE, color=INK, linestyle=(0, (1, 2)), linewidth=1)
        log_ticks(axes.xaxis, base_two=True)
        log_ticks(axes.yaxis)
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel("best time (s)")
        legend(canvas, axes)

    labels = [title(row) for row, _ in rows] + ([ROOFLINE] if flops_per_second else [])
    last = [(row, length, line["result"]) for row, found in rows for length, line in found.items() if not _seconds(line)]
    ended = [f"{title(row)} {result['status']} at {length:,}" for row, length, result in last]
    caption = "Time of one call against length, both logarithmic." + (f" Lines end: {'; '.join(ended)}." if ended else "")
    return draw(slug("bench", "scaling", group), f"Time by length: {group}", caption, paint, HEIGHT + legend_height(labels))


ROOFLINE = "PermuteFormer's work as matrix products"


def _side_by_side(sweep: str, group: str, lines: Sequence[Line], flops_per_second: float | None) -> Figure:
    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for place, line in enumerate(reversed(lines)):
            look, result = style(line["row"].partition(" at ")[0], place), line["result"]
            best, slowest = 1e3 * result["seconds_best"], 1e3 * result["seconds_spread"][1]
            axes.plot([best, slowest], [place, place], color=look.color, linewidth=1)
            axes.plot([best], [place], color=look.color, marker="o", markersize=8)
            axes.annotate(f"{significant(best)}", (best, place), (0, 7), textcoords="offset points", ha="center", fontsize=8)
            if flops_per_second and result["flops"]:
                limit = 1e3 * result["flops"] / flops_per_second
                axes.plot([limit, limit], [place - 0.3, place + 0.3], color=INK, linewidth=1.5)
        axes.set_yticks(range(len(lines)), [title(line["row"]) for line in reversed(lines)])
        axes.set_xlabel("time of a call (ms)")
        axes.set_xscale("log")
        axes.margins(x=0.1, y=0.15)
        log_ticks(axes.xaxis)
        axes.grid(axis="y", visible=False)

    caption = "Best time of a call; a line goes up to the slowest."
    caption += " A stroke is where the work would end at the machine's rate of matrix products." if flops_per_second else ""
    return draw(slug("bench", sweep, group), f"{sweep}: {group}", caption, paint, 0.9 + 0.42 * len(lines), width=6.4)


def _limit(found: Mapping[int, Line], flops_per_second: float | None) -> dict[int, float]:
    if not flops_per_second:
        return {}
    work = {length: number(line["result"]["flops"]) for length, line in found.items()}
    return {length: flops / flops_per_second for length, flops in work.items() if flops}


def _groups(lines: Iterable[Line]) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["group"], []).append(line)
    return groups


def _rows(lines: Iterable[Line]) -> list[tuple[str, dict[int, Line]]]:
    rows: dict[str, dict[int, Line]] = {}
    for line in lines:
        rows.setdefault(line["row"], {})[line["length"]] = line
    return list(rows.items())


def _seconds(line: Line) -> float | None:
    return number(line["result"]["seconds_best"])


def _times(found: Mapping[int, Line]) -> dict[int, float]:
    return {length: seconds for length, line in found.items() if (seconds := _seconds(line))}


def _rate(line: Line) -> float | None:
    flops, seconds = number(line["result"]["flops"]), _seconds(line)
    return flops / seconds if flops and seconds else None


def _cell(line: Line | None, name: str, factor: float, show: Callable[[float], str] = significant) -> str:
    if line is None:
        return "–"
    value = number(line["result"][name])
    return str(line["result"]["status"]) if value is None else show(value * factor)


def _exponent(found: Mapping[int, Line]) -> str:
    points = list(_times(found).items())
    points = points[len(points) // 2 :]  # what is done once counts for little there
    return f"{growth(dict(points)):.2f}" if len(points) > 1 else ""


def growth(times: Mapping[int, float]) -> float:
    """The power of the length that times grow with: a line fitted to their logarithms.

    >>> round(growth({1000: 1.0, 2000: 4.0, 4000: 16.0}), 6)
    2.0
    """
    points = [(math.log(length), math.log(seconds)) for length, seconds in times.items()]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return float(sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points))
