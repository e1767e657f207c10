"""The learning rate: up in a line, then down with the square root of the step."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, warmup_from: float = 0.0) -> float:
    """Of update number ``step``, counted from 1. It rises from ``warmup_from``, before the first, to ``peak`` at ``warmup_steps``.

    >>> [round(learning_rate(step, peak=1.0, warmup_steps=4), 3) for step in (1, 2, 4, 5, 16, 400)]
    [0.25, 0.5, 1.0, 0.894, 0.5, 0.1]
    """
    if step < warmup_steps:
        return warmup_from + (peak - warmup_from) * step / warmup_steps
    return peak * math.sqrt(max(warmup_steps, 1) / step)
