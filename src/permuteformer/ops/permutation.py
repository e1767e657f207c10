"""Permutations of a head's features, and their powers in closed form.

The paper's (P x)_a = x_{pi(a)}, so (P^i x)_a = x_{pi^i(a)}. On a cycle, pi steps from one feature to the next, so pi^i(a) is found by
adding i to the rank of a in its cycle: no table, no largest position, and the inverse is -i.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from permuteformer.ops.checks import is_transformed


class Cycles(NamedTuple):
    """The cycles of one permutation per head. Slots number the features cycle by cycle, in the order pi visits them.

    Where ``contiguous``, slot and feature are the same: P^i then rotates contiguous runs of a token's features.

    >>> decompose(torch.tensor([[1, 2, 0, 4, 3]])).length
    tensor([[3, 3, 3, 2, 2]])
    """

    feature: Tensor
    """``h m``: the feature in each slot."""
    rank: Tensor
    """``h m``: the rank of each feature in its cycle."""
    start: Tensor
    """``h m``: the first slot of each feature's cycle."""
    length: Tensor
    """``h m``: the length of each feature's cycle."""
    axis: Tensor
    """``m``: the axis of positions that permutes each feature."""
    contiguous: bool


class Rotation(NamedTuple):
    """Contiguous cycles as the CPU kernel reads them: P^i rotates each run of features to the left by i. int32 on the CPU."""

    cycles: Tensor
    """``n 3``: the first feature, the length and the axis of every cycle of every head."""
    of_head: Tensor
    """``h + 1``: where the cycles of each head begin, and where the last end."""


