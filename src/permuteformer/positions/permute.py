"""The paper's encoding: token i's features are permuted i times (equations 11 and 14)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from permuteformer.ops.checks import check_whole
from permuteformer.ops.permutation import (
    Cycles,
    Rotation,
    axis_sizes,
    canonical,
    contiguous_cycles,
    decompose,
    max_order_permutation,
    period,
    permutation_power,
    permute_features,
    random_permutation,
)
from permuteformer.positions.base import POSITIONS, Copy, PositionEncoding
from permuteformer.registry import unknown

KINDS = {"random": random_permutation, "max_order": max_order_permutation}

MOST_FEATURES = 2**16
"""Of all heads: they are taken apart one by one."""

MOST_SEARCHED = 2**11
"""Of a head whose permutation is to have the largest order: looking for it takes time that grows with the square."""


@POSITIONS.register("permute")
class Permute(PositionEncoding):
    """A fixed permutation a head, applied as often as the token's position says.

    With several axes each moves its own share of the features, by a permutation of its own (``same_axes`` gives the
    shares of equal size the same one, as the authors' code does).

    Args:
        num_heads: heads, each with its own permutation.
        feature_size: features of a head, m.
        axes: numbers in a position: 1 for text, 2 for images.
        permutation: ``"random"`` (the paper), ``"max_order"`` (the longest period one head of this size can have), or an
            int64 tensor ``h m`` of your own.
        seed: what ``"random"`` and ``"max_order"`` are drawn from. The same seed in every layer shares the permutations.
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
        check_whole(num_heads=num_heads, feature_size=feature_size, axes=axes)
        check_whole(0, seed=seed)
        most = MOST_SEARCHED if permutation == "max_order" else MOST_FEATURES // num_heads
        if feature_size > most:
            raise ValueError(
                f"feature_size of {num_heads} heads with permutation={permutation!r} must be at most {most:,}; it is {feature_size:,}"
            )
        self.num_heads, self.feature_size, self.axes = num_heads, feature_size, axes
        with torch.device("cpu"):
            self._initial = self._choose(num_heads, feature_size, axes, permutation, seed, same_axes)
        self.register_buffer("permutation", torch.empty_like(self._initial, device=torch.get_default_device()))
        for name in ("feature", "rank", "start", "length"):
            self.register_buffer(name, torch.empty_like(self.permutation), persistent=False)
        self.register_buffer("axis", torch.empty_like(self.permutation[0]), persistent=False)
        self.reset()

    @staticmethod
    def _choose(num_heads: int, feature_size: int, axes: int, permutation: str | Tensor, seed: int, same_axes: bool) -> Tensor:
        if isinstance(permutation, Tensor):
            if permutation.shape != (num_heads, feature_size):
                raise ValueError(
                    f"permutation must have shape (heads, features) = ({num_heads}, {feature_size}); it has {tuple(permutation.shape)}"
                )
            return permutation.detach().cpu().clone()
        if not isinstance(permutation, str) or permutation not in KINDS:
            raise ValueError(unknown("permutation", permutation, KINDS) + ", or an int64 tensor (heads, features)")
        return _draw(permutation, num_heads, axis_sizes(feature_size, axes), seed, same_axes)

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        copy(self.permutation, self._initial)
        self.derive()

    def derive(self) -> None:
        """Take the permutation apart into cycles, again whenever it was loaded."""
        with torch.device("cpu"), torch.inference_mode(False):  # what is kept is for training too
            permutation = self._initial if self.permutation.is_meta else self.permutation.cpu().clone()
            cycles = decompose(permutation, self.axes)
            self._rotation = contiguous_cycles(cycles)
            self._rotations: dict[torch.device, Rotation] = {}
        for name in ("feature", "rank", "start", "length", "axis"):
            getattr(self, name).copy_(getattr(cycles, name))
        self.contiguous = cycles.contiguous
        self.period = period(cycles)
        self._derived_from = self._identity()

    def _identity(self) -> tuple[int, int]:
        """Which permutation this is, without looking at its numbers."""
        place = self.permutation.data_ptr() if not self.permutation.is_meta else 0
        return place, 0 if self.permutation.is_inference() else self.permutation._version

    @property
    def reach(self) -> tuple[int, ...]:
        return self.period

    @property
    def cycles(self) -> Cycles:
        return Cycles(*(getattr(self, name) for name in Cycles._fields))

    def _check_derived(self) -> None:
        if not torch.compiler.is_compiling() and self._identity() != self._derived_from:
            self.derive()  # somebody put another permutation here without load_state_dict

    def rotation(self, device: torch.device) -> Rotation | None:
        if type(self).transform is not Permute.transform or type(self).tables is not Permute.tables:
            return None  # a kind of one's own does something else
        self._check_derived()
        if self._rotation is None or device.type == "cpu":
            return self._rotation
        if device not in self._rotations:
            with torch.inference_mode(False):
                self._rotations[device] = self._rotation.to(device)
        return self._rotations[device]

    def tables(self, positions: Tensor) -> Tensor:
        self._check_derived()
        return permutation_power(self.cycles, positions)  # b h l m

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        return permute_features(x, tables)

    def check(self, reach: Sequence[int]) -> None:
        """Warn where a distance is longer than the period, after which all heads together repeat."""
        for axis, (distance, period_) in enumerate(zip(reach, self.period, strict=bool(reach))):
            if distance >= period_:
                # One text for all lengths, so that Python's own filter shows it once.
                warnings.warn(
                    f"positions on axis {axis} reach further than {period_:,}, the period after which the permutations of all heads "
                    "together repeat: distances that differ by it look the same. More heads or a larger feature_multiplier make it longer.",
                    stacklevel=2,
                )

    def extra_repr(self) -> str:
        heads, features = self.permutation.shape
        return f"heads={heads}, features={features}, axes={self.axes}, period={'x'.join(f'{p:,}' for p in self.period)}"


def _draw(kind: str, num_heads: int, sizes: list[int], seed: int, same_axes: bool) -> Tensor:
    """A permutation of all the features of a head, put together from one an axis, with every cycle contiguous."""
    generator = torch.Generator().manual_seed(seed)
    shares: list[Tensor] = []
    for size in sizes:
        if same_axes and shares and shares[0].shape[-1] == size:
            shares.append(shares[0])
        else:
            shares.append(canonical(KINDS[kind](num_heads, size, generator)))
    offsets = [sum(sizes[:axis]) for axis in range(len(sizes))]
    return torch.cat([share + offset for share, offset in zip(shares, offsets, strict=True)], dim=-1)
