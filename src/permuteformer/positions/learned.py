"""A learned vector for each position, added to embeddings (BERT)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from permuteformer.ops.checks import check_whole, is_looked_through
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("learned")
class Learned(PositionEncoding):
    """A table of vectors, one for each position from 0 to max_length - 1; with several axes a table each, summed.

    It knows no position outside its table, and says so.

    Args:
        hidden_size: channels of an embedding.
        max_length: positions there are, on each axis.
        axes: numbers in a position: 1 for text, 2 for images.

    >>> encoding = Learned(hidden_size=8, max_length=512)
    >>> encoding.embed(torch.zeros(1, 1, 8), torch.tensor([[[512]]]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: position 512 on axis 0 is outside the learned table: max_length=512 has positions 0 … 511; ...
    """

    axes: int

    def __init__(self, hidden_size: int, max_length: int, axes: int = 1) -> None:
        super().__init__()
        check_whole(hidden_size=hidden_size, max_length=max_length, axes=axes)
        self.axes = axes
        self.max_length = max_length
        self.axis_tables = nn.ModuleList(nn.Embedding(max_length, hidden_size) for _ in range(axes))
        self.reset()

    @torch.no_grad()
    def reset(self, copy: Copy = Tensor.copy_) -> None:
        for table in self.axis_tables:
            if table.weight.is_meta:  # nothing of them would be kept
                return
            copy(table.weight, 0.02 * torch.randn(table.weight.shape, device="cpu"))  # type: ignore[arg-type]  # as BERT

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        if not is_looked_through() and not positions.is_meta:
            self._check_inside(positions)
        for axis, table in enumerate(self.axis_tables):
            x = x + table(positions[..., axis]).to(x.dtype)
        return x

    @property
    def reach(self) -> tuple[int, ...]:
        return (self.max_length,) * self.axes

    def _check_inside(self, positions: Tensor) -> None:
        """Raise where a position is not in the table."""
        outside = ((positions < 0) | (positions >= self.max_length)).nonzero()
        if len(outside):
            place = tuple(outside[0].tolist())
            raise ValueError(
                f"position {int(positions[place])} on axis {place[-1]} is outside the learned table: max_length={self.max_length} has "
                f"positions 0 … {self.max_length - 1}; cut the sequence, build with a larger max_length, or take an encoding "
                "without one, such as 'sinusoidal'"
            )

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}"
