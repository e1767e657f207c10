"""GPUs, dealt out to runs that are under way together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

NAME = "CUDA_VISIBLE_DEVICES"


def gpus() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get(NAME, "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def environment_of(slot: int, devices: Sequence[str]) -> Mapping[str, str]:
    """What a run's environment says of its GPU: runs that are under way together take turns.

    >>> [environment_of(slot, ["0", "3"]) for slot in range(3)], environment_of(5, [])
    ([{'CUDA_VISIBLE_DEVICES': '0'}, {'CUDA_VISIBLE_DEVICES': '3'}, {'CUDA_VISIBLE_DEVICES': '0'}], {})
    """
    return {NAME: devices[slot % len(devices)]} if devices else {}
