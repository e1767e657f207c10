"""Commands that train, and evaluate what was trained."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from permuteformer.cli.terminal import console, errors_in_words, say

if TYPE_CHECKING:
    from permuteformer.experiments.base import Experiment
    from permuteformer.train.loop import How

Data = Annotated[Path | None, typer.Option(help="Data folder; else PERMUTEFORMER_DATA, else the user's cache.")]
Shard = Annotated[bool, typer.Option("--shard", help="Share out weights and optimiser over the processes of torchrun (FSDP).")]
Spread = Annotated[int, typer.Option("--sequence-parallel", help="Spread every sequence over so many processes of torchrun.", min=1)]
Track = Annotated[
    list[str] | None, typer.Option(help="Where else metrics go: tensorboard (unless told, where it is installed), wandb, none. Repeatable.")
]
Workers = Annotated[int, typer.Option(help="Processes that make batches ahead.", min=0)]
Minutes = Annotated[float, typer.Option(help="Save a checkpoint so often, besides at every validation.", min=0)]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no bar.")]


def train(
    task: Annotated[str, typer.Argument(help="A task; `permuteformer data list` shows them.")],
    rest: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH] [--FIELD VALUE]...", help="Your file or folder, for own data; then any field."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A preset of `permuteformer models`; one that suits the task unless told.")] = None,
    output: Annotated[Path | None, typer.Option(help="Run folder; runs/TASK-MODEL-seedN unless told. A run there is gone on with.")] = None,
    data: Data = None,
    shard: Shard = False,
    sequence_parallel: Spread = 1,
    track: Track = None,
    workers: Workers = 0,
    checkpoint_minutes: Minutes = 10.0,
    quiet: Quiet = False,
) -> None:
    """Train a model on a task. Any field may be set: --learning-rate 1e-3 --hidden-size 128 --epochs 3.

    Fields are settings of training (`permuteformer fields TASK` lists all), fields of the model's configuration, and options of the
    task, in this order; --model.NAME and --task.NAME say which. On several processes: torchrun --nproc-per-node 8 -m permuteformer train ….

    Killed or interrupted, the same command goes on where it was, and ends with the same weights.
    """
    from permuteformer.train.fields import experiment_from_words

    with errors_in_words(*_errors()):
        words = rest or []
        given = {"path": words.pop(0)} if words and not words[0].startswith("--") else {}
        experiment = experiment_from_words(task, model, words, given, None if data is None else str(data))
        folder = output or Path("runs") / f"{task}-{experiment.model}-seed{experiment.seed}"
        _run(experiment, folder, _how(data, shard, sequence_parallel, track, workers, checkpoint_minutes, quiet))


def resume(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    data: Data = None,
    shard: Shard = False,
    sequence_parallel: Spread = 1,
    track: Track = None,
    workers: Workers = 0,
    checkpoint_minutes: Minutes = 10.0,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was interrupted, from its last good checkpoint."""
    from permuteformer.experiments.base import Experiment
    from permuteformer.train.run import read_run

    with errors_in_words(*_errors()):
        content = read_run(run)
        how = _how(data, shard, sequence_parallel, track, workers, checkpoint_minutes, quiet)
        _run(Experiment.from_json(content.get("experiment") or {}), run, how, content.get("cell"))


