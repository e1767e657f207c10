"""The paper's tables with its sizes and budgets, for GPUs. Hyperparameters are those of the tasks' recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from permuteformer.experiments.tables import Column, Plan, Table
from permuteformer.presets import LM_LENGTH, TASK_MODELS, table_rows
from permuteformer.tasks import TASKS

COLUMNS = ("text", "retrieval", "image", "pathfinder")
"""Columns of Tables 1 to 3, in the paper's order."""


def accuracy_column(name: str, **changes: Any) -> Column:
    """Return a column of Table 1. ``changes`` replace fields of it, and single entries of ``settings``."""
    settings = {**TASKS[f"lra-{name}"].recipe.settings, **changes.pop("settings", {})}
    same = {"permuteformer-1d": "permuteformer"} if TASK_MODELS[name].axes == 1 else {}
    return Column(name=name, task=f"lra-{name}", model=f"{{row}}-{name}", settings=settings, same_rows=same, **changes)


def timed_column(name: str, kind: str, batch_size: int, repeats: int) -> Column:
    """Return a column of Tables 2 and 3."""
    items = TASKS[f"lra-{name}"].official_items["train"]
    settings = {"kind": kind, "length": TASK_MODELS[name].length, "batch_size": batch_size, "repeats": repeats, "items": items}
    apart = {"performer-t5": {"batch_size": 1}}  # weights of all pairs do not fit into memory otherwise
    return Column(name=name, task=f"lra-{name}", model=f"{{row}}-{name}", settings=settings, row_settings=apart)


def epoch_times(batch_sizes: dict[str, int], repeats: int) -> Table:
    """Return Table 2 with these batch sizes."""
    columns = tuple(timed_column(name, "training", size, repeats) for name, size in batch_sizes.items())
    return Table(name="2", title="training time for one epoch", rows=table_rows("2"), columns=columns, kind="measurement")


def language_column(task: str, length: int, settings: Mapping[str, Any], **changes: Any) -> Column:
    """Return a column of Table 4: windows of a length, half of each as context, and tests at up to 16 times the length."""
    options = {**changes.pop("task_options", {}), "length": length, "context": length // 2}
    longer = tuple(length * times for times in (2, 4, 8, 16))
    return Column(name="lm", task=task, model="{row}", task_options=options, settings={**settings, "test_lengths": longer}, **changes)


def speed_table(lengths: tuple[int, ...], sizes: Mapping[str, Any], repeats: int) -> Table:
    """Return a table of training steps of language models at growing lengths, with the same number of tokens."""
    columns = tuple(
        Column(
            name=str(length),
            task="lm-bytes",
            model="{row}",
            model_fields=sizes,
            settings={"kind": "training", "length": length, "batch_size": max(lengths) // length, "repeats": repeats},
        )
        for length in lengths
    )
    rows = ("transformer-lm", "performer-lm", "permuteformer-lm")
    return Table(name="speed", title="a training step by length", rows=rows, columns=columns, kind="measurement")


ACCURACY = Table(
    name="1",
    title="accuracy on Long-Range Arena",
    rows=table_rows("1"),
    columns=tuple(accuracy_column(name) for name in COLUMNS),
)
EPOCH_TIMES = epoch_times({name: TASKS[f"lra-{name}"].recipe.settings["batch_size"] for name in COLUMNS}, repeats=5)
LATENCY = Table(
    name="3",
    title="latency of one sample",
    rows=table_rows("3"),
    columns=tuple(timed_column(name, "inference", 1, repeats=20) for name in COLUMNS),
    kind="measurement",
)
PERPLEXITY = Table(
    name="4",
    title="perplexity of language models on WikiText-103",
    rows=table_rows("4"),
    columns=(language_column("wikitext-103", LM_LENGTH, TASKS["wikitext-103"].recipe.settings),),
)

FROM_TABLE_4 = {"figure2": "4", "length": "4"}
"""Drawn from the runs of Table 4."""

PLAN = Plan(
    name="paper",
    title="the paper's sizes and budgets, for GPUs",
    tables=(ACCURACY, EPOCH_TIMES, LATENCY, PERPLEXITY),
    seeds=5,
    also=FROM_TABLE_4,
)
