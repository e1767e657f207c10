"""Nyströmformer (Xiong et al., 2021): the softmax matrix from its rows and columns at a few landmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from permuteformer.attention.base import ATTENTIONS, Attention
from permuteformer.ops.checks import check_whole, without_autocast
from permuteformer.positions.base import PositionEncoding


@ATTENTIONS.register("nystromformer")
class NystromformerAttention(Attention):
    """softmax(q k~^T) softmax(q~ k~^T)^+ softmax(q~ k^T) v, with landmarks q~, k~: linear in the length.

    Landmarks are the means of consecutive segments of a row's real tokens, as equal in size as can be, so any length
    will do and padding moves none of them. With no more real tokens than landmarks, each token is one, the others
    stay empty and unseen, and the result nears softmax attention as the pseudo-inverse converges. It never switches
    to softmax attention there: that would make the output depend on the padding.

    Args:
        num_heads: heads.
        head_size: size of a head's values.
        causal: refused: a landmark is a mean of tokens before and after.
        position: none with a hook in attention; positions belong in the embeddings.
        num_landmarks: landmarks a head, m in the paper.
        iterations: steps of the pseudo-inverse.
        convolution_size: tokens, an odd number, of a depth-wise convolution of the values that is added to the output;
            ``None`` for none.

    >>> attention = NystromformerAttention(2, 4, num_landmarks=8)
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
        num_landmarks: int = 64,
        iterations: int = 6,
        convolution_size: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_size, causal, position)
        check_whole(num_landmarks=num_landmarks, iterations=iterations)
        if convolution_size is not None and (not isinstance(convolution_size, int) or convolution_size < 1 or convolution_size % 2 == 0):
            raise ValueError(
                "convolution_size must be an odd number of tokens, at least 1, so that a token stands in the middle, or None for no "
                f"convolution; it is {convolution_size!r}"
            )
        self.num_landmarks = num_landmarks
        self.iterations = iterations
        self.convolution: nn.Conv2d | None = None
        if convolution_size is not None:  # one filter a head, the same for all of its features
            self.convolution = nn.Conv2d(
                num_heads, num_heads, (convolution_size, 1), padding=(convolution_size // 2, 0), groups=num_heads, bias=False
            )

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None, key_mask: Tensor | None, segments: Tensor | None, state: Any
    ) -> tuple[Tensor, None]:
        self.require_for(segments=segments, state=state)
        dtype = v.dtype
        # The pseudo-inverse enlarges rounding errors more than tenfold: bfloat16 has no digits to spare for that.
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        with without_autocast(q.device):
            if key_mask is not None:
                hidden = ~key_mask[:, None, :, None]
                q, k, v = q.masked_fill(hidden, 0), k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
            means = _segment_means(q, key_mask, self.num_landmarks)  # b m l
            query_landmarks, key_landmarks = (torch.einsum("bml,bhld->bhmd", means, x) for x in (q, k))
            filled = (means > 0).any(-1)  # b m
            values = _attend(query_landmarks, k, v, key_mask)  # b h m v
            values = _pseudo_inverse(_landmark_weights(query_landmarks, key_landmarks, filled), self.iterations) @ values
            out = _attend(q, key_landmarks, values, filled)  # b h l v
            if self.convolution is not None:
                weight, padding = self.convolution.weight.to(v.dtype), (self.convolution.kernel_size[0] // 2, 0)
                out = out + F.conv2d(v, weight, padding=padding, groups=self.num_heads)
        return out.to(dtype), None

    def extra_repr(self) -> str:
        return f"num_landmarks={self.num_landmarks}, iterations={self.iterations}"


def _segment_means(x: Tensor, key_mask: Tensor | None, num_landmarks: int) -> Tensor:
    """The matrix ``b m l`` that takes a row's tokens to the means of its segments, in the dtype of ``x`` (``b h l d``).

    Of n real tokens, the one of rank i is in segment floor(i m / n); a segment without a token gets a row of zeros.
    """
    b, _, length, _ = x.shape
    if key_mask is None:
        key_mask = torch.ones(1, length, dtype=torch.bool, device=x.device)
    rank = key_mask.cumsum(-1) - 1
    count = key_mask.sum(-1, keepdim=True).clamp(min=1)
    segment = rank * num_landmarks // count  # b l
    member = (segment.unsqueeze(-2) == torch.arange(num_landmarks, device=x.device).unsqueeze(-1)) & key_mask.unsqueeze(-2)
    member = member.to(x.dtype)
    return (member / member.sum(-1, keepdim=True).clamp(min=1)).expand(b, -1, -1)


def _landmark_weights(query_landmarks: Tensor, key_landmarks: Tensor, filled: Tensor) -> Tensor:
    """softmax(q~ k~^T / sqrt d), ``b h m m``, with zeros in the rows and columns of empty landmarks.

    The pseudo-inverse of such a matrix is that of its filled part, with zeros around it.
    """
    scores: Tensor = query_landmarks @ key_landmarks.transpose(-1, -2) * query_landmarks.shape[-1] ** -0.5
    rows, columns = filled[:, None, :, None], filled[:, None, None, :]
    weights = scores.masked_fill(~columns, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~(rows & columns), 0)


def _pseudo_inverse(matrix: Tensor, iterations: int) -> Tensor:
    """The Moore–Penrose inverse of weights ``b h m m`` whose rows sum to 1 or are zero: the paper's iteration of the third order.

    It starts from A^T / (|A|_1 |A|_inf), with the norms of each matrix by itself: one norm for the batch would tie
    rows to each other.
    """
    # |A|_inf, the largest sum of a row, is 1. |A|_1, of a column, is then at least 1, but for a matrix of zeros.
    norm = matrix.sum(-2).amax(-1).clamp(min=1)[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = matrix.transpose(-1, -2) / norm
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse


def _attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Softmax attention to the keys of ``key_mask``, ``b s``."""
    if key_mask is not None:  # where it has none, all are seen, whose values are zero: not every backend can do without a key
        key_mask = (key_mask | ~key_mask.any(-1, keepdim=True))[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask)
