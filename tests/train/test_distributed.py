"""Several processes compute what one does."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from train_processes import (
    TERM,
    UPDATE,
    At,
    Command,
    digits,
    fail,
    infinite_on_rank_1,
    nan_in_a_gradient,
    nan_in_a_weight,
    nan_on_rank_1,
    pairs,
    record,
    steps,
    text,
    weights,
)

from permuteformer.models import PermuteFormerForSequenceClassification

# With a large epsilon Adam does not make a whole step of a gradient that is zero but for rounding.
EXACT = {"hidden_dropout": 0, "adam_epsilon": 1e-3, "learning_rate": 0.05, "warmup_steps": 3, "epochs": 2}
ODD = {**EXACT, "train_items": 37}
"""The last of five batches has five items: one process has three of them, the other two."""
FEW = {**EXACT, "train_items": 33}
"""The last batch has one item, so that one process has none."""
CLIPPED = {**FEW, "gradient_clip": 0.5}
SHARDED = {"shard": True, "micro_batch_size": 2}
SPREAD = {"sequence_parallel": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with these fields, each made once."""
    made = {}

    def run(processes=1, task=digits, **fields):
        key = (processes, *task(**fields))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("run") / "run"
            Command(*task(**fields), output=made[key], processes=processes).succeed()
        return made[key]

    return run


def assert_close(one, other):
    own, others = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert own.keys() == others.keys()
    assert max(float((own[name] - others[name]).abs().max()) for name in own) < 1e-5
    for line, same in zip(record(one), record(other), strict=True):
        assert (line["event"], line["step"]) == (same["event"], same["step"])
        numbers = line.get("metrics", line)
        assert numbers["loss"] == pytest.approx(same.get("metrics", same)["loss"], abs=1e-5)
    assert result(one)["tokens"] == result(other)["tokens"]


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    ("fields", "more", "processes"),
    [
        (ODD, {"micro_batch_size": 3}, 1),
        (ODD, {}, 2),
        (FEW, {}, 2),
        (ODD, {"micro_batch_size": 2}, 2),
        (ODD, SHARDED, 2),
        (CLIPPED, {"shard": True}, 2),
        (CLIPPED, {}, 2),
        (ODD, {}, 3),
        (ODD, {**SPREAD, "micro_batch_size": 3}, 2),
        (FEW, {**SPREAD, "shard": True}, 2),
        (FEW, SPREAD, 4),
    ],
    ids=[
        "micro",
        "odd",
        "few",
        "odd-micro",
        "shard-micro",
        "shard-few-clip",
        "few-clip",
        "three",
        "spread",
        "spread-shard",
        "spread-of-four",
    ],
)
def test_as_on_one_process(fields, more, processes, run):
    assert_close(run(processes, **fields, **more), run(**fields))


@pytest.mark.parametrize(("task", "stretches"), [(text, 2), (pairs, 3)], ids=["lm", "match"])
def test_rows_spread_over_processes_as_on_one(task, stretches, run):
    fields = {**EXACT, "epochs": 1}
    assert_close(run(stretches, task, **fields, sequence_parallel=stretches), run(1, task, **fields))


def test_a_spread_run_goes_on(run, tmp_path):
    whole = run(2, text, sequence_parallel=2, epochs=2)  # with dropout
    words = text(sequence_parallel=2, epochs=2)
    interrupted = Command(*words, output=tmp_path / "run", processes=2, at=At(UPDATE, 7, TERM))
    assert interrupted.wait() == [128 + TERM, 0], interrupted.text
    assert "was begun with --sequence-parallel 2: go on as it was begun" in fail(Command("resume", tmp_path / "run", processes=2))
    Command("resume", tmp_path / "run", "--sequence-parallel", 2, processes=2).succeed()
    assert weights(tmp_path / "run") == weights(whole)
    assert record(tmp_path / "run") == record(whole)


