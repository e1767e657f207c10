"""Models for tasks: configuration, class, and arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

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
from permuteformer.tasks.inputs import Input

HEADS: dict[str, type[PermuteFormerPreTrainedModel]] = {
    "classify": PermuteFormerForSequenceClassification,
    "match": PermuteFormerForMatching,
    "lm": PermuteFormerForCausalLM,
}
"""The model class for each kind of input."""


def build_task(name: str, options: Mapping[str, Any], data: str | None = None) -> Task:
    """Return a task; ``data`` is the data folder."""
    TASKS.check(name, options, ())
    if "path" in TASKS.options(name) and "path" not in options:
        raise ValueError(f"{name} needs a file: permuteformer train {name} FILE")
    task: Task = TASKS[name](**{"data": data, **options})
    return task


def build_config(preset: str, overrides: Mapping[str, Any], input: Input) -> PermuteFormerConfig:
    """Return the configuration of a preset for an input: its vocabulary, labels and longest sequence.

    Where a preset limits positions to the longest input of the paper's task (learned positions, Linformer), the limit is this input's.
    """
    if preset not in PRESETS:
        raise ValueError(unknown("preset", preset, PRESETS))
    fields: dict[str, Any] = copy.deepcopy({**PRESETS[preset], "vocab_size": input.vocab_size, "pad_token_id": input.pad_id})
    for entry in [fields["attention"], *fields["position"]]:
        if "max_length" in entry:
            entry["max_length"] = input.max_length
    if input.kind == "lm":
        fields["bos_token_id"] = input.start_id
    else:
        names = dict(enumerate(input.labels))
        fields |= {"num_labels": len(names), "id2label": names, "label2id": {name: n for n, name in names.items()}}
        if len(names) > 1:  # else transformers sets it at the first loss, which a resumed run may not compute
            fields["problem_type"] = "single_label_classification"
    fields |= copy.deepcopy(dict(overrides))
    if input.grid is None and fields.get("axes", 1) > 1 and "axes" not in overrides:
        fields["axes"] = 1  # a preset of images, used for text
    config = PermuteFormerConfig(**fields)
    if config.causal != (input.kind == "lm"):
        wanted = "a causal model: a preset that ends in -lm" if input.kind == "lm" else "a model that is not causal"
        raise ValueError(f"model {preset!r} does not fit this task: it needs {wanted}")
    if config.axes > 1 and input.grid is None:
        raise ValueError(f"axes={config.axes} needs a task of images: set --model.axes 1")
    return config


def build_model(config: PermuteFormerConfig, kind: str) -> PermuteFormerPreTrainedModel:
    """Return a model with new weights, drawn from torch's global generator."""
    return HEADS[kind](config)


def model_inputs(batch: Batch, config: PermuteFormerConfig) -> dict[str, Tensor]:
    """Return the arguments of a model without labels. A model with one axis counts tokens along the sequence."""
    given = {"input_ids": batch.input_ids, "attention_mask": batch.mask}
    if batch.positions is not None and config.axes > 1:
        given["position_ids"] = batch.positions
    if batch.second_input_ids is not None and batch.second_mask is not None:
        given |= {"second_input_ids": batch.second_input_ids, "second_attention_mask": batch.second_mask}
    if config.causal and bool(batch.mask.all()):
        del given["attention_mask"]  # no padding
    return given


def model_targets(batch: Batch) -> dict[str, Tensor]:
    """Return the labels as arguments of a model. Labels of language models are at the token that predicts them."""
    return {"labels": batch.labels, "shift_labels": batch.labels} if batch.labels.dim() == 2 else {"labels": batch.labels}
