"""Dropout whose noise a CPU draws faster than torch's: four numbers at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANCES = 2**16
"""A number is kept or not by 16 random bits, so that p is exact to 1/65,536."""


class Dropout(nn.Dropout):
    """As ``nn.Dropout``, from torch's own generator: but four numbers of a draw, where torch draws once for each and one after the other.

    >>> dropout = Dropout(0.25)
    >>> y = dropout(torch.ones(1000, 1000))
    >>> round(float((y == 0).float().mean()), 2), round(float(y.mean()), 2)
    (0.25, 1.0)
    """

    def forward(self, input: Tensor) -> Tensor:
        """Some numbers zero, the others larger, in training; else all as they are."""
        if not self.training or self.p == 0:
            return input
        if input.device.type != "cpu" or self.inplace or torch.compiler.is_compiling():
            return F.dropout(input, self.p, True, self.inplace)
        dropped = round(self.p * CHANCES)
        bits = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        noise = bits[: input.numel()].view(input.shape).float().ge_(dropped - CHANCES // 2).mul_(CHANCES / max(CHANCES - dropped, 1))
        return input * noise.to(input.dtype)
