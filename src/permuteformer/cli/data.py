"""Commands on data: list, fetch, generate, check and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from permuteformer.cli.console import console, progress_bar, say
from permuteformer.cli.options import TaskOptions
from permuteformer.console import description_column
from permuteformer.formatting import format_bytes, printable
from permuteformer.storage import data_folder
from permuteformer.tasks import SPLITS, TASKS, GenerateOptions, NotReady, Task

MAX_LABELS = 20


def list_tasks(*, data: str | None = None) -> None:
    """List the tasks, their licences, and whether their data was found."""
    from permuteformer.tasks.downloads import DOWNLOADS, find_download

    table = Table(title=f"data folder: {data_folder(data)}", title_justify="left")
    for column in ("task", "what", "licence", "data"):
        table.add_column(column, no_wrap=column == "task", overflow="fold")
    packed = {task: find_download(task).bytes_packed for download in DOWNLOADS.values() for task in download.tasks}
    for name in TASKS:
        kind = TASKS[name]
        ways = ["generate"] if kind.generate is not Task.generate else []
        ways += [f"fetch ({format_bytes(packed[name])})"] if name in packed else []
        table.add_row(name, Text(kind.title), Text(kind.licence), _status(name, data, " or ".join(ways)))
    console.print(table)
    say("permuteformer data fetch TASK, generate TASK, check TASK, show TASK; each has --help")


def fetch(name: str | None = None, *, data: str | None = None) -> None:
    """Download data. Interrupted downloads resume; files are verified and appear only when they are complete.

    Args:
        name: a task or a download; without it, downloads are listed.
    """
    from permuteformer.tasks.downloads import DOWNLOADS, find_download
    from permuteformer.tasks.fetch import fetch as run

    if name is None:
        table = Table("download", "what", "packed", "on disk", "licence")
        for d in DOWNLOADS.values():
            unpacked = "?" if d.bytes_unpacked is None else format_bytes(d.bytes_unpacked)
            table.add_row(d.name, d.title, format_bytes(d.bytes_packed), unpacked, d.licence)
        console.print(table)
        return
    download = find_download(name)
    columns = (description_column(), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(download.name, total=None)
        path = run(download, data_folder(data), progress=lambda done, total: progress.update(bar, completed=done, total=total))
    say(f"{download.title}: {path}")


def generate(
    task: str,
    *,
    train: int | None = None,
    validation: int | None = None,
    test: int | None = None,
    seed: int = 0,
    documents: Path | None = None,
    processes: int | None = None,
    data: str | None = None,
    options: TaskOptions,
) -> None:
    """Generate the data of lra-listops, lra-pathfinder or lra-retrieval in the official layout, and print statistics of it.

    Args:
        task: lra-listops, lra-pathfinder or lra-retrieval.
        train: training items; default: the official number.
        validation: validation items; default: the official number.
        test: test items; default: the official number.
        seed: the same seed gives the same data.
        documents: lra-retrieval: articles, as a folder of wiki.{train,valid,test}.*, text files or a table.
        processes: default: one per core. The data does not depend on it.
    """
    from permuteformer.ops.checks import check_integer

    counts = {split: count for split, count in zip(SPLITS, (train, validation, test), strict=True) if count is not None}
    check_integer(**counts)
    check_integer(0, seed=seed)
    made = make_task("data generate", task, None, data, options)
    total = sum({**made.official_items, **counts}.values()) if documents is None else None
    with progress_bar(f"generating {task}", total) as advance:
        order = GenerateOptions(counts=counts, seed=seed, processes=processes, documents=documents, progress=advance)
        generated = made.generate(order)
    table = Table("", "", show_header=False)
    for key, value in generated.statistics.items():
        table.add_row(str(key).replace("_", " "), _value(value))
    console.print(table)
    say(f"written to {generated.folder}")


def check(task: str, path: str | None = None, *, data: str | None = None, options: TaskOptions) -> None:
    """Read all of a task's data; print counts, labels, lengths, repetitions between splits, and items that cannot be read.

    Items that cannot be read are an error unless --skip-bad is given.
    """
    from permuteformer.tasks.inspect import LONG_LINE, Report
    from permuteformer.tasks.inspect import check as run

    made = make_task("data check", task, path, data, options)
    with progress_bar(f"reading {task}") as advance:
        report: Report = run(made, advance)
    say(f"{task}: {report.title}")
    for option, value in made.guessed_options().items():
        say(f"{option}: {printable(value)}")
    for remark in report.notes:
        say(f"note: {remark}", style="yellow")
    console.print(_report_table(made, report))
    for (first, second), count in report.shared.items():
        what = f"lines of {LONG_LINE} tokens and more" if made.input.kind == "lm" else "items"
        say(f"{what} in both {first} and {second}: {count:,}", style="yellow" if count else "")
    for split in SPLITS:
        if split not in report.splits and not (split == "validation" and made.validation_split == "test"):
            say(f"there is no {split} split", style="yellow")
    if report.errors:
        say(f"{report.errors:,} items cannot be read; the first are", style="red")
        for error in report.shown:
            say(f"  {error}")
        raise SystemExit(0 if made.skip_bad else 1)
    say("all items can be read")


def _report_table(task: Task, report: Any) -> Table:
    table = Table("", *())
    for split in report.splits:
        table.add_column(split, justify="right")
    found, input = report.splits.values(), task.input
    table.add_row("tokens" if input.kind == "lm" else "items", *(f"{split.items:,}" for split in found))
    if input.kind == "lm":
        table.add_row("windows", *(f"{split.windows:,}" for split in found))
        return table
    for label in input.labels[:MAX_LABELS]:
        shares = (f"{split.labels[label]:,} ({100 * split.labels[label] / split.items:.1f} %)" for split in found)
        table.add_row(Text(f"label {printable(label, 40)}"), *shares)
    if len(input.labels) > MAX_LABELS:
        table.add_row(f"… and {len(input.labels) - MAX_LABELS:,} more labels")
    if len({length for split in found for length in split.lengths.values()}) == 1:
        table.add_row("length", *(f"{split.lengths[0]:,}" for split in found))
    else:
        for quantile in next(iter(found)).lengths:
            title = {0: "shortest", 50: "median length", 100: "longest"}.get(quantile, f"length, {quantile} % of items")
            table.add_row(title, *(f"{split.lengths[quantile]:,}" for split in found))
    table.add_row(f"cut at {input.max_length:,} tokens", *(f"{split.cut:,}" for split in found))
    table.add_row("repeated", *(f"{split.repeated:,}" for split in found))
    for baseline in next(iter(found)).baselines:
        table.add_row(f"{input.metric}: {baseline}", *(f"{100 * split.baselines[baseline]:.1f} %" for split in found))
    return table


def show(
    task: str,
    path: str | None = None,
    *,
    count: int | None = None,
    split: str = "train",
    seed: int = 0,
    output: Path | None = None,
    data: str | None = None,
    options: TaskOptions,
) -> None:
    """Show a few items: texts in the terminal, images as one PNG.

    Args:
        count: items to show; default: 3 texts or 36 images.
        split: train, validation or test.
        seed: the same seed shows the same items.
        output: PNG file for images; default: TASK.png.
    """
    from permuteformer.ops.checks import check_integer
    from permuteformer.tasks.inspect import contact_sheet, samples

    check_integer(**({} if count is None else {"count": count}))
    check_integer(0, seed=seed)
    made = make_task("data show", task, path, data, options)
    with progress_bar(f"reading {task}") as advance:
        made.prepare(advance)
    for remark in made.notes():
        say(f"note: {remark}", style="yellow")
    if made.input.grid is not None:
        sheet = output or Path(f"{task}.png")
        say(f"{contact_sheet(made, split, count or 36, sheet, seed)} images of the {split} split: {sheet}")
        return
    for item in samples(made, split, count or 3, seed):
        console.rule(Text(f"{split} {item.id:,}" + (f" · {printable(item.label, 40)}" if item.label else "")))
        for text in item.texts:
            say(text)


def make_task(command: str, name: str, path: str | None, data: str | None, options: TaskOptions) -> Task:
    """Return the task that the words of a command describe."""
    own = [task for task in TASKS if "path" in TASKS.options(task)]
    if name in own and path is None:
        raise ValueError(f"{name} needs a file: permuteformer {command} {name} FILE")
    if name not in own and path is not None:
        raise ValueError(f"{name} has its own data and takes no file, got {path!r}; {', '.join(own)} take a file")
    task: Task = TASKS[name](**{"data": data, **({} if path is None else {"path": path}), **options})
    return task


def _status(name: str, data: str | None, ways: str) -> Text:
    if "path" in TASKS.options(name):
        return Text("yours: data check TASK PATH", style="cyan")
    try:
        source = TASKS[name](data=data).source
    except NotReady:
        return Text(ways or "not found", style="yellow")
    files = [path.stat().st_size for path in source.paths if path.is_file()]
    known = files and len(files) == len(source.paths)
    return Text(f"found: {source.title}" + (f" ({format_bytes(sum(files))})" if known else ""), style="green")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
