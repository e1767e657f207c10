"""What one head does with positions, as numbers for a picture; all of them are the library's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from permuteformer.attention import ATTENTIONS
from permuteformer.models.inspection import SHORT, STILL, Head, cycles_of
from permuteformer.ops.feature_map import relu_eps
from permuteformer.positions.base import Compose, PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute
from permuteformer.words import short

HEADS = 8
"""Heads that are drawn together; one of them is looked at."""
STEPS = 65
"""Positions that features are shown at, from 0 on."""
DISTANCES = 48
TOKENS = 32
"""Of the map of a text."""
TOKEN_SEED = 3
SIDE = 15
"""Of the map of an image: its middle pixel looks at all the others."""

KINDS = ("random", "max_order", "none")
PAPER = "paper"
"""r as in the paper: each head has its own."""


@dataclass(frozen=True)
class Choice:
    """What was chosen."""

    features: int
    """Of a head, m."""
    permutation: str
    """One of ``KINDS``."""
    seed: int
    head: int
    """From 0."""
    r: float | str | None
    """A number, ``PAPER``, or none."""
    axes: int
    """1 for text, 2 for images."""
    alike: bool
    """Whether all tokens of the map are the same."""


@lru_cache(maxsize=128)
@torch.no_grad()
def look(choice: Choice) -> dict[str, Any]:
    """Cycles, where features go, scores by distance, and weights of Performer beside those of PermuteFormer."""
    permute = _permute(choice)
    rate = None if choice.r is None else float((Decay(HEADS) if choice.r == PAPER else Decay(HEADS, float(choice.r))).r[choice.head])
    cycles = cycles_of(permute, choice.head)
    head = Head(tuple(tuple(sorted(map(len, of_axis), reverse=True)) for of_axis in cycles), rate)
    where = torch.arange(STEPS)[:, None].expand(-1, choice.axes)
    one = Permute(1, choice.features, choice.axes, permute.permutation[choice.head : choice.head + 1])
    return {
        "cycles": [{"axis": axis, "features": cycle} for axis, of_axis in enumerate(cycles) for cycle in of_axis],
        "axis": permute.cycles.axis.tolist(),
        "order": [f"{n:,}" for n in head.order],
        "reach": [short(n) for n in permute.period],
        "r": rate,
        "half_life": None if head.half_life is None or math.isinf(head.half_life) else head.half_life,
        "warnings": _warnings(head),
        "places": one.tables(where.unsqueeze(0))[0, 0].tolist(),
        **_scores(choice, one, rate, head),
        "map": _plane(choice, one) if choice.axes == 2 else _line(choice, one, rate),
    }


def _permute(choice: Choice) -> Permute:
    if choice.permutation == "none":
        identity = torch.arange(choice.features).expand(HEADS, -1)
        return Permute(HEADS, choice.features, choice.axes, identity.clone())
    return Permute(HEADS, choice.features, choice.axes, choice.permutation, choice.seed)


def _warnings(head: Head) -> list[str]:
    told = []
    if head.still >= STILL * head.features:
        told.append(f"{head.still} of {head.features} features are never moved.")
    if head.half_life is not None and head.half_life < SHORT:
        told.append(f"r = {head.r:.3g} halves a weight within {head.half_life:.2g} tokens.")
    return told


def _features(choice: Choice, count: int) -> Tensor:
    """``1 1 l m``: queries, which are the keys as well. Of a seed of their own, so that another permutation meets the same tokens."""
    x = torch.randn(1, 1, count, choice.features, generator=torch.Generator().manual_seed(TOKEN_SEED), dtype=torch.float64)
    return x[:, :, :1].expand_as(x) if choice.alike else x


def _scores(choice: Choice, permute: Permute, rate: float | None, head: Head) -> dict[str, Any]:
    """The score of a token with its like so many places before, over that with itself: of images, along a column."""
    distances = torch.arange(DISTANCES + 1)
    x = relu_eps(_features(choice, 1)).expand(-1, -1, len(distances), -1)
    at = torch.zeros(1, len(distances), choice.axes, dtype=torch.int64)
    at[0, :, -1] = -distances  # keys; the query stands at 0
    moved = permute.transform(x, permute.tables(at))
    itself = x.square().sum(-1)
    decay = 1.0 if rate is None else rate ** distances.double()
    zeros = (0,) * (choice.axes - 1)
    return {
        "distances": distances.tolist(),
        "permuteformer": _rounded(((x * moved).sum(-1) / itself * decay)[0, 0]),
        "performer": _rounded(((x * x).sum(-1) / itself)[0, 0]),  # features do not know where they are
        "likeness": [round(head.alike(*zeros, d), 5) for d in distances.tolist()],
    }


def _line(choice: Choice, permute: Permute, rate: float | None) -> dict[str, Any]:
    """Weights of every query of a text, causal, as both attentions give them."""
    encodings: list[PositionEncoding] = [permute] if rate is None else [permute, Decay(1, rate)]
    ours, theirs = (_weights(choice, encoding, TOKENS, causal=True) for encoding in (Compose(encodings), None))
    return {"rows": TOKENS, "columns": TOKENS, "permuteformer": _rounded(ours), "performer": _rounded(theirs)}


def _plane(choice: Choice, permute: Permute) -> dict[str, Any]:
    """Weights that the middle pixel gives to all."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    at = torch.stack([columns.flatten(), rows.flatten()], dim=-1).unsqueeze(0)
    middle = SIDE * SIDE // 2
    ours, theirs = (
        _weights(choice, encoding, SIDE * SIDE, causal=False, positions=at)[middle].view(SIDE, SIDE) for encoding in (permute, None)
    )
    return {"rows": SIDE, "columns": SIDE, "permuteformer": _rounded(ours), "performer": _rounded(theirs)}


def _weights(choice: Choice, encoding: PositionEncoding | None, count: int, causal: bool, positions: Tensor | None = None) -> Tensor:
    """``l l``: mixing is linear in the values, so weights are what it makes of the identity."""
    x = _features(choice, count)
    attention = ATTENTIONS["linear"](1, choice.features, causal=causal, position=encoding)
    at = positions if encoding is not None else None
    identity = torch.eye(count, dtype=x.dtype).expand(1, 1, -1, -1)
    weights: Tensor = attention.mix(x, x, identity, positions=at, key_mask=None, segments=None, state=None)[0][0, 0]
    return weights


def _rounded(x: Tensor) -> Any:
    return [_rounded(row) for row in x] if x.dim() > 1 else [round(value, 5) for value in x.tolist()]
