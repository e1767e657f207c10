"""Snakes of Pathfinder images: dashed curves that grow paddle by paddle around what is there already, many in lockstep.

A paddle has one of few directions: whole degrees for the first of a snake, then those from a pixel to the pixels on a circle around it. So
all that growing needs (rasters, moves, weights) is a table by direction, and a step of a thousand snakes is a few look-ups. A pixel is one
number: images lie flattened, with a frame of occupied pixels around each, so that no look-up leaves them.
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

_FINER = 2
"""Lines and discs are drawn this much larger, then reduced."""

_TRIES = 3
"""Ends that are tried for a paddle before its snake is given up."""

_CLASH = 459
"""Two paddles clash where their masks sum to 1.8 or more; 1.0 is 255."""

_FREE = 76
"""A pixel is free while its occupancy is 0.3 at most."""

SEEDS = 360
"""Directions of first paddles: whole degrees from -180 on. In the tables the candidates of all other paddles follow."""


@dataclass(frozen=True, eq=False)
class Stamps:
    """Rasters as lists of their pixels, n of them: only these are touched when one is drawn. Shorter lists repeat a pixel of theirs."""

    places: Array
    """n a: pixels, from the centre of the raster."""
    values: Array
    """n a, uint8."""

    @classmethod
    def of(cls, rasters: Array, side: int) -> Stamps:
        """The pixels of ``rasters`` (n p p) that are not black, for images of ``side`` pixels."""
        reach = rasters.shape[1] // 2
        lit = [np.argwhere(raster) for raster in rasters]
        longest = max(map(len, lit))
        lit = [np.concatenate([pixels, np.repeat(pixels[:1], longest - len(pixels), axis=0)]) for pixels in lit]
        values = np.stack([raster[tuple(pixels.T)] for raster, pixels in zip(rasters, lit, strict=True)])
        return cls((np.stack(lit) - reach) @ [side, 1], values)

    def draw(self, images: Array, rows: Array, pixels: Array, which: Array, contrast: float = 1) -> None:
        """Put raster ``which`` around a pixel of each of ``rows``, as far as it is brighter than what is there."""
        flat = images.reshape(-1)
        where = (rows * images.shape[1] + pixels)[:, None] + self.places[which]
        flat[where] = np.maximum(flat.take(where), self.values[which] if contrast == 1 else self.values[which] * contrast)


@dataclass(frozen=True, eq=False)
class Paddles:
    """All that is known of paddles before one is drawn: d directions, after the first 360 those of the k candidates.

    A first paddle hangs on the pixel where it begins, all others on the pixel where they end; this pixel is the centre of the rasters.
    Moves are differences of pixel numbers.
    """

    size: int
    frame: int
    """Pixels around the image, on each side."""
    hanging: Array
    """d: the angle, in radians from the right and downwards, at which the line leaves its pixel."""
    lines: Stamps
    """d: what is seen."""
    masks: Stamps
    """d: what is occupied, the line dilated by the margin."""
    pivots: Array
    """360: from the beginning of a first paddle to its pivot."""
    moves: Array
    """d: from the pivot of a paddle to the pivot of the next."""
    followers: Array
    """d c: the candidates that are liked after a paddle of direction d, as directions."""
    weights: Array
    """d c: how much."""
    ends: Array
    """d: from the pivot to the end of the paddle; the first 360 are not used."""
    near: Array
    """b: from the end to all pixels within the margin."""
    rooms: tuple[int, ...]
    """360: the pixels where a first paddle can begin so that it stays in the image, as the bits of a number."""
    cores: tuple[tuple[int, ...], ...]
    """360 times: the pixels that must be free for a first paddle, from its beginning."""
    solids: Stamps
    """d: the pixels in which a paddle can clash, and the occupancy from which on it does."""

    @property
    def side(self) -> int:
        """Of the framed image."""
        return self.size + 2 * self.frame

    def flat(self, pixels: Array) -> Array:
        """The numbers of pixels that are given as row and column."""
        return np.asarray((pixels + self.frame) @ [self.side, 1])

    def pixels(self, flat: Array) -> Array:
        """Row and column again."""
        return np.stack(np.divmod(flat, self.side), axis=-1) - self.frame


@lru_cache(maxsize=16)
def paddles(size: int, length: int, thickness: float, margin: int, continuity: float) -> Paddles:
    """The tables for images of ``size`` x ``size``, and paddles of ``length`` and ``thickness`` that keep a ``margin``."""
    circle = _circle(length + margin)
    degrees, turns = np.radians(np.arange(-180, 180)), np.arctan2(circle[:, 0], circle[:, 1])
    angles = np.concatenate([degrees, turns])
    hanging = np.concatenate([degrees, turns + np.pi])
    lines, masks = (np.stack(rasters) for rasters in zip(*(_paddle(angle, length, thickness, margin) for angle in hanging), strict=True))
    frame = length + 3 * margin + 4  # from the end of a paddle to all that is looked at for the next one
    side = size + 2 * frame
    number = np.array([side, 1])
    inside = _bits(np.pad(np.ones((size, size), bool), frame))
    heads = _up(_way(degrees, length))
    pivots = _up(heads - _way(degrees, length + margin)) @ number
    weights = _weights(angles, turns, continuity)
    most = np.max(np.count_nonzero(weights > 1e-9, axis=1))
    liked = np.argsort(-weights, axis=1, kind="stable")[:, :most]
    return Paddles(
        size=size,
        frame=frame,
        hanging=hanging,
        lines=Stamps.of(lines, side),
        masks=Stamps.of(masks, side),
        pivots=pivots,
        moves=_up(_way(angles, length + 2 * margin)) @ number,
        followers=SEEDS + liked,
        weights=np.take_along_axis(weights, liked, axis=1),
        ends=np.concatenate([np.zeros(SEEDS, np.int64), circle @ number]),
        near=np.argwhere(_dilated(np.pad([[1]], margin), margin)) @ number - margin * number.sum(),
        rooms=tuple(
            _shifted(inside, move) & _shifted(inside, back) for move, back in zip((heads @ number).tolist(), pivots.tolist(), strict=True)
        ),
        cores=tuple(_core(mask, side) for mask in masks[:SEEDS]),
        solids=Stamps.of(np.where(masks > _CLASH - 256, _CLASH - masks.astype(int), 0).astype(np.uint8), side),
    )


class Field:
    """What is occupied in n images: n pixels, uint8."""

    def __init__(self, tables: Paddles, occupied: Array) -> None:
        self.tables, self.occupied = tables, occupied

    @classmethod
    def empty(cls, tables: Paddles, count: int, border: int) -> Field:
        """Images that are free but for a ``border``."""
        square = np.full((tables.side, tables.side), 255, np.uint8)
        inside = slice(tables.frame + border, -tables.frame - border)
        square[inside, inside] = 0
        return cls(tables, np.tile(square.ravel(), (count, 1)))

    def beginnings(self, row: int, direction: int, least: float = 0.0) -> Array:
        """The pixels of an image where a first paddle can begin; none if less than the share ``least`` of the image is free."""
        free = _bits(self.occupied[row] <= _FREE)
        if free.bit_count() < least * self.tables.size**2:
            return np.empty(0, np.int64)
        fit = self.tables.rooms[direction]
        for move in self.tables.cores[direction]:
            fit &= _shifted(free, move)
        octets = np.frombuffer(fit.to_bytes(fit.bit_length() // 8 + 1, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(octets, bitorder="little"))


class Snakes:
    """Snakes that grow in lockstep, each in one row of a field.

    A paddle occupies its place only when the next one has found its own, as neighbours of a snake may touch.
    """

    def __init__(self, field: Field, rows: Array, beginnings: Array, directions: Array) -> None:
        self.field, self.rows = field, rows
        self.pivots = beginnings + field.tables.pivots[directions]
        self.pixels, self.directions = beginnings[:, None], directions[:, None]

    def grow(self, rng: np.random.Generator) -> Array:
        """Add a paddle to each; n bool: which snakes have found a place. ``keep`` these, the others are void."""
        tables, last = self.field.tables, self.directions[:, -1]
        occupied, first = self.field.occupied.reshape(-1), self.rows * self.field.occupied.shape[1]
        pivots = self.pivots + tables.moves[last]
        followers = tables.followers[last]
        ends = pivots[:, None] + tables.ends[followers]
        near = occupied.take(first[:, None] + ends + tables.near[:, None, None])
        likes = np.cumsum(tables.weights[last] * (255 - near.max(axis=0)), axis=1)
        picks = np.full(len(ends), -1)
        waiting = np.flatnonzero(likes[:, -1] >= 1e-4 * 255)
        for _ in range(_TRIES):
            like = likes[waiting]
            pick = np.argmax(like > like[:, -1:] * rng.random((len(waiting), 1)), axis=1)
            chosen = followers[waiting, pick]
            touched = (first[waiting] + ends[waiting, pick])[:, None] + tables.solids.places[chosen]
            clash = (occupied.take(touched) >= tables.solids.values[chosen]).any(axis=1)
            picks[waiting[~clash]] = pick[~clash]
            waiting = waiting[clash]
        grown = picks >= 0
        tables.masks.draw(self.field.occupied, self.rows[grown], self.pixels[grown, -1], last[grown])
        every = np.arange(len(ends))
        self.pivots = pivots
        self.pixels = np.column_stack([self.pixels, ends[every, picks]])
        self.directions = np.column_stack([self.directions, followers[every, picks]])
        return grown

    def keep(self, chosen: Array) -> None:
        """Go on with some of the snakes."""
        self.rows, self.pivots = self.rows[chosen], self.pivots[chosen]
        self.pixels, self.directions = self.pixels[chosen], self.directions[chosen]

    def end(self) -> None:
        """Have the last paddles occupy their places."""
        self.field.tables.masks.draw(self.field.occupied, self.rows, self.pixels[:, -1], self.directions[:, -1])


def draw_discs(tables: Paddles, images: Array, pixels: Array, radius: float) -> None:
    """Draw a disc around a pixel of each image."""
    discs, reach = _discs(radius, tables.side)
    places = tables.pixels(pixels)
    places = np.minimum(places, reach) + np.maximum(places - (tables.size - 1 - reach), 0)
    discs.draw(images, np.arange(len(images)), pixels, places @ [2 * reach + 1, 1])


@lru_cache(maxsize=16)
def _discs(radius: float, side: int) -> tuple[Stamps, int]:
    """Discs by their place in a square that has the edges of an image, with one pixel to stand for all that are far from these.

    They depend on it, as the filter of the reduction ends at the edges. The number is the row and the column of that pixel.
    """
    reach = math.ceil(radius) + 3  # the filter is three pixels wide
    size = 2 * reach + 1
    rows, columns = np.ogrid[: size * _FINER, : size * _FINER]
    rasters = []
    for row in range(size):
        for column in range(size):
            inside = (rows - row * _FINER) ** 2 + (columns - column * _FINER) ** 2 <= (radius * _FINER) ** 2
            rasters.append(np.pad(_reduced(inside * np.uint8(255)), ((size - 1 - row, row), (size - 1 - column, column))))
    return Stamps.of(np.stack(rasters), side), reach


def _circle(radius: int) -> Array:
    """k 2: the pixels on a circle around (0, 0), as far as steps of about one pixel along it meet them."""
    steps = np.arange(0, 2 * np.pi, 1 / radius)
    return np.unique(np.floor(np.round(_way(steps, radius), 9)).astype(np.int64), axis=0)


def _weights(angles: Array, turns: Array, continuity: float) -> Array:
    """d k: the cosine of the turn, sharpened by ``continuity``, squared."""
    turn = np.abs(angles[:, None] - turns)
    turn = np.minimum(turn, 2 * np.pi - turn)
    return np.asarray(np.cos(np.minimum(continuity * turn, np.pi / 2)) ** 2)


def _paddle(angle: float, length: int, thickness: float, margin: int) -> tuple[Array, Array]:
    """A line that leaves the centre at ``angle``, and its mask."""
    centre = (length + math.ceil(thickness) + margin) * _FINER
    row, column = (centre + _up(_way(angle, length * _FINER))).tolist()
    canvas = Image.new("L", (2 * centre + 1, 2 * centre + 1))
    ImageDraw.Draw(canvas).line([(centre, centre), (column, row)], fill=255, width=round(thickness * _FINER))
    line = np.asarray(canvas)
    return _reduced(line), _reduced(_dilated(line, margin * _FINER))


def _core(mask: Array, side: int) -> tuple[int, ...]:
    """The full pixels of a mask, from its centre. In the official images they are looked for one pixel further down and right."""
    reach = mask.shape[0] // 2 - 1
    return tuple(((np.argwhere(mask == 255) - reach) @ [side, 1]).tolist())


def _bits(image: Array) -> int:
    """A number with a bit a pixel: a whole image is shifted and compared at once."""
    return int.from_bytes(np.packbits(image, bitorder="little").tobytes(), "little")


def _shifted(bits: int, move: int) -> int:
    """The image in which each pixel is what was at its number plus ``move``."""
    return bits >> move if move > 0 else bits << -move


def _way(angle: Any, distance: float) -> Array:
    """Rows and columns to go for a distance at an angle."""
    return np.stack([distance * np.sin(angle), distance * np.cos(angle)], axis=-1)


def _up(places: Array) -> Array:
    """The pixel of a place, which is the next one down and right."""
    return np.ceil(np.round(places, 9)).astype(np.int64)


def _dilated(image: Array, radius: int) -> Array:
    """The image where each pixel is the brightest within a disc around it."""
    height, width = image.shape
    padded, result = np.pad(image, radius), np.array(image)
    for row in range(-radius, radius + 1):
        for column in range(-radius, radius + 1):
            if row * row + column * column <= radius * radius:
                np.maximum(result, padded[radius + row :, radius + column :][:height, :width], out=result)
    return result


def _reduced(image: Array) -> Array:
    """The image at its final size, an odd number of pixels."""
    size = image.shape[0] // _FINER | 1
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS))
