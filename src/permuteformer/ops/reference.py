"""The paper as it is written: attention in O(L^2), never optimised. Read this first.

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
    """PermuteFormer's attention, equations 2, 3, 11 and 14.

    ``query``, ``key``: ``b h l m``; ``value``: ``b h l v``; ``permutations``: one ``h m`` for each axis, which commute;
    ``positions``: ``b l a``; ``visible``: bool, true where query i may see key j, broadcasts to ``b h l l``;
    ``decay``: r of each head, ``h``.

    >>> q = k = v = torch.randn(1, 1, 4, 6, dtype=torch.float64)
    >>> turn = torch.tensor([[1, 2, 3, 4, 5, 0]])
    >>> positions, before = torch.arange(4).view(1, 4, 1), torch.ones(4, 4, dtype=torch.bool).tril()
    >>> here = attention(q, k, v, permutations=[turn], positions=positions, visible=before, feature_map=torch.exp)
    >>> there = attention(q, k, v, permutations=[turn], positions=positions + 100, visible=before, feature_map=torch.exp)
    >>> torch.allclose(here, there)    # b h l v, and only i - j counts
    True
    """
    query = permute(feature_map(query), permutations, positions)
    key = permute(feature_map(key), permutations, positions)
    return kernel_attention(query, key, value, visible=visible, decay=decay, normalize=normalize)


def permute(features: Tensor, permutations: Sequence[Tensor], positions: Tensor) -> Tensor:
    """P_x^x P_y^y … phi for every token: ``b h l m``, by powers of permutation matrices.

    >>> permute(torch.tensor([[[[1.0, 2, 3], [1, 2, 3]]]]), [torch.tensor([[1, 2, 0]])], torch.tensor([[[0], [1]]])).tolist()
    [[[[1.0, 2.0, 3.0], [2.0, 3.0, 1.0]]]]
    """
    moved = features.clone()
    for axis, permutation in enumerate(permutations):
        for h, matrix in enumerate(map(permutation_matrix, permutation)):
            for b in range(features.shape[0]):
                for i in range(features.shape[2]):
                    power = torch.linalg.matrix_power(matrix, int(positions[b, i, axis]))
                    moved[b, h, i] = power.to(features) @ moved[b, h, i].clone()
    return moved


def permutation_matrix(permutation: Tensor) -> Tensor:
    """P_pi, ``m m``: entry (i, j) is 1 where pi(i) = j, so that (P x)_i = x_{pi(i)}.

    >>> permutation_matrix(torch.tensor([2, 0, 1])) @ torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    tensor([30., 10., 20.], dtype=torch.float64)
    """
    return torch.eye(len(permutation), dtype=torch.float64)[permutation]


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
    """Equations 2 and 3 on features that carry their position: sums over all visible keys, divided by their weights.

    r^|i-j| weighs each pair; where only j <= i is visible that is the paper's r^i r^-j. ``plain``: query and key
    features that the normaliser is taken from instead. A query that sees no key gives zero.

    >>> q = k = v = torch.rand(1, 1, 4, 6, dtype=torch.float64)
    >>> kernel_attention(q, k, v, visible=torch.ones(4, 4, dtype=torch.bool)).shape    # b h l v
    torch.Size([1, 1, 4, 6])
    """
    i = torch.arange(query.shape[-2])
    weight = torch.ones(()) if decay is None else decay[:, None, None] ** (i[:, None] - i).abs()
    similarity = torch.where(visible, query @ key.transpose(-1, -2) * weight, 0)  # b h l l
    if not normalize:
        return similarity @ value
    if plain is not None:
        total = torch.where(visible, plain[0] @ plain[1].transpose(-1, -2) * weight, 0).sum(-1, keepdim=True)
    else:
        total = similarity.sum(-1, keepdim=True)
    return similarity @ value / torch.where(total == 0, 1, total)
