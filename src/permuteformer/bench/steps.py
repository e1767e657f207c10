"""What is timed of a model that returns a loss where it is given labels, as those of transformers do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from permuteformer.bench.items import Prepared
from permuteformer.bench.subjects import Subject

BACKWARD = 2
"""Work of a backward pass, in forward passes: a product for the gradient of each factor."""


def subject_of(model: nn.Module, prepared: Prepared, forward_flops: float | None = None) -> Subject:
    """A model that does what was measured: a step of training (forward, backward, an update by Adam), or a forward pass."""
    measurement = prepared.measurement
    training = measurement.kind == "training"
    return Subject(
        _training(model, prepared.arguments) if training else _inference(model, prepared.arguments),
        parameters=sum(p.numel() for p in model.parameters()),
        flops=None if forward_flops is None else work(measurement.kind, forward_flops),
        calls_per_epoch=None if measurement.items is None else math.ceil(measurement.items / measurement.batch_size),
    )


def work(kind: str, forward: float) -> float:
    """Multiplications and additions of a step, of those of a forward pass."""
    return forward * (1 + BACKWARD if kind == "training" else 1)


def _training(model: nn.Module, arguments: Mapping[str, Any]) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)  # which is what trains models here, and the best of torch for all

    def step() -> None:
        model(**arguments).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _inference(model: nn.Module, arguments: Mapping[str, Any]) -> Callable[[], None]:
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        model(**arguments)

    return step
