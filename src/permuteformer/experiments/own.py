"""Where nobody said how to train: the paper's settings for the paper's tasks, and moderate ones for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from permuteformer.experiments import lra, wikitext

MODERATE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "classify": (
        "permuteformer-retrieval",
        {},
        {"epochs": 10, "batch_size": 16, "learning_rate": 5e-4, "warmup_steps": 100},
    ),
    "images": (
        "permuteformer-image",
        {"hidden_dropout": 0.1},
        {"epochs": 20, "batch_size": 32, "learning_rate": 2e-3, "warmup_steps": 100},
    ),
    "match": (
        "permuteformer-retrieval",
        {},
        {"epochs": 10, "batch_size": 16, "learning_rate": 5e-4, "warmup_steps": 100},
    ),
    "lm": (
        "permuteformer-lm",
        {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512},
        {"epochs": 10, "batch_size": 16, "learning_rate": 1e-3, "warmup_steps": 200, "adam_beta2": 0.98},
    ),
}
"""A preset, the fields that differ from it, and settings, for each kind of task; sizes that a computer without a GPU can bear."""


def task_options(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a task: those that are given, and of the paper's tasks its tokens and our validation split, unless one of them is given.

    >>> task_options("lra-text", {"max_length": 1024})
    {'protocol': 'paper', 'validate_on': 'train', 'max_length': 1024}
    >>> task_options("lra-text", {"protocol": "lra"})
    {'protocol': 'lra'}
    """
    usual = lra.TASK_OPTIONS.get(task.removeprefix("lra-"), {}) if task.startswith("lra-") else {}
    return dict(given) if set(usual) & set(given) else {**usual, **given}


def defaults(task: str, kind: str, has_grid: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The preset, its changed fields, and the experiment's settings for a task."""
    name = task.removeprefix("lra-")
    if task.startswith("lra-") and name in lra.OPTIMIZER:
        return f"permuteformer-{name}", {}, dict(lra.OPTIMIZER[name])
    if task == "wikitext-103":
        return "permuteformer-lm", {}, dict(wikitext.OPTIMIZER)
    model, fields, settings = MODERATE["images" if kind == "classify" and has_grid else kind]
    return model, dict(fields), dict(settings)
