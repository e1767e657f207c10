"""What goes wrong is said, nothing is lost by it, and the run goes on afterwards."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from train_processes import (
    INTERRUPT,
    SHARED,
    TERM,
    UPDATE,
    At,
    Command,
    digits,
    fail,
    interrupted_already,
    nan_in_a_weight,
    record,
    steps,
    tiny,
    weights,
)

from permuteformer.train import loop
from permuteformer.train.checkpoint import load
from permuteformer.train.finite import NotFinite
from permuteformer.train.loop import How, train
from permuteformer.train.update import Updater

QUIET = How(quiet=True, track=())
SHORT = {"steps": 9, "evaluate_every": 4}


@pytest.fixture(autouse=True)
def prepared(cache, monkeypatch):
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    Command(*digits(**SHORT), output=folder).succeed()
    return folder


def result(folder):
    return json.loads((folder / "result.json").read_text())


# A full disk; soak/disk.py has real ones


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread of its own
@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json.new", "events.out"])
def test_no_room_for_any_of_its_files(name, tmp_path, monkeypatch):
    """Whichever is the first that does not fit."""
    import builtins
    import io

    real = io.open

    def full(path, mode="r", *rest, **named):
        if name in str(path) and "r" not in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(io, "open", full)
        patched.setattr(builtins, "open", full)
        with pytest.raises(OSError, match="the disk is full, and training stopped"):
            train(tiny(steps=2), tmp_path / "run", How(quiet=True))
    assert train(tiny(steps=2), tmp_path / "run", QUIET)["status"] == "finished"


def test_other_errors_of_the_system_are_what_they_are(tmp_path, monkeypatch):
    def broken(*given):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(loop, "save", broken)
    with pytest.raises(OSError, match="Input/output error"):
        train(tiny(steps=2), tmp_path / "run", QUIET)


# Numbers that are not finite


def test_nan_in_a_weight(tmp_path):
    folder = tmp_path / "run"
    said = fail(Command(*digits(steps=9, evaluate_every=2), output=folder, poison=nan_in_a_weight))
    assert "step 6: the loss is nan; it began in model.layers.0.expand, whose weight is not finite; items " in said
    assert "Nothing of this step is kept; the checkpoint of step 4 stays. A lower learning_rate, more warmup_steps or a" in said
    assert result(folder)["status"] == "not finite"
    assert result(folder)["message"] in said
    assert result(folder)["value"] is None
    assert (result(folder)["steps"], result(folder)["best_step"] in (2, 4)) == (5, True)
    assert steps(folder)[-1] == 4
    assert "step 6: the loss is nan" in (folder / "log.txt").read_text()
    resumed = Command("resume", folder, at=At(UPDATE, 2, TERM))  # where nobody spoils the weights
    assert "going on from step 4 of 9" in fail(resumed, 128 + TERM)
    assert not (folder / "result.json").exists()  # it does not hold any more
    Command("resume", folder).succeed()
    assert result(folder)["status"] == "finished"


def test_the_items_are_those_of_the_batch(tmp_path, monkeypatch):
    seen = []
    update = Updater.__call__

    def spoiled(self, share, step, **named):
        seen[:] = [n for piece in share for n in piece.batch.ids.tolist()]
        if step == 3:
            self.bare.model.embed_tokens.weight.data.fill_(float("nan"))
        return update(self, share, step, **named)

    monkeypatch.setattr(Updater, "__call__", spoiled)
    with pytest.raises(NotFinite) as error:
        train(tiny(steps=5), tmp_path / "run", QUIET)
    assert f"items {', '.join(map(str, seen))} of the train split" in str(error.value)
    assert "it began in model.embed_tokens, whose weight is not finite" in str(error.value)
    assert "there is no checkpoint before it" in str(error.value)


def test_one_piece_of_several_is_named(tmp_path, monkeypatch):
    """Gradients of micro-batches add up; the items are those of the one that is not finite."""
    loss = Updater.loss
    calls, ids = [], []

    def spoiled(self, batch, model=None):
        calls.append(batch)
        value = loss(self, batch, model)
        if len(calls) == 6:  # the second piece of the second batch
            ids.extend(batch.ids.tolist())
            return value * float("inf")
        return value

    monkeypatch.setattr(Updater, "loss", spoiled)
    with pytest.raises(NotFinite) as error:
        train(tiny(steps=5, batch_size=8, micro_batch_size=2), tmp_path / "run", QUIET)
    assert len(ids) == 2
    assert f"step 2: the loss is inf; it began in none when it was computed once more; items {ids[0]}, {ids[1]} of" in str(error.value)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_nan_in_a_gradient_alone(clip, tmp_path, monkeypatch):
    update = Updater.__call__

    def spoiled(self, share, step, **named):
        if step == 3:
            self.bare.model.layers[0].contract.weight.register_hook(lambda gradient: gradient * float("nan"))
        return update(self, share, step, **named)

    monkeypatch.setattr(Updater, "__call__", spoiled)
    with pytest.raises(NotFinite, match=r"step 3: a gradient is not finite, of model.layers.0.contract.weight; items \d+, ") as error:
        train(tiny(steps=5, evaluate_every=2, gradient_clip=clip), tmp_path / "run", QUIET)
    assert "the checkpoint of step 2 stays" in str(error.value)
    kept = load(tmp_path / "run" / "checkpoints", 2).tensors
    assert all(torch.isfinite(value).all() for group in kept.values() for value in group.values())


@pytest.mark.parametrize("name", ["model.layers.0.attention.query.bias", "classifier.bias"])
def test_an_infinite_weight_that_no_loss_shows(name, tmp_path, monkeypatch):
    """Minus infinity is nothing after a relu or a softmax, and the gradients are finite."""
    update = Updater.__call__

    def spoiled(self, share, step, **named):
        if step == 3:
            used = {label for piece in share for label in piece.batch.labels.tolist()}
            unused = next(label for label in range(10) if label not in used)
            self.bare.get_parameter(name).data[unused] = -math.inf
        return update(self, share, step, **named)

    monkeypatch.setattr(Updater, "__call__", spoiled)
    with pytest.raises(NotFinite, match=f"step 3: a weight is not finite, of {name}; items ") as error:
        train(tiny(steps=5, evaluate_every=2), tmp_path / "run", QUIET)
    assert "the checkpoint of step 2 stays" in str(error.value)


def test_what_is_not_finite_is_not_saved(tmp_path, monkeypatch):
    """Infinite squares of gradients: the weight stands still for ever, and nothing else shows."""
    update = Updater.__call__

    def spoiled(self, share, step, **named):
        if step == 4:
            self.optimizer.state[self.bare.classifier.bias]["exp_avg_sq"][0] = math.inf
        return update(self, share, step, **named)

    monkeypatch.setattr(Updater, "__call__", spoiled)
    with pytest.raises(NotFinite, match=r"step 4: not finite, and not saved: classifier.bias/exp_avg_sq \(optimizer\)"):
        train(tiny(steps=5, evaluate_every=2), tmp_path / "run", QUIET)
    assert steps(tmp_path / "run") == [2]
    assert result(tmp_path / "run")["status"] == "not finite"


def test_dropout_is_drawn_as_before_when_the_layer_is_looked_for(tmp_path, monkeypatch):
    """A number that some dropout makes too large is found again only with the same dropout."""
    init = Updater.__init__

    def spoiled(self, model, *rest):
        init(self, model, *rest)
        chance = [True, False, True, False]  # one time in 16
        model.model.layers[0].dropout.register_forward_hook(
            lambda module, given, out: out * float("inf") if (out[0, 0, :4] == 0).tolist() == chance else out
        )

    monkeypatch.setattr(Updater, "__init__", spoiled)
    for seed in range(3):
        with pytest.raises(NotFinite, match=r"it began in model.layers.0.dropout;"):
            train(tiny(steps=300, evaluate_every=300, hidden_dropout=0.5, seed=seed), tmp_path / f"run{seed}", QUIET)


@pytest.mark.parametrize("every", [None, 1])
def test_a_learning_rate_that_is_too_high(every, tmp_path):
    with pytest.raises(NotFinite) as error:
        train(tiny(steps=8, evaluate_every=every, learning_rate=1e30, warmup_steps=1), tmp_path / "run", QUIET)
    assert ("the loss on the validation split is nan" in str(error.value)) == (every == 1)
    assert f"step {1 if every else 2}: " in str(error.value)
    assert result(tmp_path / "run")["status"] == "not finite"
    assert steps(tmp_path / "run") == []


def test_what_shows_in_an_evaluation_only_is_named_too(tmp_path, monkeypatch):
    """Dropout may have hidden it in training."""
    init = Updater.__init__

    def spoiled(self, model, *rest):
        init(self, model, *rest)
        model.model.embed_tokens.register_forward_hook(lambda module, given, out: out if module.training else out * float("inf"))

    monkeypatch.setattr(Updater, "__init__", spoiled)
    with pytest.raises(
        NotFinite, match=r"step 2: the loss on the validation split is nan; it began in model.embed_tokens; weights not finite: none"
    ):
        train(tiny(steps=4, evaluate_every=2), tmp_path / "run", QUIET)
    assert result(tmp_path / "run")["status"] == "not finite"
    assert steps(tmp_path / "run") == []


# Other processes, and signals


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    folder = tmp_path / "run"
    said = fail(Command(*digits(**SHORT), output=folder, at=At(UPDATE, 6, INTERRUPT), poison=interrupted_already), 130)
    assert "interrupted; what was not finished is not kept" in said
    assert steps(folder) == [4]


def test_data_that_has_changed_is_noticed(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "".join(f"text {n},{'ab'[n % 2]}\n" for n in range(60)))
    words = ["train", "classify", str(table), *digits(**SHORT)[2:]]
    fields = {word: value for word, value in zip(words[3::2], words[4::2], strict=True) if word != "--train-items"}
    words = [*words[:3], *(part for pair in fields.items() for part in pair)]
    fail(Command(*words, output=tmp_path / "run", at=At(UPDATE, 6, TERM)), 128 + TERM)
    with table.open("a") as file:
        file.write("".join(f"more {n},a\n" for n in range(30)))
    said = fail(Command("resume", tmp_path / "run"))
    assert "has changed: it had 48 items to train on, and has " in said


def test_by_the_command_itself(tmp_path, whole):
    """``python -m permuteformer``, as a user starts it, goes on with a run that others began."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()
    for step in steps(folder)[1:]:
        shutil.rmtree(folder / "checkpoints" / f"step-{step:09d}")
    shutil.rmtree(folder / "model")
    command = [sys.executable, "-m", "permuteformer", "resume", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **SHARED}, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"run folder: {folder}" in done.stdout
    assert weights(folder) == weights(whole)
    assert record(folder) == record(whole)
