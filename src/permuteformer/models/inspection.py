"""Inspection of models: what their positions do, and the size and work of a configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from permuteformer.attention import Attention
from permuteformer.models.backbone import PermuteFormerModel
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.heads import PermuteFormerForCausalLM, PermuteFormerForSequenceClassification
from permuteformer.models.loading import silence_transformers
from permuteformer.positions import PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute
from permuteformer.presets import PRESETS
from permuteformer.registry import unknown
from permuteformer.storage import read_own_json

STILL = 1 / 4
"""Warn if at least this share of the features of a head never moves."""
SHORT = 2.0
"""Warn if a half-life is shorter than this number of tokens."""

Grid = tuple[int, ...]
"""The shape of an image: (height, width). Positions are in the opposite order: (column, row)."""


@dataclass(frozen=True)
class Head:
    """How one head encodes positions."""

    cycles: tuple[tuple[int, ...], ...]
    """For each axis, the lengths of the cycles of its permutation, longest first. Empty without a permutation."""
    r: float | None
    """Factor of a key's weight per token of distance; ``None`` without a decay."""
    two_sided: bool = False
    """Whether the decay is r^|i-j|; else it is causal, r^(i-j)."""
    axis: int = 0
    """On several axes, the axis that varies fastest in the order in which the decay counts tokens: 0 is raster order."""

    @property
    def features(self) -> int:
        """Number of features."""
        return sum(map(sum, self.cycles))

    @property
    def still(self) -> int:
        """Number of features that never move."""
        return sum(lengths.count(1) for lengths in self.cycles)

    @property
    def order(self) -> tuple[int, ...]:
        """Order of the permutation of each axis: steps after which every feature is back in place."""
        return tuple(math.lcm(*lengths) for lengths in self.cycles)

    @property
    def half_life(self) -> float | None:
        """Tokens after which the weight of a key is halved; ``None`` without a decay, infinite if r is 1."""
        if self.r is None:
            return None
        return math.inf if self.r == 1 else math.log(0.5) / math.log(self.r)

    def decay(self, *distance: int, grid: Grid | None = None) -> float:
        """Return r^|i-j| of two tokens at a distance on each axis; on several axes, 1 if the ``grid`` is not known.

        >>> Head((), r=0.5, two_sided=True, axis=1).decay(0, 2, grid=(4, 4))    # two rows down, column by column
        0.25
        """
        if self.r is None or (len(distance) > 1 and grid is None):
            return 1.0
        if grid is None:
            return self.r ** abs(distance[0])
        tokens, stride = 0, 1
        for axis in (self.axis, *(axis for axis in range(len(distance)) if axis != self.axis)):
            tokens += stride * distance[axis]
            stride *= grid[-1 - axis]
        return self.r ** abs(tokens)

    def similarity(self, *distance: int, grid: Grid | None = None) -> float:
        """Return the similarity of a token to itself at a distance on each axis: the share of features back in place, times the decay.

        This is the expected score of independent features, relative to that at distance 0.

        >>> head = Head(cycles=((3, 1),), r=0.5)
        >>> head.similarity(0), head.similarity(1), head.similarity(3)
        (1.0, 0.125, 0.125)
        """
        back = sum(n for lengths, d in zip(self.cycles, distance, strict=False) for n in lengths if d % n == 0)
        share = back / self.features if self.cycles else 1.0
        return share * self.decay(*distance, grid=grid)


@dataclass(frozen=True)
class Layers:
    """Layers with equal heads."""

    numbers: tuple[int, ...]
    """Counted from 0."""
    heads: tuple[Head, ...]

    @property
    def name(self) -> str:
        """The name for display.

        >>> Layers((0, 1, 2, 5), ()).name
        'layers 0, 1, 2, 5'
        """
        return f"layer{'s' if len(self.numbers) > 1 else ''} {', '.join(map(str, self.numbers))}"


@dataclass(frozen=True)
class Inspection:
    """The positions of a model."""

    config: PermuteFormerConfig
    layers: tuple[Layers, ...]
    """Groups of equal layers; empty if attention has neither permutation nor decay."""

    @property
    def reach(self) -> tuple[int, ...]:
        """For each axis, the distance after which all heads of a layer repeat together, of the layer where it is longest."""
        orders = [zip(*(head.order for head in layers.heads), strict=True) for layers in self.layers]
        return max((tuple(math.lcm(*of_axis) for of_axis in of_layer) for of_layer in orders), default=())

    def warnings(self, length: int = 0, grid: Grid | None = None) -> list[str]:
        """Return what to know before using these positions for sequences of ``length``, and images of shape ``grid``."""
        found = []
        if not self.layers:
            names = ", ".join(entry["name"] for entry in self.config.position) or "none"
            found.append(f"the attention has neither permutation nor decay: positions are {names}")
        for axis, reach in enumerate(self.reach):
            if 0 < reach <= length:
                found.append(f"axis {axis}: distances that differ by {reach:,} look the same to all heads, and sequences have {length:,}")
        heads = [(layers, number, head) for layers in self.layers for number, head in enumerate(layers.heads)]
        if self.config.axes > 1 and grid is None and any(head.r is not None for _, _, head in heads):
            found.append("similarity on several axes is without r, which counts tokens: pass the grid to include it")
        for layers, number, head in heads:
            where = f"head {number}" if len(self.layers) == 1 else f"layer {layers.numbers[0]}, head {number}"
            if head.features and head.still >= STILL * head.features:
                found.append(f"{where}: {head.still} of {head.features} features never move")
            if self.config.causal and head.half_life is not None and head.half_life < SHORT:
                found.append(f"{where}: r = {head.r:.3g} has a half-life of only {head.half_life:.2g} tokens")
        return found


