"""The command line: it parses, calls, and shows; what is done is done elsewhere."""

from __future__ import annotations

import typer

from permuteformer.cli import data, models

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(models.models)
app.command()(models.convert)
app.add_typer(data.app, name="data")


@app.callback()
def permuteformer() -> None:
    """PermuteFormer: relative positions for linear attention, at any length."""
