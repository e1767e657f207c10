"""The fused halves of a block are what modules of PyTorch compute one by one in float64."""

import copy
import subprocess
import sys

import pytest
import torch
from block_modules import FeedForward, attention_half
from checks import assert_as_exact
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from permuteformer.ops.fused_block import ACTIVATIONS, NO_DROPOUT, Chance, drop
from permuteformer.ops.native import load
from permuteformer.ops.native_backend import MAPS

KERNEL = load()
pytestmark = pytest.mark.skipif(isinstance(KERNEL, str), reason=str(KERNEL))


def results(half, x, queries, d_y, way, dtype):
    """The output and the gradients of everything."""
    half = copy.deepcopy(half).to(dtype)
    given = [None if y is None else y.to(dtype).requires_grad_() for y in (x, queries)]
    y = getattr(half, way)(*given)
    wanted = [*(each for each in given if each is not None), *half.parameters()]
    return [y.detach(), *torch.autograd.grad(y, wanted, d_y.to(dtype))]


def compare(half, x, queries=None):
    """Compare the kernel with modules in float64, and with their error in float32. Outputs of masked tokens are undefined."""
    mask = getattr(getattr(half, "mixing", None), "mask", None) if queries is None else None
    hidden = torch.zeros(1, 1, 1, dtype=torch.bool) if mask is None else ~mask.unsqueeze(-1)
    d_y = torch.randn_like(x if queries is None else queries).masked_fill(hidden, 0)
    ways = (("fused", torch.float32), ("forward", torch.float32), ("forward", torch.float64))
    found = [results(half, x, queries, d_y, *way) for way in ways]
    assert_as_exact(*([y.masked_fill(hidden, 0), *gradients] for y, *gradients in found))


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65, 129, 1030, 2100])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_feed_forward(instruction_set, rows, activation):
    compare(FeedForward(48, 80, activation), torch.randn(1, rows, 48))


@pytest.mark.parametrize(("width", "hidden"), [(16, 16), (32, 256), (64, 272), (16, 1040)])
def test_feed_forward_of_any_width(instruction_set, width, hidden):
    """Several parts of the hidden layer, and one that is not full."""
    compare(FeedForward(width, hidden, "gelu", bias=hidden != 256), torch.randn(2, 3, 40, width))


