"""The model card (README.md) that ``save_pretrained`` writes. ``train/card.py`` writes one with data, metric and command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from permuteformer.folders import content_of
from permuteformer.version import __version__

NAME = "README.md"
TEMPLATE = "has been automatically generated"
"""A phrase of the empty card that transformers writes for an upload to the hub."""
CARRIED = "Saved again from a model that was loaded with this card. What was done to its weights in between is not recorded."
UNKNOWN = "Nothing is recorded: the weights are as initialised, or were trained without recording how"

CARD = """\
---
library_name: permuteformer
tags: [permuteformer, linear-attention, long-sequences]
---

# {name}

A `{name}` of permuteformer {version}, of {parameters:,} parameters: {config.num_hidden_layers} layers of width {config.hidden_size} with \
{config.num_attention_heads} heads, attention {attention}, positions {positions}.

## Data

{origin}.

## Numbers

None are recorded.

## Use

```python
from permuteformer.models import {name}

model = {name}.from_pretrained("FOLDER")
```

## Made by

`save_pretrained`. `permuteformer train` records data, metric and command, and writes a card with them.

## Limits

- The model was not evaluated.
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
        name=name, version=__version__, parameters=parameters, config=config, attention=attention, positions=positions, origin=origin
    )


def is_template(path: Path) -> bool:
    """Whether a card is the empty one of transformers."""
    return TEMPLATE in (_read(path) or "")


def _read(path: Path) -> str | None:
    try:
        return content_of(path).decode()
    except (OSError, ValueError):
        return None
