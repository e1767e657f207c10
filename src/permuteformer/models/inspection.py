"""What the positions of a model do: the cycles of every head, after how many tokens they repeat, and how fast r forgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from permuteformer.attention import Attention
from permuteformer.folders import read_json
from permuteformer.models.backbone import PermuteFormerModel
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.loading import quietly
from permuteformer.models.presets import PRESETS
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute
from permuteformer.registry import unknown

STILL = 1 / 4
"""From this share of features on, that are never moved, it is told."""
SHORT = 2.0
"""Tokens: where the weight of a key is halved in fewer, it is told."""


@dataclass(frozen=True)
class Head:
    """How one head tells positions apart."""

    cycles: tuple[tuple[int, ...], ...]
    """Of each axis, the lengths of the cycles of its permutation, the longest first. Empty without a permutation."""
    r: float | None
    """What a key's weight shrinks by with every token; ``None`` without a decay."""

    @property
    def features(self) -> int:
        """How many there are."""
        return sum(map(sum, self.cycles))

    @property
    def still(self) -> int:
        """Features that are never moved."""
        return sum(lengths.count(1) for lengths in self.cycles)

    @property
    def order(self) -> tuple[int, ...]:
        """Steps on each axis after which every feature is back."""
        return tuple(math.lcm(*lengths) for lengths in self.cycles)

    @property
    def half_life(self) -> float | None:
        """Tokens after which the weight of a key is half; none without a decay, infinite where r is 1."""
        if self.r is None:
            return None
        return math.inf if self.r == 1 else math.log(0.5) / math.log(self.r)

    def alike(self, *distance: int) -> float:
        """How much a token is like itself so far away: the share of features that are back in their place, and r to that distance.

        It is the score of features that have nothing to do with each other, over that at distance 0. On several axes it is without r,
        which counts tokens: how many lie between two pixels depends on the width of the image.

        >>> head = Head(cycles=((3, 1),), r=0.5)
        >>> head.alike(0), head.alike(1), head.alike(3)
        (1.0, 0.125, 0.125)
        """
        back = sum(n for lengths, d in zip(self.cycles, distance, strict=False) for n in lengths if d % n == 0)
        share = back / self.features if self.cycles else 1.0
        return share * (1.0 if self.r is None or len(distance) > 1 else self.r ** abs(distance[0]))


@dataclass(frozen=True)
class Layers:
    """Layers whose heads are alike."""

    numbers: tuple[int, ...]
    """Counted from 0."""
    heads: tuple[Head, ...]

    @property
    def name(self) -> str:
        """For people.

        >>> Layers((0, 1, 2, 5), ()).name
        'layers 0, 1, 2, 5'
        """
        return f"layer{'s' if len(self.numbers) > 1 else ''} {', '.join(map(str, self.numbers))}"


@dataclass(frozen=True)
class Inspection:
    """A model's positions."""

    config: PermuteFormerConfig
    layers: tuple[Layers, ...]
    """Those that differ, each with its heads; without any where the attention has neither permutation nor decay."""

    @property
    def reach(self) -> tuple[int, ...]:
        """Of each axis, the distance from which on all heads of a layer together repeat; of the layer where that is furthest."""
        orders = [zip(*(head.order for head in layers.heads), strict=True) for layers in self.layers]
        return max((tuple(math.lcm(*of_axis) for of_axis in of_layer) for of_layer in orders), default=())

    def warnings(self, length: int = 0) -> list[str]:
        """What is to be known of these positions before a sequence of ``length`` is trusted to them."""
        told = []
        if not self.layers:
            names = ", ".join(entry["name"] for entry in self.config.position) or "none"
            told.append(f"the attention has neither permutation nor decay: positions are {names}")
        for axis, reach in enumerate(self.reach):
            if 0 < reach <= length:
                told.append(f"axis {axis}: distances that differ by {reach:,} look the same to all heads, and sequences have {length:,}")
        if self.config.axes > 1 and any(head.r is not None for layers in self.layers for head in layers.heads):
            told.append("r counts tokens row by row, so likeness on several axes is shown without it")
        for layers in self.layers:
            for number, head in enumerate(layers.heads):
                where = f"head {number}" if len(self.layers) == 1 else f"layer {layers.numbers[0]}, head {number}"
                if head.features and head.still >= STILL * head.features:
                    told.append(f"{where}: {head.still} of {head.features} features are never moved")
                if head.half_life is not None and head.half_life < SHORT:
                    told.append(f"{where}: r = {head.r:.3g} halves a weight within {head.half_life:.2g} tokens")
        return told


def inspect(source: str) -> Inspection:
    """Look into a preset, a folder of a model, or a run folder.

    >>> inspect("permuteformer-lm").layers[0].heads[0].order
    (63,)
    """
    path = Path(source)
    if source in PRESETS:
        config = PermuteFormerConfig.preset(source)
        attentions = [config.build_layer(n).attention for n in range(config.num_hidden_layers)]
        return inspection_of(config, attentions)
    folder = path / "model" if (path / "model" / "config.json").is_file() else path
    if not (folder / "config.json").is_file():
        hint = "is no folder of a model or of a run" if path.exists() else unknown("preset", source, PRESETS)
        raise ValueError(f"{source}: {hint}" if path.exists() else hint)
    if (kind := read_json(folder / "config.json").get("model_type")) != PermuteFormerConfig.model_type:
        raise ValueError(f"{folder} holds a model of type {kind!r}, and this looks into {PermuteFormerConfig.model_type!r}")
    with quietly():
        model = PermuteFormerModel.from_pretrained(folder, local_files_only=True)
    return inspection_of(model.config, [layer.attention.attention for layer in model.layers])


def inspection_of(config: PermuteFormerConfig, attentions: Sequence[Attention]) -> Inspection:
    """The same of the attentions of layers."""
    alike: dict[tuple[Head, ...], list[int]] = {}
    for number, attention in enumerate(attentions):
        if heads := _heads(attention):
            alike.setdefault(heads, []).append(number)
    return Inspection(config, tuple(Layers(tuple(numbers), heads) for heads, numbers in alike.items()))


@torch.no_grad()
def _heads(attention: Attention) -> tuple[Head, ...]:
    permute = next((encoding for encoding in attention.encodings if isinstance(encoding, Permute)), None)
    decay = next((encoding for encoding in attention.encodings if isinstance(encoding, Decay)), None)
    if permute is None and decay is None:
        return ()
    rates = [None] * attention.num_heads if decay is None else decay.r.tolist()
    return tuple(Head(() if permute is None else _cycles(permute, head), rates[head]) for head in range(attention.num_heads))


def _cycles(permute: Permute, head: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(map(len, of_axis), reverse=True)) for of_axis in cycles_of(permute, head))


def cycles_of(permute: Permute, head: int) -> list[list[list[int]]]:
    """The features of every cycle of a head in the order that the permutation goes through them, by axis.

    >>> cycles_of(Permute(1, 5, permutation=torch.tensor([[2, 1, 0, 4, 3]])), 0)
    [[[0, 2], [1], [3, 4]]]
    """
    cycles = permute.cycles
    axes, starts, features = cycles.axis.tolist(), cycles.start[head].tolist(), cycles.feature[head].tolist()
    found: list[list[list[int]]] = [[] for _ in range(permute.axes)]
    for slot, feature in enumerate(features):
        if starts[feature] == slot:
            found[axes[feature]].append([])
        found[axes[feature]][-1].append(feature)
    return found
