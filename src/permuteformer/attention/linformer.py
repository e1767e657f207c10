"""Linformer (Wang et al., 2020): keys and values are projected along the length to a fixed number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from permuteformer.attention.base import ATTENTIONS, Attention
from permuteformer.ops.call import Tokens
from permuteformer.ops.checks import check_integer
from permuteformer.positions.base import Copy, PositionEncoding


@ATTENTIONS.register("linformer")
class LinformerAttention(Attention):
    """softmax(q (E k)^T / sqrt d) (F v) with learned E and F: linear in the length, up to a fixed length.

    Token j of a row uses column j of E and F. Masked tokens are zeroed before the projection, so padding after the real tokens changes
    nothing. Other arguments are those of ``Attention``.

    Args:
        causal: not supported: a projected key mixes the whole sequence.
        max_length: the longest input, the number of columns of E and F. A shorter input uses the first columns.
        projected_length: projected keys and values per head, k in the paper.
        share_key_value: use one matrix as E and F.

    >>> attention = LinformerAttention(2, 4, max_length=100, projected_length=8)
    >>> q = k = v = torch.randn(1, 2, 50, 4)
    >>> attention.mix(q, k, v, Tokens(), None)[0].shape
    torch.Size([1, 2, 50, 4])
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        causal: bool = False,
        position: PositionEncoding | None = None,
        *,
        max_length: int,
        projected_length: int = 256,
        share_key_value: bool = True,
    ) -> None:
        super().__init__(num_heads, head_size, causal, position)
        check_integer(max_length=max_length, projected_length=projected_length)
        self.max_length = max_length
        self.key_projection = nn.Parameter(torch.empty(num_heads, projected_length, max_length))
        self.value_projection = None if share_key_value else nn.Parameter(torch.empty_like(self.key_projection))
        self.reset()

    @torch.no_grad()
    def reset(self, copy: Copy = Tensor.copy_) -> None:
        """Draw the projections from N(0, 1 / max_length): at full length, projected keys and values have the scale of keys and values."""
        for projection in self.parameters():
            if not projection.is_meta:
                copy(projection, self.max_length**-0.5 * torch.randn(projection.shape, device="cpu"))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: Any) -> tuple[Tensor, None]:
        if k.shape[2] > self.max_length:
            raise ValueError(
                f"length must be at most max_length={self.max_length}, got {k.shape[2]}: build with a larger max_length, or cut the input"
            )
        if tokens.mask is not None:  # queries too: a NaN in one of them would reach the gradient of every key
            masked = ~tokens.mask[:, None, :, None]
            q, k, v = (x.masked_fill(masked, 0) for x in (q, k, v))
        values = self.key_projection if self.value_projection is None else self.value_projection
        return F.scaled_dot_product_attention(q, _project(self.key_projection, k), _project(values, v)), None

    def extra_repr(self) -> str:
        _, projected, length = self.key_projection.shape
        return f"max_length={length}, projected_length={projected}, share_key_value={self.value_projection is None}"


def _project(projection: Tensor, x: Tensor) -> Tensor:
    """Multiply the first l columns of ``projection`` with ``x``, ``b h l d``; matmul would copy it for every row of the batch."""
    return torch.einsum("hpl,bhld->bhpd", projection[..., : x.shape[2]].to(x.dtype), x)
