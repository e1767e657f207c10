"""Draws the figures of README and docs from the library and from results: ``python docs/figures.py`` writes docs/pictures/*.svg.

``python docs/figures.py screenshots`` takes those of the report and of the demo, by chromium.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import matplotlib
import torch
from matplotlib.colors import LinearSegmentedColormap

from permuteformer.ops.permutation import from_cycle_lengths, order
from permuteformer.ops.reference import decay_weights, ranks
from permuteformer.positions import PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute
from permuteformer.positions.properties import kernel
from permuteformer.positions.sinusoidal import Sinusoidal
from permuteformer.report.cells import group_runs
from permuteformer.report.figure import BLUE, GREEN, INK, VERMILION, draw, legend, log_ticks
from permuteformer.report.runs import load_runs
from permuteformer.report.tables import build_tables

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "results"
STYLE = "<style>svg { color: #24292f } @media (prefers-color-scheme: dark) { svg { color: #e6e8eb } }</style>"
"""Text and axes are dark on a light page, light on a dark one."""
CYCLES = (5, 4, 3)
COLORS = (BLUE, VERMILION, GREEN)
FIGURES: dict[str, Callable[[], str]] = {}


def figure(title: str, height: float, width: float = 5.0) -> Callable[[Callable[[Any], None]], Callable[[], str]]:
    """Register a function that paints on a canvas; the name of the figure is that of the function."""

    def register(paint: Callable[[Any], None]) -> Callable[[], str]:
        def svg() -> str:
            drawn = draw(name, title, "", paint, height, width)
            start, end = drawn.svg.split("><title", 1)
            return f'{start} width="{96 * width:.0f}">{STYLE}<title{end}\n'

        name = paint.__name__.replace("_", "-")
        FIGURES[name] = svg
        return svg

    return register


@figure("Features of a token at positions 0 to 7: three cycles rotate, each by one place per position", 2.9)
def permutation(canvas: Any) -> None:
    axes = canvas.subplots()
    encoding = Permute(1, sum(CYCLES), permutation=from_cycle_lengths(CYCLES).unsqueeze(0))
    cycle = [n for n, length in enumerate(CYCLES) for _ in range(length)]
    columns = [place + cycle[place] for place in range(sum(CYCLES))]  # an empty column between cycles
    pixels = torch.zeros(8, columns[-1] + 1, 4)
    for position, features in enumerate(encoding.tables(torch.arange(8).view(1, 8, 1))[0, 0].tolist()):
        for column, feature in zip(columns, features, strict=True):
            number, color = feature - sum(CYCLES[: cycle[feature]]), matplotlib.colors.to_rgb(COLORS[cycle[feature]])
            pixels[position, column] = torch.tensor([*color, 0.2 + 0.6 * number / CYCLES[cycle[feature]]])
            axes.text(column, position, str(feature + 1), ha="center", va="center")
    axes.imshow(pixels.tolist(), interpolation="none", aspect="auto")
    axes.set(yticks=range(8), xticks=[], ylabel="position", title="the same twelve features, permuted once per position")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(visible=False)


@figure("Scores of a query and a key at all pairs of positions: constant along diagonals only with permuted features", 3.0)
def relative(canvas: Any) -> None:
    q, k = torch.rand(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    size, encoding, absolute = 14, Permute(1, 32, seed=3), Sinusoidal(hidden_size=32)
    permuted = [[float(q @ kernel(encoding, 1, 32, i, j)[0] @ k) for j in range(size)] for i in range(size)]
    positions = torch.arange(size).view(1, size, 1)
    added_q, added_k = (absolute.embed(x.expand(1, size, 32) - 0.5, positions)[0].relu() for x in (q, k))
    maps = {"permuted: depends on i − j": permuted, "added: depends on i and j": (added_q @ added_k.T).tolist()}
    _maps(canvas, maps, (BLUE, VERMILION), "position j of the key", "position i of the query")


@figure("Score by distance: a permutation distinguishes distances, r makes the score fade, both together do both", 2.9)
def decay(canvas: Any) -> None:
    axes = canvas.subplots()
    distances, r = range(65), float(Decay(8).r[0])
    similarity = [_similarity(Permute(1, 64, seed=2), 1, 64, d, 0) for d in distances]
    axes.plot(distances, similarity, color=VERMILION, label="P alone: share of features back in place")
    axes.plot(distances, [r**d for d in distances], color=GREEN, label=f"r alone: {r:.2f}^(i − j)")
    axes.plot(distances, [s * r**d for d, s in zip(distances, similarity, strict=True)], color=BLUE, label="both")
    _label(canvas, axes, "distance i − j (tokens)", "relative score")


@figure("Powers of r of the paper's eight heads: half after a few tokens in the first, after about 70 in the last", 2.9)
def half_lives(canvas: Any) -> None:
    axes = canvas.subplots()
    rates, distances = Decay(8).r.tolist(), range(0, 121, 3)
    for r, color in zip(rates, matplotlib.colormaps["viridis"](torch.linspace(0.3, 0.9, 8).tolist()), strict=True):
        label = f"r = {r:.3f}: half after {math.log(0.5) / math.log(r):.0f}"
        axes.plot(distances, [r**d for d in distances], color=color, label=label)
    _label(canvas, axes, "distance i − j (tokens)", "weight r^(i − j)")


@figure("Cycles of 5, 4 and 3 features are at their start together only after 60 positions, their least common multiple", 1.5)
def cycles(canvas: Any) -> None:
    axes = canvas.subplots()
    (whole,) = order(Permute(1, sum(CYCLES), permutation=from_cycle_lengths(CYCLES).unsqueeze(0)).cycles)
    for row, (length, color) in enumerate(zip(CYCLES, COLORS, strict=True)):
        starts = range(0, whole + 1, length)
        axes.plot(starts, [row] * len(starts), "o", color=color)
        axes.plot([0, whole], [row, row], "o", color=color, markersize=9)
    axes.set(yticks=range(3), yticklabels=[f"cycle of {n}" for n in CYCLES], ylim=(2.6, -0.6), xticks=range(0, whole + 1, 10))
    axes.set_xlabel("positions at which a cycle is at its start")


@figure("On a grid, two axes see rows and columns; one axis sees neighbours of a row only", 3.0)
def axes_of_images(canvas: Any) -> None:
    size, middle = 11, 5
    two, one = Permute(4, 64, axes=2, seed=0), Permute(4, 64, seed=0)
    grid = [[_similarity(two, 4, 64, (middle, middle), (x, y)) for x in range(size)] for y in range(size)]
    rows = [[_similarity(one, 4, 64, middle * size + middle, y * size + x) for x in range(size)] for y in range(size)]
    _maps(canvas, {"two axes: rows and columns": grid, "one axis: along the rows": rows}, (BLUE, VERMILION), "column", "row")


@figure("r^(i − j) grows without bound for keys after the query; r^|i − j| is at most 1", 2.7)
def two_sided(canvas: Any) -> None:
    axes = canvas.subplots()
    distances, r = range(-16, 17), float(Decay(8).r[0])
    axes.plot(distances, [r**d for d in distances], color=VERMILION, label="r^(i − j)")
    axes.plot(distances, [r ** abs(d) for d in distances], color=BLUE, label="r^|i − j|")
    _label(canvas, axes, "distance i − j (tokens)", f"weight of a key, r = {r:.2f}")


@figure("Two-sided r on an image: half of the heads decay along rows, half along columns", 3.0)
def two_sided_images(canvas: Any) -> None:
    size = 15
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1).unsqueeze(0)
    decay = Decay(2, r=0.5 ** (1 / size), two_sided=True, axes=2)
    maps = {}
    for axis, title in enumerate(("even heads: by row", "odd heads: by column")):
        weights = decay_weights(decay.r[axis : axis + 1], ranks(positions, axis).unsqueeze(1))
        maps[title] = weights[0, 0, size * size // 2].view(size, size).tolist()
    _maps(canvas, maps, (BLUE, GREEN), "column", "row")


@figure("Perplexity at 512 to 8,192 bytes of models trained at 512: that of PermuteFormer stays the same", 3.0)
def lengths(canvas: Any) -> None:
    axes = canvas.subplots()
    found = build_tables(group_runs(load_runs([RESULTS / "experiments" / "small" / "results.jsonl"]).runs))
    (table,) = (table for table in found if table.name.startswith("length"))
    colors = {"Transformer": INK, "Performer": VERMILION, "PermuteFormer": BLUE}
    for row in table.rows:
        if row.leads[0] in colors:
            means = [table.cell(row, column).mean for column in table.columns]
            axes.plot([table.lengths[column.name] for column in table.columns], means, "o-", color=colors[row.leads[0]], label=row.leads[0])
    axes.set_xscale("log", base=2)
    log_ticks(axes.xaxis, base_two=True)
    _label(canvas, axes, "bytes of text (trained at 512)", "perplexity per byte")


@figure("Accuracy of recalling the token nine places before, by length: PermuteFormer keeps it, Performer's falls", 3.0)
def recall(canvas: Any) -> None:
    axes = canvas.subplots()
    records = [json.loads(path.read_text()) for path in sorted((RESULTS / "core").glob("recall-seed*/recall.json"))]
    for name, color in (("PermuteFormer", BLUE), ("Performer", VERMILION)):
        seeds = [[100 * value for value in record["results"][name]["accuracy"]] for record in records]
        means, low, high = ([of(values) for values in zip(*seeds, strict=True)] for of in (fmean, min, max))
        axes.plot(records[0]["lengths"], means, "o-", color=color, label=name)
        axes.fill_between(records[0]["lengths"], low, high, color=color, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    log_ticks(axes.xaxis, base_two=True)
    _label(canvas, axes, "tokens (trained at 128)", "tokens recalled (%)")


def _similarity(encoding: PositionEncoding, heads: int, size: int, i: int | Sequence[int], j: int | Sequence[int]) -> float:
    """Return the share of features that are at the same place at positions i and j."""
    return float(kernel(encoding, heads, size, i, j).diagonal(dim1=-2, dim2=-1).mean())


def _maps(canvas: Any, maps: dict[str, list[list[float]]], colors: Sequence[str], x: str, y: str) -> None:
    """Paint matrices side by side; the larger a value, the less transparent."""
    panels = canvas.subplots(1, 2, sharey=True)
    for axes, (title, values), color in zip(panels, maps.items(), colors, strict=True):
        shades = LinearSegmentedColormap.from_list("", [(*matplotlib.colors.to_rgb(color), alpha) for alpha in (0, 1)])
        axes.imshow(values, cmap=shades, interpolation="none")
        axes.set(title=title, xlabel=x, xticks=range(0, len(values), 5), yticks=range(0, len(values), 5))
        axes.grid(visible=False)
    panels[0].set_ylabel(y)


def _label(canvas: Any, axes: Any, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    legend(canvas, axes)


def screenshots() -> None:
    from permuteformer.demo.api import Api
    from permuteformer.demo.server import Server

    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "permuteformer", "report", str(RESULTS / "experiments" / "small"), "--output", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        _screenshot((Path(folder) / "index.html").as_uri(), "report", "1000,900")
    server = Server(Api(), 0)
    Thread(target=server.serve_forever, daemon=True).start()
    _screenshot(server.address, "demo", "1200,850")
    server.stop()


def _screenshot(address: str, name: str, size: str) -> None:
    """Write a picture of a page with few colours, so that it is small."""
    from PIL import Image

    path = PICTURES / f"{name}.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000", f"--window-size={size}"]
    subprocess.run(["chromium", *flags, f"--screenshot={path}", address], check=True, capture_output=True)
    with Image.open(path) as image:
        image.convert("RGB").quantize(32).save(path, optimize=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["screenshots"]:
        screenshots()
    else:
        for name, svg in FIGURES.items():
            (PICTURES / f"{name}.svg").write_text(svg())
