"""``nn.Linear`` and ``nn.Dropout`` with the CPU kernel: for a few rows, as in decoding, and for dropout in training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from permuteformer.ops import fused_block
from permuteformer.ops.checks import is_eager, is_traced
from permuteformer.ops.fused_block import NO_DROPOUT, Chance
from permuteformer.ops.linear import requested_backend
from permuteformer.ops.native import load

FEW_ROWS = 16
"""Rows up to which the kernel multiplies faster than torch, since it reads the weights at the speed of memory."""
HASH_VALUES = 2**32


def has_kernel() -> bool:
    """Return whether the CPU kernel is loaded and no other backend was asked for."""
    return requested_backend() in ("auto", "native") and not isinstance(load(), str)


class Linear(nn.Linear):
    """``nn.Linear`` that is faster on a CPU for few rows without gradients.

    >>> with torch.inference_mode():
    ...     Linear(16, 3)(torch.randn(1, 1, 16)).shape
    torch.Size([1, 1, 3])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        weight, bias, size = self.weight, self.bias, self.weight.shape[-1]
        if (
            torch.is_grad_enabled()
            or not is_eager()  # before any size: an exported graph must not depend on the length
            or input.numel() > FEW_ROWS * size
            or size % fused_block.ALIGNED
            or not _is_plain(input, Tensor)
            or not _is_plain(weight, nn.Parameter)
            or not (bias is None or _is_plain(bias, nn.Parameter))
            or input.shape[-1:] != (size,)
            or not has_kernel()
        ):
            return F.linear(input, weight, bias)
        return fused_block.project(input, weight, bias)


class Dropout(nn.Dropout):
    """``nn.Dropout`` whose noise on a CPU is a hash of each number's place and of a seed from torch's generator: nothing is saved for it.

    >>> dropout = Dropout(0.25)
    >>> y = dropout(torch.ones(1000, 1000))
    >>> round(float((y == 0).float().mean()), 2), round(float(y.mean()), 2)
    (0.25, 1.0)
    """

    def draw(self) -> Chance | None:
        """Draw the noise of the next call; ``None`` where the kernel cannot do it, as it would drop everything."""
        dropped = round(self.p * HASH_VALUES) if self.training else 0
        if dropped in (0, HASH_VALUES):
            return NO_DROPOUT if dropped == 0 else None
        return Chance(int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)), dropped)

    def forward(self, input: Tensor) -> Tensor:
        """Drop numbers in training."""
        if not self.training or self.p == 0:
            return input
        if not _is_plain(input, Tensor) or self.inplace or is_traced() or not has_kernel() or (chance := self.draw()) is None:
            return F.dropout(input, self.p, True, self.inplace)
        return fused_block.drop(input, chance)


def _is_plain(x: Tensor, kind: type) -> bool:
    """Return whether the kernel can read ``x``."""
    return type(x) is kind and x.is_cpu and x.dtype == torch.float32
