"""Evaluation against one item at a time; on several processes in test_distributed.py."""

import random

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from train_processes import SHARED, TINY, TINY_TEXT

from permuteformer.train.build import build_config, build_model, build_task
from permuteformer.train.evaluate import evaluate
from permuteformer.train.feed import chosen
from permuteformer.train.interrupt import Interrupted


@pytest.fixture(autouse=True)
def prepared(cache, monkeypatch):
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def digits():
    task = build_task("digits", {})
    config = build_config("permuteformer-image", TINY, task)
    model = build_model(config, "classify")
    with torch.no_grad():
        model.classifier.weight.normal_()
    return model, config, task


def test_digits_one_at_a_time(digits):
    model, config, task = digits
    losses, correct = [], 0
    dataset = task.dataset("validation")
    model.eval()
    with torch.no_grad():
        for n in chosen(len(dataset), 101).tolist():
            batch = task.collate([dataset[n]])
            logits = model(input_ids=batch.input_ids, attention_mask=batch.key_mask, position_ids=batch.positions).logits
            losses.append(float(cross_entropy(logits.double(), batch.labels)))
            correct += int(logits.argmax() == batch.labels[0])
    assert 0 < correct < 101
    for batch_size in (1, 7, 101):
        metrics = evaluate(model, config, task, "validation", batch_size=batch_size, items=101)
        assert metrics["accuracy"] == correct / 101
        assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_text_scores_every_token_once():
    task = build_task("lm-bytes", {"corpus": "topics", "length": 48, "context": 16})
    config = build_config("permuteformer-lm", TINY_TEXT, task)
    model = build_model(config, "lm").eval()
    dataset, total, count = task.dataset("test"), 0.0, 0
    with torch.no_grad():
        for n in chosen(len(dataset), 11).tolist():
            batch = task.collate([dataset[n]])
            scored = batch.labels[0] != -100
            logits = model(input_ids=batch.input_ids, use_cache=False).logits[0, scored]
            total += float(cross_entropy(logits.double(), batch.labels[0, scored], reduction="sum"))
            count += int(scored.sum())
    metrics = evaluate(model, config, task, "test", batch_size=4, items=11)
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-6)


def test_model_and_random_numbers_are_left_as_they_were(digits):
    model, config, task = digits
    model.train()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002

    def draw(*given):
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002

    hook = model.register_forward_hook(draw)
    evaluate(model, config, task, "validation", batch_size=50, items=100)
    hook.remove()
    assert model.training
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])
    assert all(p.grad is None for p in model.parameters())


def test_dropout_is_off(digits):
    model, config, task = digits
    first, second = (evaluate(model.train(), config, task, "validation", batch_size=50, items=100) for _ in range(2))
    assert first == second


def test_interrupted_in_the_middle(digits):
    model, config, task = digits
    model.train()
    done = []
    with pytest.raises(Interrupted):
        evaluate(model, config, task, "validation", batch_size=10, items=100, progress=done.append, interrupted=lambda: len(done) == 3)
    assert done == [10, 10, 10]
    assert model.training