def test_what_cannot_be_spread_is_refused(tmp_path):
    for words, processes, said in (
        (
            digits(**SPREAD),
            1,
            "spreads every row over 2 processes, and this is one: start so many, or a multiple, torchrun",
        ),
        (digits(**SPREAD), 3, "and these are 3: start so many"),
        ([*digits(**SPREAD), "--model", "transformer-image"], 2, "attention 'softmax' does not support 'sequence_parallel'"),
    ):
        assert said in fail(Command(*words, output=tmp_path / "run", processes=processes))
        assert not (tmp_path / "run").exists()


def test_what_is_compared_differs_otherwise(run):
    for other in (FEW, {**ODD, "seed": 1}, {**ODD, "learning_rate": 0.0501}):
        with pytest.raises(AssertionError):
            assert_close(run(**ODD), run(**other))
    with pytest.raises(AssertionError):
        assert_close(run(**FEW), run(**CLIPPED))


def test_a_sharded_model_is_a_plain_one_when_saved(run):
    folder = run(2, **ODD, **SHARDED)
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["architectures"] == ["PermuteFormerForSequenceClassification"]
    model, info = PermuteFormerForSequenceClassification.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (folder / "looks.json").exists()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_sharded_run_goes_on(run, tmp_path):
    whole = run(2, **ODD, **SHARDED)
    interrupted = Command(*digits(**ODD, **SHARDED), output=tmp_path / "run", processes=2, at=At(UPDATE, 7, TERM))
    assert interrupted.wait() == [128 + TERM, 0], interrupted.text
    assert "was begun with --shard: go on as it was begun" in fail(Command("resume", tmp_path / "run", processes=2))
    Command("resume", tmp_path / "run", "--shard", processes=2).succeed()
    assert weights(tmp_path / "run") == weights(whole)
    assert record(tmp_path / "run") == record(whole)


def test_sharding_one_process_is_refused(tmp_path):
    assert "--shard shares out a model over processes, and this is one: torchrun" in fail(
        Command(*digits(**EXACT, shard=True), output=tmp_path / "run")
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [{}, {"shard": True}], ids=["whole", "shard"])
def test_evaluation_gives_equal_numbers(more, run):
    """With a learning rate that changes no weight, runs have the same model on any number of processes."""
    fields = {"learning_rate": 1e-30, "steps": 1, "validation_items": 101, "test_items": 101, "evaluation_batch_size": 7}
    one, two = (
        [line["metrics"] for line in record(folder) if line["event"] in ("evaluation", "test")]
        for folder in (run(**fields), run(2, **fields, **more))
    )
    assert len(one) == 2
    assert one == two


@pytest.mark.parametrize("more", [{}, {"shard": True}], ids=["whole", "shard"])
@pytest.mark.parametrize(
    ("poison", "words"),
    [
        (nan_in_a_weight, ["the loss is nan; it began in model.layers.0.expand, whose weight is not finite; items "]),
        (nan_on_rank_1, ["the loss is nan; it began in none when it was computed once more; items "]),
        (infinite_on_rank_1, ["the loss is inf; it began in none"]),
        (nan_in_a_gradient, ["a gradient is not finite, of model.layers.0.contract.weight; items"]),
    ],
)
def test_not_finite_on_one_of_two_stops_both(poison, words, more, tmp_path):
    folder = tmp_path / "run"
    said = fail(Command(*digits(**EXACT, **more, evaluate_every=4), output=folder, processes=2, poison=poison))
    for part in ["step 6: ", *words, "the checkpoint of step 4 stays"]:
        assert part in said
    assert result(folder)["status"] == "not finite"
    assert result(folder)["message"] in said
    assert steps(folder) == [4]


def test_an_error_of_the_main_process_ends_all(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note.txt").write_text("mine")
    said = fail(Command(*digits(**EXACT), output=tmp_path / "run", processes=2))
    assert said.count("is there and is no run folder") == 2
    assert os.listdir(tmp_path / "run") == ["note.txt"]
