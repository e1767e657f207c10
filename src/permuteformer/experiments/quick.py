"""The paper's tables at small scale on bundled data, in minutes on two cores: ``make run``."""

from __future__ import annotations

from typing import Any

from permuteformer.experiments.paper import FROM_TABLE_4, language_column, speed_table
from permuteformer.experiments.tables import Column, Plan, Table
from permuteformer.presets import table_rows

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
}

PERPLEXITY = Table(
    name="4",
    title="perplexity per byte, on Python's help",
    rows=table_rows("4"),
    columns=(language_column("lm-bytes", 256, LM_SETTINGS, model_fields=LM_SIZES),),
)

ACCURACY = Table(
    name="1",
    title="accuracy on handwritten digits, 8 x 8",
    rows=("performer", "permuteformer", "permuteformer-1d"),
    columns=(
        Column(
            name="digits",
            task="digits",
            model="{row}-image",
            model_fields={"num_hidden_layers": 2, "hidden_dropout": 0.0},
            settings={"epochs": 10, "batch_size": 16, "learning_rate": 2e-3, "warmup_steps": 100, "evaluation_batch_size": 64},
        ),
    ),
)


SPEED = speed_table((512, 2048, 8192), LM_SIZES, repeats=2)

PLAN = Plan(name="quick", title="minutes on two cores, bundled data", tables=(PERPLEXITY, ACCURACY, SPEED), seeds=1, also=FROM_TABLE_4)
