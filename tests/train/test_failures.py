"""Failures are explained, lose nothing, and a resumed run ends with the bytes of an undisturbed one. See also tests/soak."""

import builtins
import errno
import io
import math
import os
import signal
from functools import partial

import pytest
import torch
from processes import DIGITS, EVALUATE, EVERY_STEP, UPDATE, Command, at_call, differences, signal_at, steps, unfinished
from train import runs
from train.runs import QUIET, record, result, tiny, words

from permuteformer.experiments.experiment import RunOptions
from permuteformer.models import PermuteFormerConfig, PermuteFormerForSequenceClassification
from permuteformer.train import checkpoint
from permuteformer.train.failures import NotFinite, bad_gradients, first_bad_module, some
from permuteformer.train.loop import train
from permuteformer.train.step import Updater

TEXT, BYTES = (words(tiny(task, steps=13, evaluate_every=4, test_lengths=(96,))) for task in ("lm", "lm-bytes"))


# Kills and signals


@pytest.mark.parametrize(
    ("command", "name", "number"),
    [
        (DIGITS, UPDATE, 3),  # within an epoch
        (DIGITS, UPDATE, 6),  # at the start of one
        (BYTES, UPDATE, 11),
        (TEXT, EVALUATE, 6),  # in the test at another length
        (DIGITS, "permuteformer.train.trained_model.attention_maps", 1),
    ],
)
def test_resume_after_a_kill_gives_the_same_bytes(command, name, number, whole, tmp_path):
    folder = tmp_path / "run"
    killed = Command(*command, *EVERY_STEP, "--output", folder, before=partial(signal_at, name=name, number=number))
    assert killed.wait() == [-signal.SIGKILL], killed.text
    assert not (folder / "result.json").exists()
    (folder / "checkpoints" / ".step-000000001.removed").mkdir()  # as if killed while it was deleted
    Command("resume", folder, *EVERY_STEP).end()
    assert not differences(folder, whole(*command))
    assert not unfinished(folder)


def test_resume_after_two_kills_between_checkpoints_with_workers(whole, tmp_path):
    folder, workers = tmp_path / "run", ["--workers", 2]
    for number, kept in ((3, []), (8, [4])):
        killed = Command(*DIGITS, *workers, "--output", folder, before=partial(signal_at, name=UPDATE, number=number))
        assert killed.wait() == [-signal.SIGKILL], killed.text
        assert steps(folder) == kept
    assert "step 4 of 13" in Command("resume", folder, *workers).end()
    assert not differences(folder, whole(*DIGITS))


@pytest.mark.parametrize(
    ("command", "before", "sent", "step"),
    [
        (DIGITS, partial(signal_at, name=UPDATE, number=7), signal.SIGTERM, 7),
        (DIGITS, partial(signal_at, name=UPDATE, number=7), signal.SIGINT, 7),
        (DIGITS, partial(signal_at, name="permuteformer.tasks.inputs.Classification.score", number=2), signal.SIGTERM, 4),
        (TEXT, partial(signal_at, name="permuteformer.tasks.language.Windows.score", number=9), signal.SIGTERM, 13),
        ([*DIGITS, "--workers", 2], partial(runs.signal_workers_too, number=7), signal.SIGTERM, 7),
    ],
)
def test_signal_saves_and_exits_and_resume_gives_the_same_bytes(command, before, sent, step, whole, tmp_path):
    folder = tmp_path / "run"
    shown = Command(*command, "--output", folder, before=partial(before, sent=sent)).end(128 + sent)
    assert f"step {step}; continue with: permuteformer resume {folder}" in shown
    assert steps(folder)[-1] == step
    assert len(record(folder, "evaluation")) == {7: 1, 4: 0, 13: 4}[step], "a validation that was interrupted is repeated"
    assert not (folder / "result.json").exists()
    Command("resume", folder).end()
    assert not differences(folder, whole(*command[:-2] if "--workers" in command else command))


def test_second_ctrl_c_exits_at_once(tmp_path):
    folder = tmp_path / "run"
    assert "interrupted" in Command(*DIGITS, "--output", folder, before=press_ctrl_c_twice).end(130)
    assert steps(folder) == [4]


