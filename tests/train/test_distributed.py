"""Several processes compute what one does, and stop together."""

import math
import os
import signal
from functools import partial

import pytest
from processes import DIGITS, UPDATE, Command, differences, signal_at, steps
from safetensors.torch import load_file
from train import runs
from train.runs import record, result, tiny, words

from permuteformer.models import PermuteFormerForSequenceClassification

# With a large epsilon Adam does not make a whole step of a gradient that is zero except for rounding.
EXACT = {"hidden_dropout": 0, "adam_epsilon": 1e-3, "learning_rate": 0.05, "warmup_steps": 3, "epochs": 2}
ODD = {**EXACT, "train_items": 37}
"""The last of five batches has five items: one process has three of them, the other two."""
FEW = {**EXACT, "train_items": 33}
"""The last batch has one item, so that one process has none."""
CLIPPED = {**FEW, "gradient_clip": 0.5}
MICRO = {**ODD, "micro_batch_size": 2}
SHARD, SEQUENCE = ["--shard"], ["--sequence-parallel"]


def numbers(folder):
    """Return what may differ between runs by rounding only: weights, and losses by event and step."""
    weights = load_file(folder / "model" / "model.safetensors")
    losses = {(line["event"], line["step"]): line.get("metrics", line)["loss"] for line in record(folder)}
    return weights, losses, result(folder)["tokens"]


def assert_close(one, other):
    (weights, losses, tokens), (other_weights, other_losses, other_tokens) = numbers(one), numbers(other)
    assert max(float((weights[name] - other_weights[name]).abs().max()) for name in {*weights, *other_weights}) < 1e-5
    assert losses == pytest.approx(other_losses, abs=1e-5)
    assert tokens == other_tokens


@pytest.mark.parametrize(
    ("task", "fields", "more", "processes"),
    [
        ("digits", {**ODD, "micro_batch_size": 3}, [], 1),
        ("digits", ODD, [], 2),
        ("digits", FEW, [], 2),
        ("digits", MICRO, [], 2),
        ("digits", MICRO, SHARD, 2),
        ("digits", CLIPPED, SHARD, 2),
        ("digits", CLIPPED, [], 2),
        ("digits", ODD, [], 3),
        ("digits", {**ODD, "micro_batch_size": 3}, [*SEQUENCE, 2], 2),
        ("digits", FEW, [*SEQUENCE, 2, *SHARD], 2),
        ("digits", FEW, [*SEQUENCE, 2], 4),
        ("lm", {**EXACT, "epochs": 1, "test_lengths": (96,)}, [*SEQUENCE, 2], 2),
        ("match", {**EXACT, "epochs": 1}, [*SEQUENCE, 3], 3),  # some texts have fewer tokens than there are processes
    ],
)
def test_processes_compute_what_one_does(task, fields, more, processes, whole):
    one = words(tiny(task, **{**fields, "micro_batch_size": None}))
    assert_close(whole(*words(tiny(task, **fields)), *more, processes=processes), whole(*one))


def test_comparison_finds_differences(whole):
    for fields, other in ((ODD, FEW), (ODD, {**ODD, "seed": 1}), (ODD, {**ODD, "learning_rate": 0.0501}), (FEW, CLIPPED)):
        with pytest.raises(AssertionError):
            assert_close(whole(*words(tiny(**fields))), whole(*words(tiny(**other))))


@pytest.mark.parametrize("more", [[], SHARD])
def test_evaluation_gives_equal_numbers(more, whole):
    """With a learning rate that changes no weight, runs have the same model on any number of processes."""
    fields = {"learning_rate": 1e-30, "steps": 1, "validation_items": 101, "test_items": 101, "evaluation_batch_size": 7}
    command = words(tiny(**fields))
    one, two = (record(folder, "evaluation", "test") for folder in (whole(*command), whole(*command, *more, processes=2)))
    assert [line["metrics"] for line in one] == [line["metrics"] for line in two]
    assert len(one) == 2


@pytest.mark.parametrize(
    ("task", "more", "rank", "message"),
    [
        ("digits", [], 1, "--nproc-per-node 2, got 1"),
        ("digits", SHARD, 0, "--shard True, got False"),
        ("lm", [*SEQUENCE, 2], 0, "--sequence-parallel 2, got 1"),
    ],
)
def test_signal_to_one_process_stops_all_and_resume_gives_the_same_bytes(task, more, rank, message, whole, tmp_path):
    folder, command = tmp_path / "run", words(tiny(task, steps=13, evaluate_every=4))
    before = partial(signal_at, name=UPDATE, number=7, sent=signal.SIGTERM, of_rank=rank)
    interrupted = Command(*command, *more, "--output", folder, processes=2, before=before)
    assert interrupted.wait() == [128 + signal.SIGTERM, 0], interrupted.text
    assert "stopped after step 7" in interrupted.text
    assert message in Command("resume", folder, processes=2 if more else 1).end(1)
    Command("resume", folder, *more, processes=2).end()
    assert not differences(folder, whole(*command, *more, processes=2))


def test_sharded_model_is_saved_as_a_plain_one(whole):
    folder = whole(*words(tiny(**MICRO)), *SHARD, processes=2)
    model, info = PermuteFormerForSequenceClassification.from_pretrained(folder / "model", output_loading_info=True)
    assert model.config.architectures == ["PermuteFormerForSequenceClassification"]
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (folder / "attention_maps.json").exists()


@pytest.mark.parametrize(
    ("more", "processes", "message"),
    [
        ([*SEQUENCE, 2], 1, "--sequence-parallel 2 needs a multiple of 2 processes, got 1"),
        ([*SEQUENCE, 2], 3, "--sequence-parallel 2 needs a multiple of 2 processes, got 3"),
        ([*SEQUENCE, 2, "--model", "transformer-image"], 2, "'softmax' does not support 'sequence_parallel'"),
        (SHARD, 1, "--shard needs two or more processes: torchrun"),
    ],
)
def test_processes_that_do_not_fit_are_refused(more, processes, message, tmp_path):
    assert message in Command(*DIGITS, *more, "--output", tmp_path / "run", processes=processes).end(1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [[], SHARD])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"kind": "weight", "name": "model.layers.0.expand.weight"}, "loss is nan, first in model.layers.0.expand, whose weight"),
        ({"kind": "loss", "of_rank": 1}, "loss is nan, first in no module"),
        ({"kind": "loss", "value": math.inf, "of_rank": 1}, "loss is inf, first in no module"),
        ({"kind": "gradient", "of_rank": 1}, "gradient is not finite, of model.layers.0.contract.weight"),
    ],
)
def test_number_that_is_not_finite_on_one_process_stops_both(spoil, message, more, tmp_path):
    folder = tmp_path / "run"
    command = [*words(tiny(**EXACT, evaluate_every=4)), *more]
    shown = Command(*command, "--output", folder, processes=2, before=partial(runs.spoil, **spoil)).end(1)
    for part in ("step 6: ", message, "; items ", "the checkpoint of step 4"):
        assert part in shown
    assert result(folder)["status"] == "not finite"
    assert result(folder)["message"] in shown
    assert steps(folder) == [4]


def test_error_of_the_main_process_ends_all(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note.txt").write_text("mine")
    shown = Command(*DIGITS, "--output", tmp_path / "run", processes=2).end(1)
    assert shown.count("is not a run folder") == 2
    assert os.listdir(tmp_path / "run") == ["note.txt"]
