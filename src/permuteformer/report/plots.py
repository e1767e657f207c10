"""Figures of numbers: what models learn over time, how they end, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING

from permuteformer.experiments.published import FIGURE2, ROW_TITLES
from permuteformer.report.figure import HEIGHT, INK, Figure, Style, draw, legend, legend_height, log_ticks, style
from permuteformer.report.groups import Group, shorten, slug
from permuteformer.report.quantities import metric_of, metric_quantity
from permuteformer.report.records import Record, number
from permuteformer.report.table import Table, by_column, sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Point = tuple[float, float, float]
"""Step, x, y."""


@dataclass(frozen=True)
class Line:
    """One row's points: their mean over seeds, and how far seeds are apart."""

    row: str
    title: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def figures_of_runs(table: Table) -> list[Figure]:
    """Of each task of a table: bars, the metric by epoch and by time, and the loss by step; and the paper's Figure 2 beside ours."""
    figures: list[Figure] = []
    for column, groups in by_column(group for group in table.groups if group.first.kind == "training").items():
        title, first = groups[0].column_title, groups[0].first
        name = slug(table.name, column)
        quantity = metric_quantity(first)
        perplexity = first.metric == "perplexity"
        what = f"validation {quantity.title}"
        figures += [] if perplexity else _bars(table, groups, name)
        curves = _lines(groups, lambda record: _evaluated(record, "epoch"))
        figures += _curves(f"{name}-by-epoch", f"{title}: {quantity.name} by epoch", curves, ("epoch", what), log_y=perplexity)
        if groups[0].table == "4" and set(FIGURE2) & {group.row for group in groups}:
            figures.append(_figure2(f"{name}-paper", {group.row for group in groups}))
        if perplexity:
            minutes = _lines(groups, lambda record: _evaluated(record, "seconds", 1 / 60))
            figures += _curves(
                f"{name}-by-time", f"{title}: {quantity.name} by training time", minutes, ("training time (minutes)", what), log_y=True
            )
        losses = _lines(groups, lambda record: ((step, step, loss) for step, loss, _ in record.losses))
        unit = "nats a token" if first.task.get("kind") == "lm" else "nats"
        figures += _curves(
            f"{name}-loss", f"{title}: loss by step", losses, ("step (updates)", f"training loss ({unit})"), log_y=False, markers=False
        )
    return figures


def figures_by_length(table: Table) -> list[Figure]:
    """A table whose columns are lengths, as lines on logarithmic axes; what ran out of memory is a cross at the top."""
    lines, failed = [], []
    for row in table.rows:
        cells = [(table.lengths[column.name], table.cell(row, column)) for column in table.columns if column.name in table.lengths]
        there = [(length, cell.mean, cell.deviation or 0.0) for length, cell in cells if cell.mean is not None and cell.mean > 0]
        failed += [(row.name, row.leads[0], length, cell.text) for length, cell in cells if cell.mean is None and cell.text]
        if there:
            x, y, spread = zip(*there, strict=True)
            low = tuple(max(m - s, m / 10) for m, s in zip(y, spread, strict=True))
            lines.append(Line(row.name, row.leads[0], x, y, low, tuple(m + s for m, s in zip(y, spread, strict=True))))
    if not any(len(line.x) > 1 for line in lines):
        return []
    every = [value for line in lines for value in line.y]
    steep = max(every) > 1.5 * min(every)  # what hardly changes would look steep by itself

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log" if steep else "linear")
        _draw_lines(axes, lines)
        if not steep:
            axes.set_ylim(bottom=0)
        top = axes.get_ylim()[1]
        for row, _, length, _ in failed:
            axes.plot([length], [top], marker="x", markersize=8, markeredgewidth=2, color=_style(row, lines).color, clip_on=False, zorder=5)
        axes.set_ylim(top=top)
        log_ticks(axes.xaxis, base_two=True)
        if steep:
            log_ticks(axes.yaxis)
        axes.set_xlabel(table.axes[0])
        axes.set_ylabel(table.axes[1])
        legend(canvas, axes)

    told = "; ".join(f"{title} at {length:,.0f}: {text}" for _, title, length, text in failed)
    caption = f"{sentence(table.axes[1])} against length, {'both' if steep else 'the latter'} logarithmic."
    caption += " Bands are one standard deviation over seeds." if any(line.low != line.high for line in lines) else ""
    caption += f" Crosses at the top: {told}." if told else ""
    titles = [line.title for line in lines]
    return [draw(slug(table.name, "figure"), table.title, caption, paint, HEIGHT + legend_height(titles))]


def _curves(name: str, title: str, lines: Sequence[Line], labels: tuple[str, str], *, log_y: bool, markers: bool = True) -> list[Figure]:
    if not any(len(line.x) > 1 for line in lines):
        return []

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        if log_y:
            axes.set_yscale("log")
        _draw_lines(axes, lines, markers=markers)
        if log_y:
            log_ticks(axes.yaxis)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.margins(x=0.02)
        legend(canvas, axes)

    spread = any(low != high for line in lines for low, high in zip(line.low, line.high, strict=True))
    caption = f"{sentence(labels[1])} against {labels[0]}."
    caption += " Lines are means over seeds, bands go from the lowest to the highest." if spread else ""
    return [draw(name, title, caption, paint, HEIGHT + legend_height([line.title for line in lines]))]


