"""The command that measures time and memory."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from permuteformer.cli.terminal import console, errors_in_words, say, separate
from permuteformer.terminal import described

LIMIT = 20.0
"""Seconds of a call of scaling."""

if TYPE_CHECKING:
    from permuteformer.report.benches import Numbers

Line = dict[str, Any]


def bench(
    sweep: Annotated[str, typer.Argument(help="ops, train, latency, decode or scaling.")],
    tasks: Annotated[list[str] | None, typer.Option(help="train, latency: text, retrieval, image, pathfinder; all unless told.")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="train, latency, scaling: rows of the paper (transformer, nystromformer, …), formula, or peers. May be repeated."
        ),
    ] = None,
    lengths: Annotated[list[str] | None, typer.Option(help="scaling: lengths; 512 to 1,048,576 unless told.")] = None,
    turns: Annotated[int, typer.Option(help="Turns of every case; the best call counts.", min=1)] = 9,
    limit_seconds: Annotated[float, typer.Option(help="scaling: a curve ends before a call that would take longer.")] = LIMIT,
    threads: Annotated[int | None, typer.Option(help="Threads of the CPU; torch decides unless told.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="ops: float32, bfloat16 or float16.")] = "float32",
    output: Annotated[Path, typer.Option(help="Folder for SWEEP.jsonl and figures.")] = Path("runs/bench"),
) -> None:
    """Measure time and memory, side by side with others.

    ops: one call of attention. train: a step of whole models. latency: one item. decode: one more token. scaling: by length.
    Every case runs in a process of its own, so that running out of memory is a result; those to be compared take turns. Peers are
    hf-nystromformer, hf-longformer, hf-bigbird, hf-modernbert, and performer-pytorch where it is installed.

    Example: permuteformer bench latency --tasks image --against performer --against formula
    """
    from permuteformer.bench.sweeps import SIDE_BY_SIDE, SWEEPS
    from permuteformer.registry import unknown

    with errors_in_words():
        if sweep not in SWEEPS:
            raise ValueError(unknown("sweep", sweep, SWEEPS))
        if sweep != "scaling" and (lengths or limit_seconds != LIMIT):
            raise ValueError(f"lengths and limit-seconds are for scaling; {sweep} has its own cases")
        if sweep == "scaling" and (tasks or dtype != "float32"):
            raise ValueError("tasks are for train and latency, and dtype for ops; scaling has models of one task, in float32")
        how: dict[str, Any] = {"threads": threads, "device": device}
        columns = (described(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            if sweep in SIDE_BY_SIDE:
                lines = _side_by_side(sweep, separate(tasks), separate(against), dtype, turns, bar, how)
            else:
                lines = _scaling(separate(lengths), separate(against), turns, limit_seconds, bar, how)
            found = list(lines)
        _write(sweep, found, output)
        _show(sweep, found, output)


def _side_by_side(
    sweep: str, tasks: list[str], against: list[str], dtype: str, turns: int, bar: Progress, how: dict[str, Any]
) -> Iterator[Line]:
    from permuteformer.bench import sweeps
    from permuteformer.bench.run import side_by_side

    kind = {"train": "training", "latency": "inference"}.get(sweep)
    if kind is None and (tasks or against):
        raise ValueError(f"tasks and against are for train, latency and scaling; {sweep} has its own cases")
    if sweep != "ops" and dtype != "float32":
        raise ValueError(f"dtype is for ops; {sweep} is in float32")
    groups = sweeps.models(kind, tasks, against) if kind else sweeps.ops(dtype) if sweep == "ops" else sweeps.decode()
    task = bar.add_task(sweep, total=sum(len(group.cases) * (turns + 1) for group in groups))

    progress = _steps(bar, task)
    yield from side_by_side(sweep, groups, turns=turns, progress=progress, **how)


def _scaling(
    lengths: list[str], against: list[str], turns: int, limit_seconds: float, bar: Progress, how: dict[str, Any]
) -> Iterator[Line]:
    from permuteformer.bench import sweeps
    from permuteformer.bench.run import by_length

    bad = [length for length in lengths if not length.isdecimal()]
    if bad:
        raise ValueError(f"lengths must be whole numbers, with commas between them; there is {bad[0]!r}")
    curves = sweeps.scaling([int(length) for length in lengths], against)
    task = bar.add_task("scaling", total=sum(len(cases) for rows in curves.values() for cases in rows.values()))
    yield from by_length("scaling", curves, turns=turns, limit_seconds=limit_seconds, progress=_steps(bar, task), **how)


def _steps(bar: Progress, task: TaskID) -> Callable[[str, int], None]:
    return lambda what, steps: bar.update(task, description=what, advance=steps)


def _write(sweep: str, lines: list[Line], output: Path) -> None:
    from permuteformer.folders import write_whole
    from permuteformer.train.environment import without_folders

    command = shlex.join(["permuteformer", *map(without_folders, sys.argv[1:])])
    output.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({**line, "command": command}) + "\n" for line in lines)
    write_whole(output / f"{sweep}.jsonl", text.encode())


def _show(sweep: str, lines: list[Line], output: Path) -> None:
    from permuteformer.folders import write_whole
    from permuteformer.report import benches

    if sweep == "scaling":
        tables, figures = benches.length_tables(lines), benches.length_figures(lines, benches.rate_of(lines))
    else:
        tables, figures = benches.side_by_side_tables(lines), benches.side_by_side_figures(lines)
    for table in tables:
        console.print(_table(table))
    if sweep != "scaling":
        say("ratio: of the best time to the first row's; extra: peak of memory above what stood ready; of rate: of matrix products'")
    for line in lines:
        if line["result"]["message"]:
            say(f"{line['group']}, {line['row']}: {line['result']['status']}: {line['result']['message']}", style="yellow")
    _show_bars(sweep, lines)
    for figure in figures:
        write_whole(output / f"{figure.name}.svg", figure.svg_file.encode())
        write_whole(output / f"{figure.name}.png", figure.png)
    say(f"written to {output}: {sweep}.jsonl and {len(figures)} figures")


def _show_bars(sweep: str, lines: list[Line]) -> None:
    from permuteformer.bench.bars import BARS, DOUBLING, worst_doubling
    from permuteformer.report.table import times

    results: dict[str, dict[str, Any]] = {}
    for line in lines:
        results.setdefault(line["group"], {})[line["row"]] = line["result"]
    shown = Table(title="to be reached", title_justify="left")
    for header in ("", "of", "at most", "measured", ""):
        shown.add_column(header, justify="right" if header in ("at most", "measured") else "left")
    rows = [
        (bar.group, f"{bar.quantity}, {bar.case} against {bar.against}", bar.at_most, bar.ratio(results.get(bar.group, {})))
        for bar in BARS.get(sweep, ())
    ]
    if sweep == "scaling":
        rows.append(("causal attention", "time, a length against half of it, from 8,192 on", DOUBLING, worst_doubling(lines)))
    for group, what, at_most, ratio in rows:
        if ratio is not None:
            told = Text("reached", style="green") if ratio <= at_most else Text("missed", style="yellow")
            shown.add_row(group, what, times(at_most), times(ratio), told)
    if shown.row_count:
        console.print(shown)


MOST_BESIDE_NAMES = 7
"""Columns of a table whose names are kept in one line: more leave a narrow terminal no room for their numbers."""


def _table(table: Numbers) -> Table:
    shown = Table(title=Text(table.title), title_justify="left")
    for place, header in enumerate(table.headers):
        whole = place == 0 and len(table.headers) <= MOST_BESIDE_NAMES
        shown.add_column(Text(header), justify="left" if place == 0 else "right", overflow="fold", no_wrap=whole)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
