"""The card of a trained model says what it is, and what comes from data stays text."""

import json

import pytest
import yaml
from train_processes import tiny

from permuteformer.train.card import model_card
from permuteformer.train.loop import How, train
from permuteformer.train.run import Run


@pytest.mark.parametrize(("task", "tag"), [("digits", "image-classification"), ("lm-bytes", "text-generation")])
def test_a_run_leaves_a_card(task, tag, tmp_path):
    experiment = tiny(task, steps=2, evaluate_every=1)
    result = train(experiment, tmp_path / "run", How(track=(), quiet=True))
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == tag
    for name, value in result["test"].items():
        assert f"| {name} | {value:.4g} |" in body
    assert f"{result['parameters']:,} parameters" in body
    assert f"One run with seed {experiment.seed}" in body
    about = json.loads((tmp_path / "run" / "experiment.json").read_text())["task"]
    assert f"up to {about['max_length']:,} tokens" in body
    assert "|---|---|" in body


def test_what_comes_from_data_stays_text(tmp_path):
    task = {
        "name": "classify",
        "kind": "classify",
        "title": "your own table",
        "grid": None,
        "max_length": 10,
        "notes": [],
        "labels": ["<script>alert(1)</script>", "`tick`", "red \x1b[31m", *(f"label {n}" for n in range(40))],
        "metric": "accuracy",
        "baselines": {},
    }
    result = {"parameters": 5, "test": {"accuracy": 0.5}, "best_step": None, "steps": 3}
    card = model_card(Run(tmp_path, tiny(steps=3), {"task": task}), result)
    assert "`<script>alert(1)</script>`" in card
    assert "`'tick'`" in card
    assert "\x1b" not in card
    assert "and 23 more" in card
    assert "after step 3 of 3" in card