def press_ctrl_c_twice(rank):
    at_call(UPDATE, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
    at_call(UPDATE, 6, lambda: os.kill(os.getpid(), signal.SIGINT))


# Disks and memory; tests/soak has real disks that are full or read-only, and lost processes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
@pytest.mark.parametrize(
    ("number", "name", "message"),
    [
        (errno.ENOSPC, "metrics.jsonl", "the disk is full.*no checkpoint yet.*permuteformer resume"),
        (errno.ENOSPC, "result.json.new", "the disk is full.*the checkpoint of step 2.*permuteformer resume"),
        (errno.EDQUOT, "events.out", "the disk quota.*permuteformer resume"),
        (errno.EROFS, "metrics.jsonl", "run cannot be written, its disk is read-only.*--output"),
        (errno.EACCES, "checkpoints", "run cannot be written, permission denied.*--output"),
        (errno.EIO, "metrics.jsonl", "^.Errno 5. as it is"),
    ],
)
def test_failure_to_write_is_explained_and_the_run_resumes(number, name, message, tmp_path, monkeypatch):
    real_open, real_mkdir = io.open, os.mkdir

    def fail(path, mode="r"):
        if name in str(path) and "r" not in str(mode):
            raise OSError(number, "as it is", str(path))

    def failing_open(path, mode="r", *arguments, **options):
        fail(path, mode)
        return real_open(path, mode, *arguments, **options)

    def failing_mkdir(path, *arguments, **options):
        fail(path, "w")
        return real_mkdir(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(io, "open", failing_open)
        patched.setattr(builtins, "open", failing_open)
        patched.setattr(os, "mkdir", failing_mkdir)
        with pytest.raises(OSError, match=message):
            train(tiny(steps=2), tmp_path / "run", RunOptions(quiet=True))
    assert train(tiny(steps=2), tmp_path / "run", QUIET)["status"] == "finished"


def test_file_size_limit_is_explained_and_resume_gives_the_same_bytes(whole, tmp_path):
    folder = tmp_path / "run"
    shown = Command(*DIGITS, "--output", folder, before=partial(runs.limit_file_size, size=15_000)).end(1)
    assert "ulimit -f" in shown
    assert "there is no checkpoint yet" in shown
    assert os.listdir(folder / "checkpoints") == []
    Command("resume", folder).end()
    assert not differences(folder, whole(*DIGITS))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA out of memory")],
)
def test_lack_of_memory_is_explained(error, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(Updater, "_loss", fail)
    with pytest.raises(MemoryError, match=r"memory.*--micro-batch-size.*no checkpoint yet"):
        train(tiny(steps=1), tmp_path / "run", QUIET)


# Numbers that are not finite


@pytest.fixture
def spoil(monkeypatch):
    monkeypatch.setattr(Updater, "update", Updater.update)  # so that it is restored
    return partial(runs.spoil, 0)


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("weight", "model.layers.0.expand.weight", math.nan, "loss is nan.*model.layers.0.expand, whose weight.*items"),
        ("weight", "classifier.bias", math.nan, "loss is nan.*classifier, whose bias.*items"),
        ("weight", "model.layers.0.attention.query.bias", -math.inf, "weight.*model.layers.0.attention.query.bias; items"),
        ("weight", "classifier.bias", -math.inf, "weight.*classifier.bias; items"),
        ("gradient", "model.layers.0.contract.weight", math.nan, "gradient.*model.layers.0.contract.weight; items"),
        ("gradient", "model.embed_tokens.weight", math.inf, "gradient.*model.embed_tokens.weight; items"),
        ("adam", "classifier.bias", math.inf, r"not saved: classifier.bias/exp_avg_sq \(optimizer\)"),
        ("input", "model.embed_tokens", math.nan, "loss is nan.*model.embed_tokens; items"),
        ("loss", "", math.inf, "loss is inf.*no module when.*items"),
    ],
)
def test_number_that_is_not_finite_stops_the_run_and_names_the_module(kind, name, value, message, spoil, tmp_path):
    """No loss shows minus infinity before a relu, or as the logit of label 1, which no item has, or infinite squares of gradients."""
    folder = tmp_path / "run"
    spoil(kind, name, value)
    with pytest.raises(NotFinite, match=f"step 6: .*{message}") as error:
        train(tiny(steps=9, evaluate_every=2, gradient_clip=1.0 if "contract" in name else None), folder, QUIET)
    for part in ("the checkpoint of step 4", "learning_rate", "warmup_steps", "gradient_clip"):
        assert part in str(error.value)
    assert result(folder)["status"] == "not finite"
    assert (result(folder)["message"], result(folder)["value"]) == (str(error.value), None)
    assert result(folder)["steps"] == (6 if kind == "adam" else 5)
    assert "step 6: " in (folder / "log.txt").read_text()
    assert not (folder / "model").exists()
    assert steps(folder)[-1] == 4
    for step in steps(folder):
        tensors = checkpoint.load(folder / "checkpoints", step).tensors
        assert all(torch.isfinite(x).all() for group in tensors.values() for x in group.values())


