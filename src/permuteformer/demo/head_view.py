"""One head as numbers for the page to draw: its cycles, features by position, scores by distance, and attention weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from permuteformer.attention.linear import LinearAttention
from permuteformer.formatting import format_count
from permuteformer.models.inspection import SHORT, STILL, Head, cycles_of
from permuteformer.ops.call import Tokens
from permuteformer.positions.base import Compose, PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute

HEADS = 8
"""Heads of the attention; the page shows one of them."""
STEPS = 65
"""Positions at which features are shown, from 0."""
DISTANCES = 48
"""Longest distance of the scores."""
TOKENS = 32
"""Tokens of a text."""
SIDE = 15
"""Rows and columns of an image."""
TOKEN_SEED = 3
"""Seed of the queries and keys, so that every permutation is applied to the same tokens."""

PERMUTATIONS = ("random", "max_order", "none")
DEFAULT = "default"
"""The default r: the paper's in a language model, half-lives from 1 token to a quarter of the tokens in an encoder."""


@dataclass(frozen=True)
class Choice:
    """A head to show."""

    features: int
    permutation: str
    """One of ``PERMUTATIONS``."""
    seed: int
    head: int
    """Counted from 0."""
    r: float | str | None
    """A number for all heads, ``DEFAULT``, or ``None`` for no decay."""
    axes: int
    """1 for a text, 2 for an image."""
    causal: bool
    """Whether it is a language model, with r^(i-j); an encoder has r^|i-j|."""
    alike: bool
    """Whether all tokens of the maps are equal."""


@lru_cache(maxsize=128)
@torch.no_grad()
def head_view(choice: Choice) -> dict[str, Any]:
    """Return what the page shows of a head. ``map`` has the weights of all queries of a text, or of the middle pixel of an image."""
    permute, decay = _permute(choice), _decay(choice)
    position = Compose([permute] if decay is None else [permute, decay])
    cycles = cycles_of(permute, choice.head)
    lengths = tuple(tuple(sorted(map(len, of_axis), reverse=True)) for of_axis in cycles)
    r = None if decay is None else float(decay.r[choice.head])
    head = Head(lengths, r, two_sided=not choice.causal, axis=choice.head % choice.axes)
    steps = torch.arange(STEPS)[None, :, None].expand(-1, -1, choice.axes)
    return {
        "axes": choice.axes,
        "two_sided": head.two_sided,
        "decay_axis": head.axis,
        "cycles": [{"axis": axis, "features": cycle} for axis, of_axis in enumerate(cycles) for cycle in of_axis],
        "axis": permute.cycles.axis.tolist(),
        "order": [f"{n:,}" for n in head.order],
        "reach": [format_count(n) for n in permute.period],
        "r": r,
        "half_life": None if head.half_life is None or math.isinf(head.half_life) else head.half_life,
        "warnings": _warnings(choice, head),
        "places": permute.tables(steps)[0, choice.head].tolist(),
        **_scores(choice, position, head),
        "map": {"permuteformer": _map(choice, position), "performer": _map(choice, None)},
    }


def _permute(choice: Choice) -> Permute:
    if choice.permutation == "none":
        return Permute(HEADS, choice.features, choice.axes, torch.arange(choice.features).repeat(HEADS, 1))
    return Permute(HEADS, choice.features, choice.axes, choice.permutation, choice.seed)


def _decay(choice: Choice) -> Decay | None:
    if choice.r is None:
        return None
    r = None if choice.r == DEFAULT else float(choice.r)
    if choice.causal:
        return Decay(HEADS, r)
    length = SIDE * SIDE if choice.axes == 2 else TOKENS
    return Decay(HEADS, r, two_sided=True, length=length if r is None else None, axes=choice.axes)


def _warnings(choice: Choice, head: Head) -> list[str]:
    found = []
    if head.still >= STILL * head.features:
        found.append(f"{head.still} of {head.features} features never move.")
    if choice.causal and head.half_life is not None and head.half_life < SHORT:
        found.append(f"r = {head.r:.3g} has a half-life of only {head.half_life:.2g} tokens.")
    return found


def _scores(choice: Choice, position: PositionEncoding, head: Head) -> dict[str, Any]:
    """Return scores of a token with a copy of itself, relative to distance 0. In an image, copies are along the axis of the decay."""
    distances = list(range(0 if choice.causal else -DISTANCES, DISTANCES + 1))
    count = len(distances)
    positions = torch.zeros(1, count, choice.axes, dtype=torch.int64)
    positions[..., head.axis] = torch.arange(count)

    def curve(encoding: PositionEncoding | None) -> list[float]:
        scores = _weights(choice, encoding, positions, alike=True, normalizer="none")[DISTANCES].flip(0)  # key 0 has the largest i - j
        return _rounded(scores / scores[distances.index(0)])

    def similarity(distance: int) -> float:
        steps = [distance if axis == head.axis else 0 for axis in range(choice.axes)]
        return round(head.similarity(*steps, grid=None if choice.axes == 1 else (count, count)), 5)

    similarities = [similarity(distance) for distance in distances]
    return {"distances": distances, "permuteformer": curve(position), "performer": curve(None), "similarity": similarities}


def _map(choice: Choice, position: PositionEncoding | None) -> list[list[float]]:
    if choice.axes == 1:
        weights = _weights(choice, position, torch.arange(TOKENS).view(1, TOKENS, 1), choice.alike)
    else:
        rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1).unsqueeze(0)
        weights = _weights(choice, position, positions, choice.alike)[SIDE * SIDE // 2].view(SIDE, SIDE)
    return [_rounded(row) for row in weights]


def _weights(choice: Choice, position: PositionEncoding | None, positions: Tensor, alike: bool, normalizer: str = "transformed") -> Tensor:
    """Return the attention weights of the head, ``l l``: the output if the values are the identity."""
    length = positions.shape[1]
    x = torch.randn(length, choice.features, generator=torch.Generator().manual_seed(TOKEN_SEED), dtype=torch.float64)
    x = (x[:1].expand_as(x) if alike else x).expand(1, HEADS, -1, -1)
    values = torch.eye(length, dtype=x.dtype).expand(1, HEADS, -1, -1)
    attention = LinearAttention(HEADS, choice.features, causal=choice.causal, position=position, normalizer=normalizer)
    tokens = Tokens.build(1, length, positions=positions, axes=choice.axes, ordered=attention.position.decay_axes > 1)
    out, _ = attention.mix(x, x, values, tokens, None)
    return out[0, choice.head]


def _rounded(row: Tensor) -> list[float]:
    return [round(value, 5) for value in row.tolist()]
