"""Commands about data: what there is, fetching, generating, checking and looking at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from permuteformer.cli.terminal import console, errors_in_words, say
from permuteformer.terminal import described
from permuteformer.words import size_in_words

if TYPE_CHECKING:
    from permuteformer.tasks import Task

app = typer.Typer(no_args_is_help=True, help="Data of the tasks: list, fetch, generate, check, show.")

Name = Annotated[str, typer.Argument(help="A task; `permuteformer data list` shows them.")]
Own = Annotated[Path | None, typer.Argument(help="Your file or folder, for classify, match, lm and images.")]
Data = Annotated[Path | None, typer.Option(help="Data folder; else PERMUTEFORMER_DATA, else the user's cache.")]
Protocol = Annotated[str | None, typer.Option(help="Whose tokens and splits, for tasks of Long-Range Arena: paper or lra.")]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="NAME=VALUE", help="An option of the task. May be repeated.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out items that cannot be read, and count them.")]
Split = Annotated[str, typer.Option(help="train, validation or test.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same data.", min=0)]


@app.command("list")
def list_tasks(data: Data = None) -> None:
    """What there is: every task, its licence, and whether its data is there."""
    from permuteformer.folders import data_folder
    from permuteformer.tasks import TASKS
    from permuteformer.tasks.catalogue import DOWNLOADS, find_download
    from permuteformer.tasks.generate import OFFICIAL

    table = Table(title=f"data folder: {data_folder(data)}", title_justify="left")
    for column in ("task", "what", "licence", "data"):
        table.add_column(column, no_wrap=column == "task", overflow="fold")
    packed = {task: find_download(task).bytes_packed for download in DOWNLOADS.values() for task in download.tasks}
    with errors_in_words():
        for name in TASKS:
            ways = ["generate"] if name in OFFICIAL else []
            ways += [f"fetch ({size_in_words(packed[name])})"] if name in packed else []
            table.add_row(name, Text(TASKS[name].title), Text(TASKS[name].licence), _where(name, data, " or ".join(ways)))
    console.print(table)
    say("permuteformer data fetch TASK, generate TASK, check TASK, show TASK; options TASK says what --set may set")


@app.command()
def options(name: Name) -> None:
    """The options of a task, for --set."""
    import inspect

    from permuteformer.options import argument_docs
    from permuteformer.tasks import TASKS

    with errors_in_words():
        summary = (inspect.getdoc(TASKS[name]) or "").partition("Args:")[0]
        table = Table()
        for column in ("option", "type", "default", "what"):
            table.add_column(column, no_wrap=column == "option")
        told = argument_docs(TASKS[name])
        for option in TASKS.options(name).values():
            default = "" if option.default is option.empty else repr(option.default)
            table.add_row(option.name, str(option.annotation), default, Text(told.get(option.name, "")))
    say(summary.strip().replace("``", ""))
    console.print(table)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A task or a download; without one they are listed.")] = "",
    data: Data = None,
) -> None:
    """Download data: resumed where it broke off, checked, and there whole or not at all."""
    from permuteformer.folders import data_folder
    from permuteformer.tasks.catalogue import DOWNLOADS, find_download
    from permuteformer.tasks.fetch import fetch as run
    from permuteformer.tasks.transfer import FetchError

    if not name:
        table = Table()
        for column in ("download", "what", "packed", "on disk", "licence"):
            table.add_column(column, no_wrap=column == "download")
        for d in DOWNLOADS.values():
            unpacked = "?" if d.bytes_unpacked is None else size_in_words(d.bytes_unpacked)
            table.add_row(d.name, d.title, size_in_words(d.bytes_packed), unpacked, d.licence)
        console.print(table)
        return
    columns = (described(), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with errors_in_words(FetchError):
        download = find_download(name)
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(download.name, total=None)
            path = run(download, data_folder(data), progress=lambda done, total: progress.update(bar, completed=done, total=total))
    say(f"{download.title}: {path}")


@app.command()
def generate(
    name: Annotated[str, typer.Argument(help="lra-listops, lra-pathfinder or lra-retrieval.")],
    train: Annotated[int | None, typer.Option(help="Training items; the official number unless told.", min=1)] = None,
    validation: Annotated[int | None, typer.Option(help="Validation items.", min=1)] = None,
    test: Annotated[int | None, typer.Option(help="Test items.", min=1)] = None,
    seed: Seed = 0,
    resolution: Annotated[int | None, typer.Option(help="lra-pathfinder: pixels of a side, 32, 64 or 128; 32 unless told.")] = None,
    level: Annotated[str | None, typer.Option(help="lra-pathfinder: easy, intermediate or hard; hard unless told.")] = None,
    documents: Annotated[
        Path | None, typer.Option("--from", help="lra-retrieval: where articles are, as a folder of wiki.{train,valid,test}.*")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Processes; all cores unless told. The data does not depend on it.", min=1)] = None,
    data: Data = None,
) -> None:
    """Make data by rule, in the official layout: ListOps, Pathfinder, or pairs of halves of articles for Retrieval.

    What was made is said in numbers at the end; docs/data.md has those of the official data beside them.
    """
    from permuteformer.folders import data_folder
    from permuteformer.tasks.generate import OFFICIAL
    from permuteformer.tasks.generate import generate as run

    given = {"train": train, "validation": validation, "test": test}
    counts = {split: count for split, count in given.items() if count is not None}
    total = sum({**OFFICIAL.get(name, {}), **counts}.values())
    with errors_in_words(), _bar(f"generating {name}", total or None) as advance:
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
        table.add_row(str(key).replace("_", " "), _value(value))
    console.print(table)
    say(f"written to {made.folder}")


@app.command()
def check(name: Name, path: Own = None, data: Data = None, protocol: Protocol = None, set_: Set = None, skip_bad: SkipBad = False) -> None:
    """Count items, labels, lengths, what is in two splits, and name what cannot be read, which is an error unless --skip-bad."""
    from permuteformer.tasks import SPLITS
    from permuteformer.tasks.check import LONG_LINE
    from permuteformer.tasks.check import check as run
    from permuteformer.texts import printable

    with errors_in_words():
        task = _task(name, path, data, protocol, set_, skip_bad)
        with _bar(f"reading {name}") as advance:
            report = run(task, advance)
    say(f"{name}: {report.title}")
    for choice, value in task.choices().items():
        say(f"{choice}: {printable(value)}")
    for note in report.notes:
        say(f"note: {note}", style="yellow")
    table = Table()
    table.add_column("")
    for split in report.splits:
        table.add_column(split, justify="right")
    found = report.splits.values()
    table.add_row("tokens" if task.kind == "lm" else "items", *(f"{split.items:,}" for split in found))
    if task.kind == "lm":
        table.add_row("windows", *(f"{split.windows:,}" for split in found))
    else:
        for label in task.labels[:20]:
            shares = (f"{split.labels[label]:,} ({100 * split.labels[label] / split.items:.1f} %)" for split in found)
            table.add_row(Text(f"label {printable(label, 40)}"), *shares)
        if len(task.labels) > 20:
            table.add_row(f"… and {len(task.labels) - 20:,} labels more")
        same = len({length for split in found for length in split.lengths.values()}) == 1
        if same:
            table.add_row("length", *(f"{split.lengths[0]:,}" for split in found))
        for quantile in () if same else next(iter(found)).lengths:
            title = {0: "shortest", 50: "median length", 100: "longest"}.get(quantile, f"length of {quantile} %")
            table.add_row(title, *(f"{split.lengths[quantile]:,}" for split in found))
        table.add_row(f"cut at {task.max_length:,} tokens", *(f"{split.cut:,}" for split in found))
        table.add_row("repeated within", *(f"{split.repeated:,}" for split in found))
        for baseline in next(iter(found)).baselines:
            table.add_row(f"{task.metric}: {baseline}", *(f"{100 * split.baselines[baseline]:.1f} %" for split in found))
    console.print(table)
    for (first, second), count in report.shared.items():
        what = f"lines of {LONG_LINE} tokens and more in both" if task.kind == "lm" else "in both"
        say(f"{what} {first} and {second}: {count:,}", style="yellow" if count else "")
    for split in SPLITS:
        if split not in report.splits and not (split == "validation" and task.validate_on == "test"):
            say(f"there is no {split} split", style="yellow")
    if report.problems:
        say(f"{report.problems:,} items cannot be read; the first are", style="red")
        for problem in report.shown:
            say(f"  {problem}")
        raise typer.Exit(0 if skip_bad else 1)
    say("all items can be read")


@app.command()
def show(
    name: Name,
    path: Own = None,
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
    from permuteformer.texts import printable

    with errors_in_words():
        task = _task(name, path, data, protocol, set_, skip_bad)
        with _bar(f"reading {name}") as advance:
            task.prepare(advance)
        for note in task.notes():
            say(f"note: {note}", style="yellow")
        if task.grid is not None:
            sheet = output or Path(f"{name}.png")
            shown = contact_sheet(task, split, count or 36, sheet, seed)
            say(f"{shown} images of the {split} split: {sheet}")
            return
        for item in samples(task, split, count or 3, seed):
            console.rule(Text(f"{split} {item.id:,}" + (f" · {printable(item.label, 40)}" if item.label else "")))
            for text in item.texts:
                say(text)


def _task(name: str, path: Path | None, data: Path | None, protocol: str | None, words: list[str] | None, skip_bad: bool) -> Task:
    from permuteformer.options import parse_options
    from permuteformer.tasks import TASKS

    arguments = parse_options(TASKS[name], words or [])
    if path is not None and "path" in arguments:
        raise ValueError(f"path is given twice, as {str(path)!r} and as {arguments['path']!r}")
    given = {"path": path and str(path), "data": data and str(data), "protocol": protocol, "skip_bad": skip_bad or None}
    arguments |= {option: value for option, value in given.items() if value is not None}
    TASKS.check(name, arguments, ())
    if "path" in TASKS.options(name) and "path" not in arguments:
        raise ValueError(f"{name} is of your own data: say where it is, after the name")
    task: Task = TASKS[name](**arguments)
    return task


def _where(name: str, data: Path | None, ways: str) -> Text:
    from permuteformer.tasks import TASKS, NotReady

    options = TASKS.options(name)
    if "path" in options:
        return Text("any: data check TASK PATH", style="cyan")
    try:
        source = TASKS[name](**({"data": str(data)} if data is not None and "data" in options else {})).source()
        files = [path.stat().st_size for path in source.paths if path.is_file()]
        known = files and len(files) == len(source.paths)
        return Text(f"ready: {source.title}" + (f" ({size_in_words(sum(files))})" if known else ""), style="green")
    except NotReady:
        return Text(ways or "not there", style="yellow")


@contextmanager
def _bar(title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    time = TimeElapsedColumn() if total is None else TimeRemainingColumn()
    with Progress(described(), BarColumn(), MofNCompleteColumn(), time, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda count: progress.advance(bar, count)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
