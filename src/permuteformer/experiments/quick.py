"""The paper's tables at small scale on bundled data, in minutes on two cores: ``make run``."""

from __future__ import annotations

from typing import Any

from permuteformer.experiments.paper import FROM_TABLE_4, longer
from permuteformer.experiments.tables import Column, Plan, Table
from permuteformer.presets import table_rows

LENGTH = 256

LM_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout": 0.0,
}
LM_SETTINGS: dict[str, Any] = {
    "steps": 360,
    "batch_size": 16,
    "learning_rate": 4e-3,
    "warmup_steps": 50,
    "adam_beta2": 0.98,
    "evaluate_every": 50,
    "validation_items": 48,
    "test_items": 128,
    "test_lengths": longer(LENGTH),
}

PERPLEXITY = Table(
    name="4",
    title="perplexity per byte, on Python's help",
    rows=table_rows("4"),
    columns=(
        Column(
            name="lm",
            task="lm-bytes",
            model="{row}",
            task_options={"length": LENGTH, "context": LENGTH // 2},
            model_fields=LM_SIZES,
            settings=LM_SETTINGS,
        ),
    ),
)

IMAGE_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_dropout": 0.0}

ACCURACY = Table(
    name="1",
    title="accuracy on handwritten digits, 8 x 8",
    rows=("performer", "permuteformer", "permuteformer-1d"),
    columns=(
        Column(
            name="digits",
            task="digits",
            model="{row}-image",
            model_fields=IMAGE_SIZES,
            settings={"epochs": 10, "batch_size": 16, "learning_rate": 2e-3, "warmup_steps": 100, "evaluation_batch_size": 64},
        ),
    ),
)


def speed_columns(lengths: tuple[int, ...], sizes: dict[str, Any], **settings: Any) -> tuple[Column, ...]:
    """Return columns of training steps of language models at growing lengths, with the same number of tokens."""
    return tuple(
        Column(
            name=str(length),
            task="lm-bytes",
            model="{row}",
            model_fields=sizes,
            settings={"kind": "training", "length": length, "batch_size": max(lengths) // length, "repeats": 2, **settings},
        )
        for length in lengths
    )


SPEED = Table(
    name="speed",
    title="a training step by length",
    rows=("transformer-lm", "performer-lm", "permuteformer-lm"),
    columns=speed_columns((512, 2048, 8192), LM_SIZES),
    kind="measurement",
)

PLAN = Plan(name="quick", title="minutes on two cores, bundled data", tables=(PERPLEXITY, ACCURACY, SPEED), seeds=1, also=FROM_TABLE_4)
