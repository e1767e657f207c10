"""Commands about models: list presets, inspect positions, convert checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import track
from rich.table import Table

from permuteformer.cli.console import console, say
from permuteformer.cli.options import ModelOptions
from permuteformer.formatting import format_bytes, format_count

if TYPE_CHECKING:
    from permuteformer.models.inspection import Grid, Head, Inspection, Layers

LEVELS = "▁▂▃▄▅▆▇█"
MAP_REACH, MAX_MAP_REACH = 7, 32
"""Rows and columns around the middle pixel of a map: by default, and at most."""


def models(only: str = "", *, length: int = 0) -> None:
    """List the presets: every row of the paper's tables, for every task.

    FLOP are those of the matrix products of a forward pass. State is the size of the decoding state of one sequence. Reach is the longest
    distance that positions distinguish.

    Args:
        only: show presets whose name contains this.
        length: tokens per sequence; default: the longest input of each task.
    """
    from permuteformer.models import PRESETS, PermuteFormerConfig
    from permuteformer.models.inspection import summarize
    from permuteformer.presets import LM_LENGTH, TASK_MODELS

    names = [name for name in PRESETS if only in name]
    if not names:
        raise ValueError(f"no preset's name contains {only!r}; there are {', '.join(PRESETS)}")
    table = Table()
    table.add_column("preset", no_wrap=True)
    for column in ("parameters", "length", "FLOP per token", "state", "reach"):
        table.add_column(column, justify="right")
    for name in track(names, description="counting", console=console, transient=True):
        own = next((task.length for ending, task in TASK_MODELS.items() if name.endswith(ending)), LM_LENGTH)
        summary = summarize(PermuteFormerConfig.preset(name), length or own)
        state = "" if summary.state_bytes is None else format_bytes(summary.state_bytes)
        reach = "any" if summary.reach is None else " x ".join(format_count(r) for r in summary.reach)
        table.add_row(name, format_count(summary.parameters), f"{summary.length:,}", format_count(summary.flops_per_token), state, reach)
    console.print(table)


def inspect(
    source: str, *, length: int = 0, distance: int | None = None, grid: tuple[int, int] = (32, 32), picture: Path | None = None
) -> None:
    """Show what positions do in a model: cycles of every head, when they repeat, and how fast the decay r forgets.

    Similarity compares a token with itself at another position: the share of its features that are back in place, times the decay. It is 1
    at distance 0, and without a decay it is 1 again at the order of the permutation.

    Args:
        source: a preset, the folder of a model, or a run folder.
        length: tokens of your sequences: warn if positions repeat within them.
        distance: longest distance in the picture; default: 48 tokens, or 7 pixels.
        grid: height and width of your images, for models with two axes.
        picture: PNG to write: similarity by distance, or a map of it for images.
    """
    from permuteformer.models.inspection import inspect

    if min(grid) < 1:
        raise ValueError(f"grid must be a height and a width of at least 1, got {grid[0]} {grid[1]}")
    found = inspect(source)
    config, names = found.config, ", ".join(entry["name"] for entry in found.config.position) or "none"
    kind = "causal" if config.causal else "bidirectional"
    say(f"{source}: {config.attention['name']} attention, {kind}, {config.num_attention_heads} heads; positions: {names}", style="bold")
    shape = grid if config.axes == 2 else None
    for layers in found.layers:
        _show_layers(layers, config.axes, shape)
    if found.reach:
        units = ("columns", "rows") if shape else ("tokens",) * config.axes
        reach = " and ".join(f"{n:,} {unit}" for n, unit in zip(found.reach, units, strict=True))
        say(f"all heads together repeat after {reach}: they distinguish shorter distances")
    for warning in found.warnings(length, shape):
        say(warning, style="yellow")
    if picture is not None:
        _draw(found, source, distance, shape, picture)
        say(f"written to {picture}")


def _show_layers(layers: Layers, axes: int, grid: Grid | None) -> None:
    heads = layers.heads
    say(layers.name)
    if heads[0].cycles:
        say("permutation: the lengths of its cycles, and its order, the distance at which all features are back in place")
        console.print(_permutation_table(heads, axes))
    if heads[0].r is not None:
        say(f"decay: the weight {_formula(heads[0])} of a key by its distance")
        if grid is not None:
            say(f"in columns (→) or rows (↓); i and j count the pixels of a {grid[0]} x {grid[1]} image row by row, or column by column")
        console.print(_decay_table(heads, grid))
    if grid is not None:
        say("similarity of two pixels by columns (across) and rows (down) between them, mean over heads, from ▁ (0) to █ (1)")
        distances = _map_distances(MAP_REACH, grid)
        for row, line in zip(distances, _map(heads, distances, grid), strict=True):
            say(f"{row:+3d} " + "".join(2 * _level(value) for value in line))


def _permutation_table(heads: Sequence[Head], axes: int) -> Table:
    table = Table()
    table.add_column("head", justify="right")
    table.add_column("cycles" if axes == 1 else "cycles, by axis", overflow="fold")
    table.add_column("order", justify="right", no_wrap=True)
    if axes == 1:
        table.add_column("similarity at 0 … 24", no_wrap=True)
    for number, head in enumerate(heads):
        cycles = " | ".join(" ".join(map(str, lengths)) for lengths in head.cycles)
        line = ["".join(_level(head.similarity(d)) for d in range(25))] if axes == 1 else []
        table.add_row(str(number), cycles, " x ".join(map(format_count, head.order)), *line)
    return table


def _decay_table(heads: Sequence[Head], grid: Grid | None) -> Table:
    distances: dict[str, tuple[int, ...]] = {f"{d:,}": (d,) for d in (1, 4, 16, 64, 256, 1024)}
    if grid is not None:
        distances = {"1 →": (1, 0), "4 →": (4, 0), "1 ↓": (0, 1), "4 ↓": (0, 4)}
    table = Table()
    for column in ("head", *([] if grid is None else ["counts pixels"]), "r", "half-life", *distances):
        table.add_column(column, justify="right")
    for number, head in enumerate(heads):
        order = [] if grid is None else [_order(head)]
        weights = [f"{head.decay(*distance, grid=grid):.2f}" for distance in distances.values()]
        table.add_row(str(number), *order, f"{head.r:.4f}", _half_life(head), *weights)
    return table


def _draw(found: Inspection, source: str, distance: int | None, grid: Grid | None, picture: Path) -> None:
    """Draw lines of all heads for text; for images a map of each head, or of each layer if layers differ."""
    from permuteformer.report.maps import similarity_figure
    from permuteformer.storage import atomic_write

    if not found.layers:
        raise ValueError(f"{source} has neither permutation nor decay: there is nothing to draw, leave out --picture")
    heads, is_one = found.layers[0].heads, len(found.layers) == 1
    panels: dict[str, Any] = {}
    names: list[str] = []
    if grid is not None:
        distances = _map_distances(distance or MAP_REACH, grid)
        if is_one:
            panels = {_head_name(n, head, grid): _map([head], distances, grid) for n, head in enumerate(heads)}
        else:
            panels = {f"{layers.name}, mean over heads": _map(layers.heads, distances, grid) for layers in found.layers}
    else:
        span = distance or 48
        distances = range(-span if heads[0].two_sided else 0, span + 1)
        names = [_head_name(n, head) if is_one else f"head {n}" for n, head in enumerate(heads)]
        has_both = bool(heads[0].cycles) and heads[0].r is not None
        for layers in found.layers:
            prefix = "" if is_one else f"{layers.name}: "
            panels[f"{prefix}similarity{', with decay' if has_both else ''}"] = [[h.similarity(d) for d in distances] for h in layers.heads]
            if has_both:
                panels[f"{prefix}decay alone, {_formula(heads[0])}"] = [[head.decay(d) for d in distances] for head in layers.heads]
    atomic_write(picture, similarity_figure(f"{Path(source).name}: positions", list(distances), panels, names).png)


def _map_distances(reach: int, grid: Grid) -> range:
    """Return the rows, and columns, of a map around a pixel: no more than an image has."""
    reach = max(1, min(reach, MAX_MAP_REACH, min(grid) - 1))
    return range(-reach, reach + 1)


def _map(heads: Sequence[Head], distances: range, grid: Grid) -> list[list[float]]:
    """Return the mean similarity by rows and columns. Positions are (column, row)."""
    return [[sum(head.similarity(column, row, grid=grid) for head in heads) / len(heads) for column in distances] for row in distances]


def _head_name(number: int, head: Head, grid: Grid | None = None) -> str:
    name = f"head {number}"
    if head.r is None:
        return name
    return f"{name}, half-life {_half_life(head)}" if grid is None else f"{name}, {_order(head)}\nhalf-life {_half_life(head)} pixels"


def _half_life(head: Head) -> str:
    return "never" if head.half_life == math.inf else f"{head.half_life:,.1f}"


def _order(head: Head) -> str:
    return "column by column" if head.axis else "row by row"


def _formula(head: Head) -> str:
    return "r^|i−j|" if head.two_sided else "r^(i−j)"


def _level(share: float) -> str:
    return LEVELS[min(int(share * len(LEVELS)), len(LEVELS) - 1)]


def convert(source: str, output: Path, *, options: ModelOptions) -> None:
    """Start a PermuteFormer from BERT or GPT-2, with all weights that fit.

    The model is written to OUTPUT with a report of what was copied, what is new and what was dropped.

    Args:
        source: folder of a BERT or GPT-2 checkpoint, or its name on the hub.
        output: folder to write; it must not exist, or be empty.
    """
    from permuteformer.models.convert import convert_checkpoint

    report = convert_checkpoint(source, output, **options)
    say(str(report))
    say(f"written to {output}")
