"""The command that measures time and memory."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from permuteformer.cli.console import console, say
from permuteformer.console import description_column

if TYPE_CHECKING:
    from permuteformer.report.bench import PlainTable

LIMIT_SECONDS = 20.0
"""Default of --limit-seconds."""
TURN_SECONDS = 0.2
"""How long a case is called before the next one has its turn."""
WIDE_TABLE = 8
"""Columns from which on the names of rows may be broken."""

Line = dict[str, Any]


def bench(
    sweep: str,
    *,
    tasks: list[str] | None = None,
    against: list[str] | None = None,
    lengths: list[int] | None = None,
    turns: int = 9,
    limit_seconds: float = LIMIT_SECONDS,
    threads: int | None = None,
    device: str | None = None,
    dtype: str = "float32",
    output: Path = Path("runs/bench"),
) -> None:
    """Measure time and memory, side by side with others.

    ops: one call of attention. train: a training step. latency: one item. decode: one more token. scaling: by length.
    Every case runs in its own process, so that running out of memory is a result; cases that are compared alternate. Peers are
    hf-nystromformer, hf-longformer, hf-bigbird, hf-modernbert, and performer-pytorch if it is installed.

    Example: permuteformer bench latency --tasks image --against performer,formula

    Args:
        sweep: ops, train, latency, decode or scaling.
        tasks: train, latency: text, retrieval, image, pathfinder; default: all.
        against: train, latency, scaling: rows of the paper (transformer, nystromformer, …), formula, or peers.
        lengths: scaling: lengths; default: 512 to 1,048,576.
        turns: repeats of every case; the best counts.
        limit_seconds: scaling: a curve ends before a call that would take longer.
        threads: threads of the CPU; default: torch's.
        device: cpu or cuda; default: a GPU if there is one.
        dtype: ops: float32, bfloat16 or float16.
        output: folder for SWEEP.jsonl and figures.
    """
    from permuteformer.bench import runner, sweeps
    from permuteformer.ops.checks import check_integer
    from permuteformer.registry import unknown

    if sweep not in sweeps.SWEEPS:
        raise ValueError(unknown("sweep", sweep, sweeps.SWEEPS))
    check_integer(turns=turns, **({} if threads is None else {"threads": threads}))
    _check_options(sweep, tasks=tasks, against=against, lengths=lengths, dtype=dtype, limit_seconds=limit_seconds)
    options: dict[str, Any] = {"threads": threads, "device": device, "turn_seconds": TURN_SECONDS}
    columns = (description_column(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:

        def progress(description: str, steps: int) -> None:
            bar.update(task, description=description, advance=steps)

        if sweep == "scaling":
            curves = sweeps.scaling(lengths or (), against or ())
            task = bar.add_task(sweep, total=sum(len(cases) for rows in curves.values() for cases in rows.values()))
            lines = list(runner.run_curves(sweep, curves, turns, limit_seconds, progress, **options))
        else:
            kind = {"train": "training", "latency": "inference"}.get(sweep)
            models = sweeps.models(kind, tasks or (), against or ()) if kind else None
            groups = models or (sweeps.ops(dtype) if sweep == "ops" else sweeps.decode())
            task = bar.add_task(sweep, total=sum(len(cases) * (turns + 1) for cases in groups.values()))
            lines = list(runner.run_groups(sweep, groups, turns, progress, **options))
    _write(sweep, lines, output)
    _show(sweep, lines, output)


def _check_options(sweep: str, **given: Any) -> None:
    """Raise for options that the sweep does not use."""
    used_by = {
        "tasks": ("train", "latency"),
        "against": ("train", "latency", "scaling"),
        "lengths": ("scaling",),
        "limit_seconds": ("scaling",),
        "dtype": ("ops",),
    }
    defaults = {"dtype": "float32", "limit_seconds": LIMIT_SECONDS}
    for name, sweeps in used_by.items():
        if sweep not in sweeps and given[name] not in (None, [], defaults.get(name)):
            raise ValueError(f"--{name.replace('_', '-')} is for {', '.join(sweeps)}; {sweep} does not use it")


def _write(sweep: str, lines: list[Line], output: Path) -> None:
    from permuteformer.machine import command_line
    from permuteformer.storage import atomic_write

    output.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({**line, "command": shlex.join(command_line())}) + "\n" for line in lines)
    atomic_write(output / f"{sweep}.jsonl", text.encode())


def _show(sweep: str, lines: list[Line], output: Path) -> None:
    from permuteformer.report import bench as tables_of
    from permuteformer.storage import atomic_write

    for text in headlines(sweep, lines):
        say(text, style="bold")
    if sweep == "scaling":
        tables, figures = tables_of.length_tables(lines), tables_of.length_figures(lines)
    else:
        tables, figures = tables_of.comparison_tables(lines), tables_of.comparison_figures(lines)
    for table in tables:
        console.print(_table(table))
    for line in lines:
        if line["result"]["message"]:
            say(f"{line['group']}, {line['row']}: {line['result']['status']}: {line['result']['message']}", style="yellow")
    _show_targets(sweep, lines)
    for figure in figures:
        atomic_write(output / f"{figure.name}.svg", figure.svg_file.encode())
        atomic_write(output / f"{figure.name}.png", figure.png)
    say(f"written to {output}: {sweep}.jsonl and {len(figures)} figures")


def headlines(sweep: str, lines: list[Line]) -> Iterator[str]:
    """Yield a sentence per group: how much faster its first row is than the others, at the longest length of each."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if line["row"] != "matmul" and line["result"]["seconds_best"]:
            groups.setdefault(line["group"], []).append(line)
    for group in groups.values():
        first = group[0]
        ours = {line["length"]: line["result"]["seconds_best"] for line in group if line["row"] == first["row"]}
        ratios = {}
        for line in group:
            if line["row"] != first["row"] and line["length"] in ours:
                ratios[line["row"], line["length"]] = line["result"]["seconds_best"] / ours[line["length"]]
        longest = dict(ratios.keys())
        shown = sorted(longest.items(), key=lambda item: -ratios[item])
        if shown:
            compared = ", ".join(_compared(ratios[row, length], row, length) for row, length in shown)
            yield f"{_group_title(sweep, first)}: {_title(first['row'])} is {compared}"


