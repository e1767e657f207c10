"""Pathfinder images by the rules of the original generator, one paddle at a time: the reference for the fast generator."""

import math
from contextlib import suppress
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import maximum_filter


class NoPlace(Exception):
    """A snake found no place."""


def offset(angle, distance):
    """Return rows and columns of a move at an angle."""
    return np.round([distance * math.sin(angle), distance * math.cos(angle)], 9)


@lru_cache
def disc(radius):
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return x * x + y * y <= radius * radius


@lru_cache
def circle(radius):
    """Return the pixels met on a circle around (0, 0) in steps of one pixel."""
    return np.array(sorted({tuple(np.floor(offset(angle, radius)).astype(int)) for angle in np.arange(0, 2 * math.pi, 1 / radius)}))


def reduce(image, size):
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS)) / 255


@lru_cache(maxsize=2000)
def small_paddle(s, margin, angle):
    """Return a line from the centre of a square, drawn at twice the size and reduced, and its mask, dilated by a disc."""
    reach = s.paddle_length + math.ceil(s.thickness) + margin
    canvas = Image.new("L", (4 * reach + 1, 4 * reach + 1))
    row, column = np.ceil(2 * reach + offset(angle, 2 * s.paddle_length)).astype(int).tolist()
    ImageDraw.Draw(canvas).line([(2 * reach, 2 * reach), (column, row)], fill=255, width=int(2 * s.thickness))
    wide = maximum_filter(np.asarray(canvas), footprint=disc(2 * margin))
    return reduce(np.asarray(canvas), 2 * reach + 1), reduce(wide, 2 * reach + 1)


def paddle(s, margin, pixel, angle):
    """Return a line and its mask as images of the full size."""
    size, images = s.resolution, []
    for small in small_paddle(s, margin, round(angle, 13)):
        row, column = (size + len(small) // 2 - int(place) for place in pixel)
        images.append(np.pad(small, size)[row : row + size, column : column + size])
    return images


def border(s, width):
    image = np.ones((s.resolution, s.resolution))
    image[width:-width, width:-width] = 0
    return image


def free_starts(s, margin, occupied, angle):
    """Return where a first paddle can begin: the full pixels of its mask, one further down and right, are free."""
    mask = small_paddle(s, margin, round(angle, 13))[1]
    far = len(mask)
    wide = np.pad(occupied, far, constant_values=1)
    good = np.ones_like(occupied, bool)
    for row, column in np.argwhere(mask == 1) - len(mask) // 2 + 1:
        good &= wide[far + row :, far + column :][: s.resolution, : s.resolution] <= 0.3
    return np.argwhere(good)


class SlowSnake:
    """One snake, grown by the rules of the original generator."""

    def __init__(self, s, margin, begin, angle):
        self.s, self.margin, self.angle = s, margin, angle
        self.line, self.mask = paddle(s, margin, begin, angle)
        head = np.ceil(begin + offset(angle, s.paddle_length))
        self.pivot = np.ceil(head - offset(angle, s.paddle_length + margin))
        self.pixels = [np.asarray(begin)]

    def grow(self, occupied, rng):
        """Add a paddle; return the occupancy with the paddle before it."""
        s, margin, radius = self.s, self.margin, self.s.paddle_length + self.margin
        pivot = np.ceil(self.pivot + offset(self.angle, s.paddle_length + 2 * margin))
        shadow = maximum_filter(occupied, footprint=disc(margin), mode="constant")
        ends = pivot.astype(int) + circle(radius)
        ends = ends[((ends >= 0) & (ends < s.resolution)).all(axis=1)]
        angles = np.arctan2(*(ends - pivot).T)
        turns = np.abs(np.angle(np.exp(1j * (angles - self.angle))))
        weights = (1 - shadow[tuple(ends.T)]) * np.maximum(np.cos(np.minimum(s.continuity * turns, math.pi / 2)), 0) ** 2
        if weights.sum() < 1e-4:
            raise NoPlace
        for _ in range(3):
            pick = rng.choice(len(ends), p=weights / weights.sum())
            line, mask = paddle(s, margin, ends[pick], angles[pick] + math.pi)
            if (occupied + mask).max() < 1.8:
                break
        else:
            raise NoPlace
        occupied, self.line, self.mask = np.maximum(occupied, self.mask), np.maximum(self.line, line), mask
        self.pivot, self.angle = pivot, angles[pick]
        self.pixels.append(ends[pick])
        return occupied


def slow_targets(s, margin, rng):
    angles = np.radians(rng.integers(-180, 180, size=2))
    places = free_starts(s, margin, border(s, 2 * s.seed_distance), angles[0])
    first = places[rng.integers(len(places))]
    second = np.rint(first + offset(math.radians(rng.integers(360)), s.seed_distance))
    pair = [SlowSnake(s, margin, first, angles[0]), SlowSnake(s, margin, second, angles[1])]
    occupied = border(s, s.padding)
    for _ in range(s.contour_length - 1):
        for snake in pair:
            occupied = snake.grow(occupied, rng)
    return pair, np.maximum(occupied, pair[1].mask)


def slow_distractor(s, margin, occupied, rng):
    angle = math.radians(rng.integers(-180, 180))
    places = free_starts(s, margin, occupied, angle)
    if (occupied <= 0.3).mean() < 0.01 or not len(places):
        raise NoPlace
    snake = SlowSnake(s, margin, places[rng.integers(len(places))], angle)
    for _ in range(s.distractor_length - 1):
        occupied = snake.grow(occupied, rng)
    return snake, np.maximum(occupied, snake.mask)


def attempt(times, grow, *arguments):
    """Return the first result of ``grow`` that does not fail, or None."""
    for _ in range(times):
        with suppress(NoPlace):
            return grow(*arguments)
    return None


def slow_draw(s, rng):
    """Return an image, its target snakes and the number of its distractors."""
    margin, distractors = s.margins[0], []
    targets, occupied = attempt(10**6, slow_targets, s, margin, rng)
    for _ in range(s.distractors):
        snake, occupied = attempt(5, slow_distractor, s, margin, occupied, rng) or (None, occupied)
        distractors += [snake] if snake else []
    label, origin = rng.integers(2, size=2)
    layers = [snake.line * s.target_contrast for snake in targets] + [snake.line * s.distractor_contrast for snake in distractors]
    layers += [marker(s, targets[origin].pixels[0]), marker(s, targets[origin if label else 1 - origin].pixels[-1])]
    image = np.max(layers, axis=0)
    image = (image - image.min()) / (image.max() - image.min()) * 255
    return np.floor(image + 0.5).astype(np.uint8), targets, len(distractors)


def marker(s, centre):
    y, x = np.ogrid[: 2 * s.resolution, : 2 * s.resolution]
    inside = (y - 2 * centre[0]) ** 2 + (x - 2 * centre[1]) ** 2 <= (2 * s.marker_radius) ** 2
    return reduce(inside * np.uint8(255), s.resolution)
