"""Linear maps of few rows, and dropout, by the CPU kernel."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from permuteformer.ops import fused_block
from permuteformer.ops.modules import FEW_ROWS, Dropout, Linear
from permuteformer.ops.native import load

needs_kernel = pytest.mark.skipif(isinstance(load(), str), reason="the kernel was not built")


@pytest.fixture
def products(monkeypatch):
    """The shapes that the kernel multiplied."""
    seen, project = [], fused_block.project
    monkeypatch.setattr(fused_block, "project", lambda x, *weights: seen.append(tuple(x.shape)) or project(x, *weights))
    return seen


@needs_kernel
@pytest.mark.parametrize(("size", "out"), [(16, 1), (48, 7), (512, 130), (1024, 515)])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_equal_torch(products, size, out, bias):
    linear = Linear(size, out, bias=bias)
    for shape in [(1, 1, size), (3, size), (2, 2, size), (7, size), (0, size), (size,), (FEW_ROWS, size)]:
        x = torch.randn(shape)
        with torch.inference_mode():
            assert torch.allclose(linear(x), F.linear(x, linear.weight, linear.bias), atol=1e-5)
    assert len(products) == 7
    x = torch.randn(size, 3).t()
    with torch.no_grad():
        assert torch.allclose(linear(x), F.linear(x, linear.weight, linear.bias), atol=1e-5)


@needs_kernel
def test_torch_multiplies_what_the_kernel_cannot(products):
    def run(linear, x, **context):
        with torch.no_grad():
            assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))

    run(Linear(32, 5), torch.randn(FEW_ROWS + 1, 32))
    run(Linear(20, 5), torch.randn(1, 20))
    run(Linear(32, 5).double(), torch.randn(1, 32).double())
    run(parametrizations.weight_norm(Linear(32, 5)), torch.randn(1, 32))
    with torch.autocast("cpu", torch.bfloat16):
        run(Linear(32, 5), torch.randn(1, 32))
    x = torch.randn(1, 32, requires_grad=True)
    Linear(32, 5)(x).sum().backward()
    assert x.grad is not None
    assert not products
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
        Linear(32, 5)(torch.randn(1, 16))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_drops_or_scales(p, dtype):
    torch.manual_seed(0)
    x = torch.full((301, 1001), 3.0, dtype=dtype)
    y = Dropout(p)(x)
    assert y.dtype == dtype
    assert float((y == 0).double().mean()) == pytest.approx(p, abs=4e-3)  # five deviations of a third of a million coins
    kept = y[y != 0].double()
    assert torch.allclose(kept, torch.full_like(kept, 3 / (1 - p) if p < 1 else 0), rtol=1e-4 if dtype != torch.bfloat16 else 8e-3)


def test_dropout_of_neighbours_is_independent():
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(400_000)) != 0).double() - 0.5
    for distance in (1, 2, 3, 4, 5, 8, 16):
        assert abs(float((kept[distance:] * kept[:-distance]).mean())) < 0.25 * 5 / 400_000**0.5


@needs_kernel
def test_dropout_depends_on_the_seed_only():
    x = torch.randn(300, 400)

    def draw(x=x, seed=3):
        torch.manual_seed(seed)
        return Dropout(0.3)(x)

    kernel, expected = load(), draw()
    assert not torch.equal(draw(seed=4), expected)
    assert torch.equal(draw(x.t().contiguous().t()), expected)
    torch.set_num_threads(3)
    assert torch.equal(draw(), expected)
    for name in kernel.instruction_sets:
        kernel.use(name)
        assert torch.equal(draw(), expected)
    kernel.use(kernel.instruction_sets[0])
    draw = Dropout(0.3)
    assert not torch.equal(draw(x), draw(x))


def test_derivatives_of_dropout():
    for shape in ((7, 11, 3), (0,), (1,), ()):
        x = torch.randn(shape, requires_grad=True)
        y = Dropout(0.5)(x)
        (d,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(d.sum(), x)
        torch.testing.assert_close(d, 4 * y)
        assert torch.equal(again, torch.where(y == 0, 0.0, 8.0))
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_dropout_is_unbiased_in_every_place():
    torch.manual_seed(0)
    seen = torch.stack([(Dropout(0.5)(torch.ones(2**14 + 100)) != 0).double() for _ in range(400)])
    deviation = 0.5 / 400**0.5
    assert float((seen.mean(0) - 0.5).abs().max()) < 5.5 * deviation
    assert float((seen.mean(1) - 0.5).abs().max()) < 5.5 * 0.5 / 2**7
    assert float(seen.mean(0).std()) == pytest.approx(deviation, rel=0.05)
    assert float(seen.mean(1).std()) == pytest.approx(0.5 / 2**7, rel=0.2)
    for n in range(2, 12):
        assert float((Dropout(2**-n)(torch.ones(2**20)) == 0).double().mean()) == pytest.approx(2**-n, abs=5 * (2**-n / 2**20) ** 0.5)