def _draw_lines(axes: Axes, lines: Sequence[Line], *, markers: bool = True) -> None:
    for line in lines:
        look = _style(line.row, lines)
        every = max(1, len(line.x) // 8)
        axes.plot(
            line.x,
            line.y,
            label=line.title,
            color=look.color,
            linestyle=look.dashes,
            marker=look.marker if markers else None,
            markevery=every,
            linewidth=1.6 if markers else 1.1,
        )
        if line.low != line.high:
            axes.fill_between(line.x, line.low, line.high, color=look.color, alpha=0.15, linewidth=0)


def _bars(table: Table, groups: Sequence[Group], name: str) -> list[Figure]:
    """The last numbers of a task as bars, with the paper's as diamonds, and what needs no model as a dotted line."""
    quantity, title = metric_quantity(groups[0].first), groups[0].column_title
    rows = [(group, table.cell_of_group(group)) for group in groups]
    if sum(cell.mean is not None for _, cell in rows) < 2:
        return []
    factor = 100 if quantity.unit == "%" else 1
    given = groups[0].first.task.get("baselines")
    baselines = {word: value for word, entry in given.items() if (value := number(entry)) is not None} if isinstance(given, dict) else {}

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for place, (group, cell) in enumerate(rows):
            color = style(group.row, place).color
            axes.barh(place, cell.mean or 0.0, color=color, alpha=0.8, height=0.62, xerr=cell.deviation, ecolor=INK, capsize=2.5)
            if cell.mean is None:
                axes.annotate(cell.text, (0, place), (5, 0), textcoords="offset points", va="center", fontstyle="italic")
            if cell.paper:
                axes.plot(
                    cell.paper[0],
                    place,
                    marker="D",
                    markersize=5.5,
                    markerfacecolor="white",
                    markeredgecolor=INK,
                    linestyle="none",
                    label="the paper",
                )
        for i, (word, value) in enumerate(baselines.items()):
            dashes = (":", "--", "-.")[i % 3]
            axes.axvline(value * factor, color=INK, linestyle=dashes, linewidth=1, label=f"{shorten(str(word), 50)} (no model)")
        axes.set_yticks(range(len(rows)), [fill(group.row_title, 32, max_lines=2, placeholder="…") for group, _ in rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"test {quantity.title}")
        handles, labels = axes.get_legend_handles_labels()
        chosen = dict(zip(labels, handles, strict=True))
        if chosen:
            columns = 2 if sum(map(len, chosen)) < 50 else 1
            canvas.legend(list(chosen.values()), list(chosen), loc="outside lower center", ncols=columns)

    caption = f"Test {quantity.title} on {title}"
    caption += "; whiskers are one standard deviation over seeds." if any(cell.deviation for _, cell in rows) else "."
    caption += " Diamonds are the paper's." if any(cell.paper for _, cell in rows) else ""
    return [draw(f"{name}-bars", f"{title}: {quantity.name}", caption, paint, 1.1 + 0.32 * len(rows))]


def _figure2(name: str, rows: set[str]) -> Figure:
    lines = []
    for row, values in FIGURE2.items():
        if row in rows:
            lines.append(Line(row, ROW_TITLES[row], tuple(range(1, len(values) + 1)), values, values, values))
    title = "The paper's Figure 2: WikiText-103"
    (figure,) = _curves(name, title, lines, ("epoch", "test perplexity"), log_y=True)
    return replace(figure, caption="Test perplexity against epoch as the paper has it, for the rows that were run here.")


def _lines(groups: Iterable[Group], points: Callable[[Record], Iterable[Point]]) -> list[Line]:
    """A line for each group; points of the same step of different seeds are one."""
    lines = []
    for group in groups:
        steps: dict[float, list[tuple[float, float]]] = {}
        for record in group.records:
            for step, x, y in points(record):
                steps.setdefault(step, []).append((x, y))
        if steps:
            ordered = [steps[step] for step in sorted(steps)]
            mean_x, mean_y = (tuple(fmean(point[axis] for point in of_it) for of_it in ordered) for axis in (0, 1))
            low, high = (tuple(choose(point[1] for point in of_it) for of_it in ordered) for choose in (min, max))
            lines.append(Line(group.row, group.row_title, mean_x, mean_y, low, high))
    return lines


def _evaluated(record: Record, x_name: str, factor: float = 1.0) -> Iterator[Point]:
    """The metric on the validation split."""
    for event in record.evaluations:
        if event.get("event") == "evaluation":
            step, x, y = number(event.get("step")), number(event.get(x_name)), metric_of(record, event.get("metrics"))
            if step is not None and x is not None and y is not None:
                yield step, x * factor, y


def _style(row: str, lines: Sequence[Line]) -> Style:
    place = next((i for i, line in enumerate(lines) if line.row == row), len(lines))
    return style(row, place)
