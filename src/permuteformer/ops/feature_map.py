"""Feature maps phi, from queries and keys to features whose dot product is a similarity.

A map is a function from ``… d`` to ``… m``, registered by its name. A map with random features takes them as a second argument,
``projection``: see ``favor``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

FeatureMap = Callable[..., Tensor]

FEATURE_MAPS: dict[str, FeatureMap] = {}


def feature_map(function: FeatureMap) -> FeatureMap:
    """Register a feature map under the function's name (a decorator); raise if the name is taken.

    >>> @feature_map
    ... def one_more(x):
    ...     return torch.relu(x) + 1
    >>> "one_more" in FEATURE_MAPS
    True
    >>> del FEATURE_MAPS["one_more"]
    """
    name = function.__name__
    if name in FEATURE_MAPS:
        raise ValueError(f"feature map {name!r} is already registered: choose another name")
    FEATURE_MAPS[name] = function
    return function


def needs_projection(function: FeatureMap) -> bool:
    """Return whether a map takes random features as its second argument."""
    return len(inspect.signature(function).parameters) > 1


@feature_map
def relu_eps(x: Tensor) -> Tensor:
    """The paper's map (equation 15): max(x, 0) + 0.001. The constant keeps the normaliser away from zero.

    >>> relu_eps(torch.tensor([-1.0, 2.0])).tolist()
    [0.0010000000474974513, 2.000999927520752]
    """
    return F.threshold(x, 0, 0).add_(1e-3)  # relu would save its result for the gradient


@feature_map
def relu(x: Tensor) -> Tensor:
    """max(x, 0). A query whose every feature is 0 gets the output 0.

    >>> relu(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return F.relu(x)


@feature_map
def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2.

    >>> squared_relu(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 4.0]
    """
    return F.relu(x).square()


@feature_map
def elu(x: Tensor) -> Tensor:
    """elu(x) + 1, of Katharopoulos et al. (2020).

    >>> elu(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 3.0]
    """
    return F.elu(x) + 1


@feature_map
def exp(x: Tensor) -> Tensor:
    """exp(x), element by element; it overflows float32 where x > 88.

    >>> exp(torch.tensor([0.0, -torch.inf])).tolist()
    [1.0, 0.0]
    """
    return x.exp()


@feature_map
def favor(x: Tensor, projection: Tensor) -> Tensor:
    """FAVOR+ of Choromanski et al. (2020): positive random features of the softmax kernel exp(q·k / sqrt d).

    ``x``: ``b h l d``. ``projection``: ``h m d`` from ``orthogonal_features``. The exponent w·x - |x|^2/2 is at most
    |w|^2/2, about d/2, so no maximum over other tokens is needed, which a causal or a split sequence does not know; with heads of 256 and
    more, large queries and keys in the same direction can overflow float32.

    >>> projection = orthogonal_features(2, 16, 8, torch.Generator().manual_seed(0))    # h m d
    >>> favor(torch.randn(1, 2, 5, 8), projection).shape    # b h l m
    torch.Size([1, 2, 5, 16])
    """
    x = x * float(x.shape[-1]) ** -0.25
    exponent = x @ projection.to(x.dtype).transpose(-1, -2) - x.square().sum(-1, keepdim=True) / 2  # b h l m
    scale: float = projection.shape[-2] ** -0.5
    return (exponent.exp() + 1e-6) * scale


def orthogonal_features(num_heads: int, num_features: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw random directions ``h m d`` for ``favor``: orthogonal within each group of d, with the lengths of Gaussian vectors.

    >>> orthogonal_features(2, 10, 4).shape
    torch.Size([2, 10, 4])
    """
    groups = -(-num_features // size)
    gaussian = torch.randn(num_heads, groups, size, size, generator=generator, dtype=torch.float64)
    directions, triangle = torch.linalg.qr(gaussian)
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform over rotations
    directions = directions.flatten(1, 2)[:, :num_features]
    lengths = torch.randn(num_heads, num_features, size, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    features: Tensor = directions * lengths
    return features.float()
