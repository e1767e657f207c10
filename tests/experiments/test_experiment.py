"""Experiments and measurements: JSON round trip, and refusal of values that make no sense."""

import json
import math

import pytest

from permuteformer.experiments import Experiment, Measurement

EXPERIMENT = {"task": "digits", "model": "permuteformer-image", "epochs": 1}
MEASUREMENT = {"kind": "training", "task": "lra-text", "model": "permuteformer-text", "length": 40}


@pytest.mark.parametrize(
    "made",
    [
        Experiment(**EXPERIMENT, learning_rate=3e-4, test_lengths=(512, 1024), model_fields={"position": [{"name": "permute"}]}),
        Measurement(**MEASUREMENT, items=3, task_options={"protocol": "paper"}),
    ],
    ids=["experiment", "measurement"],
)
def test_json_round_trip(made):
    content = json.loads(json.dumps(made.to_json()))
    assert type(made).from_json(content) == made
    with pytest.raises(ValueError, match="'modle'.*'model'"):
        type(made).from_json({**content, "modle": 1})


def test_an_experiment_is_frozen_and_copies_its_options():
    options = {"protocol": "paper"}
    experiment = Experiment(**EXPERIMENT, task_options=options)
    options["protocol"] = "lra"
    assert experiment.task_options == {"protocol": "paper"}
    with pytest.raises(AttributeError):
        experiment.seed = 3


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("learning_rate", math.nan, "learning_rate.*nan"),
        ("learning_rate", 0.0, "learning_rate.*above 0.*0.0"),
        ("learning_rate", "1e-3", "learning_rate.*'1e-3'"),
        ("epochs", math.inf, "epochs.*above 0.*inf"),
        ("batch_size", 0, "batch_size.*at least 1.*0"),
        ("batch_size", 2.5, "batch_size.*integer.*2.5"),
        ("batch_size", True, "batch_size.*integer.*True"),
        ("batch_size", None, "batch_size.*integer.*None"),
        ("warmup_steps", -1, "warmup_steps.*at least 0.*-1"),
        ("weight_decay", -0.1, "weight_decay.*at least 0.*-0.1"),
        ("adam_beta2", 1.0, "adam_beta2.*below 1.*1.0"),
        ("gradient_clip", 0, "gradient_clip.*above 0.*0"),
        ("precision", "bf16", "precision.*'bf16'.*'bfloat16'"),
        ("seed", -1, "seed.*at least 0.*-1"),
        ("train_items", 0, "train_items.*at least 1.*0"),
        ("test_lengths", (0,), "test_lengths.*at least 1.*0"),
        ("steps", 5, "epochs.*steps.*1.*5"),
        ("epochs", None, "epochs.*steps.*None"),
    ],
)
def test_bad_fields_of_an_experiment_are_refused(field, value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Experiment(**{**EXPERIMENT, field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "trainig", "'trainig'.*'training'"),
        ("length", 0, "length.*at least 1.*0"),
        ("length", None, "length.*integer.*None"),
        ("length", 1.5, "length.*integer.*1.5"),
        ("repeats", 0, "repeats.*at least 1.*0"),
        ("batch_size", True, "batch_size.*integer.*True"),
        ("items", 0, "items.*at least 1.*0"),
        ("model", None, "model.*None"),
    ],
)
def test_bad_fields_of_a_measurement_are_refused(field, value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Measurement(**{**MEASUREMENT, field: value})
