import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from permuteformer.tasks.batches import POOL, BatchSampler, loader
from permuteformer.tasks.digits import Digits


@given(st.integers(0, 500), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 5))
def test_every_item_comes_once(count, size, shuffle, by_length, epoch):
    lengths = np.random.default_rng(count).integers(1, 100, count) if by_length else None
    batches = list(BatchSampler(count, size, epoch=epoch, shuffle=shuffle, lengths=lengths))
    assert sorted(n for batch in batches for n in batch) == list(range(count))
    assert len(batches) == len(BatchSampler(count, size)) == -(-count // size)
    assert sum(len(batch) != size for batch in batches) <= 1


@pytest.mark.parametrize("lengths", [None, np.arange(1000)[::-1]])
def test_seed_and_epoch_decide_and_a_start_goes_on(lengths):
    def batches(**options):
        return list(BatchSampler(1000, 7, lengths=lengths, **options))

    assert batches(seed=1, epoch=2) == batches(seed=1, epoch=2)
    assert batches(seed=1, epoch=2) != batches(seed=1, epoch=3)
    assert batches(seed=1, epoch=2) != batches(seed=2, epoch=2)
    assert batches(seed=1, epoch=2, start=30) == batches(seed=1, epoch=2)[30:]
    assert batches(start=1000) == []


def test_by_length_pads_little_and_shuffles_honestly():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6.9, 0.8, 25_000).astype(int) + 2, 4000)  # about those of film reviews

    def padding(batches):
        padded = sum(max(lengths[b]) * len(b) for b in batches)
        return 1 - lengths.sum() / padded

    by_length = list(BatchSampler(len(lengths), 32, lengths=lengths))
    assert padding(by_length) < 0.10 < 0.4 < padding(list(BatchSampler(len(lengths), 32)))
    # Lengths of batches do not run along the epoch: neighbours are no more alike than chance has it.
    means = np.array([lengths[b].mean() for b in by_length])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1
    # Who comes with whom is another matter in another epoch.
    again = list(BatchSampler(len(lengths), 32, lengths=lengths, epoch=1))
    together = {frozenset((a, b)) for batch in by_length for a in batch for b in batch if a < b}
    same = sum(frozenset((a, b)) in together for batch in again for a in batch for b in batch if a < b)
    assert same < 0.1 * len(together)
    # And when an item comes does not depend on its length.
    when = np.empty(len(lengths))
    for n, batch in enumerate(by_length):
        when[batch] = n
    assert abs(np.corrcoef(when, lengths)[0, 1]) < 0.05
    assert len(lengths) > POOL * 32, "there are several pools"


def test_workers_make_the_same_batches():
    task = Digits()

    def batches(workers):
        return [
            (b.ids, b.input_ids, b.key_mask, b.labels, b.positions) for b in loader(task, "validation", 17, shuffle=True, workers=workers)
        ]

    alone = batches(0)
    for workers in (1, 2):
        for mine, theirs in zip(alone, batches(workers), strict=True):
            assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))


def test_training_is_shuffled_and_the_rest_is_not():
    task = Digits()
    ids = {split: [n for batch in loader(task, split, 50) for n in batch.ids.tolist()] for split in ("train", "validation")}
    assert ids["validation"] == list(range(len(ids["validation"])))
    assert ids["train"] != sorted(ids["train"])


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="batch_size must be 1 or more; it is 0"):
        BatchSampler(3, 0)
    with pytest.raises(ValueError, match="start must be 0 or more; it is -1"):
        BatchSampler(3, 1, start=-1)
    with pytest.raises(ValueError, match="one for each of the 3 items; there are 2"):
        BatchSampler(3, 1, lengths=np.ones(2))
    with pytest.raises(ValueError, match="split must be one of train, validation, test; it is 'dev'"):
        loader(Digits(), "dev", 4)
