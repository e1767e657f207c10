"""The halves of a block by the CPU kernel are what modules of torch compute one by one in float64."""

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sublayer_modules import FeedForward, make_attend
from torch import nn

from permuteformer.ops.backend import MAPS
from permuteformer.ops.native import load
from permuteformer.ops.sublayers import ACTIVATIONS, Chance

KERNEL = load()
pytestmark = pytest.mark.skipif(isinstance(KERNEL, str), reason=str(KERNEL))


def results(half, x, queries, d_y, call, dtype):
    """The output and the gradients of everything, in a row."""
    half = copy.deepcopy(half).to(dtype)
    given = [None if y is None else y.to(dtype).requires_grad_() for y in (x, queries)]
    y = getattr(half, call)(*given)
    wanted = [*(each for each in given if each is not None), *half.parameters()]
    return [y.detach(), *torch.autograd.grad(y, wanted, d_y.to(dtype))]


def assert_as_exact(half, x, queries=None, hidden=None):
    """Ours is nearly as close to float64 as torch's own float32. What hidden tokens give means nothing."""
    d_y = torch.randn_like(x if queries is None else queries)
    if hidden is not None:
        d_y = d_y.masked_fill(hidden.unsqueeze(-1), 0)
    ways = (("forward", torch.float64), ("forward", torch.float32), ("by_kernel", torch.float32))
    exact, usual, ours = (results(half, x, queries, d_y, *way) for way in ways)
    for n, (a, b, c) in enumerate(zip(exact, usual, ours, strict=True)):
        if n == 0 and hidden is not None:
            a, b, c = (y.masked_fill(hidden.unsqueeze(-1), 0) for y in (a, b, c))
        size = a.abs().max().clamp(min=1)
        error, other = ((y.double() - a).abs().max() for y in (c, b))
        assert error <= 2e-6 * size + 5 * other, (n, float(error), float(other))


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65, 129, 1030, 2100])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_feed_forward(instruction_set, rows, activation):
    assert_as_exact(FeedForward(48, 80, activation), torch.randn(1, rows, 48))


def test_a_second_derivative_of_rows_that_are_not_contiguous():
    half = FeedForward(16, 32, "gelu")
    x = torch.randn(4, 16, 5, requires_grad=True)
    found = []
    for way in (half.forward, half.by_kernel):
        (d,) = torch.autograd.grad(way(x.transpose(1, 2), None).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(d.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("width", "hidden"), [(16, 16), (32, 256), (64, 272), (16, 1040)])
def test_feed_forward_of_any_width(instruction_set, width, hidden):
    """More than one part of what is between the two maps, and one that is not full."""
    assert_as_exact(FeedForward(width, hidden, "gelu", bias=hidden != 256), torch.randn(2, 3, 40, width))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 1030])
