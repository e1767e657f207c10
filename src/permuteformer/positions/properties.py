"""The paper's three properties of a position encoding, as questions that any encoding can be asked.

An encoding makes of the similarity phi(q)^T phi(k) of tokens at i and j the similarity phi(q)^T K(i, j) phi(k), with
K(i, j) = M_i^T N_j r^(i-j) e^bias(i, j) (equation 7, with r and a bias told apart from the matrices, so that neither
over- nor underflows). The matrices are read off the encoding itself, by what it does to the unit vectors.

Asked at finitely many positions, a property that fails has been refuted; one that holds has not been proved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from permuteformer.positions.base import PositionEncoding

Position: TypeAlias = int | Sequence[int]
"""An integer, or one for each axis."""


@dataclass(frozen=True)
class Verdict:
    """Whether a property holds, and the case that is worst for it. True and false as ``holds`` is.

    >>> from permuteformer.positions.permute import Permute
    >>> bool(is_relative(Permute(2, 8), num_heads=2, feature_size=8))
    True
    """

    holds: bool
    violation: float
    """How much is wrong in the worst case; up to the tolerance it is put down to rounding."""
    positions: tuple[tuple[int, ...], ...]
    """The position of the worst case, or the query's and the key's."""
    head: int

    def __bool__(self) -> bool:
        return self.holds


def kernel(encoding: PositionEncoding, num_heads: int, feature_size: int, i: Position, j: Position) -> Tensor:
    """K(i, j) of each head: ``h m m`` in float64.

    >>> from permuteformer.positions.permute import Permute
    >>> kernel(Permute(1, 3, permutation=torch.tensor([[1, 2, 0]])), 1, 3, i=10, j=11)
    tensor([[[0., 1., 0.],
             [0., 0., 1.],
             [1., 0., 0.]]], dtype=torch.float64)
    """
    query, key = _positions([i]), _positions([j])
    product = _maps(encoding, num_heads, feature_size, query).mT @ _maps(encoding, num_heads, feature_size, key)
    return product[0] * _log_weight(encoding, num_heads, query, key)[0].exp()[:, None, None]


def is_relative(
    encoding: PositionEncoding,
    num_heads: int,
    feature_size: int,
    positions: Sequence[Position] | None = None,
    tolerance: float = 1e-9,
) -> Verdict:
    """Property 1: K(i, j) depends on i - j only.

    ``violation`` is the largest difference of an entry of K(i, j) from K(i - j, 0), or of the logarithm of its factor.
    ``positions`` are those to ask at, ``spread(axes=1)`` if not given.

    >>> from permuteformer.positions.permute import Permute
    >>> is_relative(Permute(2, 8), num_heads=2, feature_size=8).holds
    True
    """
    at = _positions(positions)
    here = _maps(encoding, num_heads, feature_size, at)  # l h m m
    zero = torch.zeros_like(at[:1])
    origin = _maps(encoding, num_heads, feature_size, zero)
    violations = []
    for i in range(len(at)):
        moved = at[i] - at
        expected = _maps(encoding, num_heads, feature_size, moved).mT @ origin
        difference = (here[i].mT @ here - expected).abs().flatten(-2).amax(-1)  # l h
        weight = _log_weight(encoding, num_heads, at[i : i + 1].expand_as(at), at)
        violations.append(torch.maximum(difference, (weight - _log_weight(encoding, num_heads, moved, zero.expand_as(at))).abs()))
    return _worst(torch.stack(violations), at, tolerance)


def is_bounded(
    encoding: PositionEncoding,
    num_heads: int,
    feature_size: int,
    causal: bool,
    positions: Sequence[Position] | None = None,
    tolerance: float = math.log(1.5),
) -> Verdict:
    """Property 2: the norm of K(i, j) has a bound for all i and j; where ``causal``, for all j that are not after i.

    A bound cannot be seen in finitely many values, but growth can: ``violation`` is the logarithm of the largest norm
    over the largest one near the origin, which is up to the square root of the furthest position. Growth comes to at least
    2 over that range, even growth as slow as a logarithm's. Norms that go up and down need positions that show how high
    they go near the origin.

    >>> from permuteformer.positions.decay import Decay
    >>> decay = Decay(2, r=0.9)
    >>> is_bounded(decay, 2, 8, causal=True).holds, is_bounded(decay, 2, 8, causal=False).holds
    (True, False)
    """
    at = _positions(positions)
    here = _maps(encoding, num_heads, feature_size, at)  # l h m m
    tiny = torch.finfo(torch.float64).tiny
    logs = []
    for i in range(len(at)):
        norm = (here[i].mT @ here).flatten(-2).norm(dim=-1)  # l h
        norm = norm.nan_to_num(nan=torch.inf).clamp(min=tiny)  # overflow leaves NaN behind
        logs.append(norm.log() + _log_weight(encoding, num_heads, at[i : i + 1].expand_as(at), at))
    log = torch.stack(logs)  # l l h
    rows = [tuple(row) for row in at.tolist()]
    if causal:  # several axes are read in the order of their names, as pixels are row by row
        unseen = torch.tensor([[i < j for j in rows] for i in rows])
        log = log.masked_fill(unseen.unsqueeze(-1), -torch.inf)
    far = at.abs().amax(-1).double()
    near = far <= torch.maximum(far.max().sqrt(), far.min())
    return _worst((log - log[near][:, near].amax((0, 1))).clamp(min=0), at, tolerance)


def is_positive(
    encoding: PositionEncoding,
    num_heads: int,
    feature_size: int,
    positions: Sequence[Position] | None = None,
    tolerance: float = 1e-9,
) -> Verdict:
    """Property 3: M_i and N_j map positive vectors to positive ones.

    ``violation`` is the size of the most negative entry among the images of the unit vectors and of random positive ones.

    >>> from permuteformer.positions.permute import Permute
    >>> from permuteformer.positions.rope import Rope
    >>> is_positive(Permute(2, 8), 2, 8).holds, is_positive(Rope(feature_size=8), 2, 8).holds
    (True, False)
    """
    at = _positions(positions)
    random = torch.rand(feature_size, feature_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vectors = torch.cat([torch.eye(feature_size, dtype=torch.float64), random])
    negative = -_images(encoding, num_heads, vectors, at).amin((0, 3))  # h l
    return _worst(negative.clamp(min=0).T, at, tolerance)


def spread(axes: int = 1) -> list[tuple[int, ...]]:
    """Positions to ask at: near ones and far ones, of both signs.

    >>> spread()[:4], spread(axes=2)[:4]
    ([(0,), (1,), (2,), (5,)], [(0, 0), (0, 1), (0, 3), (1, 0)])
    """
    line = (0, 1, 2, 5, 16, 63, 257, 4099, 10**6 + 3, 10**9 + 7, 10**12 + 39, -1, -40, -(10**7))
    if axes == 1:
        return [(i,) for i in line]
    rolled = [tuple(line[(n + 5 * axis) % len(line)] for axis in range(axes)) for n in range(len(line))]
    return [*itertools.islice(itertools.product((0, 1, 3), repeat=axes), 9), *rolled]


def _positions(positions: Sequence[Position] | None) -> Tensor:
    """``l a`` int64."""
    rows = spread() if positions is None else [[row] if isinstance(row, int) else list(row) for row in positions]
    return torch.tensor(rows, dtype=torch.int64)


def _maps(encoding: PositionEncoding, num_heads: int, feature_size: int, at: Tensor) -> Tensor:
    """M_i (which is N_i as well) for each position: ``l h m m`` in float64."""
    return _images(encoding, num_heads, torch.eye(feature_size, dtype=torch.float64), at).permute(2, 1, 3, 0)


def _images(encoding: PositionEncoding, num_heads: int, vectors: Tensor, at: Tensor) -> Tensor:
    """What the encoding makes of each of n vectors, ``n m``, at each position: ``n h l m``."""
    if "embed" in encoding.hooks:
        raise ValueError(
            f"{type(encoding).__name__} adds to embeddings: the properties are about encodings that act on queries and keys or on their "
            "scores, and with it there is no M_i to ask about"
        )
    device = _device(encoding)
    x = vectors.to(device)[:, None, None, :].expand(-1, num_heads, len(at), -1)
    with torch.no_grad():
        return encoding.transform(x, encoding.tables(at.to(device).unsqueeze(0))).cpu()


def _log_weight(encoding: PositionEncoding, num_heads: int, query: Tensor, key: Tensor) -> Tensor:
    """log of r^(i-j) e^bias(i, j) for each pair of rows of ``query`` and ``key``, both ``l a``: ``l h``."""
    weight = torch.zeros(len(query), num_heads, dtype=torch.float64)
    device = _device(encoding)
    with torch.no_grad():
        log_decay = encoding.log_decay()
        if log_decay is not None:
            if query.shape[-1] > 1:
                raise ValueError(
                    "a decay counts tokens, and positions on several axes do not say how many lie between two of them: ask about the "
                    "other encodings without it, and about the decay on one axis"
                )
            distance = (query - key).abs() if encoding.two_sided else query - key  # l 1
            weight = weight + distance * log_decay.double().cpu()
        if "bias" in encoding.hooks:
            bias = encoding.bias(query.to(device).unsqueeze(1), key.to(device).unsqueeze(1))  # l h 1 1
            weight = weight + bias[..., 0, 0].double().cpu()
    return weight


def _device(encoding: PositionEncoding) -> torch.device:
    tensor = next(itertools.chain(encoding.buffers(), encoding.parameters()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _worst(violations: Tensor, at: Tensor, tolerance: float) -> Verdict:
    """The verdict on violations ``l h``, or ``l l h`` for pairs. Not a number is as wrong as can be."""
    violations = violations.nan_to_num(nan=torch.inf, posinf=torch.inf)
    *rows, head = (int(index) for index in torch.unravel_index(violations.argmax(), violations.shape))
    violation = float(violations.max()) + 0.0  # no minus zero
    return Verdict(violation <= tolerance, violation, tuple(tuple(at[row].tolist()) for row in rows), head)
