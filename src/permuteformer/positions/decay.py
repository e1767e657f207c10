"""The paper's r: a key's weight shrinks by r with every token between it and the query (equation 11)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from permuteformer.ops.checks import check_flag, check_whole
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("decay")
class Decay(PositionEncoding):
    """r^(i-j) for each head, counted in tokens. r^-j itself is never formed, so no length overflows.

    Args:
        num_heads: heads, each with its own r.
        r: one number for all heads, or a tensor ``h``, in (0, 1]. ``None`` is the paper's sigmoid(2 + 3h/H): with 8 heads
            0.881 to 0.990.
        learnable: train r (as its logit, so that it stays in (0, 1)).
        two_sided: weigh by r^|i-j| in a bidirectional model. The paper has r in causal models only.

    >>> Decay(num_heads=8).r[[0, -1]]
    tensor([0.8808, 0.9903], dtype=torch.float64)
    """

    exact = ("log_r",)
    log_r: Tensor

    def __init__(self, num_heads: int, r: float | Tensor | None = None, learnable: bool = False, two_sided: bool = False) -> None:
        super().__init__()
        check_whole(num_heads=num_heads)
        check_flag(learnable=learnable, two_sided=two_sided)
        self.num_heads = num_heads
        self.two_sided = two_sided
        self.learnable = learnable
        with torch.device("cpu"):
            self._initial = self._choose(num_heads, r)
        if learnable:
            if (self._initial == 0).any():
                raise ValueError("r must be below 1 where it is learnable: its logit is what is trained; start it at 0.99, say")
            self.logit = nn.Parameter(torch.empty(num_heads))
        else:
            self.register_buffer("log_r", torch.empty(num_heads, dtype=torch.float64))
        self.reset()

    @staticmethod
    def _choose(num_heads: int, r: float | Tensor | None) -> Tensor:
        """log r of each head, in float64."""
        if r is None:
            return nn.functional.logsigmoid(2 + 3 * torch.arange(num_heads, dtype=torch.float64) / num_heads)
        if isinstance(r, Tensor) and r.requires_grad:
            raise ValueError("r is a parameter, but only its value would be taken: pass r.detach() and learnable=True to train it")
        if isinstance(r, (bool, str)):
            raise ValueError(f"r must be a number in (0, 1], a tensor of {num_heads} of them, or None; it is {r!r}")
        r = torch.as_tensor(r, dtype=torch.float64, device="cpu")
        if r.shape not in ((), (num_heads,)) or not ((r >= 1e-30) & (r <= 1)).all():
            raise ValueError(f"r must be a number, or a tensor of {num_heads}, one a head, in (0, 1]; it is {r.tolist()}")
        return r.log().expand(num_heads).clone()

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

    def log_decay(self) -> Tensor:
        if self.learnable:
            return nn.functional.logsigmoid(self.logit)
        return self.log_r

    def extra_repr(self) -> str:
        return f"learnable={self.learnable}, two_sided={self.two_sided}"