@pytest.mark.parametrize("axes", [0, 1, 2], ids=["plain", "permuted", "two axes"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_attention(instruction_set, length, axes, masked):
    half = make_attend(48, 4, 20, length, axes=axes, masked=masked)
    assert_as_exact(half, torch.randn(2, length, 48), hidden=~half.work.shown if masked else None)


@pytest.mark.parametrize("queries", [1, 3, 70])
def test_attention_of_some_tokens(instruction_set, queries):
    half = make_attend(32, 2, 40, 200, axes=1, masked=True, queries=queries)
    assert_as_exact(half, torch.randn(2, 200, 32), torch.randn(2, queries, 32))


@pytest.mark.parametrize(("batch", "length"), [(1, 2050), (3, 700), (40, 60), (70, 5)])
def test_rows_that_are_shared_out_otherwise(batch, length):
    """A row in parts, rows by themselves, several rows together: gradients of weights are added up in groups of them."""
    half = make_attend(32, 2, 16, length, batch, axes=1, masked=True)
    assert_as_exact(half, torch.randn(batch, length, 32), hidden=~half.work.shown)
    assert_as_exact(FeedForward(32, 64, "gelu"), torch.randn(batch, length, 32))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 150), st.integers(1, 40), st.integers(1, 3), st.integers(0, 3), st.booleans(),
    st.booleans(), st.sampled_from(sorted(MAPS)), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_any_sizes(batch, heads, length, features, width, axes, masked, bias, feature_map, normalize, seed):
    """Heads that end within a vector: only all of them together need fill one."""
    torch.manual_seed(seed)
    heads, width = 2**heads, 32 * width  # 2 to 32 heads
    features = -(-features * heads // 16) * 16 // heads if 16 % heads else features * 16 // heads
    sizes = {"axes": min(axes, features), "masked": masked, "feature_map": feature_map, "normalize": normalize, "bias": bias}
    half = make_attend(width, heads, max(features, 1), length, batch, **sizes)
    if any(size % 16 for each in half.maps for size in each.weight.shape):
        return
    for each in half.maps[:2]:  # sums of weights so small that rounding is all there is tell nothing
        nn.init.normal_(each.weight)
        if bias:
            nn.init.constant_(each.bias, 0.5)
    assert_as_exact(half, torch.randn(batch, length, width), hidden=~half.work.shown if masked else None)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_is_that_of_the_noise(instruction_set, p):
    """A number of a row is dropped by the seed, the row and its place; gradients of what is dropped are zero."""
    for half in (FeedForward(32, 64, "gelu"), make_attend(32, 2, 16, 150, axes=1)):
        chance, x = Chance(seed=-(2**60), dropped=round(p * 2**32)), torch.randn(2, 150, 32, requires_grad=True)
        bare = copy.deepcopy(half)
        nn.init.zeros_(bare.maps[-1].weight)
        nn.init.ones_(bare.maps[-1].bias)
        noise = (bare.by_kernel(torch.zeros_like(x), None, chance)).detach()
        assert float((noise == 0).float().mean()) == pytest.approx(p, abs=0.03)
        d_y = torch.randn_like(x)
        ours, theirs = half.by_kernel(x, None, chance), half(x, None, noise)
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
        for a, b in zip(*(torch.autograd.grad(y, [x, *half.parameters()], d_y) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-4)


def test_threads_change_no_bit():
    halves = [FeedForward(32, 64, "gelu"), make_attend(32, 2, 16, 1500, axes=1, masked=True)]
    x, d_y = torch.randn(2, 1500, 32), torch.randn(2, 1500, 32)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        found.append([y for half in halves for y in results(half, x, None, d_y, "by_kernel", torch.float32)])
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_padding_reaches_no_real_token():
    """Whatever is in it: not in what comes out, nor in the gradients of real tokens."""
    half = make_attend(32, 2, 16, 100, axes=1)
    real = torch.randn(1, 70, 32, requires_grad=True)
    expected = half.by_kernel(real, None)
    (d_expected,) = torch.autograd.grad(expected.sum(), real)
    padded = torch.cat([real.detach(), torch.full((1, 30, 32), torch.nan)], dim=1).requires_grad_()
    half.work = half.work._replace(shown=torch.arange(100).view(1, -1) < 70)
    y = half.by_kernel(padded, None)[:, :70]
    (d_padded,) = torch.autograd.grad(y.sum(), padded)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(d_padded[:, :70], d_expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad):
    x = torch.randn(1, 80, 32)
    x[0, 7, 3] = bad
    assert not FeedForward(32, 64, "gelu").by_kernel(x, None)[0, 7].isfinite().any()
    assert not make_attend(32, 2, 16, 80, 1, axes=1).by_kernel(x, None)[0].isfinite().any()


@pytest.mark.parametrize("size", [-1e30, -100.0, -12.0, -6.0, 0.0, 6.0, 12.0, 1e30])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations_far_from_zero(instruction_set, activation, size):
    """By a map that gives nothing but its bias, and one that adds nothing."""
    half = FeedForward(16, 16, activation)
    with torch.no_grad():
        half.maps[0].weight.zero_()
        half.maps[0].bias.fill_(size)
        half.maps[1].weight.copy_(torch.eye(16))
        half.maps[1].bias.zero_()
    x = torch.zeros(1, 3, 16)
    y, d_y = half.by_kernel(x, None), torch.ones(1, 3, 16)
    torch.testing.assert_close(y, half(x, None), rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(f(x, None), half.maps[0].bias, d_y)[0] for f in (half.by_kernel, half))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_was_changed_before_the_backward_pass_is_noticed():
    half = make_attend(32, 2, 16, 50, axes=2)
    y = half.by_kernel(torch.randn(2, 50, 32, requires_grad=True), None)
    half.work.positions.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


STEP = """
import resource, sys, torch
sys.path.insert(0, "tests")
from sublayer_modules import FeedForward, make_attend
half = FeedForward(32, 1024, "gelu") if sys.argv[1] == "feed" else make_attend(32, 4, 256, 60_000, 1, axes=1)
def step(length):
    x = torch.randn(1, length, 32, requires_grad=True)
    half.by_kernel(x, None).sum().backward()
step(2_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(60_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("which", ["feed", "attend"])
def test_nothing_wide_is_in_memory(which):
    """60,000 tokens of 1,024 features, or of a hidden layer of 1,024, would be 246 MB each; what is 32 wide is 8."""
    done = subprocess.run([sys.executable, "-c", STEP, which], capture_output=True, text=True, check=True)
    assert int(done.stdout) * (1 if sys.platform == "darwin" else 1024) < 90e6  # getrusage's units
