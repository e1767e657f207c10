"""Commands about models: the presets, and starting from other checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track
from rich.table import Table

from permuteformer.cli.terminal import console, errors_in_words, say
from permuteformer.words import short, size_in_words

if TYPE_CHECKING:
    from permuteformer.models.inspection import Head, Inspection

LEVELS = "▁▂▃▄▅▆▇█"


def models(
    only: Annotated[str, typer.Argument(help="Show presets whose name contains this.")] = "",
    length: Annotated[int, typer.Option(help="Tokens to count the work at; 0 for each task's own longest input.", min=0)] = 0,
) -> None:
    """List the presets: every row of the paper's tables.

    Work is that of one forward pass, in multiplications and additions of matrix products a token. State is what decoding keeps of one
    sequence of that length. Reach is the longest distance that positions tell apart.
    """
    from permuteformer.models import PRESETS, PermuteFormerConfig
    from permuteformer.models.presets import LM_LENGTH, TASKS
    from permuteformer.models.summary import summarize

    names = [name for name in PRESETS if only in name]
    if not names:
        say(f"no preset's name contains {only!r}; there are {', '.join(PRESETS)}")
        raise typer.Exit(1)
    table = Table()
    table.add_column("preset", no_wrap=True)
    for column in ("parameters", "length", "FLOP a token", "state", "reach"):
        table.add_column(column, justify="right")
    for name in track(names, description="counting", console=console, transient=True):
        own = next((longest for task, (_, longest, _) in TASKS.items() if name.endswith(task)), LM_LENGTH)
        summary = summarize(PermuteFormerConfig.preset(name), length or own)
        state = "" if summary.state_bytes is None else size_in_words(summary.state_bytes)
        reach = "any" if summary.reach is None else " x ".join(short(r) for r in summary.reach)
        table.add_row(name, short(summary.parameters), f"{summary.length:,}", short(summary.flops_per_token), state, reach)
    console.print(table)


def inspect(
    source: Annotated[str, typer.Argument(help="A preset, a folder of a model, or a run folder.")],
    length: Annotated[int, typer.Option(help="Tokens of your sequences, to be warned where positions repeat before.", min=0)] = 0,
    distance: Annotated[int, typer.Option(help="The longest distance that is shown.", min=1, max=100_000)] = 48,
    picture: Annotated[Path | None, typer.Option(help="A PNG to write: likeness by distance, or a map where there are two axes.")] = None,
) -> None:
    """What positions do in a model: the cycles of every head, when they repeat, how fast r forgets.

    Likeness is how much a token is like itself so many places away: the share of its features that are back in their place, times r to
    the distance. At 0 it is 1, at the order of the permutation without r it is 1 again.
    """
    from permuteformer.models.inspection import inspect

    with errors_in_words():
        found = inspect(source)
        config, names = found.config, ", ".join(entry["name"] for entry in found.config.position) or "none"
        kind = "causal" if config.causal else "bidirectional"
        say(f"{source}: {config.attention['name']} attention, {kind}, {config.num_attention_heads} heads; positions: {names}", style="bold")
        for layers in found.layers:
            say(layers.name)
            console.print(_heads_table(layers.heads, config.axes, distance))
            if config.axes == 2 and layers.heads[0].cycles:
                say("likeness by columns (across) and rows (down) between two pixels, mean over heads")
                for line in _map_lines(layers.heads):
                    say(line)
        if found.reach:
            reach = " x ".join(f"{n:,}" for n in found.reach)
            say(f"all heads together repeat after {reach} tokens: distances below that are told apart")
        for warning in found.warnings(length):
            say(warning, style="yellow")
        if picture is not None:
            _draw_likeness(found, source, distance, picture)
            say(f"written to {picture}")


def _heads_table(heads: Sequence[Head], axes: int, distance: int) -> Table:
    table = Table()
    table.add_column("head", justify="right")
    if heads[0].cycles:
        table.add_column("cycles" + (", by axis" if axes > 1 else ""), overflow="fold")
        table.add_column("order", justify="right", no_wrap=True)
    if heads[0].r is not None:
        table.add_column("r", justify="right")
        table.add_column("half-life", justify="right")
    shown = min(distance, 24)
    table.add_column(f"likeness at 0 … {shown}" + (" on the last axis" if axes > 1 else ""), no_wrap=True)
    for number, head in enumerate(heads):
        cells = [str(number)]
        if head.cycles:
            cells += [" | ".join(" ".join(map(str, lengths)) for lengths in head.cycles), " x ".join(map(short, head.order))]
        if head.half_life is not None:
            cells += [f"{head.r:.4f}", "never" if head.half_life == float("inf") else f"{head.half_life:.1f}"]
        line = (head.alike(*(0,) * (len(head.cycles) - 1), d) for d in range(shown + 1))
        table.add_row(*cells, "".join(map(_level, line)))
    return table


def _map_lines(heads: Sequence[Head], reach: int = 8) -> list[str]:
    """A map in characters: positions are (column, row)."""
    around = range(-reach, reach + 1)
    means = [[sum(head.alike(column, row) for head in heads) / len(heads) for column in around] for row in around]
    return [f"{row:+3d} " + "".join(2 * _level(value) for value in line) for row, line in zip(around, means, strict=True)]


def _level(share: float) -> str:
    return LEVELS[min(int(share * len(LEVELS)), len(LEVELS) - 1)]


def _draw_likeness(found: Inspection, source: str, distance: int, picture: Path) -> None:
    from permuteformer.folders import write_whole
    from permuteformer.report.pictures import likeness_figure

    if not found.layers:
        raise ValueError(f"{source} has neither permutation nor decay: there is nothing to draw; leave --picture out")
    grid = found.config.axes == 2
    span = min(distance, 32) if grid else distance
    numbers = range(-span if grid else 0, span + 1)
    layers = [
        [
            [[head.alike(column, row) for column in numbers] for row in numbers] if grid else [head.alike(d) for d in numbers]
            for head in group.heads
        ]
        for group in found.layers
    ]
    reach = f"All heads together repeat after {' x '.join(f'{n:,}' for n in found.reach)}." if found.reach else ""
    figure = likeness_figure(f"{Path(source).name}: positions", list(numbers), layers, [group.name for group in found.layers], reach)
    write_whole(picture, figure.png)


def convert(
    source: Annotated[str, typer.Argument(help="Folder of a BERT or GPT-2 checkpoint, or its name on the hub.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; it must not exist yet, or be empty.")],
    field: Annotated[list[str] | None, typer.Option(help="A configuration field, NAME=JSON: pooling='\"mean\"'. May be repeated.")] = None,
) -> None:
    """Start a PermuteFormer from BERT or GPT-2, taking over all weights that fit.

    The model is written to OUTPUT with a report of what was taken, what is new and what was dropped.
    """
    from huggingface_hub.errors import StrictDataclassError

    from permuteformer.models.convert import convert_checkpoint

    try:
        overrides = {name: json.loads(value) for name, _, value in (entry.partition("=") for entry in field or [])}
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"a value must be JSON (numbers as they are, texts in double quotes): {error}") from None
    with errors_in_words(StrictDataclassError):
        report = convert_checkpoint(source, output, **overrides)
    say(str(report))
    say(f"written to {output}")
