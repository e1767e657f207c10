"""Pathfinder images by rule: two discs lie on the ends of dashed curves. Is it one curve, or are they two?

The images are distributed as those of the Long-Range Arena (drewlinsley/pathfinder with its settings), and lie in the same folders.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from permuteformer.folders import new_folder
from permuteformer.registry import unknown
from permuteformer.tasks.generators.parallel import pieces
from permuteformer.tasks.generators.snakes import SEEDS, Array, Field, Paddles, Snakes, draw_discs, paddles

LEVELS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}
"""Levels, and how their folders are called."""

SPLITS_FILE = "splits.json"
"""How many images are of which split, in the order of the metadata: ours, and not in the official data."""

PADDLES = {"easy": 6, "intermediate": 9, "hard": 14}
"""Levels, and how many paddles a target snake has."""

_DISTRACTOR_ATTEMPTS = 5
_LEAST_FREE = 0.01
"""Below this share of free pixels no distractor is begun."""

_FOLDER = 1000
"""Images of a folder, which is a piece of the work."""

_BLOCK = 50
"""Images that are drawn in lockstep."""

_ROUND = 2000
"""Pairs of target snakes that grow in lockstep, at most. Nearly all of them fail; more need more memory than is near."""


@dataclass(frozen=True)
class PathfinderSettings:
    """How images of one resolution and level are drawn; lengths are in pixels, except where they count paddles."""

    resolution: int
    paddle_length: int
    thickness: float
    margins: tuple[int, ...]
    """Free pixels around a paddle; an image has one of these."""
    continuity: float
    """How straight snakes are: turns are at most 90 degrees divided by this."""
    seed_distance: int
    """Between the beginnings of the two target snakes; the first is at least twice as far from the edges."""
    marker_radius: float
    distractor_paddles: int
    """In all distractors together."""
    target_contrast: float
    distractor_contrast: float
    padding: int = 1
    level: str = "hard"
    contour_length: int = 14
    """Paddles of a target snake."""

    @property
    def distractor_length(self) -> int:
        """Paddles of a distractor."""
        return self.contour_length // 3

    @property
    def distractors(self) -> int:
        """How many are tried."""
        return self.distractor_paddles // self.distractor_length


_SETTINGS = {  # resolution, paddle length, thickness, margins, continuity, seed distance, marker radius, distractor paddles
    32: PathfinderSettings(32, 2, 0.5, (1,), 1.0, 7, 1.5, 20, target_contrast=1.5, distractor_contrast=2.0),
    64: PathfinderSettings(64, 5, 1, (1,), 1.8, 12, 2.5, 22, target_contrast=0.8, distractor_contrast=0.8),
    128: PathfinderSettings(128, 5, 1.5, (2, 3), 1.8, 20, 3, 35, target_contrast=0.9, distractor_contrast=0.9),
}


def settings(resolution: int, level: str) -> PathfinderSettings:
    """The settings of a resolution (32, 64, 128) and a level (easy, intermediate, hard).

    >>> hard = settings(32, "hard")
    >>> hard.contour_length, hard.distractors, hard.distractor_length
    (14, 5, 4)
    """
    if resolution not in _SETTINGS:
        raise ValueError(f"resolution must be 32, 64 or 128; it is {resolution!r}: choose one of these")
    if level not in PADDLES:
        raise ValueError(unknown("level", level, PADDLES))
    return replace(_SETTINGS[resolution], level=level, contour_length=PADDLES[level])


@dataclass(frozen=True, eq=False)
class Snake:
    """A curve of n paddles, in the order in which it grew.

    A paddle is a line that leaves ``pixels`` (n 2, row and column) at ``angles`` (n, radians from the right and downwards). For the first
    paddle this is where it begins, for the others where they end: so the snake's tips are the first and the last of ``pixels``.
    """

    pixels: Array
    angles: Array

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True, eq=False)
class Sample:
    """An image (h w, uint8), whether its markers are connected (1) or not (0), and what is in it."""

    image: Array
    label: int
    margin: int
    targets: tuple[Snake, Snake]
    distractors: tuple[Snake, ...]
    markers: Array
    """2 2: rows and columns of the centres; the first is where a snake begins, the second where one ends."""


def draw(settings: PathfinderSettings, rng: np.random.Generator) -> Sample:
    """One image. ``draw_many`` is much faster for several.

    >>> sample = draw(settings(32, "easy"), np.random.default_rng(0))
    >>> sample.image.shape, len(sample.targets[0])
    ((32, 32), 6)
    """
    return draw_many(settings, rng, 1)[0]


def draw_many(settings: PathfinderSettings, rng: np.random.Generator, count: int) -> list[Sample]:
    """Several images, drawn in lockstep."""
    samples: dict[int, Sample] = {}
    margins = rng.choice(settings.margins, size=count)
    for margin in settings.margins:
        which = np.flatnonzero(margins == margin).tolist()
        if which:
            samples.update(zip(which, _draw(settings, margin, rng, len(which)), strict=True))
    return [samples[number] for number in range(count)]


def generate_pathfinder(
    folder: Path,
    *,
    resolution: int = 32,
    level: str = "hard",
    count: int = 200_000,
    splits: Mapping[str, int] | None = None,
    seed: int = 0,
    processes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Write images as they lie in the Long-Range Arena: ``pathfinder32/curv_contour_length_14/{imgs,metadata}`` in ``folder``.

    The same seed gives the same files, whatever the number of processes; more images begin with those that fewer would be. The folder
    appears when it is complete.

    Args:
        folder: where ``pathfinder<resolution>`` is or will be.
        resolution: 32, 64 or 128.
        level: ``"easy"``, ``"intermediate"`` or ``"hard"``: target snakes of 6, 9 or 14 paddles.
        count: of images; a folder in ``imgs`` has 1,000.
        splits: images of ``"train"``, ``"validation"`` and ``"test"``, in this order, which add up to ``count``. They are noted in
            ``splits.json``; without it they are taken to be 80 : 10 : 10.
        seed: from 0 on.
        processes: all cores unless told.
        progress: is called with the number of images that were just finished.

    Returns:
        of all images: ``images``, ``connected`` (the share of label 1), ``mean`` intensity (of 255), ``lit`` and ``bright`` (shares of
        pixels above 0 and above 127), ``distractors`` an image, ``paddles`` a target snake, and the share of images with
        ``markers_on_ends``, both of one snake where the label is 1, of each one where it is 0.
    """
    chosen = settings(resolution, level)
    for name, value, least in (("count", count, 1), ("seed", seed, 0), ("processes", processes, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be a whole number from {least} on; it is {value!r}")
    if splits is not None and sum(splits.values()) != count:
        raise ValueError(f"splits must add up to count, {count:,}; they are {dict(splits)}")
    sums = np.zeros(8, np.int64)
    with new_folder(Path(folder) / f"pathfinder{resolution}" / LEVELS[level]) as unfinished:
        (unfinished / "metadata").mkdir()
        if splits is not None:
            (unfinished / SPLITS_FILE).write_text(json.dumps(dict(splits)), encoding="ascii")
        work = pieces(partial(_write_folder, unfinished, chosen, count, seed), math.ceil(count / _FOLDER), processes)
        with closing(work) as folders:  # no process writes on when there is an exception
            for part in folders:
                sums += part
                if progress is not None:
                    progress(int(part[0]))
    images, connected, intensity, lit, bright, distractors, dashes, on_ends = sums.tolist()
    pixels = images * resolution**2
    return {
        "images": images,
        "connected": connected / images,
        "mean": intensity / pixels,
        "lit": lit / pixels,
        "bright": bright / pixels,
        "distractors": distractors / images,
        "paddles": dashes / (2 * images),
        "markers_on_ends": on_ends / images,
    }


def _write_folder(root: Path, settings: PathfinderSettings, count: int, seed: int, number: int) -> Array:
    """Write a folder of images and its metadata. Sums over them: images, labels, intensity, lit, bright, distractors, paddles of targets,
    and images whose markers are on the right ends."""
    rng = np.random.default_rng([seed, number])
    count = min(_FOLDER, count - number * _FOLDER)
    folder = root / "imgs" / str(number)
    folder.mkdir(parents=True)
    sums, lines = np.zeros(8, np.int64), []
    for first in range(0, count, _BLOCK):
        # A block is drawn whole even if some of it is not needed, so that images do not depend on the count.
        for index, sample in enumerate(draw_many(settings, rng, _BLOCK)[: count - first], first):
            Image.fromarray(sample.image).save(folder / f"sample_{index}.png")
            lines.append(_metadata(settings, sample, number, index))
            image = sample.image
            lit, bright = np.count_nonzero(image), np.count_nonzero(image > 127)
            dashes = sum(len(snake) for snake in sample.targets)
            sums += np.array([1, sample.label, image.sum(), lit, bright, len(sample.distractors), dashes, _on_ends(sample)], np.int64)
    (root / "metadata" / f"{number}.npy").write_text("".join(lines), encoding="ascii", newline="\n")
    return sums


def _on_ends(sample: Sample) -> bool:
    begins, ends = (
        [np.array_equal(snake.pixels[tip], marker) for snake in sample.targets] for tip, marker in zip((0, -1), sample.markers, strict=True)
    )
    return any(begin and end for begin, end in zip(begins, ends if sample.label else reversed(ends), strict=True))


def _metadata(settings: PathfinderSettings, sample: Sample, number: int, index: int) -> str:
    shape = (settings.continuity, settings.contour_length, settings.distractor_length, settings.paddle_length, settings.thickness)
    contrasts = 1
    return " ".join(map(str, (f"imgs/{number}", f"sample_{index}.png", index, sample.label, *shape, sample.margin, contrasts))) + "\n"


class _Curves(NamedTuple):
    """Snakes of n paddles that are complete, m of them."""

    rows: Array
    """m: the image of each."""
    pixels: Array
    """m n."""
    directions: Array
    """m n."""


def _draw(settings: PathfinderSettings, margin: int, rng: np.random.Generator, count: int) -> list[Sample]:
    tables = paddles(settings.resolution, settings.paddle_length, settings.thickness, margin, settings.continuity)
    field, targets = _targets(settings, tables, rng, count)
    distractors = _distractors(settings, field, rng)
    rows, labels, first = np.arange(count), rng.integers(2, size=count), rng.integers(2, size=count)
    beginnings, ends = (np.stack([snakes.pixels[:, tip] for snakes in targets]) for tip in (0, -1))
    markers = np.stack([beginnings[first, rows], ends[np.where(labels == 1, first, 1 - first), rows]])
    images = _paint(settings, tables, targets, distractors, markers)
    one, other = (_snakes(tables, [snakes], count) for snakes in targets)
    short = _snakes(tables, distractors, count)
    return [
        Sample(images[n], int(labels[n]), margin, (one[n][0], other[n][0]), tuple(short[n]), tables.pixels(markers[:, n]))
        for n in range(count)
    ]


def _targets(settings: PathfinderSettings, tables: Paddles, rng: np.random.Generator, count: int) -> tuple[Field, list[_Curves]]:
    """Two snakes for each image, and the field with them. Most pairs fail, so many are tried, and the first that do not are taken."""
    parts: list[tuple[Array, ...]] = []
    found = tried = 0
    while found < count:
        needed = 1.1 * tried / found if found else 4 + tried
        attempts = min(math.ceil((count - found) * needed), _ROUND)
        parts.append(tuple(array[: count - found] for array in _pairs(settings, tables, rng, attempts)))
        found += len(parts[-1][0])
        tried += attempts
    occupied, *snakes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Field(tables, occupied), [_Curves(np.arange(count), *snakes[:2]), _Curves(np.arange(count), *snakes[2:])]


def _pairs(settings: PathfinderSettings, tables: Paddles, rng: np.random.Generator, attempts: int) -> tuple[Array, ...]:
    """Try to grow pairs of target snakes, one in each image of a field. For those that grow to the end: the occupancy, and of the one snake
    and the other pixels and directions."""
    field = Field.empty(tables, attempts, settings.padding)
    rows, directions = np.arange(attempts), rng.integers(SEEDS, size=(2, attempts))
    starts, offsets, numbers = _starts(tables, settings.seed_distance)
    one = starts[offsets[directions[0]] + (numbers[directions[0]] * rng.random(attempts)).astype(np.int64)]
    around = np.radians(rng.integers(360, size=attempts))
    away = np.rint(settings.seed_distance * np.stack([np.sin(around), np.cos(around)], axis=-1)).astype(np.int64)
    other = tables.flat(tables.pixels(one) + away)
    pair = Snakes(field, rows, one, directions[0]), Snakes(field, rows, other, directions[1])
    for _ in range(settings.contour_length - 1):
        for snakes in pair:
            grown = snakes.grow(rng)
            for both in pair:
                both.keep(grown)
    pair[1].end()  # only this one: in the official images, too, the last paddle of the other keeps no distractor off
    return field.occupied[pair[0].rows], *(part for snakes in pair for part in (snakes.pixels, snakes.directions))


@lru_cache(maxsize=16)
def _starts(tables: Paddles, distance: int) -> tuple[Array, Array, Array]:
    """Where the first target snake can begin: the pixels for all directions in one row, and by direction their offset and number."""
    empty = Field.empty(tables, 1, 2 * distance)
    places = [empty.beginnings(0, direction) for direction in range(SEEDS)]
    numbers = np.array([len(pixels) for pixels in places])
    return np.concatenate(places), np.cumsum(numbers) - numbers, numbers


def _distractors(settings: PathfinderSettings, field: Field, rng: np.random.Generator) -> list[_Curves]:
    """As many distractors as find a place, in each image of the field."""
    found = []
    for _ in range(settings.distractors):
        waiting = np.arange(len(field.occupied))
        for _ in range(_DISTRACTOR_ATTEMPTS):
            snakes = _seeds(field, waiting, rng)
            for _ in range(settings.distractor_length - 1):
                snakes.keep(snakes.grow(rng))
            snakes.end()
            rows = waiting[snakes.rows]
            field.occupied[rows] = snakes.field.occupied[snakes.rows]
            found.append(_Curves(rows, snakes.pixels, snakes.directions))
            waiting = np.delete(waiting, snakes.rows)
    return found


def _seeds(field: Field, images: Array, rng: np.random.Generator) -> Snakes:
    """First paddles in copies of the ``images``, where there is room for one."""
    directions = rng.integers(SEEDS, size=len(images))
    places = [field.beginnings(image, direction, _LEAST_FREE) for image, direction in zip(images, directions, strict=True)]
    number = np.array([len(pixels) for pixels in places], np.int64)
    picks = (number * rng.random(len(images))).astype(np.int64)
    rows = np.flatnonzero(number)
    beginnings = np.array([places[row][picks[row]] for row in rows], np.int64)
    return Snakes(Field(field.tables, field.occupied[images]), rows, beginnings, directions[rows])


def _paint(settings: PathfinderSettings, tables: Paddles, targets: list[_Curves], distractors: list[_Curves], markers: Array) -> Array:
    """Images of snakes and markers (2 n), each stretched to 0 … 255: n h w, uint8."""
    count = markers.shape[1]
    canvas = np.zeros((count, tables.side**2))
    for curves, contrast in ((targets, settings.target_contrast), (distractors, settings.distractor_contrast)):
        for rows, pixels, directions in curves:
            for paddle in range(pixels.shape[1]):
                tables.lines.draw(canvas, rows, pixels[:, paddle], directions[:, paddle], contrast)
    for centres in markers:
        draw_discs(tables, canvas, centres, settings.marker_radius)
    inside = slice(tables.frame, tables.frame + tables.size)
    images = canvas.reshape(count, tables.side, tables.side)[:, inside, inside]
    low, high = (bound(images, axis=(1, 2), keepdims=True) for bound in (np.min, np.max))
    return np.asarray((images - low) * (255 / (high - low)) + 0.5, np.uint8)


def _snakes(tables: Paddles, curves: list[_Curves], count: int) -> list[list[Snake]]:
    """The snakes of each of ``count`` images."""
    snakes: list[list[Snake]] = [[] for _ in range(count)]
    for rows, pixels, directions in curves:
        for row, places, angles in zip(rows.tolist(), tables.pixels(pixels), tables.hanging[directions], strict=True):
            snakes[row].append(Snake(places, angles))
    return snakes
