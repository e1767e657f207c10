"""Batches: their order, and the share of each that a process gets."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train.runs import WINDOWS, tiny

from permuteformer.tasks import Batch
from permuteformer.tasks.inputs import UNSCORED
from permuteformer.tasks.store import sample_numbers
from permuteformer.train.build import build_task
from permuteformer.train.data import POOL, BatchSampler, evaluation_batches, training_shares
from permuteformer.train.distributed import Distributed, shard_rows


@pytest.fixture
def text():
    return build_task("lm-bytes", {"corpus": "topics", **WINDOWS})


@given(st.integers(0, 500), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 5))
def test_every_item_is_in_one_batch(count, size, shuffle, by_length, epoch):
    lengths = np.random.default_rng(count).integers(1, 100, count) if by_length else None
    batches = list(BatchSampler(count, size, epoch=epoch, shuffle=shuffle, lengths=lengths))
    assert sorted(chain(*batches)) == list(range(count))
    assert len(batches) == len(BatchSampler(count, size)) == -(-count // size)
    assert sum(len(batch) != size for batch in batches) <= 1


@pytest.mark.parametrize("lengths", [None, np.arange(1000)[::-1]])
def test_order_depends_on_seed_and_epoch_and_continues_from_a_start(lengths):
    def batches(**options):
        return list(BatchSampler(1000, 7, lengths=lengths, **{"seed": 1, "epoch": 2, **options}))

    assert batches() == batches()
    assert batches() != batches(epoch=3)
    assert batches() != batches(seed=2)
    assert batches(start=30) == batches()[30:]
    assert batches(start=1000) == []


def test_batches_by_length_have_little_padding_and_a_random_order():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6.9, 0.8, 25_000).astype(int) + 2, 4000)  # about those of film reviews

    def padding(batches):
        return 1 - lengths.sum() / sum(max(lengths[b]) * len(b) for b in batches)

    by_length = list(BatchSampler(len(lengths), 32, lengths=lengths))
    assert padding(by_length) < 0.10 < 0.4 < padding(list(BatchSampler(len(lengths), 32)))
    means = np.array([lengths[b].mean() for b in by_length])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1, "neighbouring batches are not similar"
    again = list(BatchSampler(len(lengths), 32, lengths=lengths, epoch=1))
    together = {frozenset((a, b)) for batch in by_length for a in batch for b in batch if a < b}
    same = sum(frozenset((a, b)) in together for batch in again for a in batch for b in batch if a < b)
    assert same < 0.1 * len(together), "items have other neighbours in another epoch"
    when = np.empty(len(lengths))
    for n, batch in enumerate(by_length):
        when[batch] = n
    assert abs(np.corrcoef(when, lengths)[0, 1]) < 0.05, "the time of an item does not depend on its length"
    assert len(lengths) > POOL * 32, "there are several pools"


@pytest.mark.parametrize(
    ("options", "words"), [({"batch_size": 0}, "batch_size.*0"), ({"start": -1}, "start.*-1"), ({"lengths": np.ones(2)}, "3 items.*2")]
)
def test_arguments_of_the_sampler_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        BatchSampler(3, **{"batch_size": 1, **options})


def test_sample_of_items_is_always_the_same_and_of_the_whole_split():
    few = sample_numbers(1000, 50)
    assert len(set(few.tolist())) == 50
    assert (np.diff(few) > 0).all()
    assert few.max() > 900
    assert (few == sample_numbers(1000, 50)).all()
    assert set(few.tolist()) <= set(sample_numbers(1000, 80).tolist())
    for items in (None, 1000, 2000):
        assert sample_numbers(1000, items).tolist() == list(range(1000))


def shares(task, rank=0, size=1, workers=0, start=0, **fields):
    fields = {"steps": 1, "train_items": 37, "seed": 3, **fields}
    return list(training_shares(task, tiny(**fields), Distributed(None, rank, size), 1, start, workers))


def ids(share, counting=True):
    return [n for micro in share if micro.labels or not counting for n in micro.batch.ids.tolist()]


@pytest.mark.parametrize("items", [37, 33, 40, 1])
@pytest.mark.parametrize("micro", [None, 1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_together_have_the_batches_of_one(items, micro, processes, digits):
    used = sample_numbers(len(digits.items("train")), items)
    order = [used[batch].tolist() for batch in BatchSampler(items, 8, seed=3, epoch=1, lengths=digits.lengths("train")[used])]
    own = [shares(digits, p, processes, train_items=items, micro_batch_size=micro) for p in range(processes)]
    assert {len(share) for share in own} == {len(order)}
    for number, batch in enumerate(order):
        parts = [share[number] for share in own]
        assert sorted(n for part in parts for n in ids(part)) == sorted(batch)
        assert len({len(part) for part in parts}) == 1, "processes wait for each other"
        assert all(len(m.batch) <= (micro or 8) for part in parts for m in part)
        assert {n for part in parts for n in ids(part, counting=False)} == set(batch)
        assert sum(m.labels for part in parts for m in part) == len(batch)
    assert [ids(share) for share in shares(digits, train_items=items, start=1)] == order[1:]


@pytest.mark.parametrize("by_length", [True, False])
def test_batches_do_not_depend_on_workers_and_draw_no_number_of_the_model(by_length, digits):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    alone, helped = (shares(digits, workers=workers, by_length=by_length, micro_batch_size=3) for workers in (0, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(alone) == len(helped) == 5
    for micro, same in zip(chain(*alone), chain(*helped), strict=True):
        assert (micro.labels, micro.tokens) == (same.labels, same.tokens)
        assert all(torch.equal(getattr(micro.batch, name), getattr(same.batch, name)) for name in ("ids", "input_ids", "labels"))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_labels_and_tokens_of_shards_are_counted_once(shards, digits, text):
    places = [Distributed(None, sequence=SimpleNamespace(rank=rank, size=shards)) for rank in range(shards)]
    for task, tokens, labels in ((digits, 37 * 66, [37] + [0] * (shards - 1)), (text, len(text.rows("train")), None)):
        experiment = tiny(steps=1, batch_size=10_000, train_items=37 if task is digits else None)
        found = [micro for place in places for share in training_shares(task, experiment, place) for micro in share]
        assert sum(micro.tokens for micro in found) == tokens
        assert [micro.labels for micro in found] == labels if labels else sum(micro.labels for micro in found) == tokens


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_item_is_evaluated_once(processes, digits):
    def batches(rank=0, size=1):
        return list(evaluation_batches(digits, "validation", batch_size=7, items=101, distributed=Distributed(None, rank, size)))

    own = [batches(rank, processes) for rank in range(processes)]
    assert len({len(found) for found in own}) == 1, "processes wait for each other"
    scored = {number: batch.ids.tolist() for found in own for number, batch, is_scored in found if is_scored}
    assert sorted(scored) == list(range(15))
    assert sorted(chain(*scored.values())) == sample_numbers(len(digits.items("validation")), 101).tolist()
    assert scored == {number: batch.ids.tolist() for number, batch, _ in batches()}


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_shards_of_rows_are_the_rows(shards, digits, text):
    for task in (digits, text):
        items = task.items("train")
        batch = task.input.collate([items[n] for n in (0, 5, len(items) - 1)])
        parts = [shard_rows(batch, n, shards) for n in range(shards)]
        names = ["input_ids", "mask", "positions" if task is digits else "labels"]
        for name in names:
            assert torch.equal(torch.cat([getattr(part, name) for part, _ in parts], dim=1), getattr(batch, name))
        lengths = {part.input_ids.shape[1] for part, _ in parts}
        assert max(lengths) - min(lengths) <= 1
        if task is digits:
            assert all(torch.equal(part.labels, batch.labels) for part, _ in parts)
            assert [counts for _, counts in parts] == [True] + [False] * (shards - 1)


def test_rows_shorter_than_their_processes_are_padded():
    rows = torch.tensor([[4, 5], [6, 0]])
    batch = Batch(torch.arange(2), rows, rows > 0, labels=torch.where(rows > 0, rows, UNSCORED))
    parts = [shard_rows(batch, n, 3) for n in range(3)]
    assert [part.input_ids.tolist() for part, _ in parts] == [[[4], [6]], [[5], [0]], [[0], [0]]]
    assert [part.mask.tolist() for part, _ in parts] == [[[True], [True]], [[True], [False]], [[False], [False]]]
    assert [counts for _, counts in parts] == [True, True, False]
    assert parts[2][0].labels.tolist() == [[0], [UNSCORED]], "a label that does not count, since a mean over none is NaN"
    assert shard_rows(batch, 2, 3, training=False)[0].labels.tolist() == [[UNSCORED], [UNSCORED]]
