"""The paper's ablation without Property 3: a random orthogonal matrix in place of the permutation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from permuteformer.ops.checks import check_integer, without_autocast
from permuteformer.ops.permutation import axis_sizes
from permuteformer.positions.angles import angles
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("orthogonal")
class Orthogonal(PositionEncoding):
    """Multiplies the features of token i by Q^i, with a random orthogonal matrix Q per head and any integer i.

    Q is stored in its real Schur form U T U^T, where T consists of rotations, 1 and -1. A power multiplies the angles of the rotations,
    so this needs no matrix powers and no table over positions. Features become negative, so linear attention computes its
    normaliser from the features before the transform (``normalizer="transformed"`` changes that).

    Args:
        num_heads: heads, each with its own matrix.
        feature_size: features per head, m. With several axes, each axis has its own part of them.
        axes: numbers per position: 1 for text, 2 for images.
        seed: seed of the matrices, which are uniform by Haar measure. Layers with the same seed share them.

    >>> encoding = Orthogonal(num_heads=2, feature_size=6)
    >>> x = torch.randn(1, 2, 1, 6)
    >>> forward = encoding.transform(x, encoding.tables(torch.tensor([[[10**12]]])))
    >>> back = encoding.transform(forward, encoding.tables(torch.tensor([[[-(10**12)]]])))
    >>> torch.allclose(back, x, atol=1e-6), torch.allclose(forward.norm(dim=-1), x.norm(dim=-1))
    (True, True)
    """

    keeps_sign = False
    is_group = True
    exact = ("basis",)
    basis: Tensor
    """``h m 2p``: U, the first columns of all p blocks of T, then the second columns."""
    turns: Tensor
    """``h p``: the angle of each block, in units of 2^-64 of a turn. Integers keep their value when a model is cast to bfloat16."""
    axis: Tensor
    """``p``: the axis of positions that rotates each block."""

    def __init__(self, num_heads: int, feature_size: int, axes: int = 1, seed: int = 0) -> None:
        super().__init__()
        check_integer(num_heads=num_heads, feature_size=feature_size, axes=axes)
        check_integer(0, seed=seed)
        self.num_heads, self.feature_size, self.axes, self.seed = num_heads, feature_size, axes, seed
        self.sizes = axis_sizes(feature_size, axes)
        blocks = sum(size // 2 + 1 for size in self.sizes)
        self.register_buffer("basis", torch.empty(num_heads, feature_size, 2 * blocks, dtype=torch.float64))
        self.register_buffer("turns", torch.empty(num_heads, blocks, dtype=torch.int64))
        self.register_buffer("axis", torch.empty(blocks, dtype=torch.int64), persistent=False)
        self.reset()

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        if self.basis.is_meta:  # eigenvalues take long to compute
            return
        with torch.device("cpu"):
            generator = torch.Generator().manual_seed(self.seed)
            columns, turns = zip(*(_draw(len(self.turns), size, generator) for size in self.sizes), strict=True)
            copy(self.basis, torch.cat([_block_diagonal(parts) for parts in zip(*columns, strict=True)], dim=-1))
            copy(self.turns, torch.cat(turns, dim=-1))
            copy(self.axis, torch.cat([torch.full(part.shape[-1:], axis) for axis, part in enumerate(turns)]))

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = angles(positions.index_select(-1, self.axis).unsqueeze(1), self.turns.unsqueeze(1))
        return angle.cos(), angle.sin()  # b h l p

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)  # a basis in bfloat16 would not keep lengths
        basis = self.basis.to(dtype)
        cos, sin = (table.to(dtype) for table in tables)
        with without_autocast(x.device):
            first, second = (x.to(dtype) @ basis).chunk(2, dim=-1)  # b h l p
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return (rotated @ basis.transpose(-1, -2)).to(x.dtype)  # b h l m

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, features={'+'.join(map(str, self.sizes))}"


def _draw(num_heads: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw Schur forms: the two columns of each block, ``2 h size p``, and its angle, ``h p`` in units of 2^-64 of a turn.

    A block is a rotation, or 1 or -1 (no turn, half a turn) with zeros for its second column. There are at most size // 2 + 1 blocks;
    unused ones are zero in both columns. Haar measure is the same in every basis, so the angles of one draw in the basis of another are
    a draw as well, and no eigenvectors are needed.
    """
    matrix, basis = _haar(num_heads, size, generator), _haar(num_heads, size, generator)
    angle = torch.linalg.eigvals(matrix).angle().abs().sort(dim=-1).values
    columns = torch.zeros(2, num_heads, size, size // 2 + 1, dtype=torch.float64)
    turns = torch.zeros(num_heads, size // 2 + 1, dtype=torch.float64)
    for h, minus_one in enumerate((torch.linalg.det(matrix) < 0).tolist()):
        # Sorted by angle, an eigenvalue 1 is first and -1 last; all others are in pairs.
        one = minus_one == (size % 2 == 0)
        pairs = angle[h, one : size - minus_one : 2] / (2 * math.pi)
        p = len(pairs)
        turns[h, :p] = pairs
        columns[:, h, :, :p] = basis[h, :, : 2 * p].unflatten(-1, (p, 2)).movedim(-1, 0)
        columns[0, h, :, p : p + one + minus_one] = basis[h, :, 2 * p :]
        if minus_one:
            turns[h, p + one] = 0.5
    # Half a turn is 2^63 units, one more than int64 holds: turn the other way, which is as likely.
    return columns, (-turns * 2.0**64).long()


def _haar(num_heads: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw orthogonal matrices ``h size size``, uniform by Haar measure: QR of normal matrices, with a positive diagonal of R."""
    q, r = torch.linalg.qr(torch.randn(num_heads, size, size, dtype=torch.float64, generator=generator))
    uniform: Tensor = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
    return uniform


def _block_diagonal(parts: tuple[Tensor, ...]) -> Tensor:
    """Return one block-diagonal matrix per head, from one matrix per axis and head."""
    return torch.stack([torch.block_diag(*heads) for heads in zip(*parts, strict=True)])
