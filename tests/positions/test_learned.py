"""The learned table: what it adds, and that it knows where it ends."""

import checks
import pytest
import torch

from permuteformer import build
from permuteformer.positions import POSITIONS
from permuteformer.positions.learned import Learned


def test_adds_rows_of_its_table():
    encoding = Learned(hidden_size=8, max_length=10).double()
    x, positions = torch.randn(3, 4, 8, dtype=torch.float64), torch.tensor([[0, 9, 3, 3], [1, 2, 3, 4], [9, 8, 7, 6]]).unsqueeze(-1)
    (table,) = encoding.axis_tables
    checks.assert_close(encoding.embed(x, positions), x + table.weight[positions.squeeze(-1)])
    checks.assert_close(encoding.embed(x, positions[:1]), x + table.weight[positions[:1].squeeze(-1)])


def test_axes_are_summed():
    encoding = Learned(hidden_size=8, max_length=10, axes=3)
    positions = torch.randint(0, 10, (2, 5, 3))
    rows = [table.weight[positions[..., n]] for n, table in enumerate(encoding.axis_tables)]
    checks.assert_close(encoding.embed(torch.zeros(2, 5, 8), positions), rows[0] + rows[1] + rows[2])


def test_only_the_rows_used_learn():
    encoding = Learned(hidden_size=8, max_length=10)
    encoding.embed(torch.zeros(1, 3, 8), torch.tensor([[[2], [5], [2]]])).sum().backward()
    gradient = encoding.axis_tables[0].weight.grad
    assert gradient.abs().sum(-1).nonzero().flatten().tolist() == [2, 5]
    assert torch.equal(gradient[2], torch.full((8,), 2.0))


def test_initial_scale():
    weight = Learned(hidden_size=256, max_length=400).axis_tables[0].weight
    assert abs(weight.std().item() - 0.02) < 0.001
    assert abs(weight.mean().item()) < 0.001


@pytest.mark.parametrize("position", [10, -1, 10**12])
@pytest.mark.parametrize("axis", [0, 1])
def test_positions_outside_are_refused(position, axis):
    encoding = Learned(hidden_size=8, max_length=10, axes=2)
    positions = torch.full((2, 3, 2), 9)
    encoding.embed(torch.zeros(2, 3, 8), positions)
    positions[1, 2, axis] = position
    message = rf"position {position} on axis {axis} .*max_length=10 has positions 0 … 9; .*larger max_length"
    with pytest.raises(ValueError, match=message):
        encoding.embed(torch.zeros(2, 3, 8), positions)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="max_length must be a whole number, at least 1; it is 0"):
        Learned(hidden_size=8, max_length=0)
    with pytest.raises(TypeError, match="max_length"):
        POSITIONS.build("learned", {}, {"hidden_size": 8})


def test_registered():
    encoding = POSITIONS.build(
        "learned", {"max_length": 5}, {"hidden_size": 12, "axes": 2, "num_heads": 3, "feature_size": 4, "causal": False}
    )
    assert encoding.hooks == {"embed"}
    assert sum(p.numel() for p in encoding.parameters()) == 2 * 5 * 12
    assert encoding.to(torch.bfloat16).embed(torch.zeros(1, 1, 12, dtype=torch.bfloat16), torch.tensor([[[1, 2]]])).dtype == torch.bfloat16


def test_attention_refuses_it():
    with pytest.raises(ValueError, match=r"'softmax' cannot be combined with position encoding 'learned'.*embeddings instead"):
        build("softmax", [("learned", {"max_length": 4})], hidden_size=8, num_heads=2)
