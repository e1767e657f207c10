"""Inputs of random tokens for models, and the steps of training and inference that are timed. No data is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from permuteformer.experiments.experiment import Measurement
from permuteformer.models import PRESETS, PermuteFormerConfig
from permuteformer.tasks import Task
from permuteformer.tasks.inputs import Input, Text
from permuteformer.tasks.language import Windows
from permuteformer.tokens import PAPER
from permuteformer.train.build import build_config, build_task, model_inputs, model_targets


@dataclass(frozen=True)
class Prepared:
    """A measurement without its model."""

    measurement: Measurement
    kind: str
    """Kind of the input."""
    config: PermuteFormerConfig
    arguments: dict[str, Tensor]
    """Arguments of the model, with labels in training."""


def prepare(fields: Mapping[str, Any], device: str) -> Prepared:
    """Return the measurement that has these fields."""
    measurement = Measurement.from_json(fields)
    task = build_task(measurement.task, measurement.task_options)
    input = measured_input(task, measurement.model, measurement.length, measurement.model_fields.get("vocab_size"))
    config = build_config(measurement.model, measurement.model_fields, input)
    batch = input.random_batch(measurement.batch_size, measurement.length).to(torch.device(device))
    targets = model_targets(batch) if measurement.kind == "training" else {}
    return Prepared(measurement, input.kind, config, {**model_inputs(batch, config), **targets})


def measured_input(task: Task, preset: str, length: int | None = None, vocab_size: int | None = None) -> Input:
    """Return a task's input for sequences of a length, without its data: a vocabulary of words has the size of the preset's."""
    input = task.input_without_data(vocab_size or int(PRESETS.get(preset, {}).get("vocab_size", PAPER.size)))
    if length is None:
        return input
    if isinstance(input, Windows):
        return replace(input, length=length, context=0)
    return replace(input, max_length=length) if isinstance(input, Text) else input


def training_step(model: nn.Module, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Return a step of forward, backward and an update by Adam. The model returns its loss, as those of transformers do."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)  # as in training here, and the fastest of torch

    def step() -> None:
        model(**arguments).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def inference_step(model: nn.Module, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Return a forward pass without gradients."""
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        model(**arguments)

    return step
