import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from permuteformer.ops import reference
from permuteformer.ops.permutation import (
    axis_sizes,
    canonical,
    decompose,
    max_order_cycle_lengths,
    max_order_permutation,
    order,
    period,
    permutation_power,
    permute_features,
    random_permutation,
)

permutations = st.lists(st.integers(1, 12), min_size=1, max_size=3).flatmap(
    lambda sizes: st.lists(st.permutations(range(sizes[0])), min_size=1, max_size=3)
)


def cycle_lengths(permutation):
    cycles = decompose(permutation)
    return [sorted(row) for row in cycles.length.tolist()]


@given(permutations, st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_powers_add_up(rows, i, j):
    cycles = decompose(torch.tensor(rows))
    first, second, both = permutation_power(cycles, torch.tensor([[i], [j], [i + j]])).unbind(1)
    assert torch.equal(first.gather(-1, second), both)


@given(permutations, st.integers(-30, 30))
def test_it_is_the_matrix_of_the_paper(rows, power):
    permutation = torch.tensor(rows)
    x = torch.randn(1, *permutation.shape, dtype=torch.float64).unsqueeze(2)  # b h 1 m
    moved = permute_features(x, permutation_power(decompose(permutation), torch.tensor([[[power]]])))
    assert torch.equal(moved, reference.permute(x, [permutation], torch.tensor([[[power]]])))


@given(permutations)
def test_canonical_keeps_the_cycles_and_makes_powers_rotate_contiguous_pieces(rows):
    permutation = torch.tensor(rows)
    stored = canonical(permutation)
    cycles = decompose(stored)
    assert cycles.contiguous
    assert cycle_lengths(stored) == cycle_lengths(permutation)
    for head, row in enumerate(permutation_power(cycles, torch.tensor([[3]]))[:, 0].tolist()):
        slot = 0
        while slot < len(row):
            size = int(cycles.length[head, slot])
            piece = list(range(slot, slot + size))
            assert row[slot : slot + size] == piece[3 % size :] + piece[: 3 % size]
            slot += size


@given(permutations)
def test_the_order_is_the_first_power_that_is_the_identity(rows):
    cycles = decompose(torch.tensor(rows))
    identity = torch.arange(len(rows[0]))
    for head, size in enumerate(order(cycles)):
        powers = permutation_power(cycles, torch.arange(1, size + 1).unsqueeze(-1))[head]
        assert (powers == identity).all(-1).nonzero().flatten().tolist() == [size - 1]
    assert period(cycles) == (math.lcm(*order(cycles)),)


def brute_force_landau(size):
    def partitions(n, largest):
        if n == 0:
            yield ()
        for part in range(min(n, largest), 0, -1):
            for rest in partitions(n - part, part):
                yield (part, *rest)

    return max(math.lcm(*partition) for partition in partitions(size, size))


@pytest.mark.parametrize("size", range(1, 31))
def test_max_order_is_landaus_function(size):
    lengths = max_order_cycle_lengths(size)
    assert sum(lengths) == size
    assert math.lcm(*lengths) == brute_force_landau(size)
    assert set(order(decompose(max_order_permutation(3, size)))) == {brute_force_landau(size)}


def test_max_order_at_the_sizes_of_models():
    """Landau's function up to 64, from the literature (OEIS A000793), and above: beyond any random permutation."""
    assert [math.lcm(*max_order_cycle_lengths(m)) for m in (16, 32, 64)] == [140, 5460, 2042040]
    for size in (128, 256):
        drawn = order(decompose(random_permutation(300, size, torch.Generator().manual_seed(0))))
        assert math.lcm(*max_order_cycle_lengths(size)) > max(drawn)
        assert sum(max_order_cycle_lengths(size)) == size


def test_any_int64_is_a_position():
    cycles = decompose(torch.tensor([[1, 2, 0, 4, 3]]))
    for position in (2**63 - 1, -(2**63), 2**62 + 5):
        expected = permutation_power(cycles, torch.tensor([[position % 6]]))
        assert torch.equal(permutation_power(cycles, torch.tensor([[position]])), expected)


def test_the_papers_orders():
    """Mean order over 3,000 at 64 features; and the distance that all heads of a model distinguish together, against "up to 1e27"."""
    cycles = decompose(random_permutation(5000, 64, torch.Generator().manual_seed(0)))
    orders = order(cycles)
    assert 2800 < statistics.mean(orders) < 3400
    assert 600 < statistics.median(orders) < 850, "the median head repeats much sooner than the mean suggests"
    together = {
        heads: statistics.median(math.lcm(*orders[start : start + heads]) for start in range(0, 4800, heads)) for heads in (8, 12, 16)
    }
    assert 1e10 < together[8] < 2e11
    assert 2e12 < together[12] < 1e14
    assert 1e14 < together[16] < 1e16
    bound = math.lcm(*range(1, 65))
    assert 1.1e27 < bound < 1.2e27, "the paper's 1e27 is the bound that no set of heads can pass"
    assert all(bound % order == 0 for order in orders)


@pytest.mark.parametrize(
    ("permutation", "message"),
    [
        (torch.tensor([[0, 0, 1]]), "head 0 .*\\[0, 0, 1\\]"),
        (torch.tensor([[0, 1], [1, 2]]), "head 1 .*\\[1, 2\\]"),
        (torch.tensor([[0.0, 1.0]]), "int64 .* torch.float32"),
        (torch.tensor([0, 1]), "shape \\(heads, features\\)"),
        (torch.zeros(0, 0, dtype=torch.int64), "shape \\(heads, features\\)"),
    ],
)
def test_what_is_no_permutation_is_refused(permutation, message):
    with pytest.raises(ValueError, match=message):
        decompose(permutation)


def test_a_permutation_that_mixes_axes_is_refused():
    with pytest.raises(ValueError, match="mixes features of different axes"):
        decompose(torch.tensor([[3, 0, 1, 2]]), axes=2)
    with pytest.raises(ValueError, match="axes .* 2, got 3"):
        axis_sizes(2, 3)


def test_random_permutations_are_uniform():
    drawn = random_permutation(6000, 3, torch.Generator().manual_seed(0)).tolist()
    counts = [drawn.count(list(order)) for order in itertools.permutations(range(3))]
    assert min(counts) > 850
    assert max(counts) < 1150
