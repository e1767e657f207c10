"""The paper's r: the weight of a key is multiplied by r for every token of distance (equation 11), and its two-sided form."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from permuteformer.ops.checks import check_flag, check_integer
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding

DEFAULT_LENGTH = 1024


@POSITIONS.register("decay")
class Decay(PositionEncoding):
    """r^(i-j) for causal models, or with ``two_sided`` r^|i-j| for bidirectional ones. r^-j is never formed: no overflow at any length.

    Distances count tokens. With several axes, head h measures them in the flattened order in which axis h mod a varies
    fastest: half of the heads read an image row by row, the others column by column.

    Args:
        num_heads: heads, each with its own r.
        r: one number for all heads, or a tensor ``h``, in (0, 1]. Default: if causal the paper's sigmoid(2 + 3h/H), with 8 heads 0.881
            to 0.990; if two-sided, half-lives are spaced geometrically from 1 to length/4 over the heads of each axis.
        learnable: train r (as its logit, so that it stays in (0, 1)).
        two_sided: use r^|i-j|, for bidirectional models. The paper has r in causal models only.
        length: the length that the default r of a two-sided decay is for; 1,024 by default.
        axes: numbers per position.

    >>> Decay(num_heads=8).r[[0, -1]]
    tensor([0.8808, 0.9903], dtype=torch.float64)
    >>> Decay(num_heads=4, two_sided=True, length=1024).half_life
    tensor([  1.0000,   6.3496,  40.3175, 256.0000], dtype=torch.float64)
    """

    exact = ("log_r",)
    log_r: Tensor

    def __init__(
        self,
        num_heads: int,
        r: float | Tensor | None = None,
        learnable: bool = False,
        two_sided: bool = False,
        length: int | None = None,
        axes: int = 1,
    ) -> None:
        super().__init__()
        check_integer(num_heads=num_heads, axes=axes)
        check_flag(learnable=learnable, two_sided=two_sided)
        if length is not None:
            check_integer(length=length)
            if not two_sided or r is not None:
                raise ValueError("length chooses the default r of a two-sided decay: leave it out, or pass two_sided=True and no r")
        if two_sided and num_heads < axes:
            raise ValueError(f"a two-sided decay needs a head per axis: num_heads={num_heads} is less than axes={axes}")
        self.num_heads, self.two_sided, self.learnable = num_heads, two_sided, learnable
        self.axes = axes if two_sided else None
        with torch.device("cpu"):
            if r is None:
                self._initial = _two_sided_default(num_heads, axes, length or DEFAULT_LENGTH) if two_sided else _paper(num_heads)
            else:
                self._initial = _given(num_heads, r)
        if learnable:
            if (self._initial == 0).any():
                raise ValueError("r must be below 1 to be learnable, since its logit is trained: start at 0.99, for example")
            self.logit = nn.Parameter(torch.empty(num_heads))
        else:
            self.register_buffer("log_r", torch.empty(num_heads, dtype=torch.float64))
        self.reset()

    @torch.no_grad()
    def reset(self, copy: Copy = Tensor.copy_) -> None:
        if self.learnable:
            copy(self.logit, self._initial.exp().logit())
        else:
            copy(self.log_r, self._initial)

    @property
    def r(self) -> Tensor:
        """r of each head."""
        return self.log_decay().exp()

    @property
    def half_life(self) -> Tensor:
        """Tokens after which the weight of a key is halved, per head."""
        return -math.log(2) / self.log_decay().double()

    def log_decay(self) -> Tensor:
        if self.learnable:
            return nn.functional.logsigmoid(self.logit)
        return self.log_r

    def extra_repr(self) -> str:
        return f"learnable={self.learnable}, two_sided={self.two_sided}"


def _paper(num_heads: int) -> Tensor:
    return nn.functional.logsigmoid(2 + 3 * torch.arange(num_heads, dtype=torch.float64) / num_heads)


def _two_sided_default(num_heads: int, axes: int, length: int) -> Tensor:
    """log r with half-lives geometric from 1 to length/4 over the heads of each axis; a head alone gets the geometric mean."""
    heads = torch.arange(num_heads, dtype=torch.float64)
    count = ((num_heads - 1 - heads % axes) // axes + 1).to(torch.float64)  # heads of the same axis
    place = torch.where(count > 1, heads.div(axes, rounding_mode="floor") / (count - 1).clamp(min=1), 0.5)
    half_life = max(length / 4, 1.0) ** place
    return -math.log(2) / half_life


def _given(num_heads: int, r: float | Tensor) -> Tensor:
    """log r of each head, in float64."""
    if isinstance(r, Tensor) and r.requires_grad:
        raise ValueError("r is a parameter, but only its value would be used: pass r.detach() and learnable=True to train it")
    if isinstance(r, (bool, str)):
        raise ValueError(f"r must be a number in (0, 1], a tensor of {num_heads} of them, or None, got {r!r}")
    r = torch.as_tensor(r, dtype=torch.float64, device="cpu")
    if r.shape not in ((), (num_heads,)) or not ((r >= 1e-30) & (r <= 1)).all():
        raise ValueError(f"r must be a number in (0, 1], or a tensor of {num_heads} of them, one per head, got {r.tolist()}")
    return r.log().expand(num_heads).clone()
