from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from permuteformer.tasks.splits import Splitter, hold_out

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=400), st.integers(0, 2**31))
def test_every_label_has_the_shares_to_within_a_hand(labels, seed):
    splitter = Splitter(SHARES, seed)
    counts = {label: Counter() for label in "abc"}
    for label in labels:
        counts[label][splitter.split_of(label)] += 1
    for label, found in counts.items():
        total = labels.count(label)
        for split, share in SHARES.items():
            assert abs(found[split] - share * total) < 10 * share + 1
        assert not total or found["train"], "a label that the model never sees"


def test_whole_hands_are_exact_whatever_the_order():
    labels = ["neg"] * 1000 + ["pos"] * 500
    for order in (labels, np.random.default_rng(1).permutation(labels).tolist()):
        splitter = Splitter(SHARES, seed=3)
        found = Counter((label, splitter.split_of(label)) for label in order)
        assert found == Counter(
            {("neg", s): round(1000 * share) for s, share in SHARES.items()}
            | {("pos", s): round(500 * share) for s, share in SHARES.items()}
        )


def test_the_seed_decides():
    def draw(seed):
        splitter = Splitter(SHARES, seed)
        return [splitter.split_of(n % 3) for n in range(300)]

    assert draw(5) == draw(5) != draw(6)
    assert draw(5)[:30] != draw(5)[30:60], "every hand is dealt in an order of its own"


@pytest.mark.parametrize("shares", [{"train": 0.5, "test": 0.4}, {"train": 0.0, "test": 1.0}, {"train": 1.5, "test": -0.5}])
def test_shares_that_make_no_sense_are_refused(shares):
    with pytest.raises(ValueError, match="add up to 1"):
        Splitter(shares, 0)


def test_hold_out_takes_from_train_alone():
    items = [("train", {"value": f"{n}".encode(), "label": n % 2}) for n in range(1000)] + [("test", {"value": b"", "label": 0})] * 50
    found = Counter(split for split, _ in hold_out(iter(items)))
    assert found == {"train": 900, "validation": 100, "test": 50}


def test_what_was_there_before_goes_where_it_was():
    splitter = Splitter(SHARES, seed=0)
    rows = [{"value": f"{n % 70}".encode(), "label": n % 3} for n in range(1000)]
    found = {}
    for row in rows:
        found.setdefault(row["value"], set()).add(splitter.split_of(row["label"], row))
    assert all(len(splits) == 1 for splits in found.values())
    assert {split for splits in found.values() for split in splits} == set(SHARES)
