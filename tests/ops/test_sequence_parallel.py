"""Rows sharded across 2, 3 and 4 processes are the rows on one: outputs and gradients in float64, wherever cuts and padding are."""

import math

import pytest
import sharded_ops
import torch
from checks import assert_close
from group_processes import Processes
from sharded_ops import ENCODINGS, MASKS, MODES, PACKED, B, H, M, V

from permuteformer.ops.feature_map import favor
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
    """Shards of all processes against the whole row on one; the gradients of shared tensors add up."""
    out, gradients, shared = sharded_ops.alone(given, **more)
    assert_close(torch.cat([part[0] for part in found], dim=2), out)
    for n, gradient in enumerate(gradients):
        assert_close(torch.cat([part[1][n] for part in found], dim=2), gradient)
    for n, gradient in enumerate(shared):
        assert gradient.abs().max() > 1e-3, "it has no effect to begin with"
        assert_close(sum(part[2][n] for part in found), gradient)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("mode", MODES)
def test_as_on_one_process(mode, encoding, processes):
    lengths = lengths_of(processes)
    cases = [(mode, encoding, mask) for mask in (*MASKS, *PACKED)]
    found = processes("sharded_ops.together", cases, lengths)
    for n, case in enumerate(cases):
        assert_same([part[n] for part in found], sharded_ops.rows(*case, lengths, seed=n))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "same",
    [{"features": favor}, {"normalizer": "none"}, {"normalizer": "plain"}, {"chunk_size": 2}],
    ids=["favor", "no normalizer", "plain normalizer", "small blocks"],
)
def test_settings(mode, same, processes):
    lengths, cases = lengths_of(processes), [(mode, "permute", "random"), (mode, "permute", "packed random")]
    found = processes("sharded_ops.together", cases, lengths, **same)
    for n, case in enumerate(cases):
        assert_same([part[n] for part in found], sharded_ops.rows(*case, lengths, seed=n, **same))


@pytest.mark.parametrize("mode", MODES)
def test_cpu_kernel_and_low_precision(mode, processes):
    lengths = [length * 31 for length in lengths_of(processes)]
    cases = [(mode, "permute", mask) for mask in ("none", "random", "one shard")]
    found = processes("sharded_ops.together", cases, lengths, dtype=torch.float32)
    for n, case in enumerate(cases):
        assert_same([part[n] for part in found], sharded_ops.rows(*case, lengths, dtype=torch.float32, seed=n), backend="torch")
    found = processes("sharded_ops.together", cases[1:2], lengths, dtype=torch.bfloat16)
    out, _, _ = sharded_ops.alone(sharded_ops.rows(*cases[1], lengths, dtype=torch.bfloat16))
    assert_close(torch.cat([part[0][0] for part in found], dim=2), out)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "global"])
def test_bytes_do_not_depend_on_the_length(mode, processes):
    """They are the formula of docs/distributed.md, at 100 and at 10,000 tokens per process."""
    n = len(processes.processes)
    state = B * H * M * (V + 1) * 4
    for length, mask in ((100, "none"), (10_000, "none"), (100, "packed")):
        found = processes("sharded_ops.together", [(mode, "permute", mask)], [length] * n, dtype=torch.float32)
        for place, part in enumerate(found):
            right, left = sends(place, n), sends(n - 1 - place, n)
            forward, backward = (right, left) if mode in ("causal", "decay") else (right + left, left + right)
            if (mode, mask) == ("bidirectional", "none"):
                forward = backward = 1
            sizes = 8 * B * (4 if mask == "packed" else 1)
            assert part[0][3] == [sizes + forward * state, 1 + forward, backward * state, backward]


def sends(place, n):
    """How often a process sends its state: to the next, and the sum it then has to those 1, 2, 4, … further on."""
    passes = sum(place > 0 and place + 2**w < n for w in range(n) if 2**w < n - 1)
    assert passes <= math.ceil(math.log2(max(n - 1, 1)))
    return (place < n - 1) + passes


def test_groups_of_a_mesh():
    """Four processes as 2 x 2: two batches of rows, each over two processes."""
    processes, lengths = Processes(4), [4, 7]
    try:
        case = ("decay", "permute", "random")
        found = processes("sharded_ops.together", [case], lengths, mesh_shape=(2, 2))
        for data in range(2):
            given = sharded_ops.rows(*case, lengths, seed=100 * data)
            assert_same([part[0] for part in found[2 * data : 2 * data + 2]], given)
        messages = processes("sharded_ops.refusals")
        assert "group" in messages[3]["group"]
        assert all("axes" in each["axes"] and "state" in each["state"] for each in messages)
    finally:
        processes.close()


def test_the_comparison_can_fail(processes):
    lengths, case = lengths_of(processes), ("decay", "permute", "none")
    found = processes("sharded_ops.together", [case], lengths)
    other = sharded_ops.rows(*case, lengths)
    other["log_decay"] = other["log_decay"] - 0.01
    with pytest.raises(AssertionError):
        assert_same([part[0] for part in found], other)


def test_without_processes_the_error_names_torchrun():
    with pytest.raises(ValueError, match="torchrun"):
        SequenceGroup()
