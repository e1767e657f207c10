"""The paper's ablation without Property 3: in place of the permutation, a random orthogonal matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from permuteformer.ops.angle import angles
from permuteformer.ops.checks import check_whole, without_autocast
from permuteformer.ops.permutation import axis_sizes
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("orthogonal")
class Orthogonal(PositionEncoding):
    """A random orthogonal matrix Q a head, to the power that the token's position says: Q^i x for any integer i.

    Q is held in its real Schur form U T U^T, T of rotations, of 1 and of -1. A power turns each rotation further, so
    there are no powers of matrices and no table over positions. Features become negative by it, so linear attention
    takes its normaliser from untransformed ones, unless it is told not to (``normalizer="transformed"``).

    Args:
        num_heads: heads, each with its own matrix.
        feature_size: features of a head, m. With several axes each turns its own share of them.
        axes: numbers in a position: 1 for text, 2 for images.
        seed: what the matrices are drawn from, uniformly (by Haar measure). The same seed in every layer shares them.

    >>> encoding = Orthogonal(num_heads=2, feature_size=6)
    >>> x = torch.randn(1, 2, 1, 6)
    >>> there = encoding.transform(x, encoding.tables(torch.tensor([[[10**12]]])))
    >>> back = encoding.transform(there, encoding.tables(torch.tensor([[[-(10**12)]]])))
    >>> torch.allclose(back, x, atol=1e-6), torch.allclose(there.norm(dim=-1), x.norm(dim=-1))
    (True, True)
    """

    keeps_sign = False
    is_group = True
    exact = ("basis",)
    basis: Tensor
    turns: Tensor
    axis: Tensor

    def __init__(self, num_heads: int, feature_size: int, axes: int = 1, seed: int = 0) -> None:
        super().__init__()
        check_whole(num_heads=num_heads, feature_size=feature_size, axes=axes)
        check_whole(0, seed=seed)
        self.num_heads, self.feature_size, self.axes = num_heads, feature_size, axes
        self.sizes = axis_sizes(feature_size, axes)
        self.seed = seed
        blocks = sum(size // 2 + 1 for size in self.sizes)
        self.register_buffer("basis", torch.empty(num_heads, feature_size, 2 * blocks, dtype=torch.float64))  # h m 2p
        # As integers, angles stay what they are when a model is cast to bfloat16.
        self.register_buffer("turns", torch.empty(num_heads, blocks, dtype=torch.int64))  # h p
        self.register_buffer("axis", torch.empty(blocks, dtype=torch.int64), persistent=False)
        self.reset()

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        if self.basis.is_meta:  # eigenvalues take long, and nothing of them would be kept
            return
        with torch.device("cpu"):
            generator = torch.Generator().manual_seed(self.seed)
            drawn = [_draw(len(self.turns), size, generator) for size in self.sizes]
            # First columns of all blocks, then second ones, whichever axis they are of.
            first, second = (_block_diagonal([basis[column] for basis, _ in drawn]) for column in (0, 1))
            copy(self.basis, torch.cat([first, second], dim=-1))
            copy(self.turns, torch.cat([turns for _, turns in drawn], dim=-1))
            blocks = torch.tensor([turns.shape[-1] for _, turns in drawn])
            copy(self.axis, torch.arange(len(blocks)).repeat_interleave(blocks))

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = angles(positions.index_select(-1, self.axis).unsqueeze(1), self.turns.unsqueeze(1))
        return angle.cos(), angle.sin()  # b h l p

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        # With the basis rounded to bfloat16 the map would no longer keep lengths.
        dtype = torch.promote_types(x.dtype, torch.float32)
        basis = self.basis.to(dtype)
        cos, sin = (table.to(dtype) for table in tables)
        with without_autocast(x.device):
            first, second = (x.to(dtype) @ basis).chunk(2, dim=-1)  # b h l p
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return (turned @ basis.transpose(-1, -2)).to(x.dtype)  # b h l m

    def extra_repr(self) -> str:
        return f"heads={self.turns.shape[0]}, features={'+'.join(map(str, self.sizes))}"


def _draw(num_heads: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Schur forms: two columns for each block, ``2 h size p``, and its angle, ``h p`` in units of 2^-64 of a turn.

    A block is a rotation, or it is 1 or -1 (no turn, half a turn) with zeros for its second column. No matrix has more
    than size // 2 + 1 of them; blocks that a matrix does not have are zeros in both columns.

    Haar measure is the same in every basis, so the angles of one draw in the basis of another are a draw as well, and
    one that no eigenvector was computed for.
    """
    matrix, basis = _haar(num_heads, size, generator), _haar(num_heads, size, generator)
    angle = torch.linalg.eigvals(matrix).angle().abs().sort(dim=-1).values
    reflects = (torch.linalg.det(matrix) < 0).tolist()
    columns = torch.zeros(2, num_heads, size, size // 2 + 1, dtype=torch.float64)
    turns = torch.zeros(num_heads, size // 2 + 1, dtype=torch.float64)
    for h in range(num_heads):
        # Sorted, an eigenvalue 1 stands first and one -1 last; all others are in pairs.
        one, minus_one = reflects[h] == (size % 2 == 0), reflects[h]
        pairs = angle[h, one : size - minus_one : 2] / (2 * math.pi)
        p = len(pairs)
        turns[h, :p] = pairs
        columns[:, h, :, :p] = basis[h, :, : 2 * p].unflatten(-1, (p, 2)).movedim(-1, 0)
        columns[0, h, :, p : p + one + minus_one] = basis[h, :, 2 * p :]
        if minus_one:
            turns[h, p + one] = 0.5
    # Half a turn is 2^63 units, one more than int64 has: turn the other way, which is as likely.
    return columns, (-turns * 2.0**64).long()


def _haar(num_heads: int, size: int, generator: torch.Generator) -> Tensor:
    """Orthogonal matrices ``h size size``, uniform by Haar measure: QR of normal ones, with R's diagonal positive."""
    q, r = torch.linalg.qr(torch.randn(num_heads, size, size, dtype=torch.float64, generator=generator))
    uniform: Tensor = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
    return uniform


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    """``h`` matrices with ``h`` blocks along their diagonals."""
    return torch.stack([torch.block_diag(*heads) for heads in zip(*blocks, strict=True)])