def run_cell(
    job: Annotated[Path, typer.Argument(help="File with the experiment, its cell and its folder, as JSON.")],
    data: Data = None,
) -> None:
    """Run one cell of a table: what `permuteformer reproduce` starts, a process each, which saves and ends when standard input ends."""
    from permuteformer.experiments.base import Experiment
    from permuteformer.folders import json_of
    from permuteformer.train.limits import limit_memory, when_parent_ends
    from permuteformer.train.loop import How

    with errors_in_words(*_errors()):
        content = json_of(job)
        if not isinstance(content, dict) or not {"experiment", "cell", "folder"} <= content.keys():
            raise ValueError(f"{job} must be an object with experiment, cell and folder, as permuteformer reproduce writes it")
        limit_memory(content.get("memory_bytes"))
        when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
        how = How(data=None if data is None else str(data), quiet=True)
        _run(Experiment.from_json(content["experiment"]), Path(content["folder"]), how, content["cell"])


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    items: Annotated[int | None, typer.Option(help="Evaluate on so many items, drawn by chance; all unless told.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Items at a time.", min=1)] = 32,
    data: Data = None,
) -> None:
    """The metrics of a trained model on a split of its task."""
    from rich.progress import Progress

    from permuteformer.train.evaluate import evaluate as run_evaluation
    from permuteformer.train.feed import chosen
    from permuteformer.train.saved import load

    with errors_in_words(*_errors()):
        trained = load(run, None if data is None else str(data))
        count = len(chosen(len(trained.same_task.dataset(split)), items))
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task(split, total=count)
            metrics = run_evaluation(
                trained.model,
                trained.model.config,
                trained.task,
                split,
                batch_size=batch_size,
                items=items,
                progress=lambda done: progress.advance(bar, done),
            )
        table = Table(title=f"{trained.task.name}, {split} split, {count:,} items", title_justify="left")
        for column in ("metric", "value"):
            table.add_column(column)
        for name, value in metrics.items():
            table.add_row(name, f"{value:.6g}")
        console.print(table)
        for note in trained.task.notes():
            say(f"note: {note}", style="yellow")


def fields(task: Annotated[str, typer.Argument(help="A task; `permuteformer data list` shows them.")]) -> None:
    """All fields that `permuteformer train TASK` may set, with their values unless told."""
    from permuteformer.train.fields import listing

    with errors_in_words():
        rows = listing(task)
    for whose in dict.fromkeys(row[1] for row in rows):
        table = Table(title=whose, title_justify="left")
        table.add_column("field", no_wrap=True)
        table.add_column("unless told", max_width=22, overflow="fold")
        table.add_column("what")
        for field, of, value, told in rows:
            if of == whose:
                table.add_row(field, Text(value), told)
        console.print(table)


def _how(
    data: Path | None, shard: bool, sequence_parallel: int, track: list[str] | None, workers: int, checkpoint_minutes: float, quiet: bool
) -> How:
    from permuteformer.train.loop import How
    from permuteformer.train.start import usual_trackers

    return How(
        data=None if data is None else str(data),
        shard=shard,
        sequence_parallel=sequence_parallel,
        track=usual_trackers() if track is None else tuple(name for name in track if name != "none"),
        workers=workers,
        checkpoint_minutes=checkpoint_minutes,
        quiet=quiet,
    )


def _run(experiment: Experiment, folder: Path, how: How, cell: Mapping[str, Any] | None = None) -> None:
    from permuteformer.bench.apart import ran_out_of_memory
    from permuteformer.experiments.layout import RESULT
    from permuteformer.folders import read_json
    from permuteformer.train.loop import train as run

    was_finished = read_json(folder / RESULT).get("status") == "finished"
    try:
        result = run(experiment, folder, how, cell)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        first = (str(error).strip().splitlines() or ["not enough memory"])[0]
        raise MemoryError(f"{first} (a smaller --micro-batch-size needs less, for the same result; checkpoints stay)") from None
    if int(os.environ.get("RANK", 0)):
        return
    if result["status"] == "interrupted":
        say(f"stopped after step {result['step']:,}; go on with: permuteformer resume {folder}")
        raise typer.Exit(128 + result["signal"])
    if was_finished:
        say(f"{folder} was finished before, and nothing was run: to train anew, choose another folder with --output, or delete this one")
    if not how.quiet:
        say(f"{result['metric']} on the test split: {result['value']:.4f} (best validation at step {result['best_step']:,})")
        say(f"run folder: {folder}; the model: {folder / 'model'}")


def _errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import StrictDataclassError

    from permuteformer.train.finite import NotFinite

    return StrictDataclassError, NotFinite, MemoryError
