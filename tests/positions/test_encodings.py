"""The interface of every encoding; learned embeddings against rows of their tables; sinusoids against the formula and Marian."""

import checks
import mpmath
import pytest
import torch
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from permuteformer.positions import POSITIONS
from permuteformer.positions.learned import Learned
from permuteformer.positions.sinusoidal import Sinusoidal

STRUCTURE = {"num_heads": 3, "feature_size": 20, "hidden_size": 12, "axes": 2, "causal": False}
TABLES = {"axis_tables.0.weight", "axis_tables.1.weight"}


@pytest.mark.parametrize(
    ("name", "options", "hook", "saved", "text"),
    [
        ("learned", {"max_length": 5}, "embed", TABLES, "max_length=5"),
        ("sinusoidal", {}, "embed", set(), "channels=6+6"),
        ("rope", {"base": 100.0}, "transform", set(), "features=10+10, base=100"),
        ("orthogonal", {"seed": 3}, "transform", {"basis", "turns"}, "heads=3, features=10+10"),
        ("permute", {}, "transform", {"permutation"}, "heads=3, features=20"),
        ("t5_bias", {"num_buckets": 8}, "bias", TABLES, "causal=False"),
        ("decay", {"two_sided": True}, "log_decay", {"log_r"}, "two_sided=True"),
    ],
)
def test_registered(name, options, hook, saved, text):
    encoding = POSITIONS.build(name, options, STRUCTURE)
    assert encoding.hooks == {hook}
    assert set(encoding.state_dict()) == saved
    assert text in repr(encoding)


@pytest.mark.parametrize(("name", "options", "deviation"), [("learned", {"max_length": 400}, 0.02), ("t5_bias", {"num_heads": 512}, 0.05)])
def test_initial_scale(name, options, deviation):
    weight = POSITIONS.build(name, options, {"hidden_size": 400}).axis_tables[0].weight
    assert abs(weight.std().item() / deviation - 1) < 0.04
    assert abs(weight.mean().item() / deviation) < 0.04


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_learned_adds_one_row_per_axis(axes, rows):
    encoding = Learned(hidden_size=8, max_length=10, axes=axes).double()
    x, positions = torch.randn(2, 5, 8, dtype=torch.float64), torch.randint(0, 10, (rows, 5, axes))
    expected = x + sum(table.weight[positions[..., axis]] for axis, table in enumerate(encoding.axis_tables))
    checks.assert_close(encoding.embed(x, positions), expected)


@pytest.mark.parametrize("position", [10, -1, 10**12])
@pytest.mark.parametrize("axis", [0, 1])
def test_learned_rejects_positions_outside_its_table(position, axis):
    encoding = Learned(hidden_size=8, max_length=10, axes=2)
    positions = torch.full((2, 3, 2), 9)
    encoding.embed(torch.zeros(2, 3, 8), positions)
    positions[1, 2, axis] = position
    with pytest.raises(ValueError, match=rf"position {position} on axis {axis} .*max_length=10"):
        encoding.embed(torch.zeros(2, 3, 8), positions)


def sines_and_cosines(position, size, base):
    """Return sines and cosines of position × base^(-2t/size), by 60-digit arithmetic."""
    with mpmath.workdps(60):
        waves = [position * mpmath.mpf(base) ** (mpmath.mpf(-2 * t) / size) for t in range((size + 1) // 2)]
        return [float(mpmath.sin(w)) for w in waves] + [float(mpmath.cos(w)) for w in waves[: size // 2]]


@pytest.mark.parametrize(("sizes", "base"), [([1], 10_000), ([2], 10_000), ([16], 10_000), ([4, 3], 300), ([5, 4, 4], 10_000)])
def test_sinusoidal_is_the_formula_on_each_axis(sizes, base):
    line = [0, 1, -1, 17, 4096, -(10**5), 10**12, 10**12 + 1, -(10**15), 2**63 - 1]
    rows = [[line[(n + axis) % len(line)] for axis in range(len(sizes))] for n in range(len(line))]  # l a
    waves = [[wave for i, size in zip(row, sizes, strict=True) for wave in sines_and_cosines(i, size, base)] for row in rows]
    x = torch.randn(3, len(line), sum(sizes), dtype=torch.float64)
    actual = Sinusoidal(sum(sizes), len(sizes), float(base)).embed(x, torch.tensor([rows]))
    torch.testing.assert_close(actual, x + torch.tensor(waves, dtype=torch.float64), rtol=0, atol=2e-15)


def test_sinusoidal_is_that_of_marian():
    """Marian has sines first too, with the frequencies of Vaswani et al."""
    marian = MarianSinusoidalPositionalEmbedding(64, 32)
    marian.weight.data = marian.create_weight()
    checks.assert_close(Sinusoidal(32).embed(torch.zeros(1, 64, 32), torch.arange(64).view(1, -1, 1))[0], marian.weight.data)
