"""Sines and cosines of the position, added to embeddings (Vaswani et al., 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from permuteformer.ops.checks import check_integer
from permuteformer.ops.permutation import axis_sizes
from permuteformer.positions.angles import angles, geometric_turns
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("sinusoidal")
class Sinusoidal(PositionEncoding):
    """Adds the sine and cosine of position × base^(-2t/d), at any integer position.

    All sines come first, then all cosines, as in fairseq (the paper alternates them: a permutation of the channels). With several axes,
    each axis has its own part of the channels, laid out in this way.

    Args:
        hidden_size: width of the embeddings, d. An odd part has one sine more than cosines.
        axes: numbers per position: 1 for text, 2 for images.
        base: the slowest sine has a period of about 2 pi × base tokens.

    >>> Sinusoidal(hidden_size=4).embed(torch.zeros(1, 2, 4), torch.tensor([[[0], [1]]]))
    tensor([[[0.0000, 0.0000, 1.0000, 1.0000],
             [0.8415, 0.0100, 0.5403, 0.9999]]])
    """

    turns: Tensor

    def __init__(self, hidden_size: int, axes: int = 1, base: float = 10_000.0) -> None:
        super().__init__()
        check_integer(hidden_size=hidden_size, axes=axes)
        self.axes, self.base = axes, base
        self.sizes = axis_sizes(hidden_size, axes)
        self.sines = [(size + 1) // 2 for size in self.sizes]
        self.register_buffer("turns", torch.empty(2, sum(self.sines), dtype=torch.int64), persistent=False)
        self.reset()

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        with torch.device("cpu"):
            copy(self.turns, torch.cat([geometric_turns(size, self.base) for size in self.sizes], dim=-1))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        waves: list[Tensor] = []
        for axis, turns in enumerate(self.turns.split(self.sines, dim=-1)):
            angle = angles(positions[..., axis, None], *turns)  # b l t
            waves += [angle.sin(), angle[..., : self.sizes[axis] // 2].cos()]
        return x + torch.cat(waves, dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"channels={'+'.join(map(str, self.sizes))}, base={self.base:g}"
