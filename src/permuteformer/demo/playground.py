"""How one head encodes positions, as numbers for the page to draw: all of them come from the library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from permuteformer.attention.linear import LinearAttention
from permuteformer.models.inspection import SHORT, STILL, Head, cycles_of
from permuteformer.ops.call import Tokens
from permuteformer.positions.base import Compose, PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute
from permuteformer.words import short

HEADS = 8
"""Heads of the attention; the page shows one of them."""
STEPS = 65
"""Positions to show features at, from 0."""
DISTANCES = 48
"""Longest distance of the score curve."""
TOKENS = 32
"""Tokens of the map of a text."""
SIDE = 15
"""Rows and columns of the map of an image: the weights of its middle pixel."""
TOKEN_SEED = 3
"""Seed of the queries and keys, so that every permutation is applied to the same tokens."""

PERMUTATIONS = ("random", "max_order", "none")
DEFAULT = "default"
"""The default r: the paper's in a language model, half-lives from 1 token to a quarter of the map in an encoder."""


@dataclass(frozen=True)
class Choice:
    """Settings of the page."""

    features: int
    """m, the features per head."""
    permutation: str
    """One of ``PERMUTATIONS``."""
    seed: int
    head: int
    """Counted from 0."""
    r: float | str | None
    """A number for all heads, ``DEFAULT``, or ``None`` for no decay."""
    axes: int
    """1 for text, 2 for images."""
    causal: bool
    """True for a language model, with r^(i-j); false for an encoder, with r^|i-j|."""
    alike: bool
    """Whether all tokens of the map are equal."""


@lru_cache(maxsize=128)
@torch.no_grad()
def look(choice: Choice) -> dict[str, Any]:
    """Return cycles, features by position, scores by distance, and the attention weights of Performer and PermuteFormer."""
    permute, decay = _permute(choice), _decay(choice)
    position = Compose([permute] if decay is None else [permute, decay])
    cycles = cycles_of(permute, choice.head)
    head = Head(
        cycles=tuple(tuple(sorted(map(len, of_axis), reverse=True)) for of_axis in cycles),
        r=None if decay is None else float(decay.r[choice.head]),
        two_sided=not choice.causal,
        axis=choice.head % choice.axes,
    )
    steps = torch.arange(STEPS)[None, :, None].expand(-1, -1, choice.axes)
    return {
        "axes": choice.axes,
        "two_sided": head.two_sided,
        "decay_axis": head.axis,
        "cycles": [{"axis": axis, "features": cycle} for axis, of_axis in enumerate(cycles) for cycle in of_axis],
        "axis": permute.cycles.axis.tolist(),
        "order": [f"{n:,}" for n in head.order],
        "reach": [short(n) for n in permute.period],
        "r": head.r,
        "half_life": None if head.half_life is None or math.isinf(head.half_life) else head.half_life,
        "warnings": _warnings(choice, head),
        "places": permute.tables(steps)[0, choice.head].tolist(),
        **_scores(choice, position, head),
        "map": _image_map(choice, position) if choice.axes == 2 else _text_map(choice, position),
    }


def _permute(choice: Choice) -> Permute:
    if choice.permutation == "none":
        identity = torch.arange(choice.features).expand(HEADS, -1)
        return Permute(HEADS, choice.features, choice.axes, identity.clone())
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
    """Score of a token with a copy of itself, relative to distance 0: i - j from 0 if causal, else of both signs.

    On images, the copies are along the axis that the head counts along.
    """
    distances = list(range(0 if choice.causal else -DISTANCES, DISTANCES + 1))
    count = len(distances)
    positions = torch.zeros(1, count, choice.axes, dtype=torch.int64)
    positions[..., head.axis] = torch.arange(count)

    def curve(encoding: PositionEncoding | None) -> Any:
        scores = _weights(choice, encoding, positions, alike=True, normalizer="none")[DISTANCES].flip(0)  # key 0 has the largest i - j
        return _rounded(scores / scores[distances.index(0)])

    def similarity(distance: int) -> float:
        steps = [distance if axis == head.axis else 0 for axis in range(choice.axes)]
        return round(head.similarity(*steps, grid=None if choice.axes == 1 else (count, count)), 5)

    return {
        "distances": distances,
        "permuteformer": curve(position),
        "performer": curve(None),
        "similarity": [similarity(distance) for distance in distances],
    }


def _text_map(choice: Choice, position: PositionEncoding) -> dict[str, Any]:
    """Weights of every query for every key."""
    positions = torch.arange(TOKENS).view(1, TOKENS, 1)
    ours, theirs = (_weights(choice, encoding, positions, choice.alike) for encoding in (position, None))
    return {"rows": TOKENS, "columns": TOKENS, "permuteformer": _rounded(ours), "performer": _rounded(theirs)}


def _image_map(choice: Choice, position: PositionEncoding) -> dict[str, Any]:
    """Weights of the middle pixel for every pixel."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1).unsqueeze(0)
    middle = SIDE * SIDE // 2
    ours, theirs = (_weights(choice, encoding, positions, choice.alike)[middle].view(SIDE, SIDE) for encoding in (position, None))
    return {"rows": SIDE, "columns": SIDE, "permuteformer": _rounded(ours), "performer": _rounded(theirs)}


def _weights(choice: Choice, position: PositionEncoding | None, positions: Tensor, alike: bool, normalizer: str = "transformed") -> Tensor:
    """Return the attention weights of the chosen head, ``l l``: the output is linear in the values, so these are the identity."""
    length = positions.shape[1]
    x = torch.randn(length, choice.features, generator=torch.Generator().manual_seed(TOKEN_SEED), dtype=torch.float64)
    x = (x[:1].expand_as(x) if alike else x).expand(1, HEADS, -1, -1)
    values = torch.eye(length, dtype=x.dtype).expand(1, HEADS, -1, -1)
    attention = LinearAttention(HEADS, choice.features, causal=choice.causal, position=position, normalizer=normalizer)
    tokens = Tokens.build(1, length, positions=positions, axes=choice.axes, ordered=attention.position.decay_axes > 1)
    out, _ = attention.mix(x, x, values, tokens, None)  # b h l v
    return out[0, choice.head]


def _rounded(x: Tensor) -> Any:
    return [_rounded(row) for row in x] if x.dim() > 1 else [round(value, 5) for value in x.tolist()]
