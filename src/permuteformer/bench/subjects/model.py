"""A model of ours on a task."""

from __future__ import annotations

from typing import Any

from permuteformer.bench.items import prepare
from permuteformer.bench.steps import subject_of
from permuteformer.bench.subjects import Subject
from permuteformer.models.inspection import summarize
from permuteformer.train.build import build_model


def make(device: str, **fields: Any) -> Subject:
    """The measurement that has these fields; its ``repeats`` are for who calls."""
    prepared = prepare(fields, device)
    measurement = prepared.measurement
    model = build_model(prepared.config, prepared.kind).to(device)
    if measurement.kind == "inference" and prepared.kind == "lm":
        model.config.use_cache = False  # nothing is to follow
    tokens = measurement.length * measurement.batch_size * (2 if prepared.kind == "match" else 1)
    return subject_of(model, prepared, summarize(prepared.config, measurement.length).flops_per_token * tokens)