def inspect(source: str) -> Inspection:
    """Inspect a preset, the folder of a model, or a run folder.

    >>> inspect("permuteformer-lm").layers[0].heads[0].order
    (63,)
    """
    if source in PRESETS:
        config = PermuteFormerConfig.preset(source)
        return inspect_attentions(config, [config.build_layer(n).attention for n in range(config.num_hidden_layers)])
    path = Path(source)
    if not path.exists():
        raise ValueError(unknown("preset", source, PRESETS))
    folder = path / "model" if (path / "model" / "config.json").is_file() else path
    if not (folder / "config.json").is_file():
        raise ValueError(f"{source} has no config.json: pass the folder of a model or of a run, or the name of a preset")
    kind = read_own_json(folder / "config.json").get("model_type")
    if kind != PermuteFormerConfig.model_type:
        raise ValueError(f"model_type in {folder} must be {PermuteFormerConfig.model_type!r}, got {kind!r}")
    with silence_transformers():
        model = PermuteFormerModel.from_pretrained(folder, local_files_only=True)
    return inspect_attentions(model.config, [layer.attention.attention for layer in model.layers])


@torch.no_grad()
def inspect_attentions(config: PermuteFormerConfig, attentions: Sequence[Attention]) -> Inspection:
    """Inspect the attentions of a model's layers."""
    groups: dict[tuple[Head, ...], list[int]] = {}
    for number, attention in enumerate(attentions):
        if heads := _heads(attention):
            groups.setdefault(heads, []).append(number)
    return Inspection(config, tuple(Layers(tuple(numbers), heads) for heads, numbers in groups.items()))


def _heads(attention: Attention) -> tuple[Head, ...]:
    permute = next((encoding for encoding in attention.encodings if isinstance(encoding, Permute)), None)
    decay = next((encoding for encoding in attention.encodings if isinstance(encoding, Decay)), None)
    if permute is None and decay is None:
        return ()
    heads = []
    for n in range(attention.num_heads):
        by_axis = [] if permute is None else cycles_of(permute, n)
        cycles = tuple(tuple(sorted(map(len, cycles), reverse=True)) for cycles in by_axis)
        heads.append(Head(cycles, None) if decay is None else Head(cycles, float(decay.r[n]), decay.two_sided, n % decay.decay_axes))
    return tuple(heads)


def cycles_of(permute: Permute, head: int) -> list[list[list[int]]]:
    """Return the features of every cycle of a head, in the order of the permutation, by axis.

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


@dataclass(frozen=True)
class Summary:
    """Size and work of a model at one length."""

    parameters: int
    """Trainable parameters."""
    flops_per_token: float
    """FLOP of a forward pass at ``length``, per token: matrix products only."""
    length: int
    state_bytes: int | None
    """Bytes of the decoding state of one sequence of ``length`` tokens; ``None`` if the model does not decode."""
    reach: tuple[int, ...] | None
    """The longest distance that positions distinguish, on each axis; ``None`` for any."""


def summarize(config: PermuteFormerConfig, length: int) -> Summary:
    """Summarize a configuration by running its model on the meta device, with ``length`` tokens.

    >>> config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    >>> summarize(config, 100).parameters
    18018
    """
    kind = PermuteFormerForCausalLM if config.causal else PermuteFormerForSequenceClassification
    with torch.device("meta"):
        model = kind(config).eval()
        ids = torch.zeros(1, length, dtype=torch.int64)
        positions = torch.zeros(1, length, config.axes, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = model(ids, position_ids=positions)
    encodings = [module for module in model.modules() if isinstance(module, PositionEncoding)]
    cache = out.past_key_values if config.causal else None
    return Summary(
        parameters=sum(p.numel() for p in model.parameters()),
        flops_per_token=counter.get_total_flops() / length,
        length=length,
        state_bytes=None if cache is None else cache.nbytes,
        reach=max((e.reach for e in encodings if e.reach is not None), default=None),
    )
