"""T5's relative bias (Raffel et al., 2020): a learned number a head for each range of distances, added to scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from permuteformer.ops.checks import check_whole
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding


@POSITIONS.register("t5_bias")
class T5Bias(PositionEncoding):
    """Distances share out among buckets: the short ones have one each, longer ones one for a range that grows.

    It is a number for each pair of tokens, so it costs O(l s): in linear attention it gives up linearity, and is here to
    compare with. With several axes each has its own table, and the biases are summed. The tables start as T5's do,
    normal with deviation hidden_size^-0.5.

    Args:
        hidden_size: width of the model, for the scale of the initial bias.
        num_heads: heads, each with its own bias.
        axes: numbers in a position: 1 for text, 2 for images.
        causal: keys are never after the query, so all buckets are for those before. Else half of them for either side.
        num_buckets: numbers learned for each head and axis.
        max_distance: distances from here on are all in the last bucket.

    >>> encoding = T5Bias(hidden_size=32, num_heads=4)
    >>> positions = torch.arange(6).view(1, -1, 1)
    >>> encoding.bias(positions, positions).shape    # b h l s
    torch.Size([1, 4, 6, 6])
    """

    starts: Tensor

    def __init__(
        self, hidden_size: int, num_heads: int, axes: int = 1, causal: bool = False, num_buckets: int = 32, max_distance: int = 128
    ) -> None:
        super().__init__()
        check_whole(hidden_size=hidden_size, num_heads=num_heads, axes=axes, num_buckets=num_buckets, max_distance=max_distance)
        self.num_heads, self.axes = num_heads, axes
        sides = 1 if causal else 2
        if num_buckets < 2 * sides or num_buckets % sides:
            raise ValueError(
                f"num_buckets must be {'at least 2' if causal else 'even and at least 4, half for either side'}; it is {num_buckets}"
            )
        if max_distance <= num_buckets // sides // 2:
            raise ValueError(
                f"max_distance must be above {num_buckets // sides // 2}, the distances that have a bucket of their own with "
                f"num_buckets={num_buckets} and causal={causal}; it is {max_distance}"
            )
        self.causal = causal
        self.max_distance = max_distance
        self.buckets = num_buckets // sides
        self.register_buffer("starts", torch.empty(self.buckets - 1, dtype=torch.int64), persistent=False)
        self.axis_tables = nn.ModuleList(nn.Embedding(num_buckets, num_heads) for _ in range(axes))
        self.deviation = hidden_size**-0.5
        self.reset()

    @torch.no_grad()
    def reset(self, copy: Copy = Tensor.copy_) -> None:
        if self.starts.is_meta:  # nothing of them would be kept
            return
        with torch.device("cpu"):
            copy(self.starts, _starts(self.buckets, self.max_distance))
            for table in self.axis_tables:
                copy(table.weight, self.deviation * torch.randn(table.weight.shape))  # type: ignore[arg-type]

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        bias: Tensor | None = None
        for axis, table in enumerate(self.axis_tables):
            distance = query_positions[..., axis].unsqueeze(-1) - key_positions[..., axis].unsqueeze(-2)
            term = table(self.bucket(distance))  # b l s h
            bias = term if bias is None else bias + term
        assert bias is not None
        return bias.permute(0, 3, 1, 2)

    @property
    def reach(self) -> tuple[int, ...]:
        return (self.max_distance,) * len(self.axis_tables)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each query position less key position, int64.

        >>> T5Bias(hidden_size=32, num_heads=4).bucket(torch.tensor([0, 7, 8, 16, 128, -1, -(10**12)]))
        tensor([ 0,  7,  8, 10, 15, 17, 31])
        """
        if self.causal:
            return torch.bucketize(distance, self.starts, right=True)
        after = (distance < 0) * (len(self.starts) + 1)
        return torch.bucketize(distance.abs(), self.starts, right=True) + after

    def extra_repr(self) -> str:
        return f"causal={self.causal}, max_distance={self.max_distance}"


def _starts(buckets: int, max_distance: int) -> Tensor:
    """The smallest distance in each bucket but the first.

    Half of the buckets hold one distance. Those after divide what is left up to ``max_distance`` evenly in its logarithm:
    the k-th of n starts at the first d with (d / exact)^n >= (max_distance / exact)^k, here in whole numbers, so that
    no rounding of a logarithm moves an edge.
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
