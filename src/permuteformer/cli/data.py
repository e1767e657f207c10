"""Commands about data: what there is, fetching, generating, checking and looking at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from permuteformer.cli.terminal import console, errors_in_words, size

if TYPE_CHECKING:
    from permuteformer.tasks import Task

app = typer.Typer(no_args_is_help=True, help="Data of the tasks: list, fetch, generate, check, show.")

Name = Annotated[str, typer.Argument(help="A task; `permuteformer data list` shows them.")]
Data = Annotated[Path | None, typer.Option(help="Data folder; else PERMUTEFORMER_DATA, else the user's cache.")]
Protocol = Annotated[str | None, typer.Option(help="Whose tokens and splits, for tasks of Long-Range Arena: paper or lra.")]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="NAME=VALUE", help="An option of the task. May be repeated.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out items that cannot be read, and count them.")]
Split = Annotated[str, typer.Option(help="train, validation or test.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same data.", min=0)]


@app.command("list")
def list_tasks(data: Data = None) -> None:
    """What there is: every task, its licence, and whether its data is there."""
    from permuteformer.tasks import TASKS
    from permuteformer.tasks.catalogue import DOWNLOADS
    from permuteformer.tasks.folders import data_folder

    table = Table(title=f"data folder: {data_folder(data)}", title_justify="left")
    for column in ("task", "what", "size", "licence", "data"):
        table.add_column(column, no_wrap=column == "task", overflow="fold")
    packed = {task: download.bytes_packed for download in DOWNLOADS.values() for task in download.tasks}
    for name in TASKS:
        title = (TASKS[name].__doc__ or "").split("\n")[0]
        table.add_row(name, title, size(packed[name]) if name in packed else "", TASKS[name].licence, _where(name, data))
    console.print(table)
    console.print("Options of a task: permuteformer data options TASK", markup=False)


@app.command()
def options(name: Name) -> None:
    """The options of a task, for --set."""
    import inspect

    from permuteformer.tasks import TASKS

    with errors_in_words():
        console.print(inspect.getdoc(TASKS[name]) or "", markup=False, highlight=False)
        table = Table()
        for column in ("option", "type", "default"):
            table.add_column(column)
        for option in TASKS.options(name).values():
            default = "" if option.default is option.empty else repr(option.default)
            table.add_row(option.name, str(option.annotation), default)
    console.print(table)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A task or a download; without one they are listed.")] = "",
    data: Data = None,
) -> None:
    """Download data: resumed where it broke off, checked, and there whole or not at all."""
    from permuteformer.tasks.catalogue import DOWNLOADS, find_download
    from permuteformer.tasks.fetch import FetchError
    from permuteformer.tasks.fetch import fetch as run
    from permuteformer.tasks.folders import data_folder

    if not name:
        table = Table()
        for column in ("download", "what", "packed", "on disk", "licence", "tasks"):
            table.add_column(column)
        for d in DOWNLOADS.values():
            unpacked = "?" if d.bytes_unpacked is None else size(d.bytes_unpacked)
            table.add_row(d.name, d.title, size(d.bytes_packed), unpacked, d.licence, ", ".join(d.tasks))
        console.print(table)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with errors_in_words(FetchError):
        download = find_download(name)
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(download.name)
            path = run(download, data_folder(data), progress=lambda done, total: progress.update(bar, completed=done, total=total))
    console.print(f"{download.title}: {path}", markup=False)


@app.command()
def generate(
    name: Annotated[str, typer.Argument(help="lra-listops, lra-pathfinder or lra-retrieval.")],
    train: Annotated[int | None, typer.Option(help="Training items; the official number unless told.", min=1)] = None,
    validation: Annotated[int | None, typer.Option(help="Validation items.", min=1)] = None,
    test: Annotated[int | None, typer.Option(help="Test items.", min=1)] = None,
    seed: Seed = 0,
    resolution: Annotated[int, typer.Option(help="lra-pathfinder: pixels of a side, 32, 64 or 128.")] = 32,
    level: Annotated[str, typer.Option(help="lra-pathfinder: easy, intermediate or hard.")] = "hard",
    documents: Annotated[Path | None, typer.Option("--from", help="lra-retrieval: folder of wiki.{train,valid,test}.* to take articles from.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes; all cores unless told. The data does not depend on it.", min=1)] = None,
    data: Data = None,
) -> None:
    """Make data by rule, in the official layout: ListOps, Pathfinder, or pairs of halves of articles for Retrieval.

    What was made is said in numbers at the end, to be compared with the official data's.
    """
    from permuteformer.tasks.folders import data_folder
    from permuteformer.tasks.generate import generate as run

    given = {"train": train, "validation": validation, "test": test}
    counts = {split: count for split, count in given.items() if count is not None}
    with errors_in_words():
        with _bar(f"generating {name}") as advance:
            made = run(
                name,
                data_folder(data),
                counts,
                seed=seed,
                processes=processes,
                progress=advance,
                resolution=resolution,
                level=level,
                documents=documents,
            )
    table = Table("", "", show_header=False)
    for key, value in made.statistics.items():
        table.add_row(str(key), _value(value))
    console.print(table)
    console.print(f"written to {made.folder}", markup=False)


@app.command()
def check(name: Name, data: Data = None, protocol: Protocol = None, set_: Set = None) -> None:
    """Count items, labels, lengths, what is in two splits, and name what cannot be read."""
    from permuteformer.tasks.check import check as run

    with errors_in_words():
        task = _task(name, data, protocol, set_, skip_bad=False)
        with _bar(f"reading {name}") as advance:
            report = run(task, advance)
    console.print(f"{name}: {report.title}", markup=False)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    table = Table()
    table.add_column("")
    for split in report.splits:
        table.add_column(split, justify="right")
    found = report.splits.values()
    table.add_row("tokens" if task.kind == "lm" else "items", *(f"{split.items:,}" for split in found))
    if task.kind != "lm":
        for label in task.labels[:20]:
            shares = (f"{split.labels[label]:,} ({100 * split.labels[label] / split.items:.1f} %)" for split in found)
            table.add_row(Text(f"label {label}"), *shares)
        if len(task.labels) > 20:
            table.add_row(f"… and {len(task.labels) - 20:,} labels more")
        for quantile in next(iter(found)).lengths:
            title = {0: "shortest", 50: "median length", 100: "longest"}.get(quantile, f"length of {quantile} %")
            table.add_row(title, *(f"{split.lengths[quantile]:,}" for split in found))
        table.add_row(f"cut at {task.max_length:,} tokens", *(f"{split.cut:,}" for split in found))
        table.add_row("repeated within", *(f"{split.repeated:,}" for split in found))
    console.print(table)
    for (first, second), count in report.shared.items():
        console.print(f"in both {first} and {second}: {count:,}", style="yellow" if count else "", markup=False)
    if report.problems:
        console.print(f"{report.problems:,} items cannot be read; the first are", style="red", markup=False)
        for problem in report.shown:
            console.print(f"  {problem}", markup=False)
        raise typer.Exit(1)
    console.print("all items can be read", markup=False)


@app.command()
def show(
    name: Name,
    count: Annotated[int | None, typer.Option(help="Items to show; 3 texts or 36 images unless told.", min=1)] = None,
    split: Split = "train",
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option(help="PNG file for images; TASK.png unless told.")] = None,
    data: Data = None,
    protocol: Protocol = None,
    set_: Set = None,
    skip_bad: SkipBad = False,
) -> None:
    """Show a few items: texts here, images as a sheet of them in a PNG file."""
    from permuteformer.tasks.show import contact_sheet, samples

    with errors_in_words():
        task = _task(name, data, protocol, set_, skip_bad)
        with _bar(f"reading {name}") as advance:
            task.prepare(advance)
        if task.grid is not None:
            path = output or Path(f"{name}.png")
            shown = contact_sheet(task, split, count or 36, path, seed)
            console.print(f"{shown} images of the {split} split: {path}", markup=False)
            return
        for item in samples(task, split, count or 3, seed):
            console.rule(Text(f"{split} {item.id:,}" + (f" · {item.label}" if item.label else "")))
            for text in item.texts:
                console.print(text, markup=False, highlight=False)


def _task(name: str, data: Path | None, protocol: str | None, words: list[str] | None, skip_bad: bool) -> Task:
    from permuteformer.options import parse_options
    from permuteformer.tasks import TASKS

    arguments = parse_options(TASKS[name], words or [])
    if data is not None:
        arguments["data"] = str(data)
    if protocol is not None:
        arguments["protocol"] = protocol
    if skip_bad:
        arguments["skip_bad"] = True
    TASKS.check(name, arguments, ())
    missing = [o.name for o in TASKS.options(name).values() if o.default is o.empty and o.name not in arguments]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}: say {' '.join(f'--set {option}=…' for option in missing)}")
    task: Task = TASKS[name](**arguments)
    return task


def _where(name: str, data: Path | None) -> Text:
    from permuteformer.tasks import TASKS, NotReady

    options = TASKS.options(name)
    if any(option.default is option.empty for option in options.values()):
        return Text(f"yours: {TASKS[name].advice.removeprefix('say which: --set ').removeprefix('say which: ')}", style="cyan")
    try:
        task = TASKS[name](**({"data": str(data)} if data is not None and "data" in options else {}))
        return Text(f"ready: {task.source().title}", style="green")
    except NotReady:
        return Text(f"not there; {TASKS[name].advice}", style="yellow")


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=None)
        yield lambda count: progress.advance(bar, count)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
