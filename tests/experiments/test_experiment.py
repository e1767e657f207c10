"""An experiment is what it says, survives JSON, and refuses what makes no sense."""

import json
import math

import pytest

from permuteformer.experiments import Experiment

PLAIN = {"task": "digits", "model": "permuteformer-image", "epochs": 1}


def test_it_survives_json():
    experiment = Experiment(**PLAIN, learning_rate=3e-4, test_lengths=(512, 1024), model_fields={"position": [{"name": "permute"}]})
    assert Experiment.from_json(json.loads(json.dumps(experiment.to_json()))) == experiment


def test_it_is_frozen_and_keeps_no_ones_dict():
    options = {"protocol": "paper"}
    experiment = Experiment(**PLAIN, task_options=options)
    options["protocol"] = "lra"
    assert experiment.task_options == {"protocol": "paper"}
    with pytest.raises(AttributeError):
        experiment.seed = 3


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("learning_rate", math.nan, "learning_rate must be a number above 0; it is nan"),
        ("learning_rate", 0.0, "learning_rate must be a number above 0"),
        ("learning_rate", "1e-3", "learning_rate must be a number; it is '1e-3'"),
        ("epochs", math.inf, "epochs must be a number above 0"),
        ("batch_size", 0, "batch_size must be 1 or more; it is 0"),
        ("batch_size", 2.5, "batch_size must be a whole number; it is 2.5"),
        ("batch_size", True, "batch_size must be a whole number"),
        ("warmup_steps", -1, "warmup_steps must be 0 or more"),
        ("weight_decay", -0.1, "weight_decay must be 0 or a number above it"),
        ("adam_beta2", 1.0, "adam_beta2 must be from 0 to below 1"),
        ("gradient_clip", 0, "gradient_clip must be a number above 0"),
        ("precision", "bf16", "unknown precision 'bf16'.*did you mean 'bfloat16'"),
        ("seed", -1, "seed must be 0 or more"),
        ("train_items", 0, "train_items must be 1 or more"),
        ("test_lengths", (0,), "test_lengths must be 1 or more"),
        ("steps", 5, "give epochs or steps, one of them"),
    ],
)
def test_nonsense_is_refused_by_name(field, value, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Experiment(**{**PLAIN, field: value})


def test_unknown_fields_of_a_file_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'learning_rate'"):
        Experiment.from_json({**PLAIN, "learnin_rate": 1e-3})


def test_neither_epochs_nor_steps_is_refused():
    with pytest.raises(ValueError, match="give epochs or steps"):
        Experiment(task="digits", model="permuteformer-image")
