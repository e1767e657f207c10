"""The paper's encoding: the features of token i are permuted i times (equations 11 and 14)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from permuteformer.ops.checks import check_integer
from permuteformer.ops.permutation import (
    Cycles,
    Rotation,
    axis_sizes,
    canonical,
    decompose,
    max_order_permutation,
    period,
    permutation_power,
    permute_features,
    random_permutation,
    rotation_of,
)
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding
from permuteformer.registry import unknown

KINDS = {"random": random_permutation, "max_order": max_order_permutation}
MAX_FEATURES = 2**16
"""Features of all heads together: decomposing a permutation takes a Python loop over them."""
MAX_SEARCHED = 2**11
"""Features per head for ``"max_order"``: the search takes time quadratic in them."""


@POSITIONS.register("permute")
class Permute(PositionEncoding):
    """A fixed permutation per head, applied as often as the token's position says.

    With several axes, each axis permutes its own part of the features (``same_axes`` gives parts of equal size the same permutation, as
    the authors' code does).

    Args:
        num_heads: heads, each with its own permutation.
        feature_size: features per head, m.
        axes: numbers per position: 1 for text, 2 for images.
        permutation: ``"random"`` (the paper), ``"max_order"`` (the longest period a head of this size can have), or an int64 tensor
            ``h m``.
        seed: seed of ``"random"`` and ``"max_order"``. Layers with the same seed share their permutations.
        same_axes: draw one permutation for all axes.

    >>> encoding = Permute(num_heads=8, feature_size=64)
    >>> encoding.tables(torch.tensor([[[0], [1], [10**12]]])).shape    # b h l m
    torch.Size([1, 8, 3, 64])
    """

    is_group = True
    permutation: Tensor
    axes: int

    def __init__(
        self,
        num_heads: int,
        feature_size: int,
        axes: int = 1,
        permutation: str | Tensor = "random",
        seed: int = 0,
        same_axes: bool = False,
    ) -> None:
        super().__init__()
        check_integer(num_heads=num_heads, feature_size=feature_size, axes=axes)
        check_integer(0, seed=seed)
        most = MAX_SEARCHED if permutation == "max_order" else MAX_FEATURES // num_heads
        if feature_size > most:
            raise ValueError(
                f"feature_size must be at most {most:,} with {num_heads} heads and permutation={permutation!r}, got {feature_size:,}"
            )
        self.num_heads, self.feature_size, self.axes = num_heads, feature_size, axes
        with torch.device("cpu"):
            self._initial = _choose(num_heads, feature_size, axes, permutation, seed, same_axes)
        self.register_buffer("permutation", torch.empty_like(self._initial, device=torch.get_default_device()))
        for name in ("feature", "rank", "start", "length"):
            self.register_buffer(name, torch.empty_like(self.permutation), persistent=False)
        self.register_buffer("axis", torch.empty_like(self.permutation[0]), persistent=False)
        self.reset()

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        copy(self.permutation, self._initial)
        self.derive()

    def derive(self) -> None:
        """Compute the cycles of the permutation; called again whenever it was loaded or changed."""
        with torch.device("cpu"), torch.inference_mode(False):  # what is derived here is for training too
            permutation = self._initial if self.permutation.is_meta else self.permutation.cpu().clone()
            cycles = decompose(permutation, self.axes)
            self._rotation = rotation_of(cycles)
        for name in ("feature", "rank", "start", "length", "axis"):
            getattr(self, name).copy_(getattr(cycles, name))
        self.contiguous = cycles.contiguous
        self.period = period(cycles)
        self._derived_from = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        x = self.permutation
        return (0, 0) if x.is_meta or x.is_inference() else (x.data_ptr(), x._version)

    def _derive_if_changed(self) -> None:
        if not torch.compiler.is_compiling() and self._stamp() != self._derived_from:
            self.derive()

    @property
    def reach(self) -> tuple[int, ...]:
        return self.period

    @property
    def cycles(self) -> Cycles:
        """The permutation as cycles."""
        return Cycles(*(getattr(self, name) for name in Cycles._fields))

    def rotation(self) -> Rotation | None:
        if type(self).transform is not Permute.transform or type(self).tables is not Permute.tables:
            return None  # a subclass computes something else
        self._derive_if_changed()
        return self._rotation

    def tables(self, positions: Tensor) -> Tensor:
        self._derive_if_changed()
        return permutation_power(self.cycles, positions)  # b h l m

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        return permute_features(x, tables)

    def check(self, reach: Sequence[int]) -> None:
        """Warn where a distance reaches the period, at which all heads together repeat."""
        for axis, (distance, period_) in enumerate(zip(reach, self.period, strict=bool(reach))):
            if distance >= period_:
                # The same text for all lengths, so that Python shows it once.
                warnings.warn(
                    f"positions on axis {axis} reach further than {period_:,}, the period at which the permutations of all heads repeat: "
                    "distances that differ by it look the same. More heads or a larger feature_multiplier make it longer.",
                    stacklevel=2,
                )

    def extra_repr(self) -> str:
        heads, features = self.permutation.shape
        return f"heads={heads}, features={features}, axes={self.axes}, period={'x'.join(f'{p:,}' for p in self.period)}"


def _choose(num_heads: int, feature_size: int, axes: int, permutation: str | Tensor, seed: int, same_axes: bool) -> Tensor:
    """Return the permutation given, or one drawn per axis with every cycle contiguous: ``h m``."""
    if isinstance(permutation, Tensor):
        if permutation.shape != (num_heads, feature_size):
            raise ValueError(
                f"permutation must have shape (heads, features) = ({num_heads}, {feature_size}), got {tuple(permutation.shape)}"
            )
        return permutation.detach().cpu().clone()
    if not isinstance(permutation, str) or permutation not in KINDS:
        raise ValueError(unknown("permutation", permutation, KINDS) + ", or an int64 tensor (heads, features)")
    sizes, generator = axis_sizes(feature_size, axes), torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    for size in sizes:
        if same_axes and parts and parts[0].shape[-1] == size:
            parts.append(parts[0])
        else:
            parts.append(canonical(KINDS[permutation](num_heads, size, generator)))
    return torch.cat([part + offset for part, offset in zip(parts, accumulate(sizes, initial=0), strict=False)], dim=-1)
