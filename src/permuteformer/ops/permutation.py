"""Permutations of a head's features, and their powers in closed form.

The paper's (P x)_a = x_{pi(a)}, so (P^i x)_a = x_{pi^i(a)}. On a cycle, pi walks from one feature to the next, so
pi^i(a) is found by adding i to the place of a in its cycle: no table, no largest position, and the inverse is -i.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from permuteformer.ops.checks import is_transformed


class Cycles(NamedTuple):
    """A permutation a head, taken apart into cycles; slots number the features cycle by cycle, in the order pi visits them.

    Where ``contiguous``, slot and feature are the same: P^i then rotates contiguous pieces of a token's features.

    >>> decompose(torch.tensor([[1, 2, 0, 4, 3]])).length    # of the cycle that each slot is in, h m
    tensor([[3, 3, 3, 2, 2]])
    """

    feature: Tensor
    """``h m``: the feature in each slot."""
    rank: Tensor
    """``h m``: the place of each feature in its cycle."""
    start: Tensor
    """``h m``: the first slot of the cycle of each feature."""
    length: Tensor
    """``h m``: the length of the cycle of each feature."""
    axis: Tensor
    """``m``: the axis of a position that moves each feature."""
    contiguous: bool


class Rotation(NamedTuple):
    """The same where every cycle lies in neighbouring features: P^i rotates each of these runs to the left by i. All int32."""

    cycles: Tensor
    """``n 3``: of every cycle of every head its first feature, its length, its axis."""
    of_feature: Tensor
    """``h m``: the cycle of each feature."""
    of_head: Tensor
    """``h + 1``: where each head's cycles begin, and the last one's end."""
    axes: int
    """How many numbers positions must have."""

    def to(self, device: torch.device) -> Rotation:
        """The same on another device."""
        return Rotation(self.cycles.to(device), self.of_feature.to(device), self.of_head.to(device), self.axes)

    def check(self, heads: int, features: int, *positions: Tensor | None) -> None:
        """Raise unless it is one of so many heads and features, and positions have its axes; ``None`` are counted, on one axis."""
        if self.of_feature.shape != (heads, features):
            made_for = "{} heads and {} features".format(*self.of_feature.shape)
            raise ValueError(f"transform permutes {made_for}; there are {heads} and {features}: make it with these")
        for given in positions:
            if self.axes > (1 if given is None else given.shape[-1]):
                found = "there are none" if given is None else f"they have shape {tuple(given.shape)}"
                raise ValueError(f"positions must have shape (batch, length, axes) with {self.axes} axes, as transform has; {found}")


def random_permutation(num_heads: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """A permutation a head, uniform over all of them: ``h m``.

    >>> random_permutation(2, 4, torch.Generator().manual_seed(0)).sort(-1).values
    tensor([[0, 1, 2, 3],
            [0, 1, 2, 3]])
    """
    return torch.stack([torch.randperm(size, generator=generator) for _ in range(num_heads)])


def max_order_permutation(num_heads: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """A random permutation a head among those with the largest order there is at this size: ``h m``.

    >>> order(decompose(max_order_permutation(num_heads=1, size=64)))
    [2042040]
    """
    canonical = from_cycle_lengths(max_order_cycle_lengths(size))
    relabel = random_permutation(num_heads, size, generator)
    # relabel ∘ canonical ∘ relabel^-1 has the same cycle lengths on shuffled features.
    return torch.empty_like(relabel).scatter_(1, relabel, relabel[:, canonical])


def from_cycle_lengths(lengths: tuple[int, ...]) -> Tensor:
    """The permutation ``m`` whose cycles, of these lengths, lie side by side.

    >>> from_cycle_lengths((3, 2))
    tensor([1, 2, 0, 4, 3])
    """
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return torch.tensor([start + (rank + 1) % length for start, length in zip(starts, lengths, strict=True) for rank in range(length)])


@lru_cache
def max_order_cycle_lengths(size: int) -> tuple[int, ...]:
    """Cycle lengths that sum to ``size`` with the largest least common multiple (Landau's function).

    >>> lengths = max_order_cycle_lengths(64)
    >>> sum(lengths), math.lcm(*lengths)
    (64, 2042040)
    """
    # The largest order needs only powers of distinct primes: spend the budget prime by prime (a knapsack).
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
    """How ``size`` features are shared out among ``axes``, as evenly as can be.

    >>> axis_sizes(7, 2)
    [4, 3]
    """
    if not 1 <= axes <= size:
        raise ValueError(f"axes must be from 1 to the number of features, {size}; it is {axes}")
    return [size // axes + (axis < size % axes) for axis in range(axes)]


def decompose(permutation: Tensor, axes: int = 1) -> Cycles:
    """Cycles of each head of a permutation ``h m``; raises if a head is not a permutation.

    With several ``axes`` the features are shared out among them (``axis_sizes``), and the permutation must keep each
    share to itself: then the axes' permutations commute, because they touch different features.

    >>> decompose(torch.tensor([[2, 1, 0]])).feature
    tensor([[0, 2, 1]])
    """
    check_permutation(permutation)
    sizes = axis_sizes(permutation.shape[-1], axes)
    axis = torch.arange(axes, device=permutation.device).repeat_interleave(torch.tensor(sizes, device=permutation.device))
    if (axis[permutation] != axis).any():
        raise ValueError(
            f"permutation mixes features of different axes: with axes={axes} the first {sizes[0]} features belong to "
            "the first axis, and so on; each share must be permuted within itself"
        )
    heads = [_cycles_of(row) for row in permutation.tolist()]
    feature, rank, start, length = (torch.tensor(told, device=permutation.device) for told in zip(*heads, strict=True))
    contiguous = bool((feature == torch.arange(feature.shape[-1], device=feature.device)).all())
    return Cycles(feature, rank, start, length, axis, contiguous)


def _cycles_of(row: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Features cycle by cycle; and of every feature its place in its cycle, where that begins, and how long it is."""
    slots: list[int] = []
    rank, start, length = [-1] * len(row), [0] * len(row), [0] * len(row)
    for first in range(len(row)):
        place, begin = first, len(slots)
        while rank[place] < 0:
            rank[place], start[place] = len(slots) - begin, begin
            slots.append(place)
            place = row[place]
        for place in slots[begin:]:
            length[place] = len(slots) - begin
    return slots, rank, start, length


def canonical(permutation: Tensor) -> Tensor:
    """The same cycle lengths, relabelled so that every cycle lies in neighbouring features, the longest first.

    Queries and keys relabelled alike have the same products, so where their projections are drawn at random this
    is the same model; stored so, P^i moves contiguous pieces, and short ones together.

    >>> canonical(torch.tensor([[2, 1, 0]]))
    tensor([[1, 0, 2]])
    """
    cycles = decompose(permutation)
    lengths = cycles.length.gather(-1, cycles.feature).tolist()
    return torch.stack([from_cycle_lengths(tuple(sorted(_runs(row), reverse=True))) for row in lengths]).to(permutation.device)


def _runs(lengths: list[int]) -> tuple[int, ...]:
    """The length of each cycle, from the length that each slot's cycle has."""
    runs = []
    slot = 0
    while slot < len(lengths):
        runs.append(lengths[slot])
        slot += lengths[slot]
    return tuple(runs)


def permutation_power(cycles: Cycles, positions: Tensor) -> Tensor:
    """pi^i for every integer position: the index to gather features by.

    ``positions``: ``… l a`` int64, any integers. Returns ``… h l m`` with ``out[…, h, l, f] = pi_h^i(f)``, i the
    position of token l on the axis of feature f.

    >>> cycles = decompose(torch.tensor([[1, 2, 0, 4, 3]]))
    >>> permutation_power(cycles, torch.tensor([[1], [-1], [10**12]]))
    tensor([[[1, 2, 0, 4, 3],
             [2, 0, 1, 4, 3],
             [1, 2, 0, 3, 4]]])
    """
    if positions.shape[-1] > 1:
        positions = positions.index_select(-1, cycles.axis)  # … l m
    start, length = cycles.start.unsqueeze(-2), cycles.length.unsqueeze(-2)  # h 1 m
    slot = positions.unsqueeze(-3).remainder(length)  # … h l m; first, so that no sum overflows
    slot = slot.add_(cycles.rank.unsqueeze(-2)).remainder_(length).add_(start)
    return slot if cycles.contiguous else cycles.feature.unsqueeze(-2).expand_as(slot).gather(-1, slot)


def contiguous_cycles(cycles: Cycles) -> Rotation | None:
    """Every cycle of every head as a run of neighbouring features; ``None`` where features of a cycle are not neighbours.

    >>> cycles, of_feature, of_head, _ = contiguous_cycles(decompose(torch.tensor([[1, 2, 0, 4, 3]])))
    >>> cycles.tolist(), of_feature.tolist(), of_head.tolist()
    ([[0, 3, 0], [3, 2, 0]], [[0, 0, 0, 1, 1]], [0, 2])
    """
    if not cycles.contiguous:
        return None
    axis = cycles.axis.tolist()
    found: list[tuple[int, int, int]] = []
    ends = [0]
    for lengths in cycles.length.tolist():
        first = 0
        for length in _runs(lengths):
            found.append((first, length, axis[first]))
            first += length
        ends.append(len(found))
    table = torch.tensor(found, dtype=torch.int32)
    of_feature = torch.arange(len(found), dtype=torch.int32).repeat_interleave(table[:, 1].long()).view(cycles.length.shape)
    return Rotation(table, of_feature, torch.tensor(ends, dtype=torch.int32), int(table[:, 2].max()) + 1)


def order(cycles: Cycles) -> list[int]:
    """The order of each head's permutation: after that many tokens it is the identity again.

    >>> order(decompose(torch.tensor([[1, 2, 0, 4, 3]])))
    [6]
    """
    return [math.lcm(*set(row)) for row in cycles.length.tolist()]


def period(cycles: Cycles) -> tuple[int, ...]:
    """For each axis, the distance at which all heads together repeat: the least common multiple of their orders.

    >>> period(decompose(torch.stack([from_cycle_lengths((3, 2)), from_cycle_lengths((4, 1))])))
    (12,)
    """
    axes = int(cycles.axis[-1]) + 1
    return tuple(math.lcm(*set(cycles.length[:, cycles.axis == axis].flatten().tolist())) for axis in range(axes))


class _Gather(torch.autograd.Function):
    """Gather by a permutation. Its backward moves every gradient back to its place, where gather's own would add."""

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
    """``x`` (``b h l m``) with the features of each token gathered by ``index``, which broadcasts to ``x``.

    >>> permute_features(torch.tensor([[[[10, 20, 30]]]]), torch.tensor([1, 2, 0]))    # b h l m
    tensor([[[[20, 30, 10]]]])
    """
    index = index.expand_as(x)
    return x.gather(-1, index) if is_transformed() else _Gather.apply(x, index)


def check_permutation(permutation: Tensor) -> None:
    """Raise unless ``permutation`` is an int64 tensor ``h m`` with every head a permutation of 0 … m-1."""
    if permutation.dtype != torch.int64 or permutation.dim() != 2 or permutation.numel() == 0:
        raise ValueError(
            f"permutation must be an int64 tensor of shape (heads, features), not {permutation.dtype} of shape "
            f"{tuple(permutation.shape)}; convert it with .long(), and add .unsqueeze(0) for one head"
        )
    expected = torch.arange(permutation.shape[-1], device=permutation.device)
    wrong = (permutation.sort(-1).values != expected).any(-1).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"permutation: head {wrong[0]} is not a permutation of 0 … {permutation.shape[-1] - 1}: "
            f"{permutation[wrong[0]].tolist()}; every feature must appear once"
        )
