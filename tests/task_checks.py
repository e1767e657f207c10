"""What must hold of every task."""

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
from permuteformer.tasks.base import UNSCORED
from permuteformer.tasks.batches import loader


def some(task, split):
    return next(iter(loader(task, split, 5)))


def batches(task):
    assert task.kind in ("classify", "match", "lm")
    assert task.title
    assert task.licence
    for split in SPLITS:
        batch = some(task, split)
        documents = [(batch.input_ids, batch.key_mask)]
        if task.kind == "match":
            documents.append((batch.second_input_ids, batch.second_key_mask))
        for ids, mask in documents:
            assert ids.dtype == torch.int64
            assert mask.dtype == torch.bool
            assert ids.shape == mask.shape
            assert ids.shape[1] <= task.max_length
            assert 0 <= int(ids.min()) <= int(ids.max()) < task.vocab_size
            assert mask[:, 0].all(), "a row has a token at least"
            assert (mask.long().diff(dim=1) <= 0).all(), "padding is at the end"
        if task.kind == "lm":
            assert ((batch.labels == UNSCORED) | ((batch.labels >= 0) & (batch.labels < task.vocab_size))).all()
            assert (batch.labels[~batch.key_mask] == UNSCORED).all()
        else:
            assert ((batch.labels >= 0) & (batch.labels < task.num_labels)).all()
            assert len(task.labels) == task.num_labels == len(set(task.labels))
        assert (batch.positions is None) == (task.grid is None)
        if task.grid is not None:
            height, width = task.grid
            assert batch.positions.shape == (*batch.input_ids.shape, 2)
            assert (batch.positions.amin((0, 1)) == 0).all()
            assert batch.positions.amax((0, 1)).tolist() == [width - 1, height - 1]


def lengths_are_those_of_batches(task):
    lengths = task.lengths("validation")
    found = []
    for batch in loader(task, "validation", 3):
        mask = batch.key_mask.sum(1)
        found += (mask if batch.second_key_mask is None else torch.maximum(mask, batch.second_key_mask.sum(1))).tolist()
    assert np.array_equal(lengths, found)


def an_item_is_the_same_alone_and_among_others(task):
    items = task.dataset("train")
    together = task.collate([items[n] for n in range(min(4, len(items)))])
    for n in range(len(together)):
        alone = task.collate([items[n]])
        assert alone.ids.tolist() == [n]
        length = alone.input_ids.shape[1]
        assert torch.equal(together.input_ids[n, :length], alone.input_ids[0])
        assert not together.key_mask[n, length:].any()
        assert torch.equal(together.labels[n, :length] if task.kind == "lm" else together.labels[n], alone.labels[0])


def sums_add_up(task):
    generator = torch.Generator().manual_seed(0)
    batches = list(loader(task, "test", 2))[:3]
    sums: dict[str, float] = {}
    for batch in batches:
        shape = (*batch.input_ids.shape, task.vocab_size) if task.kind == "lm" else (len(batch), task.num_labels)
        logits = torch.randn(shape, generator=generator)
        whole = task.score(logits, batch)
        parts = []
        for n in range(len(batch)):
            row = type(batch)(**{f.name: x[n : n + 1] for f in fields(batch) if (x := getattr(batch, f.name)) is not None})
            parts.append(task.score(logits[n : n + 1], row))
        for name, value in whole.items():
            assert float(value) == pytest.approx(sum(float(part[name]) for part in parts), rel=1e-6)
            sums[name] = sums.get(name, 0) + float(value)
    found = task.summarize(sums, "test")
    assert np.isfinite(list(found.values())).all()
    assert task.metric in found


def a_copy_in_another_process_is_the_same_task(task):
    batch = some(task, "test")
    copy = pickle.loads(pickle.dumps(task))
    again = some(copy, "test")
    assert torch.equal(batch.input_ids, again.input_ids)
    assert copy.labels == task.labels


def items_in_words(task):
    words = task.words(task.dataset("train")[0])
    assert (words == []) == (task.grid is not None)
    assert all(isinstance(word, str) for word in words)


@torch.no_grad()
def models_take_its_batches(task):
    batch = some(task, "validation")
    small = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": task.vocab_size}
    if task.kind == "lm":
        model = PermuteFormerForCausalLM(PermuteFormerConfig.preset("permuteformer-lm", **small)).eval()
        output = model(batch.input_ids, attention_mask=batch.key_mask, labels=batch.labels, shift_labels=batch.labels)
        sums = task.score(output.logits, batch)
        assert output.loss.item() == pytest.approx(float(sums["loss"]) / float(sums["tokens"]), rel=1e-4)
        return
    assert torch.equal(batch.to("cpu").input_ids, batch.input_ids)
    config = PermuteFormerConfig(**small, id2label=dict(enumerate(task.labels)), axes=2 if task.grid else 1)
    if task.kind == "match":
        model = PermuteFormerForMatching(config).eval()
        output = model(batch.input_ids, batch.second_input_ids, batch.key_mask, batch.second_key_mask, labels=batch.labels)
    else:
        model = PermuteFormerForSequenceClassification(config).eval()
        output = model(batch.input_ids, attention_mask=batch.key_mask, position_ids=batch.positions, labels=batch.labels)
    assert list(PermuteFormerConfig.from_dict(config.to_dict()).id2label.values()) == task.labels, "labels are saved with the model"
    sums = task.score(output.logits, batch)
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
