"""Checkpoints: what is read is what was written, or it is not read."""

import errno
import json
import random
import shutil

import numpy as np
import pytest
import torch
from torch.optim import AdamW

from permuteformer.models import PermuteFormerConfig, PermuteFormerForCausalLM, PermuteFormerForSequenceClassification
from permuteformer.train import checkpoint
from permuteformer.train.checkpoint import load, load_latest, save, steps, tidy
from permuteformer.train.state import (
    Cursor,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    random_state,
    same_random_numbers_after,
    seed_all,
    set_random_state,
)

CPU = torch.device("cpu")
STATE = {"cursor": {"step": 7, "best": {"loss": 0.1 + 0.2}}, "random": [[1, None, 2**63]]}


def tensors():
    return {
        "model": {"a.b": torch.randn(3, 4), "half": torch.randn(5).to(torch.bfloat16)},
        "optimizer": {"a.b/step": torch.tensor(3.0), "turned": torch.randn(4, 6).t()},
    }


def test_there_and_back(tmp_path):
    given = tensors()
    save(tmp_path, 7, STATE, given)
    found = load(tmp_path, 7)
    assert (found.step, found.state) == (7, STATE)
    for file, group in given.items():
        assert set(found.tensors[file]) == set(group)
        for name, value in group.items():
            assert found.tensors[file][name].dtype == value.dtype
            assert torch.equal(found.tensors[file][name], value)


def test_the_last_good_one_is_taken(tmp_path):
    assert load_latest(tmp_path) == (None, [])
    for step in (5, 50, 1_000_000_000):
        save(tmp_path, step, {"at": step}, {})
    assert steps(tmp_path) == [5, 50, 1_000_000_000]
    (tmp_path / "step-1000000000" / "state.json").write_text("{}")
    (tmp_path / "step-junk").mkdir()
    found, problems = load_latest(tmp_path)
    assert found is not None
    assert found.step == 50
    assert len(problems) == 1
    assert problems[0].endswith("step-1000000000 is damaged: state.json")
    for step in (5, 50):
        shutil.rmtree(tmp_path / f"step-{step:09d}")
    assert load_latest(tmp_path)[0] is None


def test_tidy_keeps_the_last_two_and_the_best(tmp_path):
    for step in (1, 2, 3, 4, 5, 9):
        save(tmp_path, step, {}, {})
    (tmp_path / ".step-000000007.partial").mkdir()
    tidy(tmp_path, newest=5, keep={2, 9})
    assert steps(tmp_path) == [2, 4, 5]  # 9 was damaged, else the run would not be at 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000002", "step-000000004", "step-000000005"]


@pytest.mark.parametrize("what", ["save_file", "flush"])
def test_one_of_the_same_step_stays_until_the_new_one_is_written(what, tmp_path, monkeypatch):
    save(tmp_path, 7, {"number": 1}, tensors())

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, what, full)
        with pytest.raises(OSError, match="disk is full"):
            save(tmp_path, 7, {"number": 2}, tensors())
    assert load(tmp_path, 7).state == {"number": 1}
    save(tmp_path, 7, {"number": 2}, tensors())
    assert load(tmp_path, 7).state == {"number": 2}


def language_model():
    config = PermuteFormerConfig.preset(
        "permuteformer-lm", vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return PermuteFormerForCausalLM(config)


def classifier():
    return PermuteFormerForSequenceClassification(PermuteFormerConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))


@pytest.mark.parametrize("make", [language_model, classifier])
@pytest.mark.parametrize("fused", [True, False])
def test_adam_goes_on_as_if_nothing_had_been(make, fused, tmp_path):
    def step(model, optimizer, tokens):
        model.eval()(torch.tensor(tokens)).logits.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = make()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    for tokens in ([[1, 2, 3]], [[4, 5, 6]]):
        step(model, optimizer, tokens)
    save(tmp_path, 2, {}, {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)})
    other = make()
    optimizer_too = AdamW(other.parameters(), lr=0.01, fused=fused)
    step(other, optimizer_too, [[7, 8]])
    found = load(tmp_path, 2)
    load_model(other, found.tensors["model"])
    load_optimizer(other, optimizer_too, found.tensors["optimizer"])
    for tokens in ([[7, 8, 9]], [[1, 1]]):
        step(model, optimizer, tokens)
        step(other, optimizer_too, tokens)
    for (name, value), same in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, same), name


def test_weights_of_another_model_are_refused():
    with pytest.raises(ValueError, match="the weights are of another model"):
        load_model(classifier(), model_tensors(language_model()))


def test_random_numbers_go_on():
    seed_all(5)
    random.gauss(0, 1), np.random.randn(), torch.randn(3)  # noqa: NPY002
    state = json.loads(json.dumps(random_state(CPU)))

    def draw():
        return random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.randn(3).tolist()  # noqa: NPY002

    first = draw()
    assert draw() != first
    set_random_state(state, CPU)
    assert draw() == first
    set_random_state(state, CPU)
    with pytest.raises(ZeroDivisionError), same_random_numbers_after(CPU):
        1 / draw().count("never")
    assert draw() == first
    seed_all(5)
    again = torch.randn(3).tolist()
    seed_all(6)
    assert torch.randn(3).tolist() != again


def test_a_cursor_is_plain_data():
    cursor = Cursor(step=3, best_step=2, best={"loss": 0.1}, loss=1 / 3)
    assert Cursor(**json.loads(json.dumps(cursor.to_json()))) == cursor
