"""Explanations of a model's answer in a terminal: words and pixels for and against it, readable with and without colour.

Explanations are the JSON that ``permuteformer explain`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Explanation = Mapping[str, Any]
Part = Mapping[str, Any]
"""A text or an image of the item, with a value per token."""
Span = Mapping[str, Any]
"""Tokens that belong together, such as the bytes of a word, and the sum of their values."""

STRONG, WEAK = 0.6, 0.2
"""Shares of the largest value from which a span is marked."""
MARKS = {2: "#", 1: "+", 0: " ", -1: "-", -2: "="}
COLORS = {2: "black on dark_orange", 1: "black on light_goldenrod2", 0: "", -1: "black on light_sky_blue1", -2: "white on dodger_blue3"}
LEGEND = "# strongly and + weakly for the answer, = strongly and - weakly against it"
MAX_LINES = 12
"""Lines of a long text to show, those with the largest values."""
MAX_SPANS = 8
MAX_WIDTH = 100
BAR = 10
SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print each text with marks, or the image as a grid of marks, then the spans with the largest values."""
    for part in explanation["parts"]:
        console.print(Text(f"{part['name']}: {LEGEND}", style="dim"))
        most = largest_value(explanation)
        is_image = bool(explanation["grid"])
        lines = _image_lines(explanation, part, console.width) if is_image else _text_lines(part, most, min(console.width, MAX_WIDTH))
        for line in lines:
            console.print(line, no_wrap=True, overflow="crop", soft_wrap=False)
    console.print(_table(explanation))


def largest_value(explanation: Explanation) -> float:
    """Return the largest absolute value of a span."""
    return max((abs(span["value"]) for part in explanation["parts"] for span in part["spans"]), default=0.0) or 1.0


def strength(value: float, largest: float) -> int:
    """Return the strength of a value, from −2 (strongly against the answer) to 2 (strongly for it).

    >>> [strength(value, 2.0) for value in (2.0, 0.5, 0.1, -0.5, -1.5)]
    [2, 1, 0, -1, -2]
    """
    size = 2 if abs(value) >= STRONG * largest else 1 if abs(value) >= WEAK * largest else 0
    return size if value > 0 else -size


def format_value(value: float, largest: float) -> str:
    """Format a value with its sign.

    >>> format_value(0.1234, 2.0), format_value(-1.5e-5, 3e-5)
    ('+0.123', '-1.5e-05')
    """
    return f"{value:+.3f}" if largest >= 0.02 else f"{value:+.1e}"


def visible(token: str) -> str:
    """Return a token with signs for white space and escapes for characters that cannot be printed.

    >>> visible("a\\n\\x1b")
    'a↵\\\\x1b'
    """
    return "".join(SIGNS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in token)


def largest_spans(explanation: Explanation, count: int = MAX_SPANS) -> list[tuple[Part, Span]]:
    """Return the spans with the largest absolute values, each with its part."""
    spans = [(part, span) for part in explanation["parts"] for span in part["spans"]]
    return sorted(spans, key=lambda pair: -abs(pair[1]["value"]))[:count]


def place(explanation: Explanation, part: Part, span: Span) -> str:
    """Return the place of a span: tokens, or rows and columns of pixels, counted from 1."""
    first, last = span["places"][0], span["places"][-1]
    if explanation["grid"]:
        width = explanation["grid"][1]
        (top, left), (bottom, right) = divmod(first, width), divmod(last, width)
        return f"row {_range(top, bottom)}, column {_range(left, right)}"
    where = _range(first, last)
    return f"{part['name']} {where}" if len(explanation["parts"]) > 1 else where


def _range(first: int, last: int) -> str:
    return f"{first + 1:,}" if first == last else f"{first + 1:,} to {last + 1:,}"


def _table(explanation: Explanation) -> Table:
    is_image, largest = bool(explanation["grid"]), largest_value(explanation)
    table = Table()
    if not is_image:
        table.add_column("word" if explanation["unit"] == "bytes" else explanation["unit"].removesuffix("s"), overflow="fold")
    table.add_column("where", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("if blanked", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for part, span in largest_spans(explanation):
        value, measured = span["value"], span["measured"]
        bar = MARKS[2 if value > 0 else -2] * max(1, round(BAR * abs(value) / largest))
        table.add_row(
            *([] if is_image else [Text(visible(span["text"]).rstrip() or visible(span["text"]))]),
            place(explanation, part, span),
            format_value(value, largest),
            "" if measured is None else format_value(measured, largest),
            Text(bar, style=COLORS[strength(value, largest)]),
        )
    return table


def _text_lines(part: Part, largest: float, width: int) -> Iterator[Text]:
    """Yield lines of the text, each followed by its marks. Of a long text, only the lines with the largest values."""
    lines = list(_wrapped(part, largest, width - 2))
    shown = set(sorted(range(len(lines)), key=lambda n: -max(abs(value) for _, _, value in lines[n]))[:MAX_LINES])
    hidden = 0
    for number, line in enumerate([*lines, []]):
        if line and number not in shown:
            hidden += sum(len(token) for token, _, _ in line)
            continue
        if hidden:
            yield Text(f"  … {hidden:,} characters …", style="dim")
            hidden = 0
        text, marks = Text("  "), ""
        for token, mark, _ in line:
            mark = 0 if token.isspace() else mark
            text.append(token, style=COLORS[mark])
            marks += MARKS[mark] * cell_len(token)
        if line:
            yield text
        if marks.strip():
            yield Text(f"  {marks}".rstrip())


def _wrapped(part: Part, largest: float, width: int) -> Iterator[list[tuple[str, int, float]]]:
    """Yield lines of tokens, each with its strength and the value of its span. Spans are not broken."""
    separator = "" if all(len(token) <= 4 for token in part["tokens"]) else " "  # between words, not between bytes
    line: list[tuple[str, int, float]] = []
    used = 0
    for span in part["spans"]:
        tokens = [visible(part["tokens"][n]) + separator for n in span["places"]]
        length = sum(map(cell_len, tokens))
        if line and used + length > width:
            yield line
            line, used = [], 0
        line += [(token, strength(span["value"], largest), span["value"]) for token in tokens]
        used += length
    if line:
        yield line


def _image_lines(explanation: Explanation, part: Part, width: int) -> Iterator[Text]:
    """Yield two characters per pixel, or per square of pixels in a narrow terminal."""
    height, across = explanation["grid"]
    side = -(-across // max(1, (width - 4) // 2))
    sums = [
        [
            sum(part["values"][y * across + x] for y in range(top, min(top + side, height)) for x in range(left, min(left + side, across)))
            for left in range(0, across, side)
        ]
        for top in range(0, height, side)
    ]
    largest = max(abs(value) for row in sums for value in row) or 1.0
    border = Text(f"  +{'--' * len(sums[0])}+")
    yield border
    for row in sums:
        line = Text("  |")
        for value in row:
            line.append(2 * MARKS[strength(value, largest)], style=COLORS[strength(value, largest)])
        yield line.append("|")
    yield border
