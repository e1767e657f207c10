"""Pathfinder images: against a slow drawing by the same rules, their rules one by one, and the files."""

from __future__ import annotations

import hashlib
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from permuteformer.tasks.generators import pathfinder
from permuteformer.tasks.generators.pathfinder import LEVELS, PathfinderSettings, draw, draw_many, generate_pathfinder
from permuteformer.tasks.generators.pathfinder import settings as settings_of
from PIL import Image, ImageDraw
from scipy.ndimage import maximum_filter
from scipy.stats import binomtest, ks_2samp

HARD = settings_of(32, "hard")


class Dead(Exception):
    """A snake found no place."""


def way(angle, distance):
    return np.round([distance * math.sin(angle), distance * math.cos(angle)], 9)


def disc(radius):
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return x * x + y * y <= radius * radius


def reduced(image, size):
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS)) / 255


@lru_cache(maxsize=2000)
def small_paddle(s: PathfinderSettings, margin, angle):
    """A line from the middle of a square at twice the size, its mask dilated by a disc, both reduced."""
    reach = s.paddle_length + math.ceil(s.thickness) + margin
    canvas = Image.new("L", (4 * reach + 1, 4 * reach + 1))
    row, column = np.ceil(2 * reach + way(angle, 2 * s.paddle_length)).astype(int).tolist()
    ImageDraw.Draw(canvas).line([(2 * reach, 2 * reach), (column, row)], fill=255, width=int(2 * s.thickness))
    wide = maximum_filter(np.asarray(canvas), footprint=disc(2 * margin))
    return reduced(np.asarray(canvas), 2 * reach + 1), reduced(wide, 2 * reach + 1)


def placed(small, pixel, size):
    """A whole image that is black but for a small one around a pixel."""
    reach = len(small) // 2
    whole = np.zeros((size + 2 * reach, size + 2 * reach))
    row, column = (int(number) for number in pixel)
    whole[row : row + 2 * reach + 1, column : column + 2 * reach + 1] = small
    return whole[reach : reach + size, reach : reach + size]


def paddle(s, margin, pixel, angle):
    return tuple(placed(small, pixel, s.resolution) for small in small_paddle(s, margin, round(angle, 9)))


def border(s, width):
    image = np.ones((s.resolution, s.resolution))
    image[width:-width, width:-width] = 0
    return image


def room(s, margin, occupied, angle):
    """Where a first paddle can begin: the full pixels of its mask, one further down and right, are free."""
    mask = small_paddle(s, margin, round(angle, 9))[1]
    far = len(mask)
    wide = np.pad(occupied, far, constant_values=1)
    good = np.ones_like(occupied, bool)
    for row, column in np.argwhere(mask == 1) - len(mask) // 2 + 1:
        good &= wide[far + row :, far + column :][: s.resolution, : s.resolution] <= 0.3
    return np.argwhere(good)


class SlowSnake:
    """One snake that grows in an image of its own, by the rules as they are told."""

    def __init__(self, s, margin, begin, angle):
        self.s, self.margin, self.angle = s, margin, angle
        self.line, self.mask = paddle(s, margin, begin, angle)
        head = np.ceil(begin + way(angle, s.paddle_length))
        self.pivot = np.ceil(head - way(angle, s.paddle_length + margin))
        self.pixels, self.hanging = [np.asarray(begin)], [angle]

    def grow(self, occupied, rng):
        """The occupancy with the paddle before, if there is a place for a new one."""
        s, margin, radius = self.s, self.margin, self.s.paddle_length + self.margin
        pivot = np.ceil(self.pivot + way(self.angle, s.paddle_length + 2 * margin))
        shadow = maximum_filter(occupied, footprint=disc(margin), mode="constant")
        ends = {tuple(np.floor(pivot + way(a, radius)).astype(int).tolist()) for a in np.arange(0, 2 * math.pi, 1 / radius)}
        ends = sorted(end for end in ends if 0 <= min(end) and max(end) < s.resolution)
        weights, angles = [], []
        for end in ends:
            angles.append(math.atan2(*(np.array(end) - pivot)))
            turn = abs(math.remainder(angles[-1] - self.angle, 2 * math.pi))
            weights.append((1 - shadow[end]) * max(math.cos(min(s.continuity * turn, math.pi / 2)), 0) ** 2)
        if sum(weights) < 1e-4:
            raise Dead
        for _ in range(3):
            pick = rng.choice(len(ends), p=np.array(weights) / sum(weights))
            line, mask = paddle(s, margin, ends[pick], angles[pick] + math.pi)
            if (occupied + mask).max() < 1.8:
                break
        else:
            raise Dead
        occupied, self.line, self.mask = np.maximum(occupied, self.mask), np.maximum(self.line, line), mask
        self.pivot, self.angle = pivot, angles[pick]
        self.pixels.append(np.array(ends[pick]))
        self.hanging.append(angles[pick] + math.pi)
        return occupied


