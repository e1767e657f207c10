"""T5's relative bias (Raffel et al., 2020): a learned number per head and range of distances, added to scores."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

from permuteformer.ops.checks import check_integer
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("t5_bias")
class T5Bias(PositionEncoding):
    """Learns a bias per bucket of distances: a bucket for each short distance, and for ranges that grow with the distance.

    A bias per pair of tokens costs O(l s), so linear attention with it is quadratic: it is here to compare with. With several axes, each
    axis has its own table, and the biases are summed. As in T5, tables start normal with standard deviation hidden_size^-0.5.

    Args:
        hidden_size: width of the model, for the scale of the initial bias.
        num_heads: heads, each with its own bias.
        axes: numbers per position: 1 for text, 2 for images.
        causal: use all buckets for keys before the query; if false, half of them for each side.
        num_buckets: biases learned per head and axis.
        max_distance: distances from here on are in the last bucket.

    >>> encoding = T5Bias(hidden_size=32, num_heads=4)
    >>> positions = torch.arange(6).view(1, -1, 1)
    >>> encoding.bias(positions, positions).shape    # b h l s
    torch.Size([1, 4, 6, 6])
    """

    axes: int
    starts: Tensor
    """The smallest distance of each bucket after the first."""

    def __init__(
        self, hidden_size: int, num_heads: int, axes: int = 1, causal: bool = False, num_buckets: int = 32, max_distance: int = 128
    ) -> None:
        super().__init__()
        check_integer(hidden_size=hidden_size, num_heads=num_heads, axes=axes, num_buckets=num_buckets, max_distance=max_distance)
        sides = 1 if causal else 2
        self.buckets = num_buckets // sides
        if self.buckets < 2 or num_buckets % sides:
            raise ValueError(f"num_buckets must be a multiple of {sides}, at least {2 * sides}, with causal={causal}, got {num_buckets}")
        if max_distance <= self.buckets // 2:
            raise ValueError(
                f"max_distance must be above {self.buckets // 2} with num_buckets={num_buckets} and causal={causal}, got {max_distance}"
            )
        self.num_heads, self.axes, self.causal, self.max_distance = num_heads, axes, causal, max_distance
        self.register_buffer("starts", torch.empty(self.buckets - 1, dtype=torch.int64), persistent=False)
        self.axis_tables = nn.ModuleList(nn.Embedding(num_buckets, num_heads) for _ in range(axes))
        self.deviation = hidden_size**-0.5
        self.reset()

    @torch.no_grad()
    def reset(self, copy: Copy = Tensor.copy_) -> None:
        if self.starts.is_meta:
            return
        with torch.device("cpu"):
            copy(self.starts, _starts(self.buckets, self.max_distance))
            for weight in self.parameters():
                copy(weight, self.deviation * torch.randn(weight.shape))

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        pairs = zip(query_positions.unbind(-1), key_positions.unbind(-1), strict=True)
        distances = (query.unsqueeze(-1) - key.unsqueeze(-2) for query, key in pairs)  # b l s
        terms = (table(self.bucket(distance)) for table, distance in zip(self.axis_tables, distances, strict=True))  # b l s h
        bias: Tensor = reduce(torch.add, terms)
        return bias.permute(0, 3, 1, 2)

    @property
    def reach(self) -> tuple[int, ...]:
        return (self.max_distance,) * self.axes

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance, query position minus key position, int64.

        >>> T5Bias(hidden_size=32, num_heads=4).bucket(torch.tensor([0, 7, 8, 16, 128, -1, -(10**12)]))
        tensor([ 0,  7,  8, 10, 15, 17, 31])
        """
        if self.causal:
            return torch.bucketize(distance, self.starts, right=True)
        return torch.bucketize(distance.abs(), self.starts, right=True) + (distance < 0) * self.buckets

    def extra_repr(self) -> str:
        return f"causal={self.causal}, max_distance={self.max_distance}"


def _starts(buckets: int, max_distance: int) -> Tensor:
    """Return the smallest distance of each bucket after the first.

    Half of the buckets hold one distance each. The n others divide the distances up to ``max_distance`` evenly in their logarithm: the
    k-th starts at the first d with (d / exact)^n >= (max_distance / exact)^k, computed in integers, so that rounding moves no edge.
    """
    exact = buckets // 2
    n = buckets - exact
    starts = list(range(1, exact + 1))
    for k in range(1, n):
        start = max(starts[-1], int(exact * (max_distance / exact) ** (k / n)) - 1)
        while start**n * exact**k < max_distance**k * exact**n:
            start += 1
        starts.append(start)
    return torch.tensor(starts)
