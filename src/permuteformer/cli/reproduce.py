"""Commands about the paper's tables: what there is to run, and running it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from permuteformer.cli.terminal import console, errors_in_words, say, separate
from permuteformer.words import duration, size_in_words

if TYPE_CHECKING:
    from permuteformer.experiments import Plan
    from permuteformer.reproduce.jobs import Job

Preset = Annotated[
    str,
    typer.Option(help="quick (minutes), small (hours on two cores, real data), paper (GPUs), or tuning: small's learning rates."),
]


def experiments(preset: Annotated[str, typer.Option(help="quick, small or paper.")] = "paper") -> None:
    """List the experiments: the rows and columns of the paper's tables with its numbers, and the command that runs each table."""
    from permuteformer.experiments import PLANS
    from permuteformer.experiments.published import UNITS, published

    with errors_in_words():
        plan = _plan(PLANS, preset)
        for table in plan.tables:
            say(f"\ntable {table.name}: {table.title}", style="bold")
            say(f"permuteformer reproduce --preset {preset} --table {table.name}", style="cyan")
            if not any(published(table.name, row, column.name) for row in table.rows for column in table.columns):
                say(f"--rows {', '.join(table.rows)}")
                continue
            shown = Table(caption=f"the paper's numbers: {UNITS[table.name]}")
            shown.add_column("--rows", no_wrap=True)
            for column in table.columns:
                shown.add_column(column.name, justify="right", no_wrap=True)
            for row in table.rows:
                numbers = (published(table.name, row, column.name) for column in table.columns)
                shown.add_row(row, *(_number(number) for number in numbers))
            console.print(shown)
        one = plan.tables[0]
        say(f"one cell: permuteformer reproduce --preset {preset} --table {one.name} --rows {one.rows[0]} --tasks {one.columns[0].name}")
        say(f"preset {preset}: {plan.title}, {plan.seeds} seed{'s' if plan.seeds > 1 else ''} unless told")
        if plan.also:
            say("drawn from the same runs: " + ", ".join(f"--{'figure 2' if n == 'figure2' else f'table {n}'}" for n in plan.also))


def reproduce(
    table: Annotated[list[str] | None, typer.Option(help="1, 2, 3, 4, length or speed. May be repeated; all unless told.")] = None,
    figure: Annotated[int | None, typer.Option(help="2: perplexity by epoch, from table 4's runs.", min=2, max=2)] = None,
    preset: Preset = "quick",
    seeds: Annotated[int | None, typer.Option(help="Runs of each cell; the preset's number unless told.")] = None,
    rows: Annotated[list[str] | None, typer.Option(help="Rows; all unless told. May be repeated.")] = None,
    tasks: Annotated[list[str] | None, typer.Option(help="Columns; all unless told. May be repeated.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the runs; runs/PRESET unless told.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data folder; else PERMUTEFORMER_DATA, else the user's cache.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; one a GPU, else a core each, at most 2, unless told.", min=1)] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Items computed at a time, where memory is short.", min=1)] = None,
    precision: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the preset's unless told.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run, how long it takes and how much memory.")] = False,
) -> None:
    """Run the paper's tables: all rows, tasks and seeds. What is finished is not run again; interrupted, it goes on.

    A row that does not fit into memory is a result of its own. At the end there are tables here, and a report to open in a browser.
    """
    from permuteformer.experiments import PLANS
    from permuteformer.reproduce.jobs import jobs_of

    with errors_in_words():
        settings = {"micro_batch_size": micro_batch_size, "precision": precision}
        usual = _plan(PLANS, preset)
        plan = usual.changed({name: value for name, value in settings.items() if value is not None})
        wanted = [*(table or []), *(["figure2"] if figure else [])]
        folder = output or Path("runs") / preset
        cells = plan.cells(wanted, separate(rows), separate(tasks), seeds)
        todo = jobs_of(cells, folder)
        place = None if data is None else str(data)
        if dry_run:
            _show_plan(todo, _at_once(jobs), place)
            return
        _check_data(todo, place)
        _run(todo, [plan, usual], folder, _at_once(jobs), place)


