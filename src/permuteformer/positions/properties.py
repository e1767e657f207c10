"""The paper's three properties of a position encoding, as checks of any encoding.

An encoding turns the similarity phi(q)^T phi(k) of tokens at i and j into phi(q)^T K(i, j) phi(k), with
K(i, j) = M_i^T M_j r^(i-j) e^bias(i, j) (equation 7; r^|i-j| if two-sided). The factors r and e^bias are kept as logarithms, so that no
distance overflows. A check at finitely many positions can refute a property, but not prove it.
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
"""An integer, or one per axis."""


@dataclass(frozen=True)
class Verdict:
    """Whether a property holds, and its worst case. Its truth value is ``holds``.

    >>> from permuteformer.positions.permute import Permute
    >>> bool(is_positive(Permute(2, 8), 2, 8))
    True
    """

    holds: bool
    violation: float
    """The error of the worst case; up to the tolerance it counts as rounding."""
    positions: tuple[tuple[int, ...], ...]
    """The position of the worst case, or those of the query and the key."""
    head: int

    def __bool__(self) -> bool:
        return self.holds


def kernel(encoding: PositionEncoding, num_heads: int, feature_size: int, i: Position, j: Position) -> Tensor:
    """Return K(i, j) of each head: ``h m m`` in float64.

    >>> from permuteformer.positions.permute import Permute
    >>> kernel(Permute(1, 3, permutation=torch.tensor([[1, 2, 0]])), 1, 3, i=10, j=11)
    tensor([[[0., 1., 0.],
             [0., 0., 1.],
             [1., 0., 0.]]], dtype=torch.float64)
    """
    query, key = _positions(encoding, [i, j])
    matrix, log_factor = _kernels(encoding, num_heads, feature_size, query.unsqueeze(0), key.unsqueeze(0))
    return matrix[0] * log_factor[0].exp()[:, None, None]


def is_relative(
    encoding: PositionEncoding, num_heads: int, feature_size: int, positions: Sequence[Position] | None = None, tolerance: float = 1e-9
) -> Verdict:
    """Check Property 1: K(i, j) depends on i - j only.

    ``violation`` is the largest difference between K(i, j) and K(i - j, 0), of an entry of M_i^T M_j or of the logarithm of the factor.
    ``positions`` are where to check, by default ``sample_positions()``.

    >>> from permuteformer.positions.permute import Permute
    >>> is_relative(Permute(2, 8), num_heads=2, feature_size=8)
    Verdict(holds=True, violation=0.0, positions=((0,), (0,)), head=0)
    """
    at = _positions(encoding, positions)
    violations = []
    for i in at:
        matrix, log_factor = _kernels(encoding, num_heads, feature_size, i, at)
        moved, moved_log_factor = _kernels(encoding, num_heads, feature_size, i - at, torch.zeros_like(i))
        violations.append(torch.maximum((matrix - moved).abs().amax((-1, -2)), (log_factor - moved_log_factor).abs()))  # l h
    return _worst(torch.stack(violations), at, tolerance)


def is_bounded(
    encoding: PositionEncoding,
    num_heads: int,
    feature_size: int,
    causal: bool,
    positions: Sequence[Position] | None = None,
    tolerance: float = math.log(1.5),
) -> Verdict:
    """Check Property 2: the norm of K(i, j) is bounded over all i and j; if ``causal``, over all j <= i.

    ``violation`` is the logarithm of the largest norm divided by the largest one near the origin: up to the square root of the furthest
    position. Growth even as slow as a logarithm's is a factor of 2 over that range. Norms that oscillate need positions near the origin
    that reach their maximum. With several axes, j <= i compares them in order, as pixels are read row by row.

    >>> from permuteformer.positions.decay import Decay
    >>> decay = Decay(2, r=0.9)
    >>> is_bounded(decay, 2, 8, causal=True).holds, is_bounded(decay, 2, 8, causal=False).holds
    (True, False)
    """
    at = _positions(encoding, positions)
    rows = []
    for i in at:
        matrix, log_factor = _kernels(encoding, num_heads, feature_size, i, at)
        norm = matrix.flatten(2).norm(dim=-1).nan_to_num(nan=torch.inf)  # overflow gives NaN
        log_norm = norm.clamp(min=torch.finfo(norm.dtype).tiny).log() + log_factor  # l h
        after = torch.tensor([i.tolist() < j for j in at.tolist()], device=at.device)
        rows.append(log_norm.masked_fill(after.unsqueeze(-1), -torch.inf) if causal else log_norm)
    log_norms = torch.stack(rows)  # l l h
    distance = at.abs().amax(-1).double()
    near = distance <= torch.maximum(distance.max().sqrt(), distance.min())
    return _worst((log_norms - log_norms[near][:, near].amax((0, 1))).clamp(min=0), at, tolerance)


def is_positive(
    encoding: PositionEncoding, num_heads: int, feature_size: int, positions: Sequence[Position] | None = None, tolerance: float = 1e-9
) -> Verdict:
    """Check Property 3: M_i maps positive vectors to positive ones. ``violation`` is the size of the most negative entry of an M_i.

    >>> from permuteformer.positions.permute import Permute
    >>> from permuteformer.positions.rope import Rope
    >>> is_positive(Permute(2, 8), 2, 8).holds, is_positive(Rope(feature_size=8), 2, 8).holds
    (True, False)
    """
    at = _positions(encoding, positions)
    return _worst((-_matrices(encoding, num_heads, feature_size, at).amin((-1, -2))).clamp(min=0), at, tolerance)


def sample_positions(axes: int = 1) -> list[tuple[int, ...]]:
    """Return positions to check at: near and far, of both signs.

    >>> sample_positions()[:4], sample_positions(axes=2)[:4]
    ([(0,), (1,), (2,), (5,)], [(0, 0), (0, 1), (0, 3), (1, 0)])
    """
    line = (0, 1, 2, 5, 16, 63, 257, 4099, 10**6 + 3, 10**9 + 7, 10**12 + 39, -1, -40, -(10**7))
    near = itertools.islice(itertools.product((0, 1, 3), repeat=axes), 9 if axes > 1 else 0)
    return [*near, *(tuple(line[(n + 5 * axis) % len(line)] for axis in range(axes)) for n in range(len(line)))]


def _positions(encoding: PositionEncoding, positions: Sequence[Position] | None) -> Tensor:
    """Return positions as int64 ``l a``, on the device of the encoding."""
    rows = sample_positions() if positions is None else [[row] if isinstance(row, int) else list(row) for row in positions]
    tensor = next(itertools.chain(encoding.buffers(), encoding.parameters()), None)
    return torch.tensor(rows, dtype=torch.int64, device="cpu" if tensor is None else tensor.device)


@torch.no_grad()
def _kernels(encoding: PositionEncoding, num_heads: int, feature_size: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return M_i^T M_j, ``l h m m``, and log(r^(i-j) e^bias(i, j)), ``l h``, for positions ``l a`` that broadcast."""
    query, key = torch.broadcast_tensors(query, key)
    product = _matrices(encoding, num_heads, feature_size, query).mT @ _matrices(encoding, num_heads, feature_size, key)
    log_factor, log_decay = torch.zeros_like(product[..., 0, 0]), encoding.log_decay()
    if log_decay is not None:
        if query.shape[-1] > 1:
            raise ValueError(
                f"positions must have 1 axis with a decay, which counts tokens, got {query.shape[-1]}: check the decay on one axis, and "
                "other encodings without it"
            )
        distance = (query - key).abs() if encoding.two_sided else query - key  # l 1
        log_factor = log_factor + distance * log_decay.double()
    if "bias" in encoding.hooks:
        log_factor = log_factor + encoding.bias(query.unsqueeze(1), key.unsqueeze(1))[..., 0, 0].double()
    return product, log_factor


@torch.no_grad()
def _matrices(encoding: PositionEncoding, num_heads: int, feature_size: int, at: Tensor) -> Tensor:
    """Return M_i at positions ``l a``, from unit vectors transformed: ``l h m m`` in float64."""
    if "embed" in encoding.hooks:
        raise ValueError(f"encoding must act on queries, keys or scores, got {type(encoding).__name__}, which adds to embeddings")
    unit = torch.eye(feature_size, dtype=torch.float64, device=at.device)[:, None, None, :]
    columns = encoding.transform(unit.expand(-1, num_heads, len(at), -1), encoding.tables(at.unsqueeze(0)))
    return columns.permute(2, 1, 3, 0)


def _worst(violations: Tensor, at: Tensor, tolerance: float) -> Verdict:
    """Return the verdict on violations ``l h``, or ``l l h`` of pairs. NaN counts as infinite."""
    violations = violations.nan_to_num(nan=torch.inf, posinf=torch.inf)
    *rows, head = (int(index) for index in torch.unravel_index(violations.argmax(), violations.shape))
    violation = float(violations.max()) + 0.0  # no minus zero
    return Verdict(violation <= tolerance, violation, tuple(tuple(at[row].tolist()) for row in rows), head)
