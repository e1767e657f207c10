"""Commands about models: the presets, and starting from other checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from permuteformer.cli.terminal import console, errors_in_words, say
from permuteformer.words import short, size_in_words


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
