"""The paper's tables on real data, for hours on two cores, and the trials that chose their learning rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from permuteformer.experiments.paper import FROM_TABLE_4, LATENCY, accuracy_column, epoch_times, language_column, speed_table
from permuteformer.experiments.tables import Column, Plan, Table
from permuteformer.presets import table_rows

LM_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "hidden_dropout": 0.0,
}

LM_SETTINGS: dict[str, Any] = {
    "steps": 1000,
    "batch_size": 8,
    "learning_rate": 2e-3,
    "warmup_steps": 100,
    "adam_beta2": 0.98,
    "evaluate_every": 100,
    "validation_items": 100,
    "test_items": 800,
}

ENCODER_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout": 0.0,
    "initialization": "fairseq",  # BERT's deviation of 0.02 is for a width of 768: narrow models hardly learn from it
}
TEXT_SIZES = {**ENCODER_SIZES, "pooling": "mean"}
"""With the paper's pooling of the first token, a Transformer of this size did not leave chance in trials."""

RATES = {"text": 3e-4, "image": 1e-3}
"""Learning rates of Table 1, tuned on the Transformer row, as in the paper: plan ``tuning`` below."""

BUDGET: dict[str, Any] = {
    "batch_size": 8,
    "epochs": 1,
    "warmup_steps": 200,
    "evaluate_every": 500,
    "validation_items": 500,
    "test_items": 2000,
}


def _column(name: str, items: int, like: str, sizes: dict[str, Any], **options: Any) -> Column:
    settings = {**BUDGET, "train_items": items, "learning_rate": RATES[like]}
    return accuracy_column(name, task_options=options, model_fields=sizes, settings=settings)


ACCURACY = Table(
    name="1",
    title="accuracy at small scale",
    rows=table_rows("1"),
    columns=(
        _column("text", 16_000, "text", TEXT_SIZES, max_length=1024),
        _column("retrieval", 8000, "text", TEXT_SIZES, max_length=1024),
        _column("image", 16_000, "image", ENCODER_SIZES),
        _column("pathfinder", 16_000, "image", ENCODER_SIZES, level="easy"),
    ),
)

EPOCH_TIMES = epoch_times({"text": 1, "retrieval": 1, "image": 4, "pathfinder": 4}, repeats=2)
"""With batches that take seconds on two cores; the paper's take minutes per step."""

PERPLEXITY = Table(
    name="4",
    title="perplexity per byte, on English Wikipedia",
    rows=table_rows("4"),
    columns=(language_column("wiki-en", 512, LM_SETTINGS, task_options={"unit": "bytes"}, model_fields=LM_SIZES),),
)

SPEED = speed_table((512, 1024, 2048, 4096, 8192, 16_384), LM_SIZES, repeats=3)

PLAN = Plan(
    name="small",
    title="real data, hours on two cores",
    tables=(PERPLEXITY, ACCURACY, EPOCH_TIMES, LATENCY, SPEED),
    seeds=3,
    also=FROM_TABLE_4,
)

TRIAL: dict[str, Any] = {"train_items": 3200, "evaluate_every": 200, "validation_items": 1000, "test_items": 500}


def _trials(column: Column) -> Table:
    """Return a table with a column per learning rate, for a part of the training of the Transformer row.

    The rate with the lowest validation loss is used for all rows, as in the paper; that of text also for retrieval, that of image also for
    pathfinder.
    """
    rates = (3e-4, 1e-3, 3e-3)
    columns = tuple(replace(column, name=f"{rate:g}", settings={**column.settings, **TRIAL, "learning_rate": rate}) for rate in rates)
    return Table(name=f"rates-{column.name}", title=f"learning rates on {column.name}", rows=("transformer",), columns=columns)


TUNING = Plan(
    name="tuning",
    title="learning rates of preset small, tried on the Transformer row",
    tables=tuple(_trials(column) for column in ACCURACY.columns if column.name in RATES),
    seeds=1,
)
