"""Linformer (Wang et al., 2020): keys and values are projected along the length to a fixed number of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from permuteformer.attention.base import ATTENTIONS, Attention
from permuteformer.ops.checks import check_whole
from permuteformer.positions.base import Copy, PositionEncoding


@ATTENTIONS.register("linformer")
class LinformerAttention(Attention):
    """softmax(q (E k)^T / sqrt d) (F v), with learned E and F: linear in the length, for lengths up to one chosen beforehand.

    Token j of a row uses column j of E and F. Hidden tokens are zeroed before the projection, so a projected key is a
    sum over real tokens only, and padding after them changes nothing.

    Args:
        num_heads: heads.
        head_size: size of a head's values.
        causal: refused: a projected key is a mixture of the whole sequence.
        position: none with a hook in attention; positions belong in the embeddings.
        max_length: the longest input: E and F have a column a token. A shorter one uses the first columns.
        projected_length: projected keys and values a head, k in the paper.
        share_key_value: one matrix is both E and F.

    >>> attention = LinformerAttention(2, 4, max_length=100, projected_length=8)
    >>> q = k = v = torch.randn(1, 2, 50, 4)
    >>> attention.mix(q, k, v, positions=None, key_mask=None, segments=None, state=None)[0].shape
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
        check_whole(max_length=max_length, projected_length=projected_length)
        self.max_length = max_length
        self.key_projection = nn.Parameter(torch.empty(num_heads, projected_length, max_length))
        self.value_projection = None if share_key_value else nn.Parameter(torch.empty_like(self.key_projection))
        self.reset()

    @torch.no_grad()
    def reset(self, copy: Copy = Tensor.copy_) -> None:
        """Draw the projections from N(0, 1 / max_length).

        The mean square of a projected entry is then the mean square of the entries it sums (at full length, whatever
        their correlation), so projected keys and values have the scale of keys and values.
        """
        for projection in self.parameters():
            if projection.is_meta:  # nothing of them would be kept
                return
            copy(projection, self.max_length**-0.5 * torch.randn(projection.shape, device="cpu"))

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None, key_mask: Tensor | None, segments: Tensor | None, state: Any
    ) -> tuple[Tensor, None]:
        self.require_for(segments=segments, state=state)
        length = k.shape[2]
        if length > self.max_length:
            raise ValueError(
                f"the input has length {length}, but this attention was built with max_length={self.max_length}: "
                "build it with a larger max_length, or cut the input"
            )
        if key_mask is not None:  # the queries too: a NaN in one of them would reach the gradient of every key
            hidden = ~key_mask[:, None, :, None]
            q, k, v = q.masked_fill(hidden, 0), k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        # A row without a real token has projected values of zero, and so an output of zero.
        values = self.key_projection if self.value_projection is None else self.value_projection
        k, v = _project(self.key_projection, k), _project(values, v)
        return F.scaled_dot_product_attention(q, k, v), None

    def extra_repr(self) -> str:
        _, projected, length = self.key_projection.shape
        return f"max_length={length}, projected_length={projected}, share_key_value={self.value_projection is None}"


def _project(projection: Tensor, x: Tensor) -> Tensor:
    """``x`` (``b h l d``) times the first l columns of ``projection``. Matmul would copy the projection for every row of the batch."""
    return torch.einsum("hpl,bhld->bhpd", projection[..., : x.shape[2]].to(x.dtype), x)
