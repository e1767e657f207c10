"""Nyströmformer (Xiong et al., 2021): approximates the softmax matrix from its rows and columns at a few landmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from permuteformer.attention.base import ATTENTIONS, Attention
from permuteformer.ops.call import Tokens
from permuteformer.ops.checks import check_integer, without_autocast
from permuteformer.positions.base import PositionEncoding


@ATTENTIONS.register("nystromformer")
class NystromformerAttention(Attention):
    """softmax(q k~^T) softmax(q~ k~^T)^+ softmax(q~ k^T) v with landmarks q~ and k~: linear in the length.

    Landmarks are means of consecutive groups of a row's real tokens, as equal in size as possible, so any length works and padding moves
    none of them. With at most as many real tokens as landmarks, each token is a landmark, the others are empty and masked, and the result
    approaches softmax attention as the pseudo-inverse converges. Other arguments are those of ``Attention``.

    Args:
        causal: not supported: a landmark is a mean of earlier and later tokens.
        num_landmarks: landmarks per head, m in the paper.
        iterations: iterations of the pseudo-inverse.
        convolution_size: tokens, an odd number, of a depth-wise convolution of the values that is added to the output; ``None`` for none.

    >>> attention = NystromformerAttention(2, 4, num_landmarks=8)
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
        num_landmarks: int = 64,
        iterations: int = 6,
        convolution_size: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_size, causal, position)
        check_integer(num_landmarks=num_landmarks, iterations=iterations)
        self.num_landmarks, self.iterations = num_landmarks, iterations
        self.convolution: nn.Conv2d | None = None
        if convolution_size is not None:
            if not isinstance(convolution_size, int) or convolution_size < 1 or convolution_size % 2 == 0:
                raise ValueError(f"convolution_size must be an odd integer of at least 1, or None, got {convolution_size!r}")
            size, padding = (convolution_size, 1), (convolution_size // 2, 0)  # one filter per head, shared by its features
            self.convolution = nn.Conv2d(num_heads, num_heads, size, padding=padding, groups=num_heads, bias=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: Any) -> tuple[Tensor, None]:
        dtype = v.dtype
        # The pseudo-inverse amplifies rounding errors more than tenfold: too much for bfloat16.
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        with without_autocast(q.device):
            if tokens.mask is not None:
                masked = ~tokens.mask[:, None, :, None]
                q, k, v = (x.masked_fill(masked, 0) for x in (q, k, v))
            means = _group_means(q, tokens.mask, self.num_landmarks)  # b m l
            query_landmarks, key_landmarks = (torch.einsum("bml,bhld->bhmd", means, x) for x in (q, k))
            filled = (means > 0).any(-1)  # b m
            inverse = _pseudo_inverse(_landmark_weights(query_landmarks, key_landmarks, filled), self.iterations)
            values = inverse @ _attend(query_landmarks, k, v, tokens.mask)  # b h m v
            out = _attend(q, key_landmarks, values, filled)  # b h l v
            if self.convolution is not None:
                weight, padding = self.convolution.weight.to(v.dtype), self.convolution.padding
                out = out + F.conv2d(v, weight, padding=padding, groups=self.num_heads)
        return out.to(dtype), None

    def extra_repr(self) -> str:
        return f"num_landmarks={self.num_landmarks}, iterations={self.iterations}"


def _group_means(x: Tensor, mask: Tensor | None, num_landmarks: int) -> Tensor:
    """Return the matrix ``b m l`` that maps tokens to the means of m groups, in the dtype of ``x``, ``b h l d``.

    Of n real tokens, token i is in group floor(i m / n). A group without a token has a row of zeros.
    """
    b, _, length, _ = x.shape
    if mask is None:
        mask = torch.ones(1, length, dtype=torch.bool, device=x.device)
    group = (mask.cumsum(-1) - 1) * num_landmarks // mask.sum(-1, keepdim=True).clamp(min=1)  # b l
    landmarks = torch.arange(num_landmarks, device=x.device).unsqueeze(-1)
    member = ((group.unsqueeze(-2) == landmarks) & mask.unsqueeze(-2)).to(x.dtype)
    return (member / member.sum(-1, keepdim=True).clamp(min=1)).expand(b, -1, -1)


def _landmark_weights(query_landmarks: Tensor, key_landmarks: Tensor, filled: Tensor) -> Tensor:
    """Return softmax(q~ k~^T / sqrt d), ``b h m m``, with zeros in the rows and columns of empty landmarks.

    The pseudo-inverse of such a matrix is that of its filled part, with zeros around it.
    """
    scores: Tensor = query_landmarks @ key_landmarks.transpose(-1, -2) * query_landmarks.shape[-1] ** -0.5
    rows, columns = filled[:, None, :, None], filled[:, None, None, :]
    weights = scores.masked_fill(~columns, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~(rows & columns), 0)


def _pseudo_inverse(matrix: Tensor, iterations: int) -> Tensor:
    """Return the Moore–Penrose inverse of weights ``b h m m`` whose rows sum to 1 or are zero, by the paper's third-order iteration.

    It starts from A^T / (|A|_1 |A|_inf), with the norms of each matrix: one norm for the batch would make rows depend on each other.
    """
    norm = matrix.sum(-2).amax(-1).clamp(min=1)[..., None, None]  # |A|_1 >= 1, unless A is zero; |A|_inf = 1
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = matrix.transpose(-1, -2) / norm
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax attention to the keys of ``mask``, ``b s``."""
    if mask is not None:  # a row without a real key sees all keys, whose values are zero: not every backend supports a fully masked row
        mask = (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
