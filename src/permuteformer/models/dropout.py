"""Dropout that a CPU does in one pass, and of which nothing is kept for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from permuteformer.ops.backend import asked
from permuteformer.ops.native import Kernel, load

CHANCES = 2**32
"""A number is dropped or not by so many values of a hash: p is exact to one of them."""


class Dropout(nn.Dropout):
    """As ``nn.Dropout``. By the CPU kernel, noise is a hash of each number's place and of a seed from torch's own generator.

    >>> dropout = Dropout(0.25)
    >>> y = dropout(torch.ones(1000, 1000))
    >>> round(float((y == 0).float().mean()), 2), round(float(y.mean()), 2)
    (0.25, 1.0)
    """

    def forward(self, input: Tensor) -> Tensor:
        """Some numbers zero, the others larger, in training; else all as they are."""
        if not self.training or self.p == 0:
            return input
        kernel, dropped = load(), round(self.p * CHANCES)
        is_known = type(input) is Tensor and input.device.type == "cpu" and input.dtype == torch.float32 and dropped < CHANCES
        if isinstance(kernel, str) or not is_known or self.inplace or torch.compiler.is_compiling() or asked(None) == "torch":
            return F.dropout(input, self.p, True, self.inplace)
        seed = int(torch.empty((), dtype=torch.int64).random_(-(2**63), None))
        y: Tensor = _Drop.apply(input, kernel, seed, dropped)
        return y


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Kernel, seed: int, dropped: int) -> Tensor:
        ctx.how = kernel, seed, dropped
        x = x.contiguous()
        y = torch.empty_like(x)
        kernel("dropout", [x.data_ptr(), y.data_ptr(), x.numel(), seed, dropped, torch.get_num_threads()])
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        return _Drop.apply(d, *ctx.how), None, None, None