def _group_title(sweep: str, line: Line) -> str:
    if sweep == "ops":
        return f"{line['group']}, {line['case']['options']['length']:,} tokens"
    return str(line["group"]) + {"train": ", a training step", "latency": ", one item"}.get(sweep, "")


def _compared(ratio: float, row: str, length: int | None) -> str:
    place = "" if length is None else f" at {length:,}"
    if 0.95 < ratio < 1.05:
        return f"as fast as {_title(row)}{place}"
    factor = max(ratio, 1 / ratio)
    return f"{factor:.{0 if factor >= 10 else 1}f}x {'faster' if ratio > 1 else 'slower'} than {_title(row)}{place}"


def _title(row: str) -> str:
    from permuteformer.report.bench import title

    return {"sdpa": "SDPA", "formula": "the formula"}.get(row) or title(row)


def _show_targets(sweep: str, lines: list[Line]) -> None:
    from permuteformer.bench.targets import measured_ratios
    from permuteformer.report.cells import times

    table = Table(title="performance targets", title_justify="left")
    for header in ("", "ratio", "at most", "measured", ""):
        table.add_column(header, justify="right" if header in ("at most", "measured") else "left")
    for group, description, at_most, ratio in measured_ratios(sweep, lines):
        outcome = Text("met", style="green") if ratio <= at_most else Text("missed", style="yellow")
        table.add_row(group, description, times(at_most), times(ratio), outcome)
    if table.row_count:
        console.print(table)


def _table(table: PlainTable) -> Table:
    shown = Table(title=Text(table.title), title_justify="left")
    for number, header in enumerate(table.headers):
        is_name = number == 0
        whole = is_name and len(table.headers) < WIDE_TABLE
        shown.add_column(Text(header), justify="left" if is_name else "right", overflow="fold", no_wrap=whole)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
