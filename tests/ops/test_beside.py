import pytest
import torch
from torch.nn import functional as F

from permuteformer.ops.beside import empty_beside, project

SIZES = [12, 12, 6]


def parameters(sizes=SIZES, width=4, dtype=torch.float64, requires_grad=True):
    weights = [torch.randn(size, width, dtype=dtype, requires_grad=requires_grad) for size in sizes]
    return weights, [torch.randn(size, dtype=dtype, requires_grad=requires_grad) for size in sizes]


def heads(x, sizes=SIZES, count=2):
    weights, _ = parameters(sizes, x.shape[-1], x.dtype, requires_grad=False)
    return [part.unflatten(-1, (count, -1)).transpose(1, 2) for part in project(x, weights)]


@pytest.mark.parametrize("shape", [(3, 5, 4), (1, 1, 4), (7, 4)])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_what_each_makes_of_it(shape, beside, biased):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights, biases = parameters()
    biases = biases if biased else []
    d = torch.randn(*shape[:-1], sum(SIZES), dtype=torch.float64).split(SIZES, dim=-1)
    if not beside:
        d = [part.clone() for part in d]
    expected = [F.linear(x, weights[n], biases[n] if biased else None) for n in range(3)]
    found = project(x, weights, biases)
    leaves = [x, *weights, *biases]
    torch.testing.assert_close(list(found), expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, d), torch.autograd.grad(expected, leaves, d))


def test_a_view_that_is_not_contiguous():
    x = torch.randn(4, 5, 3, dtype=torch.float64).transpose(0, 2)  # 3 5 4
    weights, biases = parameters()
    torch.testing.assert_close(project(x, weights, biases)[1], F.linear(x, weights[1], biases[1]))


def test_gradients_side_by_side_are_not_copied_and_others_are(monkeypatch):
    x = torch.randn(2, 5, 4, requires_grad=True)
    weights, _ = parameters(dtype=torch.float32)
    parts = project(x, weights)
    copied = []
    monkeypatch.setattr(torch, "cat", lambda tensors, dim=0, cat=torch.cat: copied.append(dim) or cat(tensors, dim=dim))
    q, k, v = torch.randn(2, 5, 30).split(SIZES, dim=-1)
    for given, is_copied in [((q, k, v), False), ((k, q, v), True), ((q, k, v.clone()), True), ((q, q, v), True)]:
        copied.clear()
        torch.autograd.grad(parts, x, given, retain_graph=True)
        assert (-1 in copied) is is_copied


def test_only_what_is_asked_for():
    x = torch.randn(2, 5, 4)
    weights, biases = parameters(dtype=torch.float32)
    project(x, weights, biases)[1].sum().backward()
    assert x.grad is None
    assert torch.equal(weights[0].grad, torch.zeros(12, 4))
    torch.testing.assert_close(weights[1].grad, x.sum((0, 1)).expand(12, 4))
    torch.testing.assert_close(biases[1].grad, torch.full((12,), 10.0))
    frozen, _ = parameters(dtype=torch.float32, requires_grad=False)
    x.requires_grad_()
    project(x, frozen)[2].sum().backward()
    torch.testing.assert_close(x.grad, frozen[2].sum(0).expand(2, 5, 4))


def test_gradients_and_second_gradients():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weights, biases = parameters([1, 3])

    def both(x, *given):
        return [part.sin() * part for part in project(x, given[:2], given[2:])]

    assert torch.autograd.gradcheck(both, (x, *weights, *biases))
    assert torch.autograd.gradgradcheck(both, (x, *weights, *biases))


@pytest.mark.parametrize("shape", [(3, 5, 4), (1, 7, 4)])
def test_room_lies_as_what_it_is_for(shape):
    parts = heads(torch.randn(shape))
    room = empty_beside(parts)
    for part, new in zip(parts, room, strict=True):
        assert (new.shape, new.stride()) == (part.shape, part.stride())
    assert len({new.untyped_storage().data_ptr() for new in room}) == 1
    for n, new in enumerate(room):
        new.fill_(n)
    assert [new.unique().tolist() for new in room] == [[0], [1], [2]]


def test_room_for_tensors_apart():
    parts = heads(torch.randn(3, 5, 4))
    for apart in ([parts[1], parts[0], parts[2]], [part.contiguous() for part in parts], [parts[0].clone(), *parts[1:]]):
        room = empty_beside(apart)
        assert [new.shape for new in room] == [part.shape for part in apart]
        assert len({new.untyped_storage().data_ptr() for new in room}) == 3
