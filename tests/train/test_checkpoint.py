"""Checkpoints: what is loaded is what was saved, damage is noticed, and the checkpoint before is used."""

import errno
import shutil
from functools import partial

import pytest
import torch
from processes import DIGITS, EVERY_STEP, UPDATE, Command, differences, signal_at, steps
from torch.optim import AdamW
from train.runs import result

from permuteformer.models import PermuteFormerConfig, PermuteFormerForCausalLM, PermuteFormerForSequenceClassification
from permuteformer.train import checkpoint
from permuteformer.train.checkpoint import load, load_latest, load_model, load_optimizer, model_tensors, remove_old, save

STATE = {"progress": {"step": 7, "best": {"loss": 0.1 + 0.2}}, "number": [[1, None, 2**63]]}


def tensors():
    return {
        "model": {"a.b": torch.randn(3, 4), "half": torch.randn(5).to(torch.bfloat16)},
        "optimizer": {"a.b/step": torch.tensor(3.0), "transposed": torch.randn(4, 6).t()},
    }


def test_saved_state_and_tensors_are_loaded(tmp_path):
    given = tensors()
    save(tmp_path, 7, STATE, given)
    found = load(tmp_path, 7)
    assert (found.step, found.state) == (7, STATE)
    for file, group in given.items():
        assert set(found.tensors[file]) == set(group)
        for name, value in group.items():
            assert found.tensors[file][name].dtype == value.dtype
            assert torch.equal(found.tensors[file][name], value)


def test_latest_checkpoint_that_is_not_damaged_is_loaded(tmp_path):
    assert load_latest(tmp_path) == (None, [])
    for step in (5, 50, 1_000_000_000):
        save(tmp_path, step, {"at": step}, {})
    assert checkpoint.steps(tmp_path) == [5, 50, 1_000_000_000]
    (tmp_path / "step-1000000000" / "state.json").write_text("{}")
    (tmp_path / "step-junk").mkdir()
    found, (problem,) = load_latest(tmp_path)
    assert found.step == 50
    assert problem.endswith("step-1000000000 is damaged: state.json")


def test_the_last_two_and_the_best_checkpoint_are_kept(tmp_path):
    for step in (1, 2, 3, 4, 5, 9):
        save(tmp_path, step, {}, {})
    (tmp_path / ".step-000000007.partial").mkdir()
    remove_old(tmp_path, newest=5, keep={2, 9})  # 9 is damaged, else the run would be at it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000002", "step-000000004", "step-000000005"]


@pytest.mark.parametrize("function", ["save_file", "fsync"])
def test_checkpoint_of_the_same_step_stays_until_the_new_one_is_written(function, tmp_path, monkeypatch):
    save(tmp_path, 7, {"number": 1}, tensors())

    def fail(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, function, fail)
        with pytest.raises(OSError, match="disk is full"):
            save(tmp_path, 7, {"number": 2}, tensors())
    assert load(tmp_path, 7).state == {"number": 1}
    save(tmp_path, 7, {"number": 2}, tensors())
    assert load(tmp_path, 7).state == {"number": 2}


def test_tensors_of_another_model_are_refused():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    one = PermuteFormerForCausalLM(PermuteFormerConfig.preset("permuteformer-lm", vocab_size=20, **sizes))
    other = PermuteFormerForSequenceClassification(PermuteFormerConfig(**sizes))
    with pytest.raises(ValueError, match="of another model: classifier.bias"):
        load_model(other, model_tensors(one))
    with pytest.raises(ValueError, match=r"classifier.bias/exp_avg.*\(3,\)"):
        load_optimizer(other, AdamW(other.parameters()), {"classifier.bias/exp_avg": torch.zeros(3)})


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that was killed with checkpoints of steps 4 (the best), 9 and 10."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    assert Command(*DIGITS, *EVERY_STEP, "--output", folder, before=partial(signal_at, name=UPDATE, number=11)).wait() == [-9]
    assert steps(folder) == [4, 9, 10]
    return folder


def damage(killed, folder, *numbers):
    shutil.copytree(killed, folder)
    for number in numbers:
        file = folder / "checkpoints" / f"step-{number:09d}" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    return folder


@pytest.mark.parametrize(("numbers", "message"), [([9, 10], "resuming from step 4 of 13"), ([4, 9, 10], "no other checkpoint")])
def test_run_resumes_from_the_last_checkpoint_that_is_not_damaged(numbers, message, killed, whole, tmp_path):
    """See also tests/soak, where every damage to a file is noticed."""
    folder = damage(killed, tmp_path / "run", *numbers)
    shown = Command("resume", folder, *EVERY_STEP).end()
    assert all(f"step-{number:09d} is damaged: model.safetensors" in shown for number in numbers)
    assert message in shown
    assert ("resuming" in shown) == (4 not in numbers)
    assert not differences(folder, whole(*DIGITS))


def test_best_weights_that_are_damaged_are_not_tested(killed, whole, tmp_path):
    assert result(whole(*DIGITS))["best_step"] == 4, "else this test is of another case"
    folder = damage(killed, tmp_path / "run", 4)
    assert "step-000000004 is damaged: model.safetensors. It has the best weights" in Command("resume", folder).end(1)
    assert not (folder / "result.json").exists()
