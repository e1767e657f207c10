"""Our dropout is dropout."""

import pytest
import torch

from permuteformer.models.dropout import Dropout
from permuteformer.ops.native import load


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_number_is_dropped_or_scaled_with_its_chance(p, dtype):
    torch.manual_seed(0)
    x = torch.full((301, 1001), 3.0, dtype=dtype)
    y = Dropout(p)(x)
    assert y.dtype == dtype
    assert float((y == 0).double().mean()) == pytest.approx(p, abs=4e-3)  # five deviations of a third of a million coins
    kept = y[y != 0].double()
    assert torch.allclose(kept, torch.full_like(kept, 3 / (1 - p) if p < 1 else 0), rtol=1e-4 if dtype != torch.bfloat16 else 8e-3)


def test_numbers_are_independent():
    """Neighbours, and those that come of one draw or of the same place of the next."""
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(400_000)) != 0).double() - 0.5
    for distance in (1, 2, 3, 4, 5, 8, 16):
        assert abs(float((kept[distance:] * kept[:-distance]).mean())) < 0.25 * 5 / 400_000**0.5


def test_gradients_go_where_numbers_went():
    x = torch.randn(7, 11, 3, requires_grad=True)
    y = Dropout(0.4)(x)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.allclose(x.grad * x, y)


def test_it_follows_the_seed_and_goes_on():
    draw = Dropout(0.5)
    torch.manual_seed(1)
    first, second = draw(torch.ones(50)), draw(torch.ones(50))
    torch.manual_seed(1)
    assert torch.equal(draw(torch.ones(50)), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("shape", [(0,), (1,), (5,), ()])
def test_small_shapes(shape):
    assert Dropout(0.5)(torch.ones(shape)).shape == shape


def test_nothing_is_dropped_otherwise():
    x = torch.randn(100)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


@pytest.mark.skipif(isinstance(load(), str), reason=str(load()))
def test_threads_and_instruction_sets_drop_the_same():
    x = torch.randn(3, 40_000)

    def draw():
        torch.manual_seed(3)
        return Dropout(0.3)(x)

    kernel, expected = load(), draw()
    torch.set_num_threads(3)
    assert torch.equal(draw(), expected)
    for name in kernel.instruction_sets:
        kernel.use(name)
        assert torch.equal(draw(), expected)
    kernel.use(kernel.instruction_sets[0])


@pytest.mark.skipif(isinstance(load(), str), reason=str(load()))
def test_its_bits_are_even():
    """Chances of one half, a quarter and so on are kept by all numbers, in rows and over rows; and another seed drops others."""
    torch.manual_seed(0)
    seen = torch.stack([(Dropout(0.5)(torch.ones(2**14 + 100)) != 0).double() for _ in range(400)])
    deviation = 0.5 / 400**0.5
    assert float((seen.mean(0) - 0.5).abs().max()) < 5.5 * deviation
    assert float((seen.mean(1) - 0.5).abs().max()) < 5.5 * 0.5 / 2**7
    assert float(seen.mean(0).std()) == pytest.approx(deviation, rel=0.05)
    assert float(seen.mean(1).std()) == pytest.approx(0.5 / 2**7, rel=0.2)
    for n in range(2, 12):
        assert float((Dropout(2**-n)(torch.ones(2**20)) == 0).double().mean()) == pytest.approx(2**-n, abs=5 * (2**-n / 2**20) ** 0.5)


def test_a_second_derivative():
    x = torch.randn(50, requires_grad=True)
    y = Dropout(0.5)(x)
    (d,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(d.sum(), x)
    assert torch.equal(again, torch.where(y == 0, 0.0, 8.0))


def test_layout_does_not_matter():
    x = torch.randn(30, 50)
    torch.manual_seed(1)
    expected = Dropout(0.5)(x)
    torch.manual_seed(1)
    assert torch.equal(Dropout(0.5)(x.t().contiguous().t()), expected)
