"""Dropout that a CPU does in one pass, and of which nothing is kept for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from permuteformer.ops.backend import asked
from permuteformer.ops.checks import is_looked_through
from permuteformer.ops.native import load
from permuteformer.ops.sublayers import NOTHING, Chance, drop

CHANCES = 2**32
"""A number is dropped or not by so many values of a hash: p is exact to one of them."""


class Dropout(nn.Dropout):
    """As ``nn.Dropout``. By the CPU kernel, noise is a hash of each number's place and of a seed from torch's own generator.

    >>> dropout = Dropout(0.25)
    >>> y = dropout(torch.ones(1000, 1000))
    >>> round(float((y == 0).float().mean()), 2), round(float(y.mean()), 2)
    (0.25, 1.0)
    """

    @property
    def is_at_work(self) -> bool:
        """Whether anything is dropped at all."""
        return self.training and self.p > 0

    def draw(self) -> Chance | None:
        """What the kernel drops in the next call: nothing where this is not at work; ``None`` where it is all, which it cannot."""
        if not self.is_at_work:
            return NOTHING
        dropped = round(self.p * CHANCES)
        return Chance(int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)), dropped) if dropped < CHANCES else None

    def forward(self, input: Tensor) -> Tensor:
        """Some numbers zero, the others larger, in training; else all as they are."""
        if not self.is_at_work:
            return input
        is_known = type(input) is Tensor and input.device.type == "cpu" and input.dtype == torch.float32 and not self.inplace
        if isinstance(load(), str) or not is_known or is_looked_through() or asked(None) == "torch" or (chance := self.draw()) is None:
            return F.dropout(input, self.p, True, self.inplace)
        return drop(input, chance)
