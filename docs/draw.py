"""Draws the pictures of the method from the library itself: ``python docs/draw.py`` writes docs/pictures/*.svg.

Each is a function that returns SVG. Ink is dark on a light page and light on a dark one, as the system is set.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from permuteformer.ops.permutation import from_cycle_lengths, order
from permuteformer.ops.reference import decay_weights, ranks
from permuteformer.positions import PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute
from permuteformer.positions.properties import kernel
from permuteformer.positions.sinusoidal import Sinusoidal
from permuteformer.report.figure import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

FOLDER = Path(__file__).resolve().parent / "pictures"
RESULTS = FOLDER.parent.parent / "results" / "experiments" / "small" / "results.jsonl"
WIDTH = 420
"""Narrow enough to be read on a telephone as it is."""
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f } .small { font-size: 10px }
.ink { stroke: #24292f; fill: none } .faint { stroke: #24292f; stroke-opacity: .25; fill: none } .none { fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e6e8eb } .ink, .faint { stroke: #e6e8eb } }
</style>"""
CYCLES = (5, 4, 3)
COLORS = (BLUE, VERMILION, GREEN)
LENGTHS = (512, 1024, 2048, 4096, 8192)


def permutation() -> str:
    """Twelve features of one token, permuted 0 to 7 times."""
    encoding = Permute(1, sum(CYCLES), permutation=from_cycle_lengths(CYCLES).unsqueeze(0))
    rows = encoding.tables(torch.arange(8).view(1, 8, 1))[0, 0].tolist()
    cycle = [n for n, length in enumerate(CYCLES) for _ in range(length)]
    parts = [text(0, 14, "position"), text(80, 14, "features of the same token, P applied so often")]
    for i, row in enumerate(rows):
        parts.append(text(30, 41 + 27 * i, str(i), "end"))
        for place, feature in enumerate(row):
            x = 56 + 27 * place + 10 * cycle[place]
            shade = 0.2 + 0.6 * (feature - sum(CYCLES[: cycle[feature]])) / CYCLES[cycle[feature]]
            parts.append(rect(x, 24 + 27 * i, 25, COLORS[cycle[feature]], shade))
            parts.append(text(x + 12.5, 41 + 27 * i, str(feature + 1), "middle"))
    return svg("Features of a token at positions 0 to 7: three cycles turn, each at its own pace", 245, parts)


def relative() -> str:
    """The score of one query and one key at all pairs of positions: by permutation, and by positions that are added."""
    q, k = features(2, 32, seed=1)
    encoding = Permute(1, 32, seed=3)
    size = 14
    turned = [[float(q @ kernel(encoding, 1, 32, i, j)[0] @ k) for j in range(size)] for i in range(size)]
    absolute = Sinusoidal(hidden_size=32)
    at = torch.arange(size).view(1, size, 1)
    raw_q, raw_k = (absolute.embed(x.view(1, 1, 32).expand(1, size, 32).double() - 0.5, at)[0].relu() for x in (q, k))
    added = (raw_q @ raw_k.T).tolist()
    parts = [text(8, 14, "permuted: depends on i − j"), text(222, 14, "added: depends on i and j")]
    parts += heat(8, 24, turned, BLUE) + heat(222, 24, added, VERMILION)
    parts += [text(8, 236, "rows: position i of the query; columns: position j of the key", style="small")]
    return svg("Scores of one query and one key at all positions: constant along diagonals only where features are permuted", 244, parts)


def decay() -> str:
    """What is left of the likeness of a token to itself so far away: of P alone, r alone and both."""
    distances = range(65)
    likeness = mean_kernel(Permute(1, 64, seed=2), 64, distances)
    r = float(Decay(8).r[0])
    fading = [r**d for d in distances]
    curves = {
        "P alone": (VERMILION, likeness),
        "r alone": (GREEN, fading),
        "both": (BLUE, [a * b for a, b in zip(likeness, fading, strict=True)]),
    }
    parts = plot(distances, curves, "distance i − j", "features back in their place, times r^(i − j)", height=200)
    return svg("Score against distance: a permutation tells distances apart, r lets them fade, both do both", 262, parts)


def half_lives() -> str:
    """r^(i-j) of the paper's eight heads."""
    distances = range(0, 121, 2)
    rates = Decay(8).r.tolist()
    colors = (VERMILION, ORANGE, GREEN, SKY, BLUE, PURPLE, "#8c6d31", "#7f7f7f")
    curves = {
        f"r = {r:.3f}, half after {math.log(0.5) / math.log(r):.0f}": (color, [r**d for d in distances])
        for color, r in zip(colors, rates, strict=True)
    }
    return svg(
        "Powers of r of eight heads: the first forgets within tens of tokens, the last within hundreds",
        306,
        plot(distances, curves, "distance i − j", "weight r^(i − j)", 200, 2),
    )


