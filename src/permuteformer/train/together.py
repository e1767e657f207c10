"""Processes in step: sums that all of them know, and what one of them does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

T = TypeVar("T")


def total(accelerator: Accelerator, *numbers: float) -> list[float]:
    """The sums of numbers over all processes, which must call it together."""
    if accelerator.num_processes == 1:
        return [float(number) for number in numbers]
    own = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=accelerator.device)
    summed: list[float] = accelerator.reduce(own, "sum").tolist()
    return summed


def on_main(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Have the main process do something, and all know what came of it: plain data, or the exception, which all of them raise."""
    if accelerator.num_processes == 1:
        return action()
    came: list[T | Exception | None] = [None]
    if accelerator.is_main_process:
        try:
            came = [action()]
        except Exception as error:
            came = [error]
    broadcast_object_list(came)
    if isinstance(came[0], Exception):
        raise came[0]
    return came[0]  # type: ignore[return-value]
