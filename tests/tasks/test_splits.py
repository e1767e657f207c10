"""Splits are seeded and have the same share of every label."""

from collections import Counter
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from permuteformer.tasks.splits import HELD_OUT, Splitter, assign_splits

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}


def splits_of(labels, seed):
    """Return the splits of items with these labels, all of different content."""
    splitter, numbers = Splitter(SHARES, seed), count()
    return [splitter.split_of(label, {"value": b"%d" % next(numbers)}) for label in labels]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=400), st.integers(0, 2**31))
def test_every_label_has_the_shares_to_within_a_block(labels, seed):
    counts = Counter(zip(labels, splits_of(labels, seed), strict=True))
    for label in set(labels):
        total = labels.count(label)
        assert all(abs(counts[label, split] - share * total) < 10 * share + 1 for split, share in SHARES.items())
        assert counts[label, "train"], "a label that the model would never see"
    assert sum(counts.values()) == len(labels)


def test_complete_blocks_are_exact_in_any_order():
    labels = ["neg"] * 1000 + ["pos"] * 500
    for order in (labels, np.random.default_rng(1).permutation(labels).tolist()):
        counts = Counter(zip(order, splits_of(order, seed=3), strict=True))
        assert counts == {(label, split): round(labels.count(label) * share) for label in ("neg", "pos") for split, share in SHARES.items()}


def test_the_seed_decides():
    labels = [n % 3 for n in range(300)]
    assert splits_of(labels, 5) == splits_of(labels, 5) != splits_of(labels, 6)
    assert splits_of(labels, 5)[:30] != splits_of(labels, 5)[30:60], "every block has its own order"


@pytest.mark.parametrize("shares", [{"train": 0.5, "test": 0.4}, {"train": 0.0, "test": 1.0}, {"train": 1.5, "test": -0.5}])
def test_shares_that_do_not_add_up_are_refused(shares):
    with pytest.raises(ValueError, match="add up to 1"):
        Splitter(shares, 0)


def test_items_are_held_out_of_the_train_split_only():
    rows = [("train", {"value": b"%d" % n, "label": n % 2}) for n in range(1000)] + [("test", {"value": b"", "label": 0})] * 50
    assert Counter(split for split, _ in assign_splits(rows, HELD_OUT, seed=0)) == {"train": 900, "validation": 100, "test": 50}


def test_repeated_content_is_in_one_split():
    found = {n: set() for n in range(70)}
    rows = [(None, {"value": b"%d" % (n % 70), "label": n % 3}) for n in range(1000)]
    for split, row in assign_splits(rows, SHARES, seed=0):
        found[int(row["value"])].add(split)
    assert all(len(splits) == 1 for splits in found.values())
    assert set().union(*found.values()) == set(SHARES)
