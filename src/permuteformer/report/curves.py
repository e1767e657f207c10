"""Figures of tables: test results as bars, learning curves, and numbers by length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING

from permuteformer.experiments.published import FIGURE2
from permuteformer.presets import ROW_TITLES
from permuteformer.report.cells import Group, baselines_of, metric_of, metric_quantity, shorten, slug
from permuteformer.report.figure import INK, Figure, Line, draw, line_figure, style
from permuteformer.report.runs import Run, number
from permuteformer.report.tables import Table, by_column, capitalized

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Point = tuple[float, float, float]
"""Step, x and y."""


def training_figures(table: Table) -> list[Figure]:
    """Return for each task of a table: test results, the metric by epoch, the loss by step; for language models also by time."""
    figures: list[Figure] = []
    for column, groups in by_column(group for group in table.groups if group.first.kind == "training").items():
        title, name, quantity = groups[0].column_title, slug(table.name, column), metric_quantity(groups[0].first)
        validation, is_lm = f"validation {quantity.title}", quantity.name.startswith("perplexity")
        figures += [] if is_lm else _bars(table, groups, name)
        by_epoch = lines_of(groups, lambda run: _validations(run, "epoch"))
        figures += _curves(f"{name}-by-epoch", f"{title}: {quantity.name} by epoch", by_epoch, ("epoch", validation), log_y=is_lm)
        if is_lm:
            figures += _published_curves(f"{name}-paper", groups)
            minutes = lines_of(groups, lambda run: _validations(run, "seconds", 1 / 60))
            axes = ("training time (minutes)", validation)
            figures += _curves(f"{name}-by-time", f"{title}: {quantity.name} by training time", minutes, axes, log_y=True)
        losses = lines_of(groups, lambda run: ((step, step, loss) for step, loss, _ in run.losses))
        axes = ("step (updates)", f"training loss ({'nats per token' if is_lm else 'nats'})")
        figures += _curves(f"{name}-loss", f"{title}: loss by step", losses, axes, markers=False)
    return figures


def length_figures(table: Table) -> list[Figure]:
    """Return a table over lengths as lines on logarithmic axes. Failed runs are crosses at the top."""
    lines, failed = [], []
    for row in table.rows:
        cells = [(table.lengths[column.name], table.cell(row, column)) for column in table.columns if column.name in table.lengths]
        failed += [(row.name, row.leads[0], length, cell.text) for length, cell in cells if cell.mean is None and cell.text]
        points = [(length, cell.mean, cell.deviation or 0.0) for length, cell in cells if cell.mean is not None and cell.mean > 0]
        if points:
            x, y, deviation = zip(*points, strict=True)
            low = tuple(max(mean - spread, mean / 10) for mean, spread in zip(y, deviation, strict=True))
            high = tuple(mean + spread for mean, spread in zip(y, deviation, strict=True))
            lines.append(Line(row.name, row.leads[0], x, y, low, high))
    if not any(len(line.x) > 1 for line in lines):
        return []
    values = [value for line in lines for value in line.y]
    is_log = max(values) > 1.5 * min(values)  # a logarithmic axis would exaggerate small differences
    places = {line.row: place for place, line in enumerate(lines)}

    def finish(axes: Axes) -> None:
        if not is_log:
            axes.set_ylim(bottom=0)
        top = axes.get_ylim()[1]
        for row, _, length, _ in failed:
            color = style(row, places.get(row, len(lines))).color
            axes.plot([length], [top], marker="x", markersize=8, markeredgewidth=2, color=color, clip_on=False, zorder=5)
        axes.set_ylim(top=top)

    caption = f"{capitalized(table.axes[1])} against length; {'both axes are' if is_log else 'the axis of length is'} logarithmic."
    caption += " Bands are one standard deviation over seeds." if any(line.has_range for line in lines) else ""
    failures = "; ".join(f"{title} at {length:,.0f}: {text}" for _, title, length, text in failed)
    caption += f" Crosses at the top: {failures}." if failed else ""
    return [line_figure(slug(table.name, "figure"), table.title, caption, lines, table.axes, log_x=True, log_y=is_log, finish=finish)]


def lines_of(groups: Iterable[Group], points: Callable[[Run], Iterable[Point]]) -> list[Line]:
    """Return a line for each group: the mean over seeds of the points with the same step, and their range."""
    lines = []
    for group in groups:
        by_step: dict[float, list[tuple[float, float]]] = {}
        for run in group.runs:
            for step, x, y in points(run):
                by_step.setdefault(step, []).append((x, y))
        if by_step:
            by_seed = [zip(*by_step[step], strict=True) for step in sorted(by_step)]
            statistics = zip(*((fmean(xs), fmean(ys), min(ys), max(ys)) for xs, ys in by_seed), strict=True)
            lines.append(Line(group.row, group.row_title, *statistics))
    return lines


def _validations(run: Run, x_name: str, factor: float = 1.0) -> Iterator[Point]:
    """Yield the metric on the validation split."""
    for event in run.evaluations:
        if event.get("event") == "evaluation":
            step, x, y = number(event.get("step")), number(event.get(x_name)), metric_of(run, event.get("metrics"))
            if step is not None and x is not None and y is not None:
                yield step, x * factor, y


def _curves(
    name: str, title: str, lines: Sequence[Line], labels: tuple[str, str], *, log_y: bool = False, markers: bool = True
) -> list[Figure]:
    """Return a figure if a line has more than one point."""
    caption = f"{capitalized(labels[1])} against {labels[0]}."
    if any(line.has_range for line in lines):
        caption += " Lines are means over seeds, bands their range."
    is_drawn = any(len(line.x) > 1 for line in lines)
    return [line_figure(name, title, caption, lines, labels, log_y=log_y, markers=markers)] if is_drawn else []


def _bars(table: Table, groups: Sequence[Group], name: str) -> list[Figure]:
    """Return test results as bars, the paper's as diamonds, and baselines as lines."""
    first, title = groups[0].first, groups[0].column_title
    quantity, bars = metric_quantity(first), [(group, table.cell_of_group(group)) for group in groups]
    if sum(cell.mean is not None for _, cell in bars) < 2:
        return []

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for place, (group, cell) in enumerate(bars):
            color = style(group.row, place).color
            axes.barh(place, cell.mean or 0.0, color=color, alpha=0.8, height=0.62, xerr=cell.deviation, ecolor=INK, capsize=2.5)
            if cell.mean is None:
                axes.annotate(cell.text, (0, place), (5, 0), textcoords="offset points", va="center", fontstyle="italic")
            if cell.paper:
                axes.plot(cell.paper[0], place, "D", markersize=5.5, markerfacecolor="white", markeredgecolor=INK, label="the paper")
        for i, (baseline, value) in enumerate(baselines_of(first).items()):
            axes.axvline(value, color=INK, linestyle=(":", "--", "-.")[i % 3], linewidth=1, label=f"{shorten(baseline, 50)} (no model)")
        axes.set_yticks(range(len(bars)), [fill(group.row_title, 32, max_lines=2, placeholder="…") for group, _ in bars])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"test {quantity.title}")
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        if unique:
            canvas.legend(list(unique.values()), list(unique), loc="outside lower center", ncols=2 if sum(map(len, unique)) < 50 else 1)

    caption = f"Test {quantity.title} on {title}"
    caption += "; whiskers are one standard deviation over seeds." if any(cell.deviation for _, cell in bars) else "."
    caption += " Diamonds are the paper's." if any(cell.paper for _, cell in bars) else ""
    return [draw(f"{name}-bars", f"{title}: {quantity.name}", caption, paint, 1.1 + 0.32 * len(bars))]


def _published_curves(name: str, groups: Sequence[Group]) -> list[Figure]:
    """Return the paper's Figure 2 for these rows."""
    found = {group.row: FIGURE2[group.row] for group in groups if group.table == "4" and group.row in FIGURE2}
    lines = [Line(row, ROW_TITLES[row], tuple(range(1, len(values) + 1)), values) for row, values in found.items()]
    return _curves(name, "The paper's Figure 2: WikiText-103", lines, ("epoch", "test perplexity in the paper"), log_y=True)