def cycles() -> str:
    """Where three cycles are back at their beginning, and where all are."""
    encoding = Permute(1, sum(CYCLES), permutation=from_cycle_lengths(CYCLES).unsqueeze(0))
    (whole,) = order(encoding.cycles)
    step = 300 / whole
    parts = []
    for n, (length, color) in enumerate(zip(CYCLES, COLORS, strict=True)):
        y = 30 + 62 * n
        parts.append(f'<circle class="faint" cx="40" cy="{y}" r="22"/>')
        for place in range(length):
            angle = 2 * math.pi * place / length - math.pi / 2
            parts.append(circle(40 + 22 * math.cos(angle), y + 22 * math.sin(angle), 6 if place == 0 else 4, color))
        parts.append(text(40, y + 4, str(length), "middle"))
        parts += [circle(90 + step * i, y, 4.5 if i % whole == 0 else 3, color) for i in range(0, whole + 1, length)]
    ends = (90, 90 + step * whole)
    parts += [f'<line class="faint" x1="{x:.1f}" y1="8" x2="{x:.1f}" y2="186"/>' for x in ends]
    parts += [text(90, 204, "position 0", "middle", "small"), text(ends[1], 204, str(whole), "middle", "small")]
    parts.append(text(90 + step * whole / 2, 204, "all three are back only here →", "middle", "small"))
    return svg(f"Cycles of 5, 4 and 3 features are back together after {whole} positions, their least common multiple", 210, parts)


def axes() -> str:
    """How like a token is to those around it, on a grid: two axes, and one that counts along the rows."""
    size, features_ = 11, 64
    middle = size // 2
    two = Permute(4, features_, axes=2, seed=0)
    one = Permute(4, features_, seed=0)
    grid = [[mean_score(two, 4, features_, (middle, middle), (x, y)) for x in range(size)] for y in range(size)]
    row = [[mean_score(one, 4, features_, middle * size + middle, y * size + x) for x in range(size)] for y in range(size)]
    parts = [text(8, 14, "two axes: rows and columns"), text(222, 14, "one axis: along the rows")]
    parts += heat(8, 24, grid, BLUE) + heat(222, 24, row, VERMILION)
    parts += [text(8, 236, "likeness of every pixel to the one in the middle, by position alone", style="small")]
    return svg("On a grid, two axes see rows and columns; one axis sees neighbours in a row, and others by accident", 244, parts)


def two_sided() -> str:
    """Weights of a causal and of a two-sided r by distance, for keys before and after the query."""
    distances = range(-16, 17)
    r = float(Decay(8).r[0])
    curves = {
        "r^(i − j): grows for keys after the query": (VERMILION, [r**d for d in distances]),
        "r^|i − j|: at most 1": (BLUE, [r ** abs(d) for d in distances]),
    }
    parts = plot(distances, curves, "distance i − j", f"weight of a key, r = {r:.2f}", height=200, columns=1)
    return svg("The causal r grows without bound for keys after the query; the two-sided r does not", 284, parts)


def two_sided_axes() -> str:
    """What the middle pixel of an image sees by a two-sided r, by a head of each axis."""
    size = 15
    middle = size * size // 2
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1).unsqueeze(0)
    decay = Decay(2, r=0.5 ** (1 / size), two_sided=True, axes=2)
    maps = []
    for axis in range(2):
        order = ranks(positions, axis).unsqueeze(1)
        maps.append(decay_weights(decay.r[axis : axis + 1], order)[0, 0, middle].view(size, size).tolist())
    parts = [text(8, 14, "even heads: raster order"), text(222, 14, "odd heads: column-major")]
    parts += heat(8, 24, maps[0], BLUE) + heat(222, 24, maps[1], GREEN)
    parts += [text(8, 236, f"weight of every pixel for the one in the middle, half after {size} pixels", style="small")]
    return svg("A two-sided r on an image: half of the heads decay along rows, half along columns", 244, parts)


def lengths() -> str:
    """Perplexity of a byte at lengths beyond the trained one, from the results."""
    from permuteformer.report.groups import group
    from permuteformer.report.load import load
    from permuteformer.report.tables import build_tables

    (table,) = (table for table in build_tables(group(load([RESULTS]).records)) if table.name.startswith("length"))
    colors = {"Transformer": "#7f7f7f", "Performer": VERMILION, "PermuteFormer": BLUE}
    curves = {}
    for row in table.rows:
        if row.leads[0] in colors:
            cells = [table.cell(row, column) for column in table.columns]
            curves[row.leads[0]] = (colors[row.leads[0]], [float(cell.text.split()[0]) for cell in cells if cell])
    places = [math.log2(length) for length in LENGTHS]
    parts = plot(
        places, curves, "bytes of text; trained at 512", "perplexity of a byte (lower is better)", 190, 3, [f"{n:,}" for n in LENGTHS]
    )
    return svg("Perplexity at 512 to 8,192 bytes of models trained at 512: PermuteFormer's stays", 254, parts)


