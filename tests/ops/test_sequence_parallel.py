"""Rows shared out over 2, 3 and 4 processes come out as on one: outputs and gradients in float64, wherever cuts and padding stand."""

import math

import pytest
import spread_ops
import torch
from checks import assert_close
from group_processes import Processes
from spread_ops import ENCODINGS, KINDS, MASKS, PACKED, B, H, M, V

from permuteformer.ops.feature_map import favor
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.sequence_parallel import SequenceGroup

LENGTHS = {2: [6, 9], 3: [7, 1, 5], 4: [3, 1, 8, 4]}


@pytest.fixture(scope="module", params=LENGTHS, ids="{} processes".format)
def processes(request):
    made = Processes(request.param)
    yield made
    made.close()


def lengths_of(processes):
    return LENGTHS[len(processes.processes)]


def assert_same(found, given, **more):
    """Stretches of all processes against the whole row on one; the gradients of what they share add up."""
    out, gradients, shared = spread_ops.alone(given, **more)
    assert_close(torch.cat([part[0] for part in found], dim=2), out)
    for n, gradient in enumerate(gradients):
        assert_close(torch.cat([part[1][n] for part in found], dim=2), gradient)
    for n, gradient in enumerate(shared):
        assert gradient.abs().max() > 1e-3, "nothing reaches it to begin with"
        assert_close(sum(part[2][n] for part in found), gradient)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_as_on_one_process(kind, encoding, processes):
    lengths = lengths_of(processes)
    cases = [(kind, encoding, mask) for mask in (*MASKS, *PACKED)]
    found = processes("spread_ops.together", cases, lengths)
    for n, case in enumerate(cases):
        assert_same([part[n] for part in found], spread_ops.rows(*case, lengths, seed=n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "same",
    [{"features": favor}, {"normalize": False}, {"plain_normalizer": True}, {"chunk_size": 2}],
    ids=["favor", "no normalizer", "plain normalizer", "small blocks"],
)
def test_whatever_is_asked_for(kind, same, processes):
    lengths, cases = lengths_of(processes), [(kind, "permute", "random"), (kind, "permute", "packed random")]
    found = processes("spread_ops.together", cases, lengths, **same)
    for n, case in enumerate(cases):
        assert_same([part[n] for part in found], spread_ops.rows(*case, lengths, seed=n, **same))


@pytest.mark.parametrize("kind", ["bidirectional", "causal", "decay"])
def test_the_kernel_of_the_cpu(kind, processes):
    lengths = [length * 31 for length in lengths_of(processes)]
    cases = [(kind, "permute", mask) for mask in ("none", "random", "one stretch")]
    found = processes("spread_ops.together", cases, lengths, dtype=torch.float32)
    for n, case in enumerate(cases):
        given = spread_ops.rows(*case, lengths, dtype=torch.float32, seed=n)
        assert_same([part[n] for part in found], given, backend="torch")


def test_bfloat16_sums_in_float32(processes):
    lengths = [length * 31 for length in lengths_of(processes)]
    cases = [(kind, "permute", "random") for kind in KINDS]
    found = processes("spread_ops.together", cases, lengths, dtype=torch.bfloat16)
    for n, case in enumerate(cases):
        out, _, _ = spread_ops.alone(spread_ops.rows(*case, lengths, dtype=torch.bfloat16, seed=n))
        assert_close(torch.cat([part[n][0] for part in found], dim=2), out)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_do_not_depend_on_the_length(kind, processes):
    """They are the formula of docs/scaling.md, at 100 and at 10,000 tokens on every process."""
    n = len(processes.processes)
    state = B * H * M * (V + 1) * 4
    same = {"dtype": torch.float32, "chunk_size": 128 if kind == "two-sided" else None}  # the kernel does the others
    for length, mask in ((100, "none"), (10_000, "none"), (100, "packed")):
        found = processes("spread_ops.together", [(kind, "permute", mask)], [length] * n, **same)
        for place, part in enumerate(found):
            right, left = sends(place, n), sends(n - 1 - place, n)
            forward, backward = (right, left) if KINDS[kind].get("causal") else (right + left, left + right)
            if (kind, mask) == ("bidirectional", "none"):
                forward = backward = 1
            told = 8 * B * (4 if mask == "packed" else 1)
            assert part[0][3] == [told + forward * state, 1 + forward, backward * state, backward]


def sends(place, n):
    """How often a process sends its state to one further on: to the next, and what it then holds to those 1, 2, 4, … further on."""
    passes = sum(place > 0 and place + 2**w < n for w in range(n) if 2**w < n - 1)
    assert passes <= math.ceil(math.log2(max(n - 1, 1)))
    return (place < n - 1) + passes


def test_groups_of_a_mesh_do_not_meet():
    """Four processes as 2 x 2: two rows of data, each over two processes."""
    processes, lengths = Processes(4), [4, 7]
    try:
        case = ("decay", "permute", "random")
        found = processes("spread_ops.together", [case], lengths, mesh_shape=(2, 2))
        for data in range(2):
            given = spread_ops.rows(*case, lengths, seed=100 * data)
            assert_same([part[0] for part in found[2 * data : 2 * data + 2]], given)
        assert "not in the group" in processes("spread_ops.refuses_strangers")[3]
    finally:
        processes.close()


def test_what_is_compared_differs_otherwise(processes):
    """A row whose stretches do not know of each other is another."""
    lengths, case = lengths_of(processes), ("decay", "permute", "none")
    found = processes("spread_ops.together", [case], lengths)
    other = spread_ops.rows(*case, lengths)
    other["log_decay"] = other["log_decay"] - 0.01
    with pytest.raises(AssertionError):
        assert_same([part[0] for part in found], other)


def test_without_processes_it_says_how_to_start_them():
    with pytest.raises(ValueError, match="torchrun"):
        SequenceGroup()


def test_a_state_from_the_right_is_for_two_sides():
    q, k, v = torch.randn(3, 1, 1, 4, 4).unbind()
    _, state = linear_attention(q, k, v, feature_map=torch.exp, two_sided=True)
    with pytest.raises(ValueError, match="after is what tokens on the right left"):
        linear_attention(q, k, v, feature_map=torch.exp, causal=True, after=state)
