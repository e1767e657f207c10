"""What an answer came from, in a terminal: words and pixels that spoke for it and against it, with colour or without.

It is read from the JSON that ``permuteformer explain`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Explained = Mapping[str, Any]

STRONG, SOME = 0.6, 0.2
"""Shares of the largest value from which on something is marked."""
MARKS = {2: "#", 1: "+", 0: " ", -1: "-", -2: "="}
COLORS = {2: "black on dark_orange", 1: "black on light_goldenrod2", 0: "", -1: "black on light_sky_blue1", -2: "white on dodger_blue3"}
LEGEND = "# much and + some for the answer, = much and - some against it"
LINES = 12
"""Lines of a long text that are shown: those with the most to say."""
TOP = 8
"""Spans in the table."""
WIDEST = 100
BAR = 10
SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def print_explanation(explained: Explained, console: Console) -> None:
    """Each text with its marks, or the image as a grid of them; then the spans that counted most."""
    most = largest(explained)
    for part in explained["parts"]:
        console.print(Text(f"{part['name']}: {LEGEND}", style="dim"))
        lines = _grid(explained, part, most, console.width) if explained["grid"] else _lines(part, most, min(console.width, WIDEST))
        for line in lines:
            console.print(line, no_wrap=True, overflow="crop", soft_wrap=False)
    console.print(_table(explained, most))


def largest(explained: Explained) -> float:
    """The size of the largest value of a span: what marks are measured by."""
    return max((abs(span["value"]) for part in explained["parts"] for span in part["spans"]), default=0.0) or 1.0


def level(value: float, most: float) -> int:
    """From −2, much against the answer, to 2, much for it.

    >>> [level(value, 2.0) for value in (2.0, 0.5, 0.1, -0.5, -1.5)]
    [2, 1, 0, -1, -2]
    """
    size = 2 if abs(value) >= STRONG * most else 1 if abs(value) >= SOME * most else 0
    return size if value > 0 else -size


def number(value: float, most: float) -> str:
    """A value, where the largest is ``most``.

    >>> number(0.1234, 2.0), number(-1.5e-5, 3e-5)
    ('+0.123', '-1.5e-05')
    """
    return f"{value:+.3f}" if most >= 0.02 else f"{value:+.1e}"


def shown(token: str) -> str:
    """A token that a terminal does not obey: signs for white space, escapes for what cannot be seen.

    >>> shown("a\\n\\x1b")
    'a↵\\\\x1b'
    """
    return "".join(SIGNS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in token)


def top_spans(explained: Explained, count: int = TOP) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The spans with the largest values, each with its part."""
    every = [(part, span) for part in explained["parts"] for span in part["spans"]]
    return sorted(every, key=lambda pair: -abs(pair[1]["value"]))[:count]


def place(explained: Explained, part: Mapping[str, Any], span: Mapping[str, Any]) -> str:
    """Where a span stands, for people: characters from 1, or rows and columns of pixels from 1."""
    first, last = span["places"][0], span["places"][-1]
    if explained["grid"]:
        width = explained["grid"][1]
        (top, left), (bottom, right) = divmod(first, width), divmod(last, width)
        return f"row {_range(top, bottom)}, column {_range(left, right)}"
    where = _range(first, last)
    return f"{part['name']} {where}" if len(explained["parts"]) > 1 else where


def strongest(part: Mapping[str, Any], span: Mapping[str, Any]) -> tuple[str, int]:
    """The token of a span with the largest value, and its number."""
    chosen = max(span["places"], key=lambda n: abs(part["values"][n]))
    return shown(part["tokens"][chosen]), chosen


def _range(first: int, last: int) -> str:
    return f"{first + 1:,}" if first == last else f"{first + 1:,} to {last + 1:,}"


def _table(explained: Explained, most: float) -> Table:
    grid = bool(explained["grid"])
    table = Table()
    if not grid:
        table.add_column("word" if explained["unit"] == "bytes" else explained["unit"].removesuffix("s"), overflow="fold")
    table.add_column("where", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("blanked out", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for part, span in top_spans(explained):
        bar = MARKS[2 if span["value"] > 0 else -2] * max(1, round(BAR * abs(span["value"]) / most))
        taken = "" if span["measured"] is None else number(span["measured"], most)
        cells = [place(explained, part, span), number(span["value"], most), taken]
        leads = [] if grid else [Text(shown(span["text"]).rstrip() or shown(span["text"]))]
        table.add_row(*leads, *cells, Text(bar, style=COLORS[level(span["value"], most)]))
    return table


def _lines(part: Mapping[str, Any], most: float, width: int) -> Iterator[Text]:
    """Lines of the text, each with a line of marks under it where it has any; of a long text, those with the largest values."""
    rows = list(_broken(part, most, width - 2))
    kept = set(sorted(range(len(rows)), key=lambda n: -max(abs(value) for _, _, value in rows[n]))[:LINES])
    left_out = 0
    for number, row in enumerate(rows):
        if number not in kept:
            left_out += sum(len(token) for token, _, _ in row)
            continue
        if left_out:
            yield Text(f"  … {left_out:,} characters …", style="dim")
            left_out = 0
        text, marks = Text("  "), "  "
        for token, strength, _ in row:
            strength = 0 if token.isspace() else strength
            text.append(token, style=COLORS[strength])
            marks += MARKS[strength] * cell_len(token)
        yield text
        if marks.strip():
            yield Text(marks.rstrip())
    if left_out:
        yield Text(f"  … {left_out:,} characters …", style="dim")


def _broken(part: Mapping[str, Any], most: float, width: int) -> Iterator[list[tuple[str, int, float]]]:
    """Tokens with their level and their span's value, in lines that are no wider than ``width``."""
    between = "" if all(len(token) <= 4 for token in part["tokens"]) else " "  # words are parted by blanks, bytes are not
    row: list[tuple[str, int, float]] = []
    used = 0
    for span in part["spans"]:
        strength = level(span["value"], most)
        tokens = [shown(part["tokens"][n]) + between for n in span["places"]]
        if used + sum(map(cell_len, tokens)) > width and row:
            yield row
            row, used = [], 0
        for token in tokens:
            row.append((token, strength, span["value"]))
            used += cell_len(token)
    if row:
        yield row


def _grid(explained: Explained, part: Mapping[str, Any], most: float, width: int) -> Iterator[Text]:
    """Two characters a pixel, or a square of pixels where there is no room."""
    height, across = explained["grid"]
    side = -(-across // max(1, (width - 4) // 2))
    cells = [
        [_sum(part["values"], across, (top, left), (min(top + side, height), min(left + side, across))) for left in range(0, across, side)]
        for top in range(0, height, side)
    ]
    most = max(abs(value) for row in cells for value in row) or most
    yield Text("  +" + "--" * len(cells[0]) + "+")
    for row in cells:
        line = Text("  |")
        for value in row:
            line.append(2 * MARKS[level(value, most)], style=COLORS[level(value, most)])
        yield line.append("|")
    yield Text("  +" + "--" * len(cells[0]) + "+")


def _sum(values: Sequence[float], across: int, first: tuple[int, int], last: tuple[int, int]) -> float:
    return sum(values[y * across + x] for y in range(first[0], last[0]) for x in range(first[1], last[1]))
