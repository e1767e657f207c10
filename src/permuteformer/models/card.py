"""Model cards (README.md): that of ``save_pretrained``, and that of a trained model with data, metrics and command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from permuteformer.formatting import escape_markdown, printable
from permuteformer.storage import read_bytes
from permuteformer.version import __version__

NAME = "README.md"
TEMPLATE = "has been automatically generated"
"""A phrase of the empty card that transformers writes for an upload to the hub."""
CARRIED = "Saved again from a model that was loaded with this card. What was done to its weights in between is not recorded."
MAX_LABELS = 20
UNKNOWN = "Nothing is recorded: the weights are as initialised, or were trained without recording how"

CARD = """\
---
library_name: permuteformer
{tag}tags: [permuteformer, linear-attention, long-sequences]
---

# {title}

{summary}

## Data

{data}

## Numbers

{numbers}

## Use

```python
from permuteformer.models import {head}

model = {head}.from_pretrained("FOLDER")
```

## Made by

{made_by}

## Limits

{limits}
- Biases it may have learned, and the harm its errors may do, were not examined.
"""


def card_beside(model: Any, folder: Path) -> str:
    """Return the card for a model saved to ``folder``: the folder's own, the one the model was loaded with, or a new one."""
    for place in (folder, Path(model.name_or_path or "/nonexistent")):
        text = _read(place / NAME)
        if text is not None and TEMPLATE not in text:
            return text if place == folder or CARRIED in text else f"{text.rstrip()}\n\n{CARRIED}\n"
    return plain_card(model)


def plain_card(model: Any, origin: str = UNKNOWN) -> str:
    """Return a card that describes the model itself. ``origin``: where its weights come from, a sentence without a full stop."""
    name, config = type(model).__name__, model.config
    parameters = sum(p.numel() for p in model.parameters())
    attention, positions = (", ".join(f"`{part['name']}`" for part in parts) or "none" for parts in ([config.attention], config.position))
    return CARD.format(
        tag="",
        title=name,
        summary=f"A `{name}` of permuteformer {__version__}, of {parameters:,} parameters: {config.num_hidden_layers} layers of width "
        f"{config.hidden_size} with {config.num_attention_heads} heads, attention {attention}, positions {positions}.",
        data=f"{origin}.",
        numbers="None are recorded.",
        head=name,
        made_by="`save_pretrained`. `permuteformer train` records data, metric and command, and writes a card with them.",
        limits="- The model was not evaluated.",
    )


def is_template(path: Path) -> bool:
    """Whether a card is the empty one of transformers."""
    return TEMPLATE in (_read(path) or "")


def _read(path: Path) -> str | None:
    try:
        return read_bytes(path).decode()
    except (OSError, ValueError):
        return None


def model_card(
    head: str, task: Mapping[str, Any], experiment: Mapping[str, Any], result: Mapping[str, Any], command: Sequence[str] | None
) -> str:
    """Return the card of a trained model, with the fields that the Hugging Face hub reads. Text from the data is escaped.

    Args:
        head: the model's class.
        task: description of the task, of the run folder.
        experiment: how it was trained.
        result: metrics of the run.
        command: words of the command that trained it.
    """
    tag = "text-generation" if task["kind"] == "lm" else "image-classification" if task["grid"] else "text-classification"
    command = command or ["permuteformer", "train", experiment["task"]]
    length = f"{task['max_length']:,} tokens"
    data = [f"Task {_quoted(task['name'])}, {escape_markdown(printable(task['title']))}: inputs of up to {length}."]
    if task["labels"]:
        data.append(f"Labels: {_labels(task['labels'])}.")
    numbers = [
        "| on the test split | |",
        "|---|---|",
        *(f"| {name} | {value:.4g} |" for name, value in result["test"].items()),
        *(f"| {escape_markdown(printable(name))} (no model) | {value:.4g} |" for name, value in task["baselines"].items()),
        "",
        f"Selected by {task['metric']} on the validation split: step {result['best_step'] or result['steps']:,} of {result['steps']:,}.",
    ]
    limits = [
        *(escape_markdown(printable(note, 400)) for note in task["notes"]),
        f"Trained on inputs of up to {length}; longer ones were not tested.",
        f"One run with seed {experiment['seed']}; other seeds give other numbers.",
    ]
    return CARD.format(
        tag=f"pipeline_tag: {tag}\n",
        title=f"{experiment['model']} on {task['name']}",
        summary=f"A `{head}` of permuteformer {__version__}, of {result['parameters']:,} parameters.",
        data="\n".join(data),
        numbers="\n".join(numbers),
        head=head,
        made_by=f"```sh\n{printable(shlex.join(map(str, command)), 2000)}\n```",
        limits="\n".join(f"- {limit.removesuffix('.')}." for limit in limits),
    )


def _labels(labels: list[str]) -> str:
    shown = ", ".join(_quoted(label) for label in labels[:MAX_LABELS])
    return shown if len(labels) <= MAX_LABELS else f"{shown} and {len(labels) - MAX_LABELS} more"


def _quoted(text: str) -> str:
    """Return text as Markdown code."""
    return f"`{printable(text, 60).replace('`', chr(39))}`"
