"""One update: the learning rate and Adam by hand, seeds. Evaluation against one item at a time."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from train.runs import QUIET, SIZES, TEXT_SIZES, WINDOWS, record, tiny

from permuteformer.models import PermuteFormerForSequenceClassification
from permuteformer.tasks.store import sample_numbers
from permuteformer.train.build import build_config, build_model, build_task, model_inputs, model_targets
from permuteformer.train.data import BatchSampler
from permuteformer.train.failures import Interrupted
from permuteformer.train.loop import train
from permuteformer.train.step import Updater, evaluate, learning_rate


def test_learning_rate_is_that_of_fairseq():
    peak, warmup, first = 5e-4, 4000, 1e-7
    rise, decay = (peak - first) / warmup, peak * warmup**0.5
    for update in (1, 2, 1999, 3999, 4000, 4001, 16_000, 50_000):
        expected = first + update * rise if update < warmup else decay * update**-0.5
        assert learning_rate(update, peak=peak, warmup_steps=warmup, warmup_from=first) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(warmup, peak=peak, warmup_steps=warmup) == peak
    assert learning_rate(1, peak=peak, warmup_steps=0) == peak
    assert learning_rate(4, peak=peak, warmup_steps=1) == peak / 2


def batches(task, experiment):
    """Yield the batches of all epochs."""
    items, epoch = task.items("train"), 0
    while True:
        for numbers in BatchSampler(len(items), experiment.batch_size, seed=experiment.seed, epoch=epoch, lengths=task.lengths("train")):
            yield task.input.collate([items[n] for n in numbers])
        epoch += 1


def adam_by_hand(experiment, task, config):
    """Return model and losses of the same training, with Adam as Kingma and Ba, and Loshchilov and Hutter, write it."""
    torch.manual_seed(experiment.seed)
    model, losses = build_model(config, task.input.kind).train(), []
    beta1, beta2 = experiment.adam_beta1, experiment.adam_beta2
    weights = {p: p.detach().double() for p in model.parameters()}
    means, squares = ({p: torch.zeros_like(w) for p, w in weights.items()} for _ in "mv")
    for step, batch in zip(range(1, experiment.steps + 1), batches(task, experiment), strict=False):
        loss = model(**model_inputs(batch, config), **model_targets(batch)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in weights))
        factor = min(1, experiment.gradient_clip / norm) if experiment.gradient_clip else 1
        rate = experiment.learning_rate * min(step / experiment.warmup_steps, math.sqrt(experiment.warmup_steps / step))
        for p, w in weights.items():
            g = p.grad.double() * factor
            means[p] = beta1 * means[p] + (1 - beta1) * g
            squares[p] = beta2 * squares[p] + (1 - beta2) * g**2
            mean, square = means[p] / (1 - beta1**step), squares[p] / (1 - beta2**step)
            w -= rate * (mean / (square.sqrt() + experiment.adam_epsilon) + experiment.weight_decay * w)
            p.data.copy_(w)
            p.grad = None
    return model, losses


@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.5}, {"gradient_clip": 0.05}, {"adam_beta1": 0.5, "adam_beta2": 0.6}])
def test_training_is_adam(more, tmp_path):
    settings = {"steps": 7, "batch_size": 300, "learning_rate": 0.02, "warmup_steps": 3, "evaluate_every": 7, "train_items": None}
    experiment = tiny(**settings, hidden_dropout=0, adam_epsilon=1e-4, **more)
    train(experiment, tmp_path / "run", QUIET)
    task = build_task("digits", {})
    model, losses = adam_by_hand(experiment, task, build_config(experiment.model, experiment.model_fields, task.input))
    trained = PermuteFormerForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    for (name, p), own in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert torch.allclose(p, own, atol=2e-5, rtol=0), name
    lines = record(tmp_path / "run", "train")
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert [line["learning_rate"] for line in lines] == [learning_rate(step, peak=0.02, warmup_steps=3) for step in range(1, 8)]


def test_dropout_is_seeded_by_seed_step_and_process():
    """So that checkpoints need no random state; that a step starts with it, resumed runs show."""

    def draw(seed, step, rank):
        torch.rand(3)
        Updater._seed(SimpleNamespace(experiment=tiny(steps=1, seed=seed), distributed=SimpleNamespace(rank=rank)), step)
        return tuple(torch.rand(4).tolist())

    places = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1), (1, 0, 0)]
    assert [draw(*place) for place in places] == [draw(*place) for place in places]
    assert len({draw(*place) for place in places}) == len(places)


@pytest.fixture
def digits():
    task = build_task("digits", {})
    model = build_model(build_config("permuteformer-image", SIZES, task.input), "classify")
    with torch.no_grad():
        model.classifier.weight.normal_()
    return model, task


def test_classification_is_evaluated_as_one_item_at_a_time(digits):
    model, task = digits
    items, losses, correct = task.items("validation"), [], 0
    model.eval()
    with torch.no_grad():
        for n in sample_numbers(len(items), 101).tolist():
            batch = task.input.collate([items[n]])
            logits = model(input_ids=batch.input_ids, attention_mask=batch.mask, position_ids=batch.positions).logits
            losses.append(float(cross_entropy(logits.double(), batch.labels)))
            correct += int(logits.argmax() == batch.labels[0])
    assert 0 < correct < 101
    for batch_size in (1, 7, 101):
        metrics = evaluate(model, task, "validation", batch_size=batch_size, items=101)
        assert metrics["accuracy"] == correct / 101
        assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_every_token_of_a_text_is_scored_once():
    task = build_task("lm-bytes", {"corpus": "topics", **WINDOWS})
    model = build_model(build_config("permuteformer-lm", TEXT_SIZES, task.input), "lm").eval()
    items, total, count = task.items("test"), 0.0, 0
    with torch.no_grad():
        for n in sample_numbers(len(items), 11).tolist():
            batch = task.input.collate([items[n]])
            scored = batch.labels[0] != -100
            logits = model(input_ids=batch.input_ids, use_cache=False).logits[0, scored]
            total += float(cross_entropy(logits.double(), batch.labels[0, scored], reduction="sum"))
            count += int(scored.sum())
    metrics = evaluate(model, task, "test", batch_size=4, items=11)
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-6)


def test_evaluation_restores_mode_and_random_numbers_and_has_no_dropout(digits):
    model, task = digits
    model.train()
    before = torch.get_rng_state()

    def draw(*given):
        torch.rand(1)

    handle = model.register_forward_hook(draw)
    metrics = evaluate(model, task, "validation", batch_size=50, items=100)
    assert torch.equal(torch.get_rng_state(), before)
    handle.remove()
    assert evaluate(model, task, "validation", batch_size=50, items=100) == metrics
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_can_be_interrupted(digits):
    model, task = digits
    model.train()
    done = []
    with pytest.raises(Interrupted):
        evaluate(model, task, "validation", batch_size=10, items=100, progress=done.append, stopped=lambda: len(done) == 3)
    assert done == [10, 10, 10]
    assert model.training
