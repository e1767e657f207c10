"""Configurations of the models in the paper's tables: each preset is a dict of configuration fields.

Names are ROW-TASK for Long-Range Arena and ROW-lm for the language models of WikiText-103. ``permuteformer-decay`` is not in the paper.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def _sizes(width: int, layers: int, heads: int, feed_forward: int, dropout: float) -> Fields:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": feed_forward}
    return {**sizes, "hidden_dropout": dropout}


LM: Fields = {
    **_sizes(512, 6, 8, 1024, 0.1),
    "vocab_size": 267_744,
    "hidden_act": "relu",
    "bos_token_id": 2,
    "causal": True,
    "scale_embeddings": True,
    "initialization": "fairseq",
    "pooling": "last",
}

LM_LENGTH = 512
"""Tokens per training sequence of the paper's language models."""

TASKS: dict[str, tuple[Fields, int, int]] = {
    "text": (_sizes(512, 6, 8, 2048, 0.1), 4000, 1),
    "retrieval": (_sizes(128, 4, 4, 512, 0.1), 4000, 1),
    "image": (_sizes(64, 3, 4, 128, 0.3), 1026, 2),
    "pathfinder": (_sizes(128, 4, 8, 128, 0.1), 1026, 2),
}
"""For each task of Long-Range Arena: model sizes, the longest input with CLS and SEP, and the number of position axes."""

REFORMER_CHUNKS = {"text": 80}
"""Chunk sizes of Reformer, where they are not 64."""


def _linear(**arguments: Any) -> Fields:
    return {"name": "linear", "feature_multiplier": 4, **arguments}


def _rows(length: int, axes: int, chunk: int) -> dict[str, Fields]:
    """Return the rows of Table 1 for one task. Encodings without axes count the pixels of an image along the sequence."""
    learned, sinusoidal = [{"name": "learned", "max_length": length}], [{"name": "sinusoidal"}]
    decay = {"name": "decay", "two_sided": True, "length": length}
    return {
        "transformer": {"attention": {"name": "softmax"}, "position": learned},
        "transformer-sinusoidal": {"attention": {"name": "softmax"}, "position": sinusoidal},
        "reformer": {"attention": {"name": "reformer", "chunk_size": chunk}, "position": learned},
        "linformer": {"attention": {"name": "linformer", "max_length": length}, "position": learned},
        "nystromformer": {"attention": {"name": "nystromformer"}, "position": learned},
        "performer": {"attention": _linear(), "position": learned},
        "roformer": {"attention": _linear(), "position": [{"name": "rope"}]},
        "performer-t5": {"attention": _linear(), "position": [{"name": "t5_bias"}]},
        "permuteformer": {"attention": _linear(), "position": [{"name": "permute"}], "axes": axes},
        "permuteformer-1d": {"attention": _linear(), "position": [{"name": "permute"}]},
        "permuteformer-decay": {"attention": _linear(), "position": [{"name": "permute"}, decay], "axes": axes},
        "permuteformer-orthogonal": {"attention": _linear(normalizer="transformed"), "position": [{"name": "orthogonal"}], "axes": axes},
    }


LM_ROWS: dict[str, Fields] = {
    "transformer-lm": {"attention": {"name": "softmax"}, "position": [{"name": "sinusoidal"}]},
    "performer-lm": {"attention": {"name": "linear"}, "position": [{"name": "sinusoidal"}]},
    "permuteformer-lm": {"attention": {"name": "linear"}, "position": [{"name": "permute"}, {"name": "decay"}]},
    "permuteformer-lm-no-decay": {"attention": {"name": "linear"}, "position": [{"name": "permute"}]},
    "permuteformer-lm-no-permutation": {"attention": {"name": "linear"}, "position": [{"name": "decay"}]},
}

PRESETS: dict[str, Fields] = {
    **{
        f"{row}-{task}": {**sizes, **fields}
        for task, (sizes, length, axes) in TASKS.items()
        for row, fields in _rows(length, axes, REFORMER_CHUNKS.get(task, 64)).items()
    },
    **{name: {**LM, **fields} for name, fields in LM_ROWS.items()},
}
