"""Drawing one figure with matplotlib: an SVG in the colours of the page around it, and a PNG."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from permuteformer.report.cells import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Canvas

INK = "#1a1b1c"
"""Colour of text and axes. In the page it becomes the colour of the page's text."""
WIDTH, HEIGHT = 5.0, 3.2
"""Inches; narrow enough to be read on a phone."""
LEGEND_LINE = 0.2
LABEL_LENGTH = 48
BLUE, SKY, GREEN, VERMILION, PURPLE, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#e69f00"
"""The colours of Okabe and Ito, which people with a colour vision deficiency can distinguish."""


class Style(NamedTuple):
    """The line of a row."""

    color: str
    dashes: Any
    marker: str


_STYLES = {
    "transformer": Style(INK, "-", "o"),
    "transformer-sinusoidal": Style(INK, "--", "s"),
    "reformer": Style(ORANGE, "-", "v"),
    "linformer": Style(ORANGE, "--", "<"),
    "nystromformer": Style(PURPLE, "--", ">"),
    "performer": Style(VERMILION, "-", "^"),
    "roformer": Style(PURPLE, "-", "P"),
    "permuteformer": Style(BLUE, "-", "D"),
    "permuteformer-decay": Style(GREEN, "-", "d"),
    "permuteformer-1d": Style(SKY, "-.", "X"),
    "permuteformer-orthogonal": Style(GREEN, ":", "*"),
    "performer-t5": Style(VERMILION, "--", "p"),
    "transformer-lm": Style(INK, "-", "o"),
    "performer-lm": Style(VERMILION, "--", "^"),
    "permuteformer-lm": Style(BLUE, "-", "D"),
    "permuteformer-lm-no-decay": Style(SKY, "-.", "X"),
    "permuteformer-lm-no-permutation": Style(GREEN, ":", "s"),
    "limit": Style(INK, (0, (1, 2)), ""),
}
_COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK)
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label with $ is not a formula
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.alpha": 0.14,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid", "hatch")},
    **{f"axes.{part}": INK for part in ("edgecolor", "labelcolor", "titlecolor")},
}


@dataclass(frozen=True)
class Figure:
    """A figure with its title and caption."""

    name: str
    """Unique in a report: the name of its files and its id in the page."""
    title: str
    caption: str
    svg: str
    """An ``<svg>`` element for a page."""
    png: bytes

    @property
    def svg_file(self) -> str:
        """The SVG as a file, on white."""
        return '<?xml version="1.0" encoding="utf-8"?>\n' + self.svg.replace('style="', f'style="color:{INK};background:#fff;', 1) + "\n"


def style(row: str, place: int) -> Style:
    """Return the style of a row: the paper's rows look the same in all figures, others depend on their place."""
    color = _COLORS[place % len(_COLORS)]
    return _STYLES.get(row) or Style(color, _DASHES[(place // len(_COLORS) + place) % len(_DASHES)], _MARKERS[place % len(_MARKERS)])


def draw(name: str, title: str, caption: str, paint: Callable[[Canvas], None], height: float = HEIGHT, width: float = WIDTH) -> Figure:
    """Return the figure that ``paint`` draws on an empty canvas."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")  # in the page, another font has it
        canvas = Canvas(figsize=(width, height), layout="constrained")
        paint(canvas)
        svg, png = io.StringIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        canvas.set_layout_engine("none")  # the layout is the same, and slow to compute
        canvas.savefig(png, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return Figure(name, title, caption, _page_svg(svg.getvalue(), name, title), png.getvalue())


@dataclass(frozen=True)
class Line:
    """A line of a row, and its range, such as that over seeds."""

    row: str
    title: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def has_range(self) -> bool:
        """Whether low and high differ."""
        return self.low != self.high


def line_figure(
    name: str,
    title: str,
    caption: str,
    lines: Sequence[Line],
    labels: tuple[str, str],
    *,
    log_x: bool = False,
    log_y: bool = False,
    markers: bool = True,
    finish: Callable[[Axes], None] | None = None,
) -> Figure:
    """Draw lines with a legend. ``log_x`` is by powers of two; ``finish`` paints more, before ticks are set."""

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        if log_x:
            axes.set_xscale("log", base=2)
        if log_y:
            axes.set_yscale("log")
        for place, line in enumerate(lines):
            look, every = style(line.row, place), max(1, len(line.x) // 8)
            offset = place * every // len(lines)  # lines that coincide have their markers at different places
            marked: dict[str, Any] = {"marker": look.marker, "markevery": (offset, every)} if markers else {"linewidth": 1.1}
            axes.plot(line.x, line.y, label=line.title, color=look.color, linestyle=look.dashes, **marked)
            if line.has_range:
                axes.fill_between(line.x, line.low, line.high, color=look.color, alpha=0.15, linewidth=0)
        if not log_x:
            axes.margins(x=0.02)
        if finish is not None:
            finish(axes)
        if log_x:
            log_ticks(axes.xaxis, base_two=True)
        if axes.get_yscale() == "log":
            log_ticks(axes.yaxis)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        legend(canvas, axes)

    return draw(name, title, caption, paint, height_with_legend([line.title for line in lines]))


def legend(canvas: Canvas, axes: Axes) -> None:
    """Add a legend below the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = _legend_columns(labels)
        canvas.legend(handles, [shorten(label, LABEL_LENGTH) for label in labels], loc="outside lower center", ncols=columns)


def height_with_legend(labels: Sequence[str], height: float = HEIGHT) -> float:
    """Return the height of a figure with a legend of these labels."""
    return height + LEGEND_LINE * math.ceil(len(labels) / _legend_columns(labels))


def _legend_columns(labels: Sequence[str]) -> int:
    return 1 if any(len(label) > 34 for label in labels) else 2


def log_ticks(axis: Axis, *, base_two: bool = False) -> None:
    """Set the ticks of a logarithmic axis as plain numbers: powers of two, or 1, 2, 5, 10, …"""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low) if low > 0 else 0.0
    if base_two:
        axis.set_major_locator(LogLocator(base=2, numticks=9))
        axis.set_minor_locator(NullLocator())
    elif decades < 0.7:
        axis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    else:
        subs = (1.0, 2.0, 3.0, 5.0, 7.0) if decades < 1.3 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
        axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:.3g}"))
    axis.set_minor_formatter(NullFormatter())


def _page_svg(svg: str, name: str, title: str) -> str:
    """Return one element for a page: ids that no other figure has, the page's font, and the colour of its text."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<!--.*?-->|\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}--\1"', svg)
    svg = re.sub(r'((?:xlink:)?href="|url\()#', rf"\1#{name}--", svg)
    svg = svg.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif").replace(INK, "currentColor")
    attributes = f'role="img" aria-labelledby="{name}--title" style="stroke-linejoin:round;stroke-linecap:butt"'
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", svg[: svg.index(">")])
    return f'{head} {attributes}><title id="{name}--title">{html.escape(title)}</title>{svg[svg.index(">") + 1 :].rstrip()}'
