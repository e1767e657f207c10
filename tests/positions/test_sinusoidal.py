"""Sinusoids against the formula, written out one number at a time, and against Hugging Face's Marian."""

import math

import checks
import mpmath
import pytest
import torch
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from permuteformer import build
from permuteformer.positions import POSITIONS
from permuteformer.positions.sinusoidal import Sinusoidal


def added(encoding, positions, dtype=torch.float64):
    """What the encoding adds at positions ``b l a``."""
    return encoding.embed(torch.zeros(*positions.shape[:2], sum(encoding.sizes), dtype=dtype), positions)


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_is_the_formula(size):
    positions = [0, 1, -1, 17, 4096, -(10**5)]
    actual = added(Sinusoidal(size), torch.tensor(positions).view(1, -1, 1))
    for n, position in enumerate(positions):
        waves = [position * 10_000 ** (-2 * t / size) for t in range((size + 1) // 2)]
        expected = [math.sin(w) for w in waves] + [math.cos(w) for w in waves[: size // 2]]
        checks.assert_close(actual[0, n], torch.tensor(expected, dtype=torch.float64))


def test_is_marians():
    """Marian lays out sines first, as here, with the frequencies of Vaswani et al."""
    theirs = MarianSinusoidalPositionalEmbedding(64, 32)
    theirs.weight.data = theirs.create_weight()
    checks.assert_close(added(Sinusoidal(32), torch.arange(64).view(1, -1, 1), torch.float32)[0], theirs.weight.data)


@pytest.mark.parametrize("position", [10**12, 10**12 + 1, -(10**15), 2**63 - 1])
def test_any_integer_is_a_position(position):
    actual = added(Sinusoidal(16), torch.tensor([[[position]]]))[0, 0]
    with mpmath.workdps(60):
        waves = [mpmath.mpf(position) * mpmath.mpf(10_000) ** (mpmath.mpf(-2 * t) / 16) for t in range(8)]
        expected = [mpmath.sin(w) for w in waves] + [mpmath.cos(w) for w in waves]
        assert max(abs(a - e) for a, e in zip(actual.tolist(), expected, strict=True)) < 1e-15


@pytest.mark.parametrize(("size", "axes"), [(16, 2), (7, 2), (13, 3)])
def test_axes_have_their_own_channels(size, axes):
    positions = torch.randint(-1000, 1000, (2, 5, axes))
    encoding = Sinusoidal(size, axes, base=300.0)
    alone = [added(Sinusoidal(share, base=300.0), positions[..., n, None]) for n, share in enumerate(encoding.sizes)]
    checks.assert_close(added(encoding, positions), torch.cat(alone, dim=-1))


def test_adds_to_what_is_there():
    encoding = Sinusoidal(8)
    x, positions = torch.randn(3, 5, 8, dtype=torch.float64), torch.arange(5).view(1, -1, 1)
    checks.assert_close(encoding.embed(x, positions), x + added(encoding, positions))
    for dtype in (torch.bfloat16, torch.float32):
        assert encoding.to(dtype).embed(x.to(dtype), positions).dtype == dtype
    checks.assert_close(encoding.embed(x, positions), x + added(Sinusoidal(8), positions))


def test_has_nothing_to_learn_or_to_save():
    encoding = POSITIONS.build("sinusoidal", {}, {"hidden_size": 12, "axes": 2, "num_heads": 3, "feature_size": 4, "causal": False})
    assert encoding.hooks == {"embed"}
    assert not list(encoding.parameters())
    assert not encoding.state_dict()
    assert "6+6" in repr(encoding)


def test_attention_refuses_it():
    with pytest.raises(ValueError, match=r"'linear' cannot be combined with position encoding 'sinusoidal'.*embeddings instead"):
        build("linear", [("sinusoidal", {})], hidden_size=8, num_heads=2)
