"""Batches: what each process gets of them, in which order, whoever makes them."""

from itertools import chain

import numpy as np
import pytest
import torch
from train_processes import SHARED

from permuteformer.tasks.base import UNSCORED, Batch
from permuteformer.tasks.batches import BatchSampler
from permuteformer.train.build import build_task
from permuteformer.train.feed import Piece, chosen, evaluation_batches, training_batches
from permuteformer.train.stretches import Place, cut


@pytest.fixture(autouse=True)
def prepared(cache, monkeypatch):
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def digits():
    return build_task("digits", {})


@pytest.fixture
def text():
    return build_task("lm-bytes", {"corpus": "topics", "length": 48, "context": 16})


def shares(task, **changes):
    settings = {"batch_size": 8, "micro_batch_size": None, "by_length": True, "items": 37, "seed": 3, "epoch": 1}
    return list(training_batches(task, **{**settings, **changes}))


def ids(share, counting=True):
    return [n for piece in share if piece.counts or not counting for n in piece.batch.ids.tolist()]


def test_chosen_items_are_a_draw_that_is_always_the_same():
    few = chosen(1000, 50)
    assert len(set(few.tolist())) == 50
    assert (np.diff(few) > 0).all()
    assert few.max() > 900  # of all of them, not the first
    assert (few == chosen(1000, 50)).all()
    assert set(few.tolist()) <= set(chosen(1000, 80).tolist())
    for all_of_them in (None, 1000, 2000):
        assert chosen(1000, all_of_them).tolist() == list(range(1000))


@pytest.mark.parametrize("items", [37, 33, 40, 1])
@pytest.mark.parametrize("micro", [None, 1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_together_have_the_batches_of_one(items, micro, processes, digits):
    used = chosen(len(digits.dataset("train")), items)
    lengths = digits.lengths("train")[used]
    order = [used[batch].tolist() for batch in BatchSampler(items, 8, seed=3, epoch=1, lengths=lengths)]
    own = [shares(digits, items=items, micro_batch_size=micro, place=Place(p, processes)) for p in range(processes)]
    for number, batch in enumerate(order):
        parts = [share[number] for share in own]
        assert sorted(n for part in parts for n in ids(part)) == sorted(batch)
        assert len({len(part) for part in parts}) == 1  # they wait for each other
        assert all(len(piece.batch) <= (micro or 8) for part in parts for piece in part)
        assert set(ids([piece for part in parts for piece in part], counting=False)) == set(batch)
        assert sum(piece.scored for part in parts for piece in part) == len(batch)
    assert len({len(share) for share in own}) == 1
    assert len(own[0]) == len(order)


@pytest.mark.parametrize("by_length", [True, False])
def test_the_order_does_not_depend_on_workers(by_length, digits):
    alone, helped = (shares(digits, workers=workers, by_length=by_length, micro_batch_size=3) for workers in (0, 2))
    assert len(alone) == len(helped) == 5
    for share, same in zip(alone, helped, strict=True):
        for piece, twin in zip(share, same, strict=True):
            assert piece.counts == twin.counts
            assert all(torch.equal(getattr(piece.batch, name), getattr(twin.batch, name)) for name in ("ids", "input_ids", "labels"))


def test_seed_and_epoch_decide_the_order(digits):
    first = [ids(share) for share in shares(digits)]
    assert first == [ids(share) for share in shares(digits)]
    for other in ({"seed": 4}, {"epoch": 2}):
        assert first != [ids(share) for share in shares(digits, **other)]
    assert sorted(chain(*first)) == chosen(len(digits.dataset("train")), 37).tolist()


def test_starting_later_goes_on_with_the_same_batches(digits):
    whole = [ids(share) for share in shares(digits)]
    assert [ids(share) for share in shares(digits, start=3)] == whole[3:]
    assert shares(digits, start=5) == []


def test_no_random_number_of_the_model_is_drawn(digits):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert shares(digits, workers=0)
    assert shares(digits, workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_piece_counts(text):
    batch = Batch(
        ids=torch.arange(2),
        input_ids=torch.zeros(2, 3, dtype=torch.int64),
        key_mask=torch.tensor([[True, True, False], [True, False, False]]),
        labels=torch.tensor([[5, UNSCORED, UNSCORED], [7, 8, UNSCORED]]),
        second_input_ids=torch.zeros(2, 2, dtype=torch.int64),
        second_key_mask=torch.tensor([[True, True], [True, False]]),
    )
    assert (Piece(batch).scored, Piece(batch).tokens) == (3, 6)
    assert (Piece(batch, counts=False).scored, Piece(batch, counts=False).tokens) == (0, 0)
    assert (Piece(batch, scores=False).scored, Piece(batch, scores=False).tokens) == (0, 6)
    windows = shares(text, batch_size=10_000, items=None)[0]
    assert Piece(windows[0].batch).tokens == len(text.items("train"))  # every token once


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_deals_every_item_once(processes, digits):
    own = [list(evaluation_batches(digits, "validation", batch_size=7, items=101, place=Place(p, processes))) for p in range(processes)]
    assert len({len(batches) for batches in own}) == 1
    dealt = {number: batch.ids.tolist() for batches in own for number, batch in batches if number >= 0}
    assert sorted(dealt) == list(range(15))
    assert sorted(chain(*dealt.values())) == chosen(len(digits.dataset("validation")), 101).tolist()
    alone = {number: batch.ids.tolist() for number, batch in evaluation_batches(digits, "validation", batch_size=7, items=101)}
    assert dealt == alone


@pytest.mark.parametrize("stretches", [2, 3, 7])
def test_stretches_of_rows_are_the_rows(stretches, digits, text):
    for task, kind in ((digits, "classify"), (text, "lm")):
        batch = task.collate([task.dataset("train")[n] for n in (0, 5, len(task.dataset("train")) - 1)])
        parts = [cut(batch, kind, n, stretches) for n in range(stretches)]
        for name in ("input_ids", "key_mask", *(["positions"] if kind == "classify" else [])):
            assert torch.equal(torch.cat([getattr(part, name) for part, _ in parts], dim=1), getattr(batch, name))
        sizes = {part.input_ids.shape[1] for part, _ in parts}
        assert max(sizes) - min(sizes) <= 1
        if kind == "classify":
            assert all(torch.equal(part.labels, batch.labels) for part, _ in parts)
            assert [counts for _, counts in parts] == [True] + [False] * (stretches - 1)
        else:
            assert torch.equal(torch.cat([part.labels for part, _ in parts], dim=1), batch.labels)


def test_a_row_shorter_than_its_processes_is_padded():
    ids = torch.arange(2)
    rows = torch.tensor([[4, 5], [6, 0]])
    batch = Batch(ids, rows, rows > 0, labels=torch.where(rows > 0, rows, UNSCORED))
    parts = [cut(batch, "lm", n, 3) for n in range(3)]
    assert [part.input_ids.tolist() for part, _ in parts] == [[[4], [6]], [[5], [0]], [[0], [0]]]
    assert [part.key_mask.tolist() for part, _ in parts] == [[[True], [True]], [[True], [False]], [[False], [False]]]
    assert [counts for _, counts in parts] == [True, True, False]
    assert parts[2][0].labels.tolist() == [[0], [UNSCORED]]  # one that does not count, since a mean over none is no number
    assert cut(batch, "lm", 2, 3, for_loss=False)[0].labels.tolist() == [[UNSCORED], [UNSCORED]]
