"""Snakes of Pathfinder images: dashed curves that grow around occupied pixels, dash by dash, thousands at a time.

A dash is called a paddle. It has one of a few directions: integer degrees for the first paddle of a snake, and the directions from a pixel
to the pixels of a circle around it for all others. Images of paddles, moves and weights are therefore tables indexed by direction, and one
step of a thousand snakes is a few look-ups.

A pixel is one number, its index in the flattened image. Every image has a frame of occupied pixels, so that no look-up leaves it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Array = npt.NDArray[Any]

DEGREES = 360
"""Directions of first paddles: integer degrees from -180. In the tables, the directions of all other paddles follow."""

_SCALE = 2
"""Lines and discs are drawn at this scale and then reduced."""

_TRIES = 3
"""Ends that are tried for a paddle before its snake fails."""

_CLASH = 459
"""Two paddles clash if their masks add up to 1.8 in a pixel; 1.0 is 255."""

_FREE = 76
"""A pixel is free up to an occupancy of 0.3."""


class Sprites:
    """Small images (n p p), stored as lists of their lit pixels, to be drawn in images of ``side`` pixels.

    Shorter lists repeat their first pixel. ``offsets`` (n a) are pixels relative to the centre, ``values`` (n a, uint8) their brightness.
    """

    def __init__(self, images: Array, side: int) -> None:
        lit = [np.argwhere(image) for image in images]
        longest = max(map(len, lit))
        lit = [np.concatenate([pixels, np.repeat(pixels[:1], longest - len(pixels), axis=0)]) for pixels in lit]
        self.values = np.stack([image[tuple(pixels.T)] for image, pixels in zip(images, lit, strict=True)])
        self.offsets = (np.stack(lit) - images.shape[1] // 2) @ [side, 1]

    def draw(self, flat: Array, pixels: Array, sprites: Array) -> None:
        """Draw sprites (m) that do not overlap around ``pixels`` (m) of a flattened image. The brighter value wins."""
        where = pixels[:, None] + self.offsets[sprites]
        flat[where] = np.maximum(flat.take(where), self.values[sprites])


class Paddles:
    """Tables of paddles by direction (d), first the 360 of first paddles and then those of all others.

    The anchor of a first paddle is the pixel where it begins, of all others the pixel where they end. It is the centre of the sprites.
    Snakes turn at pivots, which lie in the gaps between paddles. Moves are differences of pixel numbers.

    Args:
        size: height and width of the image.
        length: length of a paddle.
        thickness: thickness of the line.
        margin: free pixels around a paddle.
        continuity: snakes turn by at most 90 degrees divided by this.
    """

    def __init__(self, size: int, length: int, thickness: float, margin: int, continuity: float) -> None:
        circle = _circle(length + margin)
        degrees, turns = np.radians(np.arange(-180, 180)), np.arctan2(circle[:, 0], circle[:, 1])
        travel = np.concatenate([degrees, turns])  # a paddle that is anchored at its end is drawn backwards
        # d: the angle at which the line leaves its anchor, in radians, from the right and downwards
        self.angles = np.concatenate([degrees, turns + np.pi])
        self.size = size
        self.frame = length + 3 * margin + 4  # pixels around the image: the farthest look-up from the end of a paddle
        self.side = size + 2 * self.frame
        number = np.array([self.side, 1])
        # p, bool: the pixels that are not in the frame
        self.inside = np.pad(np.ones((size, size), bool), self.frame).ravel()

        paddles = [_paddle(angle, length, thickness, margin) for angle in self.angles]
        lines, masks = (np.stack(images) for images in zip(*paddles, strict=True))
        self.lines = Sprites(lines, self.side)  # d: the visible line
        self.masks = Sprites(masks, self.side)  # d: the occupied pixels, which are the line dilated by the margin
        # d: the occupancy that clashes with the mask, in pixels where the mask is large enough to clash at all
        self.limits = Sprites(np.where(masks > _CLASH - 256, _CLASH - masks.astype(int), 0).astype(np.uint8), self.side)

        # 360: moves from the beginning of a first paddle to its end, to its pivot, and to the pixels that must be free, which are the full
        # pixels of the mask, one further down and right, as in the official generator
        heads = _ceil(_offset(degrees, length))
        self.heads = heads @ number
        self.pivots = _ceil(heads - _offset(degrees, length + margin)) @ number
        self.cores = [(np.argwhere(mask == 255) - mask.shape[0] // 2 + 1) @ number for mask in masks[:DEGREES]]

        # d: moves from the pivot of a paddle to the pivot of the next one
        self.moves = _ceil(_offset(travel, length + 2 * margin)) @ number
        # d c: directions that can follow a paddle, the most likely first, and their weights
        weights = _weights(travel, turns, continuity)
        most = np.max(np.count_nonzero(weights > 1e-9, axis=1))
        likely = np.argsort(-weights, axis=1, kind="stable")[:, :most]
        self.followers, self.weights = DEGREES + likely, np.take_along_axis(weights, likely, axis=1)
        # d: moves from the pivot to the end of the paddle; 0 for first paddles
        self.ends = np.concatenate([np.zeros(DEGREES, np.int64), circle @ number])
        self.near = _disc_offsets(margin) @ number  # moves to all pixels within the margin

    def coordinates(self, pixels: Array) -> Array:
        """Return the rows and columns of pixel numbers."""
        return np.stack(np.divmod(pixels, self.side), axis=-1) - self.frame

    def empty(self, count: int, border: int) -> Array:
        """Return the occupancy (n p) of images in which all is free except a ``border``."""
        square = np.full((self.side, self.side), 255, np.uint8)
        inside = slice(self.frame + border, -self.frame - border)
        square[inside, inside] = 0
        return np.tile(square.ravel(), (count, 1))

    def starts(self, occupied: Array, direction: int, min_free: float = 0.0) -> Array:
        """Return the pixels of an image (p) where a first paddle can begin; none if less than the share ``min_free`` is free."""
        free = occupied <= _FREE
        if np.count_nonzero(free) < min_free * self.size**2:
            return np.empty(0, np.int64)
        reach = self.frame * self.side

        def moved(image: Array, move: int) -> Array:
            return image[reach + move : len(image) - reach + move]

        fits = moved(self.inside, self.heads[direction]) & moved(self.inside, self.pivots[direction])
        for move in self.cores[direction]:
            fits &= moved(free, move)
        return np.flatnonzero(fits) + reach


paddle_tables = lru_cache(maxsize=16)(Paddles)


@dataclass(frozen=True, eq=False)
class Snake:
    """A snake of n paddles, in the order in which it grew."""

    paddles: Paddles
    anchors: Array
    """n: pixel numbers."""
    directions: Array
    """n: indices into the tables."""

    @property
    def pixels(self) -> Array:
        """Rows and columns (n 2) of the anchors: the beginning of the first paddle, the end of all others."""
        return self.paddles.coordinates(self.anchors)

    @property
    def angles(self) -> Array:
        """Angles (n) at which the paddles leave their anchors, in radians, from the right and downwards."""
        return np.asarray(self.paddles.angles[self.directions])


class Snakes:
    """Snakes (n) that grow together, each in one of the ``rows`` of ``occupied``, which they change.

    A paddle occupies its pixels only after the next one is placed, because neighbours of one snake may touch.

    Args:
        paddles: The tables.
        occupied: Occupancy of images (m p, uint8).
        rows: The image of each snake (n).
        starts: Pixels where the snakes begin (n).
        directions: Directions of their first paddles (n).
    """

    def __init__(self, paddles: Paddles, occupied: Array, rows: Array, starts: Array, directions: Array) -> None:
        self.paddles, self.occupied, self.rows = paddles, occupied, rows
        self.pivots = starts + paddles.pivots[directions]
        self.anchors, self.directions = starts[:, None], directions[:, None]

    def grow(self, rng: np.random.Generator) -> Array:
        """Add a paddle to each snake, and return which ones found a place (n, bool). ``keep`` only these."""
        tables, last = self.paddles, self.directions[:, -1]
        occupied, first = self.occupied.reshape(-1), self.rows * self.occupied.shape[1]
        pivots = self.pivots + tables.moves[last]
        followers = tables.followers[last]
        ends = pivots[:, None] + tables.ends[followers]
        near = occupied.take(first[:, None] + ends + tables.near[:, None, None])
        cumulative = np.cumsum(tables.weights[last] * (255 - near.max(axis=0)), axis=1)
        picks = np.full(len(ends), -1)
        waiting = np.flatnonzero(cumulative[:, -1] >= 1e-4 * 255)
        for _ in range(_TRIES):
            sums = cumulative[waiting]
            pick = np.argmax(sums > sums[:, -1:] * rng.random((len(waiting), 1)), axis=1)
            direction = followers[waiting, pick]
            touched = (first[waiting] + ends[waiting, pick])[:, None] + tables.limits.offsets[direction]
            clash = (occupied.take(touched) >= tables.limits.values[direction]).any(axis=1)
            picks[waiting[~clash]] = pick[~clash]
            waiting = waiting[clash]
        grown = picks >= 0
        tables.masks.draw(occupied, (first + self.anchors[:, -1])[grown], last[grown])
        every = np.arange(len(ends))
        self.pivots = pivots
        self.anchors = np.column_stack([self.anchors, ends[every, picks]])
        self.directions = np.column_stack([self.directions, followers[every, picks]])
        return grown

    def keep(self, chosen: Array) -> None:
        """Drop all snakes except the ``chosen`` ones (n, bool)."""
        self.rows, self.pivots = self.rows[chosen], self.pivots[chosen]
        self.anchors, self.directions = self.anchors[chosen], self.directions[chosen]

    def finish(self) -> None:
        """Occupy the pixels of the last paddles."""
        pixels = self.rows * self.occupied.shape[1] + self.anchors[:, -1]
        self.paddles.masks.draw(self.occupied.reshape(-1), pixels, self.directions[:, -1])

    def snakes(self) -> list[Snake]:
        """Return the snakes one by one."""
        return [Snake(self.paddles, *snake) for snake in zip(self.anchors, self.directions, strict=True)]


@lru_cache(maxsize=2048)
def disc(size: int, radius: float, row: int, column: int) -> Array:
    """Return an image (size size, uint8) of a disc around a pixel."""
    rows, columns = np.ogrid[: size * _SCALE, : size * _SCALE]
    inside = (rows - row * _SCALE) ** 2 + (columns - column * _SCALE) ** 2 <= (radius * _SCALE) ** 2
    return _reduce(inside * np.uint8(255), size)


def _paddle(angle: float, length: int, thickness: float, margin: int) -> tuple[Array, Array]:
    """Draw a line that leaves the centre at ``angle``; return it and its mask."""
    reach = length + math.ceil(thickness) + margin
    centre = reach * _SCALE
    row, column = (centre + _ceil(_offset(angle, length * _SCALE))).tolist()
    canvas = Image.new("L", (2 * centre + 1, 2 * centre + 1))
    ImageDraw.Draw(canvas).line([(centre, centre), (column, row)], fill=255, width=round(thickness * _SCALE))
    line = np.asarray(canvas)
    return _reduce(line, 2 * reach + 1), _reduce(_dilate(line, margin * _SCALE), 2 * reach + 1)


def _circle(radius: int) -> Array:
    """Return the pixels (k 2) that steps of about one pixel along a circle around (0, 0) meet."""
    steps = np.arange(0, 2 * np.pi, 1 / radius)
    return np.unique(np.floor(_offset(steps, radius)).astype(np.int64), axis=0)


def _weights(travel: Array, turns: Array, continuity: float) -> Array:
    """Return the weight (d k) of each candidate: the squared cosine of the turn times ``continuity``."""
    turn = np.abs(travel[:, None] - turns)
    turn = np.minimum(turn, 2 * np.pi - turn)
    return np.asarray(np.cos(np.minimum(continuity * turn, np.pi / 2)) ** 2)


def _offset(angle: Any, distance: float) -> Array:
    """Return the rows and columns of a move at an angle. Rounded, so that ``ceil`` and ``floor`` do not see floating-point errors."""
    return np.asarray(np.round(np.stack([distance * np.sin(angle), distance * np.cos(angle)], axis=-1), 9))


def _ceil(offsets: Array) -> Array:
    return np.asarray(np.ceil(offsets).astype(np.int64))


def _dilate(image: Array, radius: int) -> Array:
    """Return the image in which each pixel is the brightest of a disc around it."""
    height, width = image.shape
    padded = np.pad(image, radius)
    moved = [padded[radius + row :, radius + column :][:height, :width] for row, column in _disc_offsets(radius)]
    return np.asarray(np.max(moved, axis=0))


def _disc_offsets(radius: int) -> Array:
    """Return all pixels (k 2) within ``radius`` of (0, 0)."""
    square = np.argwhere(np.ones((2 * radius + 1, 2 * radius + 1))) - radius
    return np.asarray(square[(square**2).sum(axis=1) <= radius**2])


def _reduce(image: Array, size: int) -> Array:
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS))
