"""Learned position embeddings: a vector per position, added to embeddings (BERT)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from permuteformer.ops.checks import check_integer, is_traced
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("learned")
class Learned(PositionEncoding):
    """A table of vectors for positions 0 to max_length - 1. With several axes, one table per axis; their vectors are summed.

    Args:
        hidden_size: width of the embeddings.
        max_length: positions per axis. A position outside raises an error.
        axes: numbers per position: 1 for text, 2 for images.

    >>> encoding = Learned(hidden_size=8, max_length=512)
    >>> encoding.embed(torch.zeros(1, 1, 8), torch.tensor([[[512]]]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: position 512 on axis 0 is outside the learned table of max_length=512: ...
    """

    axes: int

    def __init__(self, hidden_size: int, max_length: int, axes: int = 1) -> None:
        super().__init__()
        check_integer(hidden_size=hidden_size, max_length=max_length, axes=axes)
        self.axes, self.max_length = axes, max_length
        self.axis_tables = nn.ModuleList(nn.Embedding(max_length, hidden_size) for _ in range(axes))
        self.reset()

    @torch.no_grad()
    def reset(self, copy: Copy = Tensor.copy_) -> None:
        for weight in self.parameters():
            if not weight.is_meta:
                copy(weight, 0.02 * torch.randn(weight.shape, device="cpu"))  # as BERT

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        if not is_traced() and not positions.is_meta:
            outside = ((positions < 0) | (positions >= self.max_length)).nonzero()
            if len(outside):
                row, token, axis = outside[0].tolist()
                raise ValueError(
                    f"position {positions[row, token, axis]} on axis {axis} is outside the learned table of max_length={self.max_length}: "
                    "cut the sequence, or use a larger max_length or 'sinusoidal', which has no limit"
                )
        for axis, table in enumerate(self.axis_tables):
            x = x + table(positions[..., axis]).to(x.dtype)
        return x

    @property
    def reach(self) -> tuple[int, ...]:
        return (self.max_length,) * self.axes

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}"