def features(count: int, size: int, seed: int) -> torch.Tensor:
    """Positive random features, as a feature map makes them."""
    return torch.rand(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mean_kernel(encoding: PositionEncoding, size: int, distances: Iterable[int]) -> list[float]:
    """The mean of φ(x)ᵀ K(d, 0) φ(x) over random sparse features, as a share of that at no distance, 0 where nothing is alike."""
    return [mean_score(encoding, 1, size, d, 0) for d in distances]


def mean_score(encoding: PositionEncoding, heads: int, size: int, i: int | Sequence[int], j: int | Sequence[int]) -> float:
    """For features without anything in common, what is left of their likeness is what stands on the diagonal of K."""
    return float(kernel(encoding, heads, size, i, j).diagonal(dim1=-2, dim2=-1).mean())


def plot(
    xs: Iterable[float],
    curves: dict[str, tuple[str, list[float]]],
    below: str,
    above: str,
    height: int,
    columns: int = 3,
    names: Sequence[str] = (),
) -> list[str]:
    """Lines over axes from 0, with a legend under them."""
    xs = list(xs)
    left, right, top = 34, WIDTH - 22, 24
    bottom = top + height - 30
    highest = max(max(values) for _, values in curves.values())
    step = next(s for s in (0.25, 0.5, 1, 2, 5, 10) if highest / s <= 6)

    def at(x: float, y: float) -> str:
        return f"{left + (x - xs[0]) / (xs[-1] - xs[0]) * (right - left):.1f},{bottom - y / highest * (bottom - top - 6):.1f}"

    parts = [text(0, 14, above), f'<path class="ink" d="M{left},{top}V{bottom}H{right}"/>', text(right, bottom + 30, below, "end")]
    for n in range(int(highest / step) + 1):
        y = at(xs[0], n * step).split(",")[1]
        parts += [
            f'<line class="faint" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>',
            text(left - 5, float(y) + 4, f"{n * step:g}", "end", "small"),
        ]
    ticks = names or [f"{x:g}" for x in xs]
    for n in range(0, len(xs), 1 if names else max(1, (len(xs) - 1) // 4)):
        parts.append(text(float(at(xs[n], 0).split(",")[0]), bottom + 14, ticks[n], "middle", "small"))
    for n, (name, (color, values)) in enumerate(curves.items()):
        points = " ".join(at(x, y) for x, y in zip(xs, values, strict=True))
        parts.append(f'<polyline class="none" stroke="{color}" stroke-width="2" points="{points}"/>')
        x, y = (WIDTH // columns) * (n % columns), bottom + 50 + 18 * (n // columns)
        parts += [f'<line x1="{x}" x2="{x + 16}" y1="{y - 4}" y2="{y - 4}" stroke="{color}" stroke-width="3"/>', text(x + 21, y, name)]
    return parts


def heat(left: float, top: float, values: list[list[float]], color: str) -> list[str]:
    """A square of squares, the darker the larger."""
    low, high = min(map(min, values)), max(map(max, values))
    size = 196 / len(values)
    frame = f'<rect class="faint" x="{left}" y="{top}" width="196" height="196"/>'
    shade = [[(value - low) / (high - low) for value in row] for row in values]
    return [
        frame,
        *(
            rect(left + size * x, top + size * y, size - 0.6, color, s, 0)
            for y, row in enumerate(shade)
            for x, s in enumerate(row)
            if s > 0.005
        ),
    ]


def rect(x: float, y: float, size: float, color: str, opacity: float, corner: float = 3) -> str:
    """A square."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{size:.1f}" rx="{corner}" fill="{color}" fill-opacity="{opacity:.2f}"/>'
    )


def circle(x: float, y: float, radius: float, color: str) -> str:
    """A dot."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> str:
    """A line of words."""
    attributes = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (f' class="{style}"' if style else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{words}</text>'


def svg(title: str, height: int, parts: list[str]) -> str:
    """A whole file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", STYLE, *parts, "</svg>"]) + "\n"


PICTURES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (permutation, relative, decay, half_lives, cycles, axes, two_sided, two_sided_axes, lengths)
}


def main() -> None:
    """Write all of them."""
    for name, function in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(function())
        sys.stdout.write(f"docs/pictures/{name}.svg\n")


if __name__ == "__main__":
    main()
