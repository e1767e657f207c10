"""Commands that train a model and evaluate it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from permuteformer.cli.console import console, progress_bar, say
from permuteformer.cli.data import make_task
from permuteformer.cli.options import ModelOptions, TaskOptions, TrainingOptions
from permuteformer.experiments.experiment import Experiment, RunOptions


def train(
    task: str,
    path: str | None = None,
    *,
    model: str | None = None,
    output: Path | None = None,
    training: TrainingOptions,
    task_options: TaskOptions,
    model_fields: ModelOptions,
    run: RunOptions,
) -> None:
    """Train a model on a task, such as `permuteformer train classify reviews.csv --epochs 3`.

    After an interruption the same command resumes, and ends with the same weights. On several processes:
    torchrun --nproc-per-node 8 -m permuteformer train …

    Args:
        model: a preset; `permuteformer models` shows them. Default: PermuteFormer in the size for the task.
        output: run folder; default: runs/TASK-MODEL-seedN. A run in it is resumed.
    """
    recipe = make_task("train", task, path, run.data, task_options).training_recipe()
    settings = {**recipe.settings, **training}
    if {"steps", "epochs"} & training.keys():
        settings |= {name: training.get(name) for name in ("steps", "epochs")}
    experiment = Experiment(
        task=task,
        model=model or f"permuteformer-{recipe.preset}",
        task_options={**task_options, **({} if path is None else {"path": path})},
        model_fields={**recipe.model, **model_fields},
        **settings,
    )
    _run(experiment, output or Path("runs") / f"{task}-{experiment.model}-seed{experiment.seed}", run)


def resume(folder: Path, *, run: RunOptions) -> None:
    """Resume an interrupted run from its latest checkpoint.

    Args:
        folder: run folder.
    """
    from permuteformer.train.run_folder import read_run

    content = read_run(folder)
    _run(Experiment.from_json(content.get("experiment") or {}), folder, run, content.get("cell"))


def run_cell(job: Path, *, data: str | None = None) -> None:
    """Run one cell of a table; `permuteformer reproduce` starts it. It saves and ends when standard input closes.

    Args:
        job: JSON file with the experiment, its cell and its folder.
    """
    from permuteformer.machine import limit_memory, when_parent_ends
    from permuteformer.storage import read_json

    content = read_json(job)
    if not isinstance(content, dict) or not {"experiment", "cell", "folder"} <= content.keys():
        raise ValueError(f"{job} must be an object with experiment, cell and folder, as permuteformer reproduce writes it")
    limit_memory(content.get("memory_bytes"))
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = RunOptions(data=data, quiet=True)
    _run(Experiment.from_json(content["experiment"]), Path(content["folder"]), run, content["cell"])


def evaluate(folder: Path, *, split: str = "test", items: int | None = None, batch_size: int = 32, data: str | None = None) -> None:
    """Print the metrics of a trained model on a split of its task.

    Args:
        folder: run folder.
        split: train, validation or test.
        items: evaluate on this many items, drawn at random; default: all.
    """
    from permuteformer.ops.checks import check_integer
    from permuteformer.tasks.store import sample_numbers
    from permuteformer.train.step import evaluate as run_evaluation
    from permuteformer.train.trained_model import load

    check_integer(batch_size=batch_size, **({} if items is None else {"items": items}))
    trained = load(folder, data)
    task = trained.task
    count = len(sample_numbers(len(task.items(split)), items))
    with progress_bar(split, count) as advance:
        metrics = run_evaluation(trained.model, task, split, batch_size=batch_size, items=items, progress=advance)
    table = Table("metric", "value", title=f"{task.name}, {split} split, {count:,} items", title_justify="left")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.6g}")
    console.print(table)
    for remark in task.notes():
        say(f"note: {remark}", style="yellow")


def _run(experiment: Experiment, folder: Path, options: RunOptions, cell: Mapping[str, Any] | None = None) -> None:
    from permuteformer.experiments.layout import RESULT
    from permuteformer.storage import read_own_json
    from permuteformer.train.loop import train

    was_finished = read_own_json(folder / RESULT).get("status") == "finished"
    result = train(experiment, folder, options, cell)
    if int(os.environ.get("RANK", 0)):
        return
    if result["status"] == "interrupted":
        say(f"stopped after step {result['step']:,}; continue with: permuteformer resume {folder}")
        raise SystemExit(128 + result["signal"])
    if was_finished:
        say(f"{folder} was already finished: to train again, use another folder with --output, or delete this one")
    if not options.quiet:
        say(f"{result['metric']} on the test split: {result['value']:.4f} (best validation at step {result['best_step']:,})")
        say(f"run folder: {folder}; model: {folder / 'model'}")
