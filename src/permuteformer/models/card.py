"""The card that ``save_pretrained`` leaves beside a model: README.md, for whoever finds the folder.

A training run writes a fuller one (``train/card.py``). Here nothing is known but the model itself, and the card says that. One that lies
there already is left alone, and one that lay beside the weights when they were loaded goes with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from permuteformer.folders import content_of
from permuteformer.version import __version__

NAME = "README.md"
TEMPLATE = "has been automatically generated"
"""Of the empty card that transformers puts into a repository of the hub, over whatever lies in the folder."""
CARRIED = "Saved again from a model that was loaded with this card. What was done to its weights in between is not recorded."
UNKNOWN = "Nothing is recorded: the weights are those it was initialised with, unless somebody has trained them since"


def card_beside(model: Any, folder: Path) -> str:
    """The card that is to lie in ``folder`` when the model is saved there: what is there, what it was loaded with, or a new one."""
    for place in (folder, Path(model.name_or_path or "/nonexistent")):
        text = _read(place / NAME)
        if text is not None and TEMPLATE not in text:
            return text if place == folder or CARRIED in text else f"{text.rstrip()}\n\n{CARRIED}\n"
    return plain_card(model)


def plain_card(model: Any, origin: str = UNKNOWN) -> str:
    """Of a model of which nothing but itself is known. ``origin``: where its weights come from, as a sentence."""
    name, config = type(model).__name__, model.config
    parts = [
        "---",
        "library_name: permuteformer",
        "tags: [permuteformer, linear-attention, long-sequences]",
        "---",
        "",
        f"# {name}",
        "",
        f"A `{name}` of permuteformer {__version__}, of {sum(p.numel() for p in model.parameters()):,} parameters: "
        f"{config.num_hidden_layers} layers of width {config.hidden_size} with {config.num_attention_heads} heads, "
        f"attention {_named([config.attention])}, positions {_named(config.position)}.",
        "",
        "## Data",
        "",
        f"{origin}.",
        "",
        "## Numbers",
        "",
        "None are recorded.",
        "",
        "## Use",
        "",
        "```python",
        f"from permuteformer.models import {name}",
        "",
        f'model = {name}.from_pretrained("FOLDER")',
        "```",
        "",
        "## Made by",
        "",
        "`save_pretrained`. `permuteformer train` records data, metric and command, and writes a card with them.",
        "",
        "## Limits",
        "",
        "- Nothing is promised of what it answers: it was not tested.",
        "- Nobody looked for what it has learned, or whom its mistakes would harm.",
        "",
    ]
    return "\n".join(parts)


def is_template(path: Path) -> bool:
    """Whether a card is the empty one of transformers."""
    return TEMPLATE in (_read(path) or "")


def _named(parts: list[dict[str, Any]]) -> str:
    return ", ".join(f"`{part['name']}`" for part in parts) or "none"


def _read(path: Path) -> str | None:
    try:
        return content_of(path).decode()
    except (OSError, ValueError):
        return None
