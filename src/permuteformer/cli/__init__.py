"""The command line: it parses, calls, and shows; what is done is done elsewhere."""

from __future__ import annotations

import typer

from permuteformer.cli import bench, data, demo, explain, info, models, report, reproduce, train, use
from permuteformer.cli.terminal import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"ignore_unknown_options": True})(train.train)
app.command()(train.resume)
app.command("eval")(train.evaluate)
app.command()(use.predict)
app.command()(use.generate)
app.command()(explain.explain)
app.command()(demo.demo)
app.command()(train.fields)
app.command("run-cell", hidden=True)(train.run_cell)
app.command()(reproduce.reproduce)
app.command()(reproduce.experiments)
app.command()(report.report)
app.command()(bench.bench)
app.command()(info.info)
app.command()(models.models)
app.command()(models.inspect)
app.command()(models.convert)
app.add_typer(data.app, name="data")


@app.callback()
def permuteformer() -> None:
    """PermuteFormer: relative positions for linear attention, at any length."""
