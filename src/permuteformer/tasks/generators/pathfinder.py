"""Pathfinder images by rule: are the two discs the ends of one dashed curve, or of two?"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image

from permuteformer.registry import unknown
from permuteformer.tasks.folders import new_folder
from permuteformer.tasks.generators.parallel import pieces
from permuteformer.tasks.generators.snakes import SEEDS, Array, Field, Paddles, Snakes, disc, paddles

LEVELS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}
"""Levels and their folders."""

_LENGTHS = {"easy": 6, "intermediate": 9, "hard": 14}
_ATTEMPTS = 5
_LEAST_FREE = 0.01
_PER_FOLDER = 1000
_TOGETHER = 100


@dataclass(frozen=True)
class PathfinderSettings:
    resolution: int
    level: str
    contour_length: int
    distractor_length: int
    distractors: int
    paddle_length: int
    thickness: float
    margins: tuple[int, ...]
    continuity: float
    seed_distance: int
    marker_radius: float
    target_contrast: float
    distractor_contrast: float
    padding: int = 1


def settings(resolution: int, level: str) -> PathfinderSettings:
    length = _LENGTHS[level]
    short = length // 3
    if resolution == 32:
        return PathfinderSettings(32, level, length, short, 20 // short, 2, 0.5, (1,), 1.0, 7, 1.5, 1.5, 2.0)
    if resolution == 64:
        return PathfinderSettings(64, level, length, short, 22 // short, 5, 1.0, (1,), 1.8, 12, 2.5, 0.8, 0.8)
    return PathfinderSettings(128, level, length, short, 35 // short, 5, 1.5, (2, 3), 1.8, 20, 3, 0.9, 0.9)


@lru_cache(maxsize=16)
def _starts(tables, seed_distance):
    field = Field.empty(tables, 1, 2 * seed_distance)
    return [field.beginnings(0, d) for d in range(SEEDS)]


STAT = {}
def targets(s, tables, rng, count):
    starts = _starts(tables, s.seed_distance)
    fields, pixels, directions = [], [], []
    have = 0
    while have < count:
        n = int(sys.argv[1])
        field = Field.empty(tables, n, s.padding)
        first = rng.integers(SEEDS, size=n)
        tails = np.array([starts[d][int(u * len(starts[d]))] for d, u in zip(first, rng.random(n))])
        around = np.radians(rng.integers(360, size=n))
        second = tables.pixels(tails) + np.rint(s.seed_distance * np.stack([np.sin(around), np.cos(around)], -1)).astype(int)
        rows = np.arange(n)
        pair = [Snakes(field, rows, tails, first), Snakes(field, rows, tables.flat(second), rng.integers(SEEDS, size=n))]
        for k in range(s.contour_length - 1):
            for snake in pair:
                grown = snake.grow(rng)
                for x in pair:
                    x.keep(grown)
            STAT.setdefault(k, []).append(len(pair[0].rows))
        have += len(pair[0].rows)
    return have
if __name__ == '__main__':
    import time, sys
    for r in (32, 64, 128):
        s = settings(r, 'hard')
        for m in s.margins:
            t0 = time.time()
            tables = paddles(r, s.paddle_length, s.thickness, m, s.continuity)
            _starts(tables, s.seed_distance)
            t1 = time.time()
            STAT.clear()
            rng = np.random.default_rng(0)
            have = targets(s, tables, rng, 100)
            t2 = time.time()
            print(r, m, 'tables', t1 - t0, 'targets', have, (t2 - t1) / have * 1e3, 'ms each', {k: np.mean(v) for k, v in STAT.items()}, tables.solids.places.shape, tables.masks.places.shape, tables.lines.places.shape, tables.followers.shape)