def slow_targets(s, margin, rng):
    angles = np.radians(rng.integers(-180, 180, size=2))
    places = room(s, margin, border(s, 2 * s.seed_distance), angles[0])
    first = places[rng.integers(len(places))]
    second = np.rint(first + way(math.radians(rng.integers(360)), s.seed_distance))
    pair = [SlowSnake(s, margin, first, angles[0]), SlowSnake(s, margin, second, angles[1])]
    occupied = border(s, s.padding)
    for _ in range(s.contour_length - 1):
        for snake in pair:
            occupied = snake.grow(occupied, rng)
    return pair, np.maximum(occupied, pair[1].mask)


def slow_distractor(s, margin, occupied, rng):
    angle = math.radians(rng.integers(-180, 180))
    places = room(s, margin, occupied, angle)
    if (occupied <= 0.3).mean() < 0.01 or not len(places):
        raise Dead
    snake = SlowSnake(s, margin, places[rng.integers(len(places))], angle)
    for _ in range(s.distractor_length - 1):
        occupied = snake.grow(occupied, rng)
    return snake, np.maximum(occupied, snake.mask)


def slow_draw(s, rng):
    """Image, label, target snakes, number of distractors."""
    margin, targets, distractors = s.margins[0], None, []
    while targets is None:
        try:
            targets, occupied = slow_targets(s, margin, rng)
        except Dead:
            continue
    for _ in range(s.distractors):
        for _ in range(5):
            try:
                snake, occupied = slow_distractor(s, margin, occupied, rng)
            except Dead:
                continue
            distractors.append(snake)
            break
    label, origin = rng.integers(2, size=2)
    layers = [snake.line * s.target_contrast for snake in targets] + [snake.line * s.distractor_contrast for snake in distractors]
    for centre in (targets[origin].pixels[0], targets[origin if label else 1 - origin].pixels[-1]):
        layers.append(slow_marker(s, centre))
    image = np.max(layers, axis=0)
    image = (image - image.min()) / (image.max() - image.min()) * 255
    return np.floor(image + 0.5).astype(np.uint8), int(label), targets, len(distractors)


def slow_marker(s, centre):
    y, x = np.ogrid[: 2 * s.resolution, : 2 * s.resolution]
    inside = (y - 2 * centre[0]) ** 2 + (x - 2 * centre[1]) ** 2 <= (2 * s.marker_radius) ** 2
    return reduced(inside * np.uint8(255), s.resolution)


def features(image, snakes, distractors):
    """What two sets of images are compared by."""
    travel = [np.diff(np.asarray(snake.pixels), axis=0) for snake in snakes]
    turns = [np.angle(np.exp(1j * np.diff(np.arctan2(steps[:, 0], steps[:, 1])))) for steps in travel]
    return {
        "mean": image.mean(),
        "lit": (image > 0).mean(),
        "bright": (image > 127).mean(),
        "brightest third": (image > 85).mean(),
        "distractors": distractors,
        "bend": np.mean(np.abs(turns)),
        "reach": np.mean([np.linalg.norm(np.asarray(snake.pixels)[-1] - np.asarray(snake.pixels)[0]) for snake in snakes]),
        "row of an end": snakes[1].pixels[-1][0],
        "column of a beginning": snakes[0].pixels[0][1],
    }


def unlike(one, other):
    """The features in which two sets differ more than chance allows: 9 tests, none of which should be that rare."""
    return [name for name in one[0] if ks_2samp([f[name] for f in one], [f[name] for f in other]).pvalue < 1e-4]


@pytest.fixture(scope="module")
def slow():
    rng = np.random.default_rng(1)
    return [features(image, targets, distractors) for image, _, targets, distractors in (slow_draw(HARD, rng) for _ in range(100))]


def fast(s, count=1000):
    samples = draw_many(s, np.random.default_rng(2), count)
    return [features(sample.image, sample.targets, len(sample.distractors)) for sample in samples]
