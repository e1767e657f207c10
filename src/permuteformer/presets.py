"""Models of the paper's tables as data: the rows of the tables, and a configuration for each row and task.

Presets are named ROW-TASK for Long-Range Arena and ROW for the language models of WikiText-103.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from permuteformer.tokens import IMAGE_SIDE, PAPER, TEXT_LENGTH

Fields = dict[str, Any]
"""Fields of a configuration."""


@dataclass(frozen=True)
class TaskModel:
    """What all models of a task of Long-Range Arena have in common."""

    sizes: Fields
    length: int
    """Tokens of the longest input, CLS and SEP included."""
    axes: int = 1
    """Axes of positions."""
    reformer_chunk: int = 64


@dataclass(frozen=True)
class Row:
    """A row of the paper's tables."""

    title: str
    tables: tuple[str, ...]
    """Tables that have this row by default."""
    fields: Callable[[TaskModel], Fields]
    """Returns attention and positions for a task."""


def _sizes(width: int, layers: int, heads: int, feed_forward: int, dropout: float) -> Fields:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": feed_forward}
    return {**sizes, "hidden_dropout": dropout}


IMAGE_LENGTH = IMAGE_SIDE**2 + PAPER.specials

TASK_MODELS = {
    "text": TaskModel(_sizes(512, 6, 8, 2048, 0.1), TEXT_LENGTH, reformer_chunk=80),
    "retrieval": TaskModel(_sizes(128, 4, 4, 512, 0.1), TEXT_LENGTH),
    "image": TaskModel(_sizes(64, 3, 4, 128, 0.3), IMAGE_LENGTH, axes=2),
    "pathfinder": TaskModel(_sizes(128, 4, 8, 128, 0.1), IMAGE_LENGTH, axes=2),
}

LM_LENGTH = 512
"""Tokens per training sequence of the paper's language models."""

LM = TaskModel(
    {
        **_sizes(512, 6, 8, 1024, 0.1),
        "vocab_size": 267_744,
        "hidden_act": "relu",
        "bos_token_id": 2,
        "causal": True,
        "scale_embeddings": True,
        "initialization": "fairseq",
        "pooling": "last",
    },
    LM_LENGTH,
)


def _fields(attention: Fields, *position: Fields, axes: int = 1) -> Fields:
    return {"attention": dict(attention), "position": [dict(entry) for entry in position], "axes": axes}


def _learned(task: TaskModel) -> Fields:
    return {"name": "learned", "max_length": task.length}


SOFTMAX: Fields = {"name": "softmax"}
LINEAR: Fields = {"name": "linear"}
LINEAR_4X: Fields = {"name": "linear", "feature_multiplier": 4}
SINUSOIDAL: Fields = {"name": "sinusoidal"}
PERMUTE: Fields = {"name": "permute"}
DECAY: Fields = {"name": "decay"}

ACCURACY, TIMED, LANGUAGE = ("1",), ("1", "2", "3"), ("4",)

ROWS: dict[str, Row] = {
    "transformer": Row("Transformer", TIMED, lambda task: _fields(SOFTMAX, _learned(task))),
    "transformer-sinusoidal": Row("Transformer, sinusoidal positions", ACCURACY, lambda task: _fields(SOFTMAX, SINUSOIDAL)),
    "reformer": Row("Reformer", TIMED, lambda task: _fields({"name": "reformer", "chunk_size": task.reformer_chunk}, _learned(task))),
    "linformer": Row("Linformer", TIMED, lambda task: _fields({"name": "linformer", "max_length": task.length}, _learned(task))),
    "nystromformer": Row("Nyströmformer", TIMED, lambda task: _fields({"name": "nystromformer"}, _learned(task))),
    "performer": Row("Performer", TIMED, lambda task: _fields(LINEAR_4X, _learned(task))),
    "roformer": Row("RoFormer", ACCURACY, lambda task: _fields(LINEAR_4X, {"name": "rope"})),
    "permuteformer": Row("PermuteFormer", TIMED, lambda task: _fields(LINEAR_4X, PERMUTE, axes=task.axes)),
    "permuteformer-decay": Row(  # not in the paper
        "PermuteFormer with two-sided r",
        (),
        lambda task: _fields(LINEAR_4X, PERMUTE, {"name": "decay", "two_sided": True, "length": task.length}, axes=task.axes),
    ),
    "permuteformer-1d": Row("PermuteFormer without 2D", ACCURACY, lambda task: _fields(LINEAR_4X, PERMUTE)),
    "permuteformer-orthogonal": Row(
        "PermuteFormer without Property 3",
        ACCURACY,
        lambda task: _fields({**LINEAR_4X, "normalizer": "transformed"}, {"name": "orthogonal"}, axes=task.axes),
    ),
    "performer-t5": Row("Performer, T5-style positions", ("2",), lambda task: _fields(LINEAR_4X, {"name": "t5_bias"})),
}
"""Rows of Tables 1 to 3, in the paper's order."""

LM_ROWS: dict[str, Row] = {
    "transformer-lm": Row("Transformer", LANGUAGE, lambda task: _fields(SOFTMAX, SINUSOIDAL)),
    "performer-lm": Row("Performer", LANGUAGE, lambda task: _fields(LINEAR, SINUSOIDAL)),
    "permuteformer-lm": Row("PermuteFormer", LANGUAGE, lambda task: _fields(LINEAR, PERMUTE, DECAY)),
    "permuteformer-lm-no-decay": Row("PermuteFormer without r", LANGUAGE, lambda task: _fields(LINEAR, PERMUTE)),
    "permuteformer-lm-no-permutation": Row("PermuteFormer without P", LANGUAGE, lambda task: _fields(LINEAR, DECAY)),
}
"""Rows of Table 4, in the paper's order."""

ROW_TITLES = {name: row.title for name, row in {**ROWS, **LM_ROWS}.items()}

PRESETS: dict[str, Fields] = {
    **{f"{row}-{name}": {**task.sizes, **ROWS[row].fields(task)} for name, task in TASK_MODELS.items() for row in ROWS},
    **{row: {**LM.sizes, **LM_ROWS[row].fields(LM)} for row in LM_ROWS},
}


def table_rows(table: str) -> tuple[str, ...]:
    """Return the rows of one of the paper's tables.

    >>> table_rows("3")
    ('transformer', 'reformer', 'linformer', 'nystromformer', 'performer', 'permuteformer')
    """
    return tuple(name for name, row in {**ROWS, **LM_ROWS}.items() if table in row.tables)
