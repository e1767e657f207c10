"""Checks that every task must pass."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch

from permuteformer.models import (
    PermuteFormerConfig,
    PermuteFormerForCausalLM,
    PermuteFormerForMatching,
    PermuteFormerForSequenceClassification,
)
from permuteformer.tasks import SPLITS
from permuteformer.tasks.inputs import UNSCORED


def batches_of(task, split, size):
    """Yield the items of a split in batches, in order."""
    items = task.items(split)
    for first in range(0, len(items), size):
        yield task.input.collate(items[first : first + size])


def some(task, split):
    return next(batches_of(task, split, 5))


def batches(task):
    input = task.input
    assert input.kind in ("classify", "match", "lm")
    assert task.title
    assert task.licence
    for split in SPLITS:
        batch = some(task, split)
        documents = [(batch.input_ids, batch.mask)]
        if input.kind == "match":
            documents.append((batch.second_input_ids, batch.second_mask))
        for ids, mask in documents:
            assert ids.dtype == torch.int64
            assert mask.dtype == torch.bool
            assert ids.shape == mask.shape
            assert ids.shape[1] <= input.max_length
            assert 0 <= int(ids.min()) <= int(ids.max()) < input.vocab_size
            assert mask[:, 0].all(), "every item has a token"
            assert (mask.long().diff(dim=1) <= 0).all(), "padding is at the end"
        if input.kind == "lm":
            assert ((batch.labels == UNSCORED) | ((batch.labels >= 0) & (batch.labels < input.vocab_size))).all()
            assert (batch.labels[~batch.mask] == UNSCORED).all()
        else:
            assert ((batch.labels >= 0) & (batch.labels < len(input.labels))).all()
            assert len(input.labels) == len(set(input.labels))
        assert (batch.positions is None) == (input.grid is None)
        if input.grid is not None:
            height, width = input.grid
            assert batch.positions.shape == (*batch.input_ids.shape, 2)
            assert (batch.positions.amin((0, 1)) == 0).all()
            assert batch.positions.amax((0, 1)).tolist() == [width - 1, height - 1]


def lengths_are_those_of_batches(task):
    found = []
    for batch in batches_of(task, "validation", 3):
        lengths = batch.mask.sum(1)
        found += (lengths if batch.second_mask is None else torch.maximum(lengths, batch.second_mask.sum(1))).tolist()
    assert np.array_equal(task.lengths("validation"), found)


def an_item_is_the_same_alone_and_among_others(task):
    items = task.items("train")
    together = task.input.collate(items[:4])
    for n in range(len(together)):
        alone = task.input.collate([items[n]])
        assert alone.ids.tolist() == [n]
        length = alone.input_ids.shape[1]
        assert torch.equal(together.input_ids[n, :length], alone.input_ids[0])
        assert not together.mask[n, length:].any()
        assert torch.equal(together.labels[n, :length] if task.input.kind == "lm" else together.labels[n], alone.labels[0])


def sums_add_up(task):
    generator = torch.Generator().manual_seed(0)
    sums: dict[str, float] = {}
    for batch in list(batches_of(task, "test", 2))[:3]:
        shape = (*batch.input_ids.shape, task.input.vocab_size) if task.input.kind == "lm" else (len(batch), len(task.input.labels))
        logits = torch.randn(shape, generator=generator)
        parts = []
        for n in range(len(batch)):
            row = type(batch)(**{f.name: x[n : n + 1] for f in fields(batch) if (x := getattr(batch, f.name)) is not None})
            parts.append(task.input.score(logits[n : n + 1], row))
        for name, value in task.input.score(logits, batch).items():
            assert float(value) == pytest.approx(sum(float(part[name]) for part in parts), rel=1e-6)
            sums[name] = sums.get(name, 0) + float(value)
    found = task.input.summarize(sums, "test")
    assert np.isfinite(list(found.values())).all()
    assert task.input.metric in found


def a_copy_in_another_process_is_the_same_task(task):
    copy = pickle.loads(pickle.dumps(task))
    assert torch.equal(some(copy, "test").input_ids, some(task, "test").input_ids)
    assert copy.input.labels == task.input.labels


def items_in_words(task):
    texts = task.input.texts(task.items("train")[0])
    assert (texts == []) == (task.input.grid is not None)
    assert all(isinstance(text, str) for text in texts)


@torch.no_grad()
def models_take_its_batches(task):
    batch, input = some(task, "validation"), task.input
    small = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": input.vocab_size}
    if input.kind == "lm":
        model = PermuteFormerForCausalLM(PermuteFormerConfig.preset("permuteformer-lm", **small)).eval()
        output = model(batch.input_ids, attention_mask=batch.mask, labels=batch.labels, shift_labels=batch.labels)
        sums = input.score(output.logits, batch)
        assert output.loss.item() == pytest.approx(float(sums["loss"]) / float(sums["tokens"]), rel=1e-4)
        return
    config = PermuteFormerConfig(**small, id2label=dict(enumerate(input.labels)), axes=2 if input.grid else 1)
    if input.kind == "match":
        model = PermuteFormerForMatching(config).eval()
        output = model(batch.input_ids, batch.second_input_ids, batch.mask, batch.second_mask, labels=batch.labels)
    else:
        model = PermuteFormerForSequenceClassification(config).eval()
        output = model(batch.input_ids, attention_mask=batch.mask, position_ids=batch.positions, labels=batch.labels)
    saved = PermuteFormerConfig.from_dict(config.to_dict()).id2label
    assert tuple(saved.values()) == input.labels, "labels are saved with the model"
    sums = input.score(output.logits, batch)
    assert output.loss.item() == pytest.approx(float(sums["loss"]) / len(batch), rel=1e-4)


CHECKS = {
    check.__name__: check
    for check in (
        batches,
        lengths_are_those_of_batches,
        an_item_is_the_same_alone_and_among_others,
        sums_add_up,
        a_copy_in_another_process_is_the_same_task,
        items_in_words,
        models_take_its_batches,
    )
}