@pytest.mark.parametrize("chance", [NO_DROPOUT, Chance(7, 2**31)], ids=["", "dropout"])
def test_a_second_derivative_of_rows_that_are_not_contiguous(chance):
    half = FeedForward(16, 32, "gelu")
    x, noise = torch.randn(4, 16, 5, requires_grad=True), drop(torch.ones(4, 5, 16), chance)
    found = []
    for way, argument in ((half.forward, noise), (half.fused, chance)):
        (d,) = torch.autograd.grad(way(x.transpose(1, 2), None, argument).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(d.square().sum(), [x, *half.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 1030])
@pytest.mark.parametrize("axes", [0, 1, 2], ids=["plain", "permuted", "two axes"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_attention(instruction_set, length, axes, masked):
    compare(attention_half(48, 4, 20, length, axes=axes, masked=masked), torch.randn(2, length, 48))


@pytest.mark.parametrize("queries", [1, 3, 70])
def test_attention_of_some_tokens(instruction_set, queries):
    half = attention_half(32, 2, 40, 200, axes=1, masked=True, queries=queries)
    compare(half, torch.randn(2, 200, 32), torch.randn(2, queries, 32))


@pytest.mark.parametrize(("batch", "length"), [(1, 2050), (3, 700), (40, 60), (70, 5)])
def test_groups_of_rows(batch, length):
    """A row in parts, single rows, several rows together: gradients of weights are summed in groups of them."""
    compare(attention_half(32, 2, 16, length, batch, axes=1, masked=True), torch.randn(batch, length, 32))
    compare(FeedForward(32, 64, "gelu"), torch.randn(batch, length, 32))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 150), st.integers(1, 40), st.integers(1, 3), st.integers(0, 3), st.booleans(),
    st.booleans(), st.sampled_from(sorted(MAPS)), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_any_sizes(batch, heads, length, features, width, axes, masked, bias, feature_map, normalize, seed):
    """Heads may end within a vector; only all of them together need to fill one."""
    torch.manual_seed(seed)
    heads, width = 2**heads, 32 * width  # 2 to 32 heads
    features = -(-features * heads // 16) * 16 // heads if 16 % heads else features * 16 // heads
    sizes = {"axes": min(axes, features), "masked": masked, "feature_map": feature_map, "normalize": normalize, "bias": bias}
    half = attention_half(width, heads, max(features, 1), length, batch, **sizes)
    if any(size % 16 for each in half.maps for size in each.weight.shape):
        return
    for each in half.maps[:2]:  # sums of weights near zero would show rounding only
        nn.init.normal_(each.weight)
        if bias:
            nn.init.constant_(each.bias, 0.5)
    compare(half, torch.randn(batch, length, width))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_depends_on_seed_and_place(instruction_set, p):
    """Gradients of dropped numbers are zero."""
    for half in (FeedForward(32, 64, "gelu"), attention_half(32, 2, 16, 150, axes=1)):
        chance, x = Chance(seed=-(2**60), dropped=round(p * 2**32)), torch.randn(2, 150, 32, requires_grad=True)
        bare = copy.deepcopy(half)
        nn.init.zeros_(bare.maps[-1].weight)
        nn.init.ones_(bare.maps[-1].bias)
        noise = bare.fused(torch.zeros_like(x), None, chance).detach()
        assert float((noise == 0).float().mean()) == pytest.approx(p, abs=0.03)
        d_y = torch.randn_like(x)
        ours, theirs = half.fused(x, None, chance), half(x, None, noise)
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
        for a, b in zip(*(torch.autograd.grad(y, [x, *half.parameters()], d_y) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-4)


def test_threads_change_nothing():
    for half in (FeedForward(32, 64, "gelu"), attention_half(32, 2, 16, 1500, axes=1, masked=True)):
        x, found = torch.randn(2, 1500, 32, requires_grad=True), []
        d_y = torch.randn_like(x)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = half.fused(x)
            found.append([y, *torch.autograd.grad(y, [x, *half.parameters()], d_y)])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_masked_tokens_may_hold_anything():
    half = attention_half(32, 2, 16, 70, axes=1)
    x = torch.randn(2, 70, 32, requires_grad=True)
    expected = half.fused(x)
    (d_expected,) = torch.autograd.grad(expected.sum(), x)
    padded = torch.cat([x.detach(), torch.full((2, 9, 32), 1e30)], dim=1).requires_grad_()
    half.mixing = half.mixing._replace(mask=(torch.arange(79) < 70).expand(2, -1))
    y = half.fused(padded)[:, :70]
    (d_padded,) = torch.autograd.grad(y.sum(), padded)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(d_padded[:, :70], d_expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad):
    x = torch.randn(1, 80, 32)
    x[0, 7, 3] = bad
    assert not FeedForward(32, 64, "gelu").fused(x)[0, 7].isfinite().any()
    assert not attention_half(32, 2, 16, 80, 1, axes=1).fused(x)[0].isfinite().any()


@pytest.mark.parametrize("size", [-1e30, -100.0, -12.0, -6.0, 0.0, 6.0, 12.0, 1e30])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations_far_from_zero(instruction_set, activation, size):
    half = FeedForward(16, 16, activation)
    with torch.no_grad():
        half.maps[0].weight.zero_()
        half.maps[0].bias.fill_(size)
        half.maps[1].weight.copy_(torch.eye(16))
        half.maps[1].bias.zero_()
    x, d_y = torch.zeros(1, 3, 16), torch.ones(1, 3, 16)
    torch.testing.assert_close(half.fused(x), half(x), rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(f(x), half.maps[0].bias, d_y)[0] for f in (half.fused, half))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_positions_changed_before_the_backward_pass_are_noticed():
    half = attention_half(32, 2, 16, 50, axes=2)
    y = half.fused(torch.randn(2, 50, 32, requires_grad=True))
    half.mixing.positions.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


STEP = """
import resource, sys, torch
sys.path.insert(0, "tests")
from block_modules import FeedForward, attention_half
half = FeedForward(32, 1024, "gelu") if sys.argv[1] == "feed" else attention_half(32, 4, 256, 60_000, 1, axes=1)
def step(length):
    x = torch.randn(1, length, 32, requires_grad=True)
    half.fused(x).sum().backward()
step(2_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(60_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("which", ["feed", "attend"])
def test_nothing_wide_is_in_memory(which):
    """60,000 tokens of 1,024 features, or of a hidden layer of 1,024, would be 246 MB each; a tensor 32 wide is 8 MB."""
    done = subprocess.run([sys.executable, "-c", STEP, which], capture_output=True, text=True, check=True)
    assert int(done.stdout) * (1 if sys.platform == "darwin" else 1024) < 90e6  # getrusage's units