def random_permutation(num_heads: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw one permutation per head uniformly: ``h m``.

    >>> random_permutation(2, 4, torch.Generator().manual_seed(0)).sort(-1).values
    tensor([[0, 1, 2, 3],
            [0, 1, 2, 3]])
    """
    return torch.stack([torch.randperm(size, generator=generator) for _ in range(num_heads)])


def max_order_permutation(num_heads: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw one permutation per head among those with the largest order at this size: ``h m``.

    >>> order(decompose(max_order_permutation(num_heads=1, size=64)))
    [2042040]
    """
    canonical = from_cycle_lengths(max_order_cycle_lengths(size))
    relabel = random_permutation(num_heads, size, generator)
    # relabel ∘ canonical ∘ relabel^-1 has the same cycle lengths on shuffled features.
    return torch.empty_like(relabel).scatter_(1, relabel, relabel[:, canonical])


def from_cycle_lengths(lengths: tuple[int, ...]) -> Tensor:
    """Return the permutation ``m`` with contiguous cycles of these lengths.

    >>> from_cycle_lengths((3, 2))
    tensor([1, 2, 0, 4, 3])
    """
    starts = accumulate(lengths, initial=0)
    return torch.tensor([start + (rank + 1) % length for start, length in zip(starts, lengths, strict=False) for rank in range(length)])


@lru_cache
def max_order_cycle_lengths(size: int) -> tuple[int, ...]:
    """Return cycle lengths that sum to ``size`` with the largest least common multiple (Landau's function).

    >>> lengths = max_order_cycle_lengths(64)
    >>> sum(lengths), math.lcm(*lengths)
    (64, 2042040)
    """
    # The largest order needs powers of distinct primes only: a knapsack over primes.
    best: list[tuple[int, tuple[int, ...]]] = [(1, ())] * (size + 1)
    for prime in (p for p in range(2, size + 1) if all(p % q for q in range(2, math.isqrt(p) + 1))):
        for budget in range(size, prime - 1, -1):
            power = prime
            while power <= budget:
                order, lengths = best[budget - power]
                best[budget] = max(best[budget], (order * power, (*lengths, power)), key=lambda entry: entry[0])
                power *= prime
    lengths = best[size][1]
    return (*lengths, *[1] * (size - sum(lengths)))


def axis_sizes(size: int, axes: int) -> list[int]:
    """Split ``size`` features over ``axes`` as evenly as possible.

    >>> axis_sizes(7, 2)
    [4, 3]
    """
    if not 1 <= axes <= size:
        raise ValueError(f"axes must be from 1 to the number of features, {size}, got {axes}")
    return [size // axes + (axis < size % axes) for axis in range(axes)]


def decompose(permutation: Tensor, axes: int = 1) -> Cycles:
    """Return the cycles of each head of a permutation ``h m``; raise if a head is not a permutation.

    With several ``axes`` the features are split over them (``axis_sizes``), and the permutation must keep each part to itself: then the
    permutations of the axes commute, because they act on different features.

    >>> decompose(torch.tensor([[2, 1, 0]])).feature
    tensor([[0, 2, 1]])
    """
    check_permutation(permutation)
    sizes = axis_sizes(permutation.shape[-1], axes)
    axis = torch.arange(axes, device=permutation.device).repeat_interleave(torch.tensor(sizes, device=permutation.device))
    if (axis[permutation] != axis).any():
        raise ValueError(
            f"permutation mixes features of different axes: with axes={axes} the first {sizes[0]} features belong to the first axis, and "
            "so on; permute each part within itself"
        )
    heads = [_cycles_of(row) for row in permutation.tolist()]
    feature, rank, start, length = (torch.tensor(rows, device=permutation.device) for rows in zip(*heads, strict=True))
    contiguous = bool((feature == torch.arange(feature.shape[-1], device=feature.device)).all())
    return Cycles(feature, rank, start, length, axis, contiguous)


def _cycles_of(row: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the features cycle by cycle, and for each feature its rank in its cycle, the cycle's first slot, and its length."""
    slots: list[int] = []
    rank, start, length = [-1] * len(row), [0] * len(row), [0] * len(row)
    for first in range(len(row)):
        feature, begin = first, len(slots)
        while rank[feature] < 0:
            rank[feature], start[feature] = len(slots) - begin, begin
            slots.append(feature)
            feature = row[feature]
        for feature in slots[begin:]:
            length[feature] = len(slots) - begin
    return slots, rank, start, length


def canonical(permutation: Tensor) -> Tensor:
    """Relabel features so that every cycle is contiguous, the longest first; cycle lengths stay the same.

    Queries and keys relabelled alike have the same products, so with randomly initialised projections this is the same model; P^i then
    moves contiguous runs.

    >>> canonical(torch.tensor([[2, 1, 0]]))
    tensor([[1, 0, 2]])
    """
    rows = []
    for start in decompose(permutation).start:  # equal for all features of a cycle
        _, lengths = start.unique(return_counts=True)
        rows.append(from_cycle_lengths(tuple(sorted(lengths.tolist(), reverse=True))))
    return torch.stack(rows).to(permutation.device)


def permutation_power(cycles: Cycles, positions: Tensor) -> Tensor:
    """Return pi^i for every position: the index to gather features by.

    ``positions``: ``… l a`` int64, any integers. Returns ``… h l m`` with ``out[…, h, l, f] = pi_h^i(f)``, where i is the position of
    token l on the axis of feature f.

    >>> cycles = decompose(torch.tensor([[1, 2, 0, 4, 3]]))
    >>> permutation_power(cycles, torch.tensor([[1], [-1], [10**12]]))
    tensor([[[1, 2, 0, 4, 3],
             [2, 0, 1, 4, 3],
             [1, 2, 0, 3, 4]]])
    """
    if positions.shape[-1] > 1:
        positions = positions.index_select(-1, cycles.axis)  # … l m
    start, length = cycles.start.unsqueeze(-2), cycles.length.unsqueeze(-2)  # h 1 m
    slot = positions.unsqueeze(-3).remainder(length)  # … h l m; taken first, so that no sum overflows
    slot = slot.add_(cycles.rank.unsqueeze(-2)).remainder_(length).add_(start)
    return slot if cycles.contiguous else cycles.feature.unsqueeze(-2).expand_as(slot).gather(-1, slot)


def rotation_of(cycles: Cycles) -> Rotation | None:
    """Return contiguous cycles for the CPU kernel; ``None`` where a cycle is not contiguous.

    >>> cycles, of_head = rotation_of(decompose(torch.tensor([[1, 2, 0, 4, 3]])))
    >>> cycles.tolist(), of_head.tolist()
    ([[0, 3, 0], [3, 2, 0]], [0, 2])
    """
    if not cycles.contiguous:
        return None
    axis, table, ends = cycles.axis.tolist(), list[tuple[int, int, int]](), [0]
    for start in cycles.start:
        firsts, lengths = (x.tolist() for x in start.unique(return_counts=True))
        table += [(first, length, axis[first]) for first, length in zip(firsts, lengths, strict=True)]
        ends.append(len(table))
    return Rotation(torch.tensor(table, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32))


def order(cycles: Cycles) -> list[int]:
    """Return the order of each head's permutation: after that many tokens it is the identity again.

    >>> order(decompose(torch.tensor([[1, 2, 0, 4, 3]])))
    [6]
    """
    return [math.lcm(*set(row)) for row in cycles.length.tolist()]


def period(cycles: Cycles) -> tuple[int, ...]:
    """Return, for each axis, the distance at which all heads together repeat: the least common multiple of their orders.

    >>> period(decompose(torch.stack([from_cycle_lengths((3, 2)), from_cycle_lengths((4, 1))])))
    (12,)
    """
    axes = int(cycles.axis[-1]) + 1
    return tuple(math.lcm(*set(cycles.length[:, cycles.axis == axis].flatten().tolist())) for axis in range(axes))


class _Gather(torch.autograd.Function):
    """Gather by a permutation. Its backward scatters each gradient back to its feature, where gather's own would add."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return x.gather(-1, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors  # type: ignore[attr-defined]
        (gradient,) = gradients
        return torch.empty_like(gradient).scatter_(-1, index, gradient), None


def permute_features(x: Tensor, index: Tensor) -> Tensor:
    """Gather the features of each token of ``x`` (``b h l m``) by ``index``, which broadcasts to ``x``.

    >>> permute_features(torch.tensor([[[[10, 20, 30]]]]), torch.tensor([1, 2, 0]))
    tensor([[[[20, 30, 10]]]])
    """
    index = index.expand_as(x)
    return x.gather(-1, index) if is_transformed() else _Gather.apply(x, index)


def check_permutation(permutation: Tensor) -> None:
    """Raise unless ``permutation`` is an int64 tensor ``h m`` with every head a permutation of 0 … m-1."""
    if permutation.dtype != torch.int64 or permutation.dim() != 2 or permutation.numel() == 0:
        raise ValueError(
            f"permutation must be an int64 tensor of shape (heads, features), got {permutation.dtype} of shape "
            f"{tuple(permutation.shape)}: convert it with .long(), and add .unsqueeze(0) for one head"
        )
    expected = torch.arange(permutation.shape[-1], device=permutation.device)
    wrong = (permutation.sort(-1).values != expected).any(-1).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"permutation: head {wrong[0]} is not a permutation of 0 … {permutation.shape[-1] - 1}, got "
            f"{permutation[wrong[0]].tolist()}: every feature must appear once"
        )
