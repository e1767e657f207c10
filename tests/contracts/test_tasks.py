"""What must hold of every task in the registry."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import small_data
import torch

from permuteformer.models import (
    PermuteFormerConfig,
    PermuteFormerForCausalLM,
    PermuteFormerForMatching,
    PermuteFormerForSequenceClassification,
)
from permuteformer.tasks import SPLITS, TASKS
from permuteformer.tasks.base import UNSCORED
from permuteformer.tasks.batches import loader


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name in ("PERMUTEFORMER_DATA", "PERMUTEFORMER_CACHE"):
        monkeypatch.delenv(name, raising=False)


def table(folder):
    return {"path": small_data.write(folder / "a.csv", small_data.ROWS)}


def pairs(folder):
    (folder / "a.tsv").write_text("text1\ttext2\tlabel\n" + "".join(f"a{n}\tb{n}{n}\t{n % 2}\n" for n in range(40)))
    return {"path": str(folder / "a.tsv")}


def pictures(folder):
    for n in range(20):
        (folder / "pictures" / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
        (folder / "pictures" / "ab"[n % 2] / f"{n}.png").write_bytes(small_data.picture(n))
    return {"path": str(folder / "pictures"), "size": 8}


def text(folder):
    (folder / "a.txt").write_text("".join(f"line number {n}\n" for n in range(200)))
    return {"path": str(folder / "a.txt"), "length": 32, "context": 8}


def wiki(name, ending):
    def write(folder):
        (folder / name).mkdir()
        for split in ("train", "valid", "test"):
            (folder / name / f"wiki.{split}.{ending}").write_text(" = Cat = \n \n the cat sat on the mat \n" * 20)
        return {"data": str(folder), "length": 32, "context": 8}

    return write


def aan(folder):
    for split in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{split}.tsv").write_text("".join(f"{n % 2}.0\ta\tb\tb'x{n}'\tb'yy{n}'\n" for n in range(8)))
    return {"data": str(folder)}


def imdb(folder):
    small_data.acl_imdb(folder)
    return {"data": str(folder)}


def cifar(folder):
    (folder / "cifar-10-batches-py").mkdir()
    for name, array in small_data.cifar_arrays().items():
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps({b"data": array, b"labels": [n % 10 for n in range(20)]}, 2))
    return {"data": str(folder)}


def pathfinder(folder):
    small_data.pathfinder(folder)
    return {"data": str(folder)}


def listops(folder):
    small_data.listops(folder, [("( ( ( [MAX 2 ) 4 ) ] )", 4), ("3", 3)] * 5)
    return {"data": str(folder)}


SMALL = {
    "classify": table,
    "match": pairs,
    "images": pictures,
    "lm": text,
    "lm-bytes": lambda folder: {"corpus": "topics", "length": 32, "context": 8},
    "digits": lambda folder: {},
    "lra-text": imdb,
    "lra-retrieval": aan,
    "lra-image": cifar,
    "lra-pathfinder": pathfinder,
    "lra-listops": listops,
    "wikitext-103": wiki("wikitext-103", "tokens"),
    "wikitext-2": wiki("wikitext-2", "tokens"),
    "wiki-en": wiki("wiki_en", "raw"),
}
"""A little data for each task, and the options to find it."""


@pytest.fixture(params=list(TASKS))
def task(request, tmp_path):
    assert request.param in SMALL, "a new task needs a little data to be tested with"
    return TASKS[request.param](**SMALL[request.param](tmp_path))


def some(task, split):
    return next(iter(loader(task, split, 5)))


def test_batches(task):
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


def test_lengths_are_those_of_batches(task):
    lengths = task.lengths("validation")
    found = []
    for batch in loader(task, "validation", 3):
        mask = batch.key_mask.sum(1)
        found += (mask if batch.second_key_mask is None else torch.maximum(mask, batch.second_key_mask.sum(1))).tolist()
    assert np.array_equal(lengths, found)


def test_an_item_is_the_same_alone_and_among_others(task):
    items = task.dataset("train")
    together = task.collate([items[n] for n in range(min(4, len(items)))])
    for n in range(len(together)):
        alone = task.collate([items[n]])
        assert alone.ids.tolist() == [n]
        length = alone.input_ids.shape[1]
        assert torch.equal(together.input_ids[n, :length], alone.input_ids[0])
        assert not together.key_mask[n, length:].any()
        assert torch.equal(together.labels[n, :length] if task.kind == "lm" else together.labels[n], alone.labels[0])


def test_sums_add_up(task):
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


def test_a_copy_in_another_process_is_the_same_task(task):
    batch = some(task, "test")
    copy = pickle.loads(pickle.dumps(task))
    again = some(copy, "test")
    assert torch.equal(batch.input_ids, again.input_ids)
    assert copy.labels == task.labels


def test_items_in_words(task):
    words = task.words(task.dataset("train")[0])
    assert (words == []) == (task.grid is not None)
    assert all(isinstance(word, str) for word in words)


@torch.no_grad()
def test_models_take_its_batches(task):
    batch = some(task, "validation")
    small = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": task.vocab_size}
    if task.kind == "lm":
        model = PermuteFormerForCausalLM(PermuteFormerConfig.preset("permuteformer-lm", **small)).eval()
        output = model(batch.input_ids, attention_mask=batch.key_mask, labels=batch.labels, shift_labels=batch.labels)
        sums = task.score(output.logits, batch)
        assert output.loss.item() == pytest.approx(float(sums["loss"]) / float(sums["tokens"]), rel=1e-4)
        return
    config = PermuteFormerConfig(**small, id2label=dict(enumerate(task.labels)), axes=2 if task.grid else 1)
    if task.kind == "match":
        model = PermuteFormerForMatching(config).eval()
        output = model(batch.input_ids, batch.second_input_ids, batch.key_mask, batch.second_key_mask, labels=batch.labels)
    else:
        model = PermuteFormerForSequenceClassification(config).eval()
        output = model(batch.input_ids, attention_mask=batch.key_mask, position_ids=batch.positions, labels=batch.labels)
    sums = task.score(output.logits, batch)
    assert output.loss.item() == pytest.approx(float(sums["loss"]) / len(batch), rel=1e-4)