def _run(todo: list[Job], plans: list[Plan], folder: Path, at_once: int, data: str | None) -> None:
    """Run jobs, and collect all that is there of any of the plans, which differ in settings: not this call's part of it alone."""
    from permuteformer.experiments.layout import RESULTS
    from permuteformer.report import print_tables, write_report
    from permuteformer.reproduce.collect import collect
    from permuteformer.reproduce.jobs import all_jobs
    from permuteformer.reproduce.run import Interrupted, run
    from permuteformer.train.environment import without_folders

    def there() -> list[Job]:
        ways = zip(*(all_jobs(plan, folder) for plan in plans), strict=True)
        return [next((job for job in same if job.result), same[0]) for same in ways]

    folder.mkdir(parents=True, exist_ok=True)
    name = plans[0].name
    command = shlex.join(["permuteformer", *map(without_folders, sys.argv[1:])])
    try:
        failures = run(todo, preset=name, command=command, at_once=at_once, data=data, console=console)
    except Interrupted:
        collect(there(), folder, name, command)
        say("interrupted; what was under way is saved, and the same command goes on")
        raise typer.Exit(130) from None
    if collect(there(), folder, name, command):
        made = write_report([folder / RESULTS], folder / "report")
        print_tables(made.tables, console)
        for sentence in made.left_out:
            say(sentence, style="yellow")
        say(f"{made.summary} The report, to open in a browser: {folder / 'report' / 'index.html'}")
    for failed, message in failures.items():
        say(f"{failed} failed: {message}", style="red")
    if failures:
        raise typer.Exit(1)


def _show_plan(todo: list[Job], at_once: int, data: str | None) -> None:
    from permuteformer.reproduce.estimate import estimate, measured_rate
    from permuteformer.train.environment import memory_bytes

    rate = measured_rate()
    finished = [job for job in todo if job.result]
    shown = Table()
    for column in ("run", "state", "time", "memory"):
        shown.add_column(column, justify="left" if column in ("run", "state") else "right", no_wrap=column != "run", overflow="fold")
    training = measuring = 0.0
    unknown = largest = 0
    for job in todo:
        guess = estimate(job, finished, rate, data)
        state = "" if not job.result else job.result["status"]
        if not state and guess.seconds is not None:
            training, measuring = (training + guess.seconds, measuring) if job.is_training else (training, measuring + guess.seconds)
            largest = max(largest, guess.memory_bytes or 0)
        unknown += guess.seconds is None
        sign = "" if guess.measured else "~ "
        time = "?" if guess.seconds is None else sign + duration(guess.seconds)
        memory = "?" if guess.memory_bytes is None else sign + size_in_words(guess.memory_bytes)
        shown.add_row(job.cell.name, Text(state, style="green"), time, memory)
    console.print(shown)
    say("~ is an estimate, from the work and this machine's rate of matrix products; without ~ it is what a finished run took.")
    say("Data that is not there is counted as the official data would be.")
    left = sum(not job.result for job in todo)
    seconds = training / at_once + measuring
    say(f"{left} of {len(todo)} to run" + (f", about {duration(seconds)} with {at_once} at a time" if seconds else ""))
    there, needed = memory_bytes(), at_once * largest
    if needed > there:
        say(
            f"{at_once} at a time may need {size_in_words(needed)} of memory, where there is {size_in_words(there)}: "
            "give --jobs 1, or a --micro-batch-size",
            style="yellow",
        )
    if unknown:
        say(f"{unknown} cannot be estimated: their data is not there; `permuteformer data list` says how to get it", style="yellow")


def _check_data(todo: list[Job], data: str | None) -> None:
    """Say what data is lacking before anything is run, and the command that brings it."""
    from permuteformer.experiments import Experiment
    from permuteformer.tasks import NotReady
    from permuteformer.train.build import build_task

    missing = []
    tasks = [(w.task, tuple(sorted(w.task_options.items()))) for job in todo if isinstance(w := job.cell.work, Experiment)]
    for name, options in dict.fromkeys(tasks):
        try:
            build_task(name, dict(options), data).source()
        except NotReady as error:
            missing.append(str(error))
    if missing:
        raise NotReady("\n".join(missing))


def _plan(plans: dict[str, Any], preset: str) -> Any:
    from permuteformer.registry import unknown

    if preset not in plans:
        raise ValueError(unknown("preset", preset, plans))
    return plans[preset]


def _at_once(jobs: int | None) -> int:
    if jobs is not None:
        return jobs
    from permuteformer.reproduce.devices import gpus

    return len(gpus()) or min(os.cpu_count() or 1, 2)


def _number(number: Any) -> str:
    if number is None:
        return ""
    mean, deviation = number
    return (f"{mean:,}" if isinstance(mean, int) else f"{mean:.2f}") + ("" if deviation is None else f"±{deviation:.2f}")
