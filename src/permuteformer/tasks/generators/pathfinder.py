"""Pathfinder images: two discs mark ends of dashed curves. Are they the two ends of one curve?

Images are distributed as those of Long-Range Arena (drewlinsley/pathfinder with its settings) and stored in the same folders.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image

from permuteformer.registry import unknown
from permuteformer.storage import new_folder
from permuteformer.tasks.generators.base import Generated, GenerateOptions, parallel_map
from permuteformer.tasks.generators.snakes import DEGREES, Array, Paddles, Snake, Snakes, disc, paddle_tables

OFFICIAL_COUNTS = {"train": 160_000, "validation": 20_000, "test": 20_000}

LEVELS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}
"""Folder names of the levels."""

PADDLES = {"easy": 6, "intermediate": 9, "hard": 14}
"""Paddles per target snake of the levels."""

SPLITS_FILE = "splits.json"
"""Number of images per split, in the order of the metadata. The official data has no such file."""

_FOLDER_IMAGES = 1000
_BLOCK_IMAGES = 50
"""Images drawn together. Another number would change the data of every seed."""

_MAX_ATTEMPTS = 2000
"""Pairs of target snakes that grow together. Most pairs fail; with more of them, memory access dominates."""

_DISTRACTOR_ATTEMPTS = 5
_MIN_FREE = 0.01
"""Share of free pixels below which no distractor is started."""


@dataclass(frozen=True)
class PathfinderSettings:
    """Settings of one resolution and level. Lengths are in pixels unless they count paddles."""

    resolution: int
    paddle_length: int
    thickness: float
    margins: tuple[int, ...]
    """Free pixels around a paddle; each image draws one of these."""
    continuity: float
    """Snakes turn by at most 90 degrees divided by this."""
    seed_distance: int
    """Distance between the starts of the two target snakes, and half the distance of the first one to the edges."""
    marker_radius: float
    distractor_paddles: int
    """Paddles of all distractors together."""
    target_contrast: float
    distractor_contrast: float
    padding: int = 1
    contour_length: int = 14
    """Paddles per target snake."""

    @property
    def distractor_length(self) -> int:
        """Paddles per distractor."""
        return self.contour_length // 3

    @property
    def distractors(self) -> int:
        """Number of distractors, of which some may find no place."""
        return self.distractor_paddles // self.distractor_length


_SETTINGS = {  # resolution, paddle length, thickness, margins, continuity, seed distance, marker radius, distractor paddles
    32: PathfinderSettings(32, 2, 0.5, (1,), 1.0, 7, 1.5, 20, target_contrast=1.5, distractor_contrast=2.0),
    64: PathfinderSettings(64, 5, 1, (1,), 1.8, 12, 2.5, 22, target_contrast=0.8, distractor_contrast=0.8),
    128: PathfinderSettings(128, 5, 1.5, (2, 3), 1.8, 20, 3, 35, target_contrast=0.9, distractor_contrast=0.9),
}


def pathfinder_settings(resolution: int, level: str) -> PathfinderSettings:
    """Return the settings of a resolution (32, 64, 128) and a level (easy, intermediate, hard).

    >>> hard = pathfinder_settings(32, "hard")
    >>> hard.contour_length, hard.distractors, hard.distractor_length
    (14, 5, 4)
    """
    if resolution not in _SETTINGS:
        raise ValueError(f"resolution must be 32, 64 or 128, got {resolution!r}")
    if level not in PADDLES:
        raise ValueError(unknown("level", level, PADDLES))
    return replace(_SETTINGS[resolution], contour_length=PADDLES[level])


def generate_pathfinder(folder: Path, options: GenerateOptions, resolution: int = 32, level: str = "hard") -> Generated:
    """Write images in the layout of Long-Range Arena, ``pathfinder32/curv_contour_length_14/{imgs,metadata}``, into the data folder.

    The splits follow each other in the metadata, and ``splits.json`` records their sizes. More images start with those of a smaller number.

    The statistics are the number of ``images``; the share ``connected`` (label 1); the ``mean`` intensity, out of 255; the shares of pixels
    above 0 (``lit``) and above 127 (``bright``); ``distractors`` per image; ``paddles`` per target snake; ``markers_on_ends``, the share of
    images with both markers on the ends that the label says.
    """
    settings = pathfinder_settings(resolution, level)
    sizes = options.sizes(OFFICIAL_COUNTS)
    count = sum(sizes.values())
    folders = range(math.ceil(count / _FOLDER_IMAGES))
    target = folder / f"pathfinder{resolution}" / LEVELS[level]
    totals: Counter[str] = Counter()
    with new_folder(target) as unfinished:
        (unfinished / "metadata").mkdir()
        (unfinished / SPLITS_FILE).write_text(json.dumps(sizes), encoding="ascii")
        write = partial(_write_folder, unfinished, settings, count, options.seed)
        with closing(parallel_map(write, folders, options.process_count(useful=len(folders)))) as work:  # waits for the processes
            for written in work:
                totals.update(written)
                options.progress(written["images"])
    units = {"mean": resolution**2, "lit": resolution**2, "bright": resolution**2, "paddles": 2}
    statistics = {name: total / (count * units.get(name, 1)) for name, total in totals.items()}
    return Generated(target, {**statistics, "images": count})


def _write_folder(root: Path, settings: PathfinderSettings, count: int, seed: int, number: int) -> dict[str, int]:
    """Write a folder of images and its metadata; return sums over the images."""
    rng = np.random.default_rng([seed, number])
    count = min(_FOLDER_IMAGES, count - number * _FOLDER_IMAGES)
    folder = root / "imgs" / str(number)
    folder.mkdir(parents=True)
    totals: Counter[str] = Counter()
    lines = []
    for first in range(0, count, _BLOCK_IMAGES):
        # A block is drawn completely even if only some of it is needed, so that images do not depend on the count.
        for index, sample in enumerate(draw_images(settings, rng, _BLOCK_IMAGES)[: count - first], first):
            Image.fromarray(sample.image).save(folder / f"sample_{index}.png")
            lines.append(_metadata(settings, sample, number, index))
            totals.update(_measure(sample))
    (root / "metadata" / f"{number}.npy").write_text("".join(lines), encoding="ascii", newline="\n")
    return totals


def _metadata(settings: PathfinderSettings, sample: Sample, number: int, index: int) -> str:
    """Return a line in the format of the official metadata."""
    shape = (settings.continuity, settings.contour_length, settings.distractor_length, settings.paddle_length, settings.thickness)
    contrasts = 1
    return " ".join(map(str, (f"imgs/{number}", f"sample_{index}.png", index, sample.label, *shape, sample.margin, contrasts))) + "\n"


def _measure(sample: Sample) -> dict[str, int]:
    """Return the measurements of an image, whose sums give the statistics."""
    starts, ends = ([snake.pixels[tip].tolist() for snake in sample.targets] for tip in (0, -1))
    on_ends = zip(starts, ends if sample.label else reversed(ends), strict=True)
    return {
        "images": 1,
        "connected": sample.label,
        "mean": int(sample.image.sum()),
        "lit": int((sample.image > 0).sum()),
        "bright": int((sample.image > 127).sum()),
        "distractors": len(sample.distractors),
        "paddles": sum(len(snake.pixels) for snake in sample.targets),
        "markers_on_ends": tuple(sample.markers.tolist()) in on_ends,
    }


@dataclass(frozen=True, eq=False)
class Sample:
    """An image (h w, uint8), its label (1 if the markers are on one snake, else 0) and its contents."""

    image: Array
    label: int
    margin: int
    targets: tuple[Snake, Snake]
    distractors: tuple[Snake, ...]
    markers: Array
    """2 2: row and column of the marker where a snake begins, and of the one where a snake ends."""


def draw_images(settings: PathfinderSettings, rng: np.random.Generator, count: int) -> list[Sample]:
    """Draw several images together, which is much faster than one by one.

    >>> [sample] = draw_images(pathfinder_settings(32, "easy"), np.random.default_rng(0), 1)
    >>> sample.image.shape, sample.targets[0].pixels.shape
    ((32, 32), (6, 2))
    """
    samples: dict[int, Sample] = {}
    margins = rng.choice(settings.margins, size=count)
    for margin in settings.margins:
        numbers = np.flatnonzero(margins == margin).tolist()
        if numbers:
            samples.update(zip(numbers, _ImageDrawer(settings, margin, rng).draw(len(numbers)), strict=True))
    return [samples[number] for number in range(count)]


class _ImageDrawer:
    """Draws images of one margin."""

    def __init__(self, settings: PathfinderSettings, margin: int, rng: np.random.Generator) -> None:
        self.settings, self.margin, self.rng = settings, margin, rng
        self.paddles = paddle_tables(settings.resolution, settings.paddle_length, settings.thickness, margin, settings.continuity)

    def draw(self, count: int) -> list[Sample]:
        occupied, targets = self.targets(count)
        distractors = self.distractors(occupied)
        labels, marked = self.rng.integers(2, size=(2, count)).tolist()
        samples = []
        for pair, others, label, one in zip(targets, distractors, labels, marked, strict=True):
            markers = np.stack([pair[one].pixels[0], pair[one if label else 1 - one].pixels[-1]])
            samples.append(Sample(self.paint(pair, others, markers), label, self.margin, pair, tuple(others), markers))
        return samples

    def targets(self, count: int) -> tuple[Array, list[tuple[Snake, Snake]]]:
        """Return the occupancy of ``count`` images and their two target snakes. Most pairs fail: try many at once."""
        found: list[tuple[Array, tuple[Snake, Snake]]] = []
        tried = 0
        while missing := count - len(found):
            needed = 1.1 * tried / len(found) if found else 4 + tried
            attempts = min(math.ceil(missing * needed), _MAX_ATTEMPTS)
            found += self.try_targets(attempts)[:missing]
            tried += attempts
        return np.stack([occupied for occupied, _ in found]), [pair for _, pair in found]

    def try_targets(self, attempts: int) -> list[tuple[Array, tuple[Snake, Snake]]]:
        """Grow pairs of target snakes, each in an image of its own; return the occupancy and the snakes of all complete pairs."""
        occupied, distance = self.paddles.empty(attempts, self.settings.padding), self.settings.seed_distance
        directions = self.rng.integers(DEGREES, size=(2, attempts))
        places = _target_starts(self.paddles, distance)
        rows, starts = self.pick([places[direction] for direction in directions[0]])
        around = np.radians(self.rng.integers(360, size=attempts))
        away = np.rint(distance * np.stack([np.sin(around), np.cos(around)], axis=-1)).astype(np.int64)
        one = Snakes(self.paddles, occupied, rows, starts, directions[0])
        other = Snakes(self.paddles, occupied, rows, starts + away @ [self.paddles.side, 1], directions[1])
        for _ in range(self.settings.contour_length - 1):
            for snakes in (one, other):
                grown = snakes.grow(self.rng)
                one.keep(grown)
                other.keep(grown)
        other.finish()  # not ``one``: in the official images, too, its last paddle does not keep distractors away
        return list(zip(occupied[one.rows], zip(one.snakes(), other.snakes(), strict=True), strict=True))

    def distractors(self, occupied: Array) -> list[list[Snake]]:
        """Return the distractors of each image that found a place, and add them to ``occupied``."""
        found: list[list[Snake]] = [[] for _ in occupied]
        for _ in range(self.settings.distractors):
            waiting = np.arange(len(occupied))
            for _ in range(_DISTRACTOR_ATTEMPTS):
                directions = self.rng.integers(DEGREES, size=len(waiting))
                rows, starts = self.pick([self.paddles.starts(occupied[n], d, _MIN_FREE) for n, d in zip(waiting, directions, strict=True)])
                snakes = Snakes(self.paddles, occupied[waiting], rows, starts, directions[rows])
                for _ in range(self.settings.distractor_length - 1):
                    snakes.keep(snakes.grow(self.rng))
                snakes.finish()
                images = waiting[snakes.rows]
                occupied[images] = snakes.occupied[snakes.rows]
                for image, snake in zip(images, snakes.snakes(), strict=True):
                    found[image].append(snake)
                waiting = np.delete(waiting, snakes.rows)
        return found

    def pick(self, places: list[Array]) -> tuple[Array, Array]:
        """Pick one pixel of each list. Return which lists are not empty, and the pixels of these."""
        numbers = np.array([len(pixels) for pixels in places], np.int64)
        picks = (numbers * self.rng.random(len(places))).astype(np.int64)
        rows = np.flatnonzero(numbers)
        return rows, np.array([places[row][picks[row]] for row in rows], np.int64)

    def paint(self, targets: Iterable[Snake], distractors: Iterable[Snake], markers: Array) -> Array:
        """Return the image (h w, uint8) of snakes and markers, scaled to 0 … 255."""
        settings, paddles, lines = self.settings, self.paddles, self.paddles.lines
        canvas = np.zeros(paddles.side**2)
        for snakes, contrast in ((targets, settings.target_contrast), (distractors, settings.distractor_contrast)):
            for snake in snakes:
                where = snake.anchors[:, None] + lines.offsets[snake.directions]
                np.maximum.at(canvas, where, contrast * lines.values[snake.directions])
        inside = slice(paddles.frame, paddles.frame + paddles.size)
        image = canvas.reshape(paddles.side, paddles.side)[inside, inside]
        for row, column in markers.tolist():
            image = np.maximum(image, disc(settings.resolution, settings.marker_radius, row, column))
        low, high = image.min(), image.max()
        return np.asarray((image - low) * (255 / (high - low)) + 0.5, np.uint8)


@lru_cache(maxsize=16)
def _target_starts(paddles: Paddles, distance: int) -> list[Array]:
    """Return the pixels where the first target snake can begin, for each direction."""
    empty = paddles.empty(1, 2 * distance)[0]
    return [paddles.starts(empty, direction) for direction in range(DEGREES)]
