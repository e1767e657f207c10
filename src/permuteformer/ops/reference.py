"""The paper's equations in O(L^2), never optimised. Read this first, then ``minimal.py``.

Every fast path of the package is tested against these functions in float64, outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    permutations: Sequence[Tensor],
    positions: Tensor,
    visible: Tensor,
    feature_map: Callable[[Tensor], Tensor],
    decay: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Compute PermuteFormer attention: equations 2, 3, 11 and 14.

    Args:
        query: ``b h l m``.
        key: ``b h l m``.
        value: ``b h l v``.
        permutations: one ``h m`` tensor per axis; they commute.
        positions: ``b l a``.
        visible: bool, true where query i sees key j; broadcasts to ``b h l l``.
        feature_map: phi.
        decay: the weight of each pair of tokens, ``b h l l``; see ``decay_weights``.
        normalize: divide by the sum of weights.

    >>> q = k = v = torch.randn(1, 1, 4, 6, dtype=torch.float64)
    >>> shift = torch.tensor([[1, 2, 3, 4, 5, 0]])
    >>> positions, causal = torch.arange(4).view(1, 4, 1), torch.ones(4, 4, dtype=torch.bool).tril()
    >>> here = attention(q, k, v, permutations=[shift], positions=positions, visible=causal, feature_map=torch.exp)
    >>> there = attention(q, k, v, permutations=[shift], positions=positions + 100, visible=causal, feature_map=torch.exp)
    >>> torch.allclose(here, there)    # only i - j matters
    True
    """
    query = permute(feature_map(query), permutations, positions)
    key = permute(feature_map(key), permutations, positions)
    return kernel_attention(query, key, value, visible=visible, decay=decay, normalize=normalize)


def permute(features: Tensor, permutations: Sequence[Tensor], positions: Tensor) -> Tensor:
    """Compute P_x^x P_y^y … phi for every token, ``b h l m``, by powers of permutation matrices.

    >>> permute(torch.tensor([[[[1.0, 2, 3], [1, 2, 3]]]]), [torch.tensor([[1, 2, 0]])], torch.tensor([[[0], [1]]])).tolist()
    [[[[1.0, 2.0, 3.0], [2.0, 3.0, 1.0]]]]
    """
    permuted = features.clone()
    for axis, permutation in enumerate(permutations):
        for h, matrix in enumerate(map(permutation_matrix, permutation)):
            for b in range(features.shape[0]):
                for i in range(features.shape[2]):
                    power = torch.linalg.matrix_power(matrix, int(positions[b, i, axis]))
                    permuted[b, h, i] = power.to(features) @ permuted[b, h, i].clone()
    return permuted


def permutation_matrix(permutation: Tensor) -> Tensor:
    """Return P_pi, ``m m``: entry (i, j) is 1 where pi(i) = j, so that (P x)_i = x_{pi(i)}.

    >>> permutation_matrix(torch.tensor([2, 0, 1])) @ torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    tensor([30., 10., 20.], dtype=torch.float64)
    """
    return torch.eye(len(permutation), dtype=torch.float64)[permutation]


def ranks(positions: Tensor, axis: int, counted: Tensor | None = None) -> Tensor:
    """Rank tokens in the order in which ``axis`` varies fastest, then the other axes in order; ties keep the sequence order.

    With one axis this is the sequence order, whatever the positions.

    Args:
        positions: ``b l a``.
        axis: the axis that varies fastest.
        counted: ``b l l`` bool, whether token j takes a step in the ranks that token i is compared by; all if ``None``.

    >>> grid = torch.tensor([[[0, 0], [1, 0], [0, 1], [1, 1]]])    # (column, row) of a 2 x 2 image
    >>> ranks(grid, 0).tolist(), ranks(grid, 1).tolist()           # raster order, column-major order
    ([[0, 1, 2, 3]], [[0, 2, 1, 3]])
    """
    b, length, axes = positions.shape
    slower = [a for a in range(axes) if a != axis]
    keys = [positions[..., a] for a in (*reversed(slower), axis)] if axes > 1 else []
    before, tied = torch.zeros(b, length, length, dtype=torch.bool), torch.ones(b, length, length, dtype=torch.bool)
    for key in (*keys, torch.arange(length).expand(b, -1)):
        i, j = key.unsqueeze(-1), key.unsqueeze(-2)
        before, tied = before | (tied & (j < i)), tied & (i == j)
    return (before if counted is None else before & counted).sum(-1)


def decay_weights(decay: Tensor, ranks: Tensor, global_mask: Tensor | None = None) -> Tensor:
    """Return r^|i - j| for every pair of tokens, ``b h l l``, where i and j are ranks; 1 where one of the two tokens is global.

    Where only j <= i is visible and ranks count tokens, this is the paper's r^i r^-j.

    Args:
        decay: r of each head, ``h``.
        ranks: ``b h l``, see ``ranks``; broadcasts.
        global_mask: ``b l`` bool.

    >>> decay_weights(torch.tensor([0.5]), torch.arange(3).view(1, 1, 3)).tolist()
    [[[[1.0, 0.5, 0.25], [0.5, 1.0, 0.5], [0.25, 0.5, 1.0]]]]
    """
    weights = decay[:, None, None] ** (ranks.unsqueeze(-1) - ranks.unsqueeze(-2)).abs()
    if global_mask is None:
        return weights
    return weights.masked_fill((global_mask.unsqueeze(-1) | global_mask.unsqueeze(-2)).unsqueeze(1), 1)


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    decay: Tensor | None = None,
    normalize: bool = True,
    plain: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute equations 2 and 3 on features that hold their position: weighted sums over visible keys, divided by their weights.

    ``decay``: the weight of each pair, ``b h l l``. ``plain``: query and key features for the normaliser, where it is not computed
    from ``query`` and ``key``. A query that sees no key gives zero.

    >>> q = k = v = torch.rand(1, 1, 4, 6, dtype=torch.float64)
    >>> kernel_attention(q, k, v, visible=torch.ones(4, 4, dtype=torch.bool)).shape    # b h l v
    torch.Size([1, 1, 4, 6])
    """

    def scores(q: Tensor, k: Tensor) -> Tensor:
        products = q @ k.transpose(-1, -2)
        return torch.where(visible, products if decay is None else products * decay, 0)  # b h l l

    similarity = scores(query, key)
    if not normalize:
        return similarity @ value
    total = (similarity if plain is None else scores(*plain)).sum(-1, keepdim=True)
    return similarity @ value / torch.where(total == 0, 1, total)