def test_run_that_was_not_finite_resumes_from_its_last_checkpoint(tmp_path):
    folder = tmp_path / "run"
    spoil = partial(runs.spoil, kind="weight", name="model.layers.0.expand.weight")
    shown = Command(*DIGITS, "--output", folder, before=spoil).end(1)
    assert result(folder)["message"] in shown
    shown = Command("resume", folder, before=partial(signal_at, name=UPDATE, number=2, sent=signal.SIGTERM)).end(128 + signal.SIGTERM)
    assert "step 4 of 13" in shown
    assert not (folder / "result.json").exists(), "it is not true any more"
    Command("resume", folder).end()
    assert result(folder)["status"] == "finished"


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_items_of_the_bad_micro_batch_are_named(micro_batch_size, tmp_path, monkeypatch):
    compute, calls = Updater._loss, []

    def spoiled(self, micro, model):
        calls.append(micro.batch.ids.tolist())
        return compute(self, micro, model) * (math.inf if len(calls) == 6 else 1)

    monkeypatch.setattr(Updater, "_loss", spoiled)
    with pytest.raises(NotFinite, match="loss is inf.*no checkpoint yet") as error:
        train(tiny(steps=6, evaluate_every=9, micro_batch_size=micro_batch_size), tmp_path / "run", QUIET)
    assert len(calls[5]) == (micro_batch_size or 8)
    assert f"step {2 if micro_batch_size else 6}: " in str(error.value)
    assert f"items {', '.join(map(str, calls[5]))} of" in str(error.value)


def spoil_output(monkeypatch, name, change):
    """Have ``change(module, output)`` replace the output of a module in new models."""
    init = Updater.__init__

    def spoiled(self, model, *arguments):
        init(self, model, *arguments)
        model.get_submodule(name).register_forward_hook(lambda module, given, out: change(module, out))

    monkeypatch.setattr(Updater, "__init__", spoiled)


@pytest.mark.parametrize("seed", range(3))
def test_module_is_found_with_the_same_dropout(seed, tmp_path, monkeypatch):
    """A number that becomes too large by some dropout, one time in 16, is found again only with the same dropout."""
    pattern = [True, False, True, False]
    spoil_output(
        monkeypatch, "model.layers.0.dropout", lambda module, out: out * math.inf if (out[0, 0, :4] == 0).tolist() == pattern else out
    )
    with pytest.raises(NotFinite, match=r"model.layers.0.dropout;"):
        train(tiny(steps=300, evaluate_every=300, hidden_dropout=0.5, seed=seed), tmp_path / "run", QUIET)


@pytest.mark.parametrize(("every", "message"), [(None, "step 2: "), (1, "step 1: .*validation split is nan")])
def test_learning_rate_that_is_too_high_stops_the_run(every, message, tmp_path):
    with pytest.raises(NotFinite, match=message):
        train(tiny(steps=8, evaluate_every=every, learning_rate=1e30, warmup_steps=1), tmp_path / "run", QUIET)
    assert steps(tmp_path / "run") == []


def test_module_is_named_if_only_evaluation_is_not_finite(tmp_path, monkeypatch):
    spoil_output(monkeypatch, "model.embed_tokens", lambda module, out: out if module.training else out * math.inf)
    with pytest.raises(NotFinite, match=r"step 2: .*validation split is nan.*model.embed_tokens; .*: none"):
        train(tiny(steps=4, evaluate_every=2), tmp_path / "run", QUIET)
    assert steps(tmp_path / "run") == []


@pytest.fixture
def model():
    config = PermuteFormerConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=20)
    return PermuteFormerForSequenceClassification(config)


def test_module_whose_output_is_not_finite_is_found(model):
    def bad_module(*tokens):
        return first_bad_module(model, lambda: model(torch.tensor([tokens])))

    model.model.embed_tokens.weight.data[7, 0] = math.nan
    assert bad_module(1, 7, 8).startswith("model.embed_tokens, whose weight")
    assert bad_module(1, 5, 6).startswith("no module"), "no token has this row"
    model.model.layers[1].feed_forward_norm.weight.data *= 1e38
    model.model.layers[1].expand.weight.data *= 1e3
    assert bad_module(1, 5, 6) == "model.layers.1.expand"
    with pytest.raises(ZeroDivisionError):
        first_bad_module(model, lambda: 1 / 0)
    assert not any(module._forward_hooks for module in model.modules())


def test_bad_gradient_nearest_to_the_loss_is_named(model):
    assert bad_gradients(model) == ""
    model(torch.tensor([[1, 5]])).logits.sum().backward()
    assert bad_gradients(model) == ""
    model.model.layers[1].expand.weight.grad[0, 0] = math.nan
    assert bad_gradients(model) == "model.layers.1.expand.weight"
    model.model.layers[0].expand.weight.grad[0, 0] = math.inf
    assert bad_gradients(model).startswith("model.layers.1.expand.weight and 1 more")
    assert some(range(25)).endswith("18, 19 and 5 more")
