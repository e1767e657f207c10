"""Long-Range Arena with the paper's sizes and budgets: tables 1, 2 and 3. Sizes of models are in the presets; the rest is here, once."""

from __future__ import annotations

from typing import Any

from permuteformer.experiments.plan import Column, Table

ROWS = (
    "transformer",
    "transformer-sinusoidal",
    "reformer",
    "linformer",
    "nystromformer",
    "performer",
    "roformer",
    "permuteformer",
    "permuteformer-1d",
    "permuteformer-orthogonal",
)
"""Table 1, in the paper's order."""

TIMED = ("transformer", "reformer", "linformer", "nystromformer", "performer", "permuteformer")
"""Tables 2 and 3."""

OPTIMIZER: dict[str, dict[str, Any]] = {
    "text": {"batch_size": 16, "epochs": 10, "learning_rate": 1e-5, "warmup_steps": 4000},
    "retrieval": {"batch_size": 32, "epochs": 10, "learning_rate": 2e-4, "warmup_steps": 1000},
    "image": {"batch_size": 256, "epochs": 50, "learning_rate": 1e-2, "warmup_steps": 200},
    "pathfinder": {"batch_size": 256, "epochs": 80, "learning_rate": 5e-4, "warmup_steps": 4000},
}
"""The paper's appendix."""

TASK_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"protocol": "paper", "validate_on": "train"},
    "retrieval": {"protocol": "paper", "validate_on": "given"},
    "image": {"protocol": "paper", "validate_on": "train"},
    "pathfinder": {"protocol": "paper", "validate_on": "given"},
}
"""The paper's tokens; but models are chosen on a validation split, where the authors took the test split."""

LENGTHS = {"text": 4000, "retrieval": 4000, "image": 1026, "pathfinder": 1026}
"""Tokens of an input, with CLS and SEP."""

ITEMS = {"text": 25_000, "retrieval": 147_086, "image": 50_000, "pathfinder": 160_000}
"""Training items of an epoch."""

WITHOUT_GRID = {"permuteformer-1d": "permuteformer"}


def column(name: str, **changes: Any) -> Column:
    """A task's column of table 1. ``changes`` are of its fields; of ``settings`` and options those that are named."""
    options = {**TASK_OPTIONS[name], **changes.pop("task_options", {})}
    same = WITHOUT_GRID if name in ("text", "retrieval") else {}
    settings = {**OPTIMIZER[name], **changes.pop("settings", {})}
    return Column(name=name, task=f"lra-{name}", model=f"{{row}}-{name}", task_options=options, settings=settings, same=same, **changes)


def timed(name: str, kind: str, batch_size: int, repeats: int = 5) -> Column:
    """A task's column of tables 2 and 3."""
    settings = {"kind": kind, "length": LENGTHS[name], "batch_size": batch_size, "repeats": repeats, "items": ITEMS[name]}
    return Column(
        name=name,
        task=f"lra-{name}",
        model=f"{{row}}-{name}",
        task_options=TASK_OPTIONS[name],
        settings=settings,
        apart={"performer-t5": {"batch_size": 1}},  # its weights of all pairs fit nowhere otherwise
    )


TABLE1 = Table(name="1", title="accuracy on Long-Range Arena", rows=ROWS, columns=tuple(column(name) for name in OPTIMIZER))
TABLE2 = Table(
    name="2",
    title="training time for one epoch",
    rows=(*TIMED, "performer-t5"),
    columns=tuple(timed(name, "training", OPTIMIZER[name]["batch_size"]) for name in OPTIMIZER),
    kind="measurement",
)
TABLE3 = Table(
    name="3",
    title="latency of one sample",
    rows=TIMED,
    columns=tuple(timed(name, "inference", 1, repeats=20) for name in OPTIMIZER),
    kind="measurement",
)
