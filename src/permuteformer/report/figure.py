"""One figure: drawn with matplotlib, kept as SVG that takes the page's colour for text and axes, and as PNG."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from permuteformer.report.groups import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Canvas

INK = "#1a1b1c"
"""Text and axes; in SVG it becomes the colour of the text around."""
WIDTH = 5.0
"""Inches; narrow enough to be read on a telephone."""
HEIGHT = 3.2
LEGEND_LINE = 0.2
LONGEST_LABEL = 48
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
BLUE, SKY, GREEN, VERMILION, PURPLE, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#e69f00"
"""Okabe and Ito's colours, which most people with a colour vision deficiency tell apart. Their black is the ink, their yellow too pale."""

_STYLES: dict[str, tuple[str, Any, str]] = {
    "transformer": (INK, "-", "o"),
    "transformer-sinusoidal": (INK, "--", "s"),
    "reformer": (ORANGE, "-", "v"),
    "linformer": (ORANGE, "--", "<"),
    "nystromformer": (PURPLE, "--", ">"),
    "performer": (VERMILION, "-", "^"),
    "roformer": (PURPLE, "-", "P"),
    "permuteformer": (BLUE, "-", "D"),
    "permuteformer-decay": (GREEN, "-", "d"),
    "permuteformer-1d": (SKY, "-.", "X"),
    "permuteformer-orthogonal": (GREEN, ":", "*"),
    "performer-t5": (VERMILION, "--", "p"),
    "transformer-lm": (INK, "-", "o"),
    "performer-lm": (VERMILION, "--", "^"),
    "permuteformer-lm": (BLUE, "-", "D"),
    "permuteformer-lm-no-decay": (SKY, "-.", "X"),
    "permuteformer-lm-no-permutation": (GREEN, ":", "s"),
}

_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "grid.color", "hatch.color")
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label with $ in it is no formula
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
    **dict.fromkeys(_INKED, INK),
}


@dataclass(frozen=True)
class Figure:
    """A picture with its words."""

    name: str
    """For files and anchors."""
    title: str
    caption: str
    svg: str
    """An ``<svg>`` element to stand in a page."""
    png: bytes

    @property
    def svg_file(self) -> str:
        """The SVG as a file of its own, on white: it may be shown on any ground."""
        return '<?xml version="1.0" encoding="utf-8"?>\n' + self.svg.replace('style="', f'style="color:{INK};background:#fff;', 1) + "\n"

    def renamed(self, name: str) -> Figure:
        """The same under another name, which its ids begin with too."""
        return replace(self, name=name, svg=self.svg.replace(f"{self.name}--", f"{name}--"))


@dataclass(frozen=True)
class Style:
    """How the line of a row looks: by colour, by dashes and by marker."""

    color: str
    dashes: Any
    marker: str


def style(row: str, place: int) -> Style:
    """The paper's rows look the same in all figures; others by their place."""
    if row in _STYLES:
        return Style(*_STYLES[row])
    colors = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK)
    return Style(colors[place % len(colors)], DASHES[(place // len(colors) + place) % len(DASHES)], MARKERS[place % len(MARKERS)])


def draw(name: str, title: str, caption: str, paint: Callable[[Canvas], None], height: float = HEIGHT, width: float = WIDTH) -> Figure:
    """Make a figure by ``paint``, which draws on an empty canvas."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")  # the SVG shows it in a font that has it
        canvas = Canvas(figsize=(width, height), layout="constrained")
        paint(canvas)
        drawn, png = io.StringIO(), io.BytesIO()
        canvas.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        canvas.set_layout_engine("none")  # it is laid out, and need not be once more
        canvas.savefig(png, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return Figure(name, title, caption, _for_page(drawn.getvalue(), name, title), png.getvalue())


def legend(canvas: Canvas, axes: Axes) -> None:
    """A legend under the axes, where it hides no line."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        canvas.legend(handles, [shorten(label, LONGEST_LABEL) for label in labels], loc="outside lower center", ncols=_columns(labels))


def legend_height(labels: list[str]) -> float:
    """Inches that the legend takes."""
    return LEGEND_LINE * -(-len(labels) // _columns(labels))


def _columns(labels: list[str]) -> int:
    return 1 if any(len(label) > LONGEST_LABEL // 2 + 10 for label in labels) else 2


def log_ticks(axis: Axis, *, base_two: bool = False) -> None:
    """Ticks of a logarithmic axis as plain numbers: 1, 2, 5, 10, …, or at equal steps where it is short; or powers of two."""
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


def _for_page(svg: str, name: str, title: str) -> str:
    """One element: no prologue, ids that no other figure has, text in the page's font, ink in the page's colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}--\1"', svg)
    svg = re.sub(r'((?:xlink:)?href="|url\()#', rf"\1#{name}--", svg)
    svg = svg.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif").replace(INK, "currentColor")
    words = f'role="img" aria-labelledby="{name}--title" style="stroke-linejoin:round;stroke-linecap:butt"'
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", svg[: svg.index(">")])
    return f'{head} {words}><title id="{name}--title">{html.escape(title)}</title>{svg[svg.index(">") + 1 :].rstrip()}'
