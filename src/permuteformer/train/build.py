"""Where a model meets a task: its configuration, its class, and what of a batch it is given."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from permuteformer.models import (
    PRESETS,
    PermuteFormerConfig,
    PermuteFormerForCausalLM,
    PermuteFormerForMatching,
    PermuteFormerForSequenceClassification,
)
from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.registry import unknown
from permuteformer.tasks import TASKS, Batch, Task
from permuteformer.tokens import PAPER


class Shape(Protocol):
    """What of a task decides a model's configuration."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def labels(self) -> Sequence[str]: ...
    @property
    def max_length(self) -> int: ...
    @property
    def grid(self) -> tuple[int, int] | None: ...
    @property
    def padding(self) -> int | None: ...


HEADS: dict[str, type[PermuteFormerPreTrainedModel]] = {
    "classify": PermuteFormerForSequenceClassification,
    "match": PermuteFormerForMatching,
    "lm": PermuteFormerForCausalLM,
}
"""The model for each kind of task."""


def build_task(name: str, options: Mapping[str, Any], data: str | None = None) -> Task:
    """A task by name. ``data`` is the data folder, for tasks that look into one."""
    arguments = dict(options)
    TASKS.check(name, arguments, ())
    if data is not None and "data" in TASKS.options(name):
        arguments.setdefault("data", data)
    if "path" in TASKS.options(name) and "path" not in arguments:
        raise ValueError(f"{name} is of your own data: say where it is, after the name")
    task: Task = TASKS[name](**arguments)
    return task


def build_config(preset: str, overrides: Mapping[str, Any], task: Shape) -> PermuteFormerConfig:
    """The configuration of a preset for a task: its vocabulary, its labels, its longest input.

    Where a preset counts positions up to the longest input of the paper's task (learned positions, Linformer), it is this task's.
    """
    if preset not in PRESETS:
        raise ValueError(unknown("preset", preset, PRESETS))
    fields: dict[str, Any] = copy.deepcopy({**PRESETS[preset], "vocab_size": task.vocab_size, "pad_token_id": task.padding})
    for entry in [fields["attention"], *fields["position"]]:
        if "max_length" in entry:
            entry["max_length"] = task.max_length
    if task.kind != "lm":
        names = dict(enumerate(task.labels))
        fields |= {"num_labels": len(names), "id2label": names, "label2id": {name: n for n, name in names.items()}}
        if len(names) > 1:  # else transformers sets it at the first loss, and a run that goes on from its last step has none
            fields["problem_type"] = "single_label_classification"
    elif getattr(task, "unit", None) == "bytes":
        fields["bos_token_id"] = PAPER.cls  # as the tokenizer of bytes has it; that of words has the preset's
    fields |= copy.deepcopy(dict(overrides))
    if task.grid is None and fields.get("axes", 1) > 1 and "axes" not in overrides:
        fields["axes"] = 1  # a preset of images, given a text
    config = PermuteFormerConfig(**fields)
    if config.causal != (task.kind == "lm"):
        wanted = "a causal one: a preset that ends in -lm" if task.kind == "lm" else "one that is not causal"
        raise ValueError(f"model {preset!r} does not fit task {task.name!r}, whose kind is {task.kind!r}: it needs {wanted}")
    if config.axes > 1 and task.grid is None:
        raise ValueError(f"axes={config.axes} needs a task with a grid; {task.name!r} is of sequences: set axes to 1")
    return config


def build_model(config: PermuteFormerConfig, kind: str) -> PermuteFormerPreTrainedModel:
    """A model with new weights, from torch's random numbers."""
    return HEADS[kind](config)


def inputs(batch: Batch, config: PermuteFormerConfig, kind: str) -> dict[str, Tensor]:
    """The arguments of a model, but for the labels. Models with one axis count tokens along the sequence."""
    given = {"input_ids": batch.input_ids, "attention_mask": batch.key_mask}
    if batch.positions is not None and config.axes > 1:
        given["position_ids"] = batch.positions
    if kind == "match":
        assert batch.second_input_ids is not None
        assert batch.second_key_mask is not None
        given |= {"second_input_ids": batch.second_input_ids, "second_attention_mask": batch.second_key_mask}
    if kind == "lm" and bool(batch.key_mask.all()):
        del given["attention_mask"]  # windows side by side: nothing is padding
    return given


def targets(batch: Batch, kind: str) -> dict[str, Tensor]:
    """The labels, as arguments of a model. Those of language models stand where they are predicted."""
    return {"labels": batch.labels, "shift_labels": batch.labels} if kind == "lm" else {"labels": batch.labels}
