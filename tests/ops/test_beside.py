import pytest
import torch

from permuteformer.ops.beside import empty_beside, split

SIZES = [12, 12, 6]


def heads(x, sizes=SIZES, count=2):
    return [part.unflatten(-1, (count, -1)).transpose(1, 2) for part in split(x, sizes)]


@pytest.mark.parametrize("shape", [(3, 5, 30), (1, 1, 30), (4, 30)])
@pytest.mark.parametrize("beside", [True, False])
def test_gradients_are_those_of_torch(shape, beside):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(shape, dtype=torch.float64).split(SIZES, dim=-1)
    if not beside:
        weights = [w.clone() for w in weights]
    (expected,) = torch.autograd.grad(x.split(SIZES, dim=-1), x, weights)
    (found,) = torch.autograd.grad(split(x, SIZES), x, weights)
    assert torch.equal(found, expected)


def test_gradients_side_by_side_are_not_copied_and_others_are():
    x = torch.randn(2, 5, 30, requires_grad=True)
    whole = torch.randn(2, 5, 30)
    q, k, v = whole.split(SIZES, dim=-1)
    for given, is_copied in [((q, k, v), False), ((k, q, v), True), ((q, k, v.clone()), True), ((q, q, v), True)]:
        (found,) = torch.autograd.grad(split(x, SIZES), x, given)
        assert (found.data_ptr() == whole.data_ptr()) is not is_copied
        assert torch.equal(found, torch.cat(given, dim=-1))


def test_a_part_without_a_gradient():
    x = torch.randn(2, 5, 30, requires_grad=True)
    split(x, SIZES)[1].sum().backward()
    assert torch.equal(x.grad, torch.cat([torch.zeros(2, 5, 12), torch.ones(2, 5, 12), torch.zeros(2, 5, 6)], dim=-1))


def test_second_gradients():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: [part.sin() * part for part in split(x, [1, 3])], x)


@pytest.mark.parametrize("shape", [(3, 5, 30), (1, 7, 30)])
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
    parts = heads(torch.randn(3, 5, 30))
    for apart in ([parts[1], parts[0], parts[2]], [part.contiguous() for part in parts], [parts[0].clone(), *parts[1:]]):
        room = empty_beside(apart)
        assert [new.shape for new in room] == [part.shape for part in apart]
        assert len({new.untyped_storage().data_ptr() for new in room}) == 3
