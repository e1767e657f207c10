"""The paper's tables on real data, sized for hours on two cores."""

from __future__ import annotations

from typing import Any

from permuteformer.experiments import lra, wikitext
from permuteformer.experiments.plan import Column, Plan, Table
from permuteformer.experiments.quick import speed_columns

LENGTH = 512

LM_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "hidden_dropout": 0.0,
}

ENCODER_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout": 0.0,
    "initialization": "fairseq",  # BERT's deviation of 0.02 is that of a width of 768: so narrow a model hardly learns from it
}
TEXT_SIZES = {**ENCODER_SIZES, "pooling": "mean"}
"""Summed up by its first token, as in the paper, so small a Transformer did not leave chance in trials."""

RATES = {"text": 3e-4, "image": 1e-3}
"""Learning rates of table 1, tuned on the Transformer row as in the paper: ``experiments/tuning.py``."""

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
    return lra.column(name, task_options=options, model_fields=sizes, settings=settings)


TABLE1 = Table(
    name="1",
    title="accuracy, in small",
    rows=lra.ROWS,
    columns=(
        _column("text", 16_000, "text", TEXT_SIZES, max_length=1024),
        _column("retrieval", 8000, "text", TEXT_SIZES, max_length=1024),
        _column("image", 16_000, "image", ENCODER_SIZES),
        _column("pathfinder", 16_000, "image", ENCODER_SIZES, level="easy"),
    ),
)

TIMED_BATCHES = {"text": 1, "retrieval": 1, "image": 4, "pathfinder": 4}
"""What two cores do in seconds; the paper's batches take minutes a step."""

TABLE2 = Table(
    name="2",
    title="training time for one epoch",
    rows=lra.TABLE2.rows,
    columns=tuple(lra.timed(name, "training", batch, 2) for name, batch in TIMED_BATCHES.items()),
    kind="measurement",
)
TABLE3 = lra.TABLE3

TABLE4 = Table(
    name="4",
    title="perplexity of a byte, on English Wikipedia",
    rows=wikitext.ROWS,
    columns=(
        Column(
            name="lm",
            task="wiki-en",
            model="{row}",
            task_options={"unit": "bytes", "length": LENGTH, "context": LENGTH // 2},
            model_fields=LM_SIZES,
            settings={
                "steps": 1000,
                "batch_size": 8,
                "learning_rate": 2e-3,
                "warmup_steps": 100,
                "adam_beta2": 0.98,
                "evaluate_every": 100,
                "validation_items": 100,
                "test_items": 800,
                "test_lengths": wikitext.longer(LENGTH),
            },
        ),
    ),
)

SPEED = Table(
    name="speed",
    title="a training step against the length",
    rows=("transformer-lm", "performer-lm", "permuteformer-lm"),
    columns=speed_columns((512, 1024, 2048, 4096, 8192, 16_384), LM_SIZES, repeats=3),
    kind="measurement",
)

PLAN = Plan(
    name="small",
    title="real data, hours on two cores",
    tables=(TABLE4, TABLE1, TABLE2, TABLE3, SPEED),
    seeds=3,
    also=wikitext.ALSO,
)
