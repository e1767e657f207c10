"""What models are timed on: random tokens of a task's vocabulary, all of one length. No data is needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from permuteformer.experiments.base import Measurement
from permuteformer.models import PRESETS, PermuteFormerConfig
from permuteformer.tasks import Batch
from permuteformer.tasks.base import Classification
from permuteformer.tasks.inputs import Values
from permuteformer.tasks.language import LanguageModelling
from permuteformer.tokens import PAPER
from permuteformer.train.build import build_config, build_task, inputs, targets


@dataclass(frozen=True)
class Prepared:
    """All of a measurement but the model itself."""

    measurement: Measurement
    kind: str
    """Of the task."""
    config: PermuteFormerConfig
    arguments: dict[str, Tensor]
    """What the model is given, with labels where it is trained."""


def prepare(fields: dict[str, Any], device: str) -> Prepared:
    """The measurement that has these fields."""
    measurement = Measurement.from_json(fields)
    items = random_items(measurement)
    config = build_config(measurement.model, measurement.model_fields, items)
    batch = items.batch(measurement.batch_size).to(torch.device(device))
    labels = targets(batch, items.kind) if measurement.kind == "training" else {}
    return Prepared(measurement, items.kind, config, {**inputs(batch, config, items.kind), **labels})


@dataclass(frozen=True)
class RandomItems:
    """Items of a task as far as a model can tell, but random and all of one length: what ``build_config`` asks of a task, and batches."""

    name: str
    kind: str
    vocab_size: int
    max_length: int
    labels: list[str] = field(default_factory=list)
    grid: tuple[int, int] | None = None
    input: Any = None
    """What makes tokens of values; none for language models, whose tokens are any."""

    @property
    def padding(self) -> int | None:
        """As of the task."""
        return PAPER.pad if self.input is None else self.input.alphabet.padding

    def batch(self, size: int) -> Batch:
        """So many items, always the same."""
        random = np.random.default_rng(0)
        ids = torch.arange(size)
        if self.kind == "lm":
            tokens, following = (torch.from_numpy(random.integers(0, self.vocab_size, (size, self.max_length))) for _ in range(2))
            return Batch(ids, tokens, torch.ones_like(tokens, dtype=torch.bool), following)
        labels = torch.from_numpy(random.integers(0, len(self.labels), size))
        alphabet = self.input.alphabet
        count = self.max_length - alphabet.specials

        def sequences() -> Any:
            return self.input.encode([random.integers(0, alphabet.count, count, dtype=np.uint8).tobytes() for _ in range(size)])

        first, mask, positions = sequences()
        batch = Batch(ids, first, mask, labels, positions)
        if self.kind != "match":
            return batch
        second, second_mask, _ = sequences()
        return replace(batch, second_input_ids=second, second_key_mask=second_mask)


def random_items(measurement: Measurement) -> RandomItems:
    """Items of the measurement's task, of its length. Raises where the task cannot have it."""
    task, length = build_task(measurement.task, measurement.task_options), measurement.length
    if isinstance(task, LanguageModelling):
        return RandomItems(task.name, task.kind, _vocabulary(measurement, task), length)
    if not isinstance(task, Classification):
        raise TypeError(f"task {task.name!r} cannot be measured: it must be a Classification, a Matching or a LanguageModelling")
    if task.grid is not None and length != task.max_length:
        height, width = task.grid
        raise ValueError(
            f"length must be {task.max_length}, the {height} x {width} pixels of {task.name!r} and the tokens around them; it is {length}"
        )
    values = replace(task.input, max_length=length) if isinstance(task.input, Values) else task.input
    return RandomItems(task.name, task.kind, task.vocab_size, length, task.labels, task.grid, values)


def _vocabulary(measurement: Measurement, task: LanguageModelling) -> int:
    """Tokens there are: of bytes the alphabet's, of words as many as the preset has, for their vocabulary is made of data."""
    size = PAPER.size if task.unit == "bytes" else PRESETS.get(measurement.model, {}).get("vocab_size", PAPER.size)
    return int(measurement.model_fields.get("vocab_size", size))
