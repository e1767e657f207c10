"""The card of a trained model: what it was trained on, how well it does and where its limits are, for whoever finds it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import permuteformer
from permuteformer.experiments.layout import ENVIRONMENT
from permuteformer.folders import read_json
from permuteformer.texts import for_markdown, printable
from permuteformer.train.build import HEADS
from permuteformer.train.run import Run

MOST_LABELS = 20


def model_card(run: Run, result: Mapping[str, Any]) -> str:
    """Markdown with the fields that the Hugging Face hub reads; what comes from data is quoted, and no markup in it counts."""
    task, experiment = run.about["task"], run.experiment
    head = HEADS[task["kind"]].__name__
    tag = "text-generation" if task["kind"] == "lm" else "image-classification" if task["grid"] else "text-classification"
    front = ["---", "library_name: permuteformer", f"pipeline_tag: {tag}", "tags: [permuteformer, linear-attention, long-sequences]", "---"]
    command = read_json(run.path / ENVIRONMENT).get("command") or ["permuteformer", "train", experiment.task]
    best = result["best_step"] or result["steps"]
    length = f"{task['max_length']:,} tokens"
    limits = [
        *(for_markdown(printable(note, 400)) for note in task["notes"]),
        f"Trained on inputs of up to {length}; nothing is promised of longer ones.",
        f"One run with seed {experiment.seed}: others differ by chance.",
        "Nobody looked for what it has learned besides the task, or whom its mistakes would harm.",
    ]
    parts = [
        *front,
        "",
        f"# {experiment.model} on {task['name']}",
        "",
        f"A `{head}` of permuteformer {permuteformer.__version__}, of {result['parameters']:,} parameters.",
        "",
        "## Data",
        "",
        f"Task {_quoted(task['name'])}, {for_markdown(printable(task['title']))}: inputs of up to {length}.",
        *([f"Labels: {_labels(task['labels'])}."] if task["labels"] else []),
        "",
        "## Numbers",
        "",
        "| on the test split | |",
        "|---|---|",
        *(f"| {name} | {value:.4g} |" for name, value in result["test"].items()),
        *(f"| {for_markdown(printable(name))} (no model) | {value:.4g} |" for name, value in task["baselines"].items()),
        "",
        f"Chosen by {task['metric']} on the validation split: after step {best:,} of {result['steps']:,}.",
        "",
        "## Use",
        "",
        "```python",
        f"from permuteformer.models import {head}",
        "",
        f'model = {head}.from_pretrained("FOLDER")',
        "```",
        "",
        "## Made by",
        "",
        "```sh",
        printable(shlex.join(map(str, command)), 2000),
        "```",
        "",
        "## Limits",
        "",
        *(f"- {limit if limit.endswith('.') else limit + '.'}" for limit in limits),
        "",
    ]
    return "\n".join(parts)


def _labels(labels: list[str]) -> str:
    shown = ", ".join(_quoted(label) for label in labels[:MOST_LABELS])
    return shown if len(labels) <= MOST_LABELS else f"{shown} and {len(labels) - MOST_LABELS} more"


def _quoted(text: str) -> str:
    """As code, which no markup or HTML gets out of."""
    return f"`{printable(text, 60).replace('`', chr(39))}`"
