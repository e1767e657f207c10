"""Commands on the paper's tables: list them, run them, and report on runs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from permuteformer.cli.console import console, say
from permuteformer.formatting import format_bytes, format_duration
from permuteformer.registry import unknown

if TYPE_CHECKING:
    from permuteformer.experiments import Plan
    from permuteformer.reproduce.jobs import Job


def experiments(*, preset: str = "paper") -> None:
    """List the experiments: rows and columns of the paper's tables with its numbers, and the command that runs each table.

    Args:
        preset: quick, small, medium, paper or tuning.
    """
    from permuteformer.experiments.published import UNITS, published

    plan = _plan(preset)
    for table in plan.tables:
        say(f"\ntable {table.name}: {table.title}", style="bold")
        say(f"permuteformer reproduce --preset {preset} --table {table.name}", style="cyan")
        if not any(published(table.name, row, column.name) for row in table.rows for column in table.columns):
            say(f"--rows {','.join(table.rows)}")
            continue
        shown = Table(caption=f"the paper's numbers: {UNITS[table.name]}")
        shown.add_column("--rows", no_wrap=True)
        for column in table.columns:
            shown.add_column(column.name, justify="right", no_wrap=True)
        for row in table.rows:
            shown.add_row(row, *(_number(published(table.name, row, column.name)) for column in table.columns))
        console.print(shown)
    one = plan.tables[0]
    say(f"one cell: permuteformer reproduce --preset {preset} --table {one.name} --rows {one.rows[0]} --tasks {one.columns[0].name}")
    say(f"preset {preset}: {plan.title}, {plan.seeds} seed{'s' if plan.seeds > 1 else ''} by default")
    if plan.also:
        say(f"drawn from the same runs: {', '.join(f'--table {name}' for name in plan.also)}")


def reproduce(
    *,
    preset: str = "quick",
    table: list[str] | None = None,
    rows: list[str] | None = None,
    tasks: list[str] | None = None,
    seeds: int | None = None,
    output: Path | None = None,
    data: str | None = None,
    jobs: int | None = None,
    micro_batch_size: int | None = None,
    precision: str | None = None,
    dry_run: bool = False,
) -> None:
    """Run the paper's tables: all rows, tasks and seeds. Finished runs are not repeated, interrupted ones are resumed.

    A row that does not fit into memory is a result of its own. At the end, tables are printed and a report for the browser is written.

    Args:
        preset: quick (minutes, bundled data), small (hours on two cores), medium (days), paper (GPUs), or tuning (rates of small).
        table: 1, 2, 3, 4, length, speed or figure2; default: all.
        rows: rows; default: all.
        tasks: columns; default: all.
        seeds: runs of each cell; default: the preset's number.
        output: folder of the runs; default: runs/PRESET.
        jobs: runs at a time; default: one per GPU, else one per core, at most 2.
        micro_batch_size: items computed at a time, if memory is short.
        precision: float32, bfloat16 or float16; default: the preset's.
        dry_run: only show the runs, with their estimated time and memory.
    """
    from permuteformer.ops.checks import check_integer
    from permuteformer.reproduce.jobs import jobs_of
    from permuteformer.reproduce.run import visible_gpus

    check_integer(**{name: value for name, value in {"jobs": jobs, "seeds": seeds}.items() if value is not None})
    settings = {"micro_batch_size": micro_batch_size, "precision": precision}
    default = _plan(preset)
    plan = default.with_settings({name: value for name, value in settings.items() if value is not None})
    folder = output or Path("runs") / preset
    todo = jobs_of(plan.cells(table or (), rows or (), tasks or (), seeds), folder)
    at_once = jobs or len(visible_gpus()) or min(os.cpu_count() or 1, 2)
    if dry_run:
        _show_plan(todo, at_once, data)
        return
    _check_data(todo, data)
    _run(todo, [plan, default], folder, at_once, data)


def report(folders: list[Path], *, output: Path = Path("report")) -> None:
    """Write tables, figures and a page from runs, with the paper's numbers beside them.

    OUTPUT gets index.html, which needs no other file, report.md, tables.tex, tables/*.csv and figures/.

    Args:
        folders: run folders, folders of run folders, or .jsonl results files.
        output: folder to write; a report in it is replaced.
    """
    from permuteformer.report import print_tables, write_report

    with console.status("reading runs") as status:
        made = write_report(folders, output, progress=lambda what: status.update(Text(what)))
    print_tables(made.tables, console)
    for sentence in made.skipped:
        say(sentence, style="yellow")
    say(f"{made.overview[0]} The report, to open in a browser: {output / 'index.html'}")


def _run(todo: list[Job], plans: list[Plan], folder: Path, at_once: int, data: str | None) -> None:
    """Run jobs, and collect all results in the folder of any of the plans, which differ in settings."""
    from permuteformer.experiments.layout import RESULTS
    from permuteformer.machine import command_line
    from permuteformer.reproduce.jobs import all_jobs, collect
    from permuteformer.reproduce.run import run

    def everything() -> list[Job]:
        alternatives = zip(*(all_jobs(plan, folder) for plan in plans), strict=True)
        return [next((job for job in same if job.result), same[0]) for same in alternatives]

    folder.mkdir(parents=True, exist_ok=True)
    name, command = plans[0].name, shlex.join(command_line())
    try:
        failures = run(todo, preset=name, command=command, at_once=at_once, data=data, console=console)
    except KeyboardInterrupt:
        collect(everything(), folder, name, command)
        say("interrupted; running jobs were saved, and the same command resumes them")
        raise SystemExit(130) from None
    if collect(everything(), folder, name, command):
        report([folder / RESULTS], output=folder / "report")
    for failed, message in failures.items():
        say(f"{failed} failed: {message}", style="red")
    if failures:
        raise SystemExit(1)


def _show_plan(todo: list[Job], at_once: int, data: str | None) -> None:
    from permuteformer.machine import total_memory
    from permuteformer.reproduce.estimate import estimate, matmul_peak

    peak = matmul_peak()
    finished = [job for job in todo if job.result]
    shown = Table()
    for column in ("run", "status", "time", "memory"):
        shown.add_column(column, justify="left" if column in ("run", "status") else "right", no_wrap=column != "run", overflow="fold")
    training = measuring = 0.0
    unknown_jobs = largest = 0
    for job in todo:
        guess = estimate(job, finished, peak, data)
        status = job.result.get("status", "")
        if not status and guess.seconds is not None:
            training, measuring = (training + guess.seconds, measuring) if job.is_training else (training, measuring + guess.seconds)
            largest = max(largest, guess.memory_bytes or 0)
        unknown_jobs += guess.seconds is None
        sign = "" if guess.measured else "~ "
        time = "?" if guess.seconds is None else sign + format_duration(guess.seconds)
        memory = "?" if guess.memory_bytes is None else sign + format_bytes(guess.memory_bytes)
        shown.add_row(job.cell.name, Text(status, style="green"), time, memory)
    console.print(shown)
    say("~ is an estimate from the number of operations and this machine's matmul peak; without ~ it was measured in a finished run.")
    say("If data is missing, the size of the official data is assumed.")
    left = sum(not job.result for job in todo)
    seconds = training / at_once + measuring
    say(f"{left} of {len(todo)} to run" + (f", about {format_duration(seconds)} with {at_once} at a time" if seconds else ""))
    if at_once * largest > total_memory():
        say(
            f"{at_once} at a time may need {format_bytes(at_once * largest)} of memory, this machine has {format_bytes(total_memory())}: "
            "use --jobs 1, or a --micro-batch-size",
            style="yellow",
        )
    if unknown_jobs:
        say(f"{unknown_jobs} cannot be estimated, their data is missing; `permuteformer data list` says how to get it", style="yellow")


def _check_data(todo: list[Job], data: str | None) -> None:
    """Raise before anything runs if data is missing, with the commands that get it."""
    from permuteformer.experiments import Experiment
    from permuteformer.tasks import NotReady
    from permuteformer.train.build import build_task

    missing = []
    tasks = [(w.task, tuple(sorted(w.task_options.items()))) for job in todo if isinstance(w := job.cell.work, Experiment)]
    for name, options in dict.fromkeys(tasks):
        try:
            _ = build_task(name, dict(options), data).source
        except NotReady as error:
            missing.append(str(error))
    if missing:
        raise NotReady("\n".join(missing))


def _plan(preset: str) -> Plan:
    from permuteformer.experiments import PLANS

    if preset not in PLANS:
        raise ValueError(unknown("preset", preset, PLANS))
    return PLANS[preset]


def _number(number: Any) -> str:
    if number is None:
        return ""
    mean, deviation = number
    return (f"{mean:,}" if isinstance(mean, int) else f"{mean:.2f}") + ("" if deviation is None else f"±{deviation:.2f}")
