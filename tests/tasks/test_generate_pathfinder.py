"""Pathfinder images: against a slow drawing by the same rules, their rules one by one, and the files."""

from __future__ import annotations

import hashlib
import math
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from scipy.ndimage import maximum_filter
from scipy.stats import binomtest, ks_2samp

from permuteformer.tasks.generators.pathfinder import LEVELS, PathfinderSettings, draw, draw_many, generate_pathfinder
from permuteformer.tasks.generators.pathfinder import settings as settings_of

HARD = settings_of(32, "hard")


class Dead(Exception):
    """A snake found no place."""


def way(angle, distance):
    return np.round([distance * math.sin(angle), distance * math.cos(angle)], 9)


@lru_cache
def disc(radius):
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return x * x + y * y <= radius * radius


@lru_cache
def circle(radius):
    """The pixels that are met on the way around a pixel, in steps of one pixel."""
    return np.array(sorted({tuple(np.floor(way(angle, radius)).astype(int)) for angle in np.arange(0, 2 * math.pi, 1 / radius)}))


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
    return tuple(placed(small, pixel, s.resolution) for small in small_paddle(s, margin, round(angle, 13)))


def border(s, width):
    image = np.ones((s.resolution, s.resolution))
    image[width:-width, width:-width] = 0
    return image


def room(s, margin, occupied, angle):
    """Where a first paddle can begin: the full pixels of its mask, one further down and right, are free."""
    mask = small_paddle(s, margin, round(angle, 13))[1]
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
        ends = pivot.astype(int) + circle(radius)
        ends = ends[((ends >= 0) & (ends < s.resolution)).all(axis=1)]
        angles = np.arctan2(*(ends - pivot).T)
        turns = np.abs(np.angle(np.exp(1j * (angles - self.angle))))
        weights = (1 - shadow[tuple(ends.T)]) * np.maximum(np.cos(np.minimum(s.continuity * turns, math.pi / 2)), 0) ** 2
        if weights.sum() < 1e-4:
            raise Dead
        for _ in range(3):
            pick = rng.choice(len(ends), p=weights / weights.sum())
            line, mask = paddle(s, margin, ends[pick], angles[pick] + math.pi)
            if (occupied + mask).max() < 1.8:
                break
        else:
            raise Dead
        occupied, self.line, self.mask = np.maximum(occupied, self.mask), np.maximum(self.line, line), mask
        self.pivot, self.angle = pivot, angles[pick]
        self.pixels.append(ends[pick])
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


def tried(times, grow, *arguments):
    """What ``grow`` gives when it does not fail, if it ever does."""
    for _ in range(times):
        with suppress(Dead):
            return grow(*arguments)
    return None


def slow_draw(s, rng):
    """Image, label, target snakes, number of distractors."""
    margin, distractors = s.margins[0], []
    targets, occupied = tried(10**6, slow_targets, s, margin, rng)
    for _ in range(s.distractors):
        snake, occupied = tried(5, slow_distractor, s, margin, occupied, rng) or (None, occupied)
        distractors += [snake] if snake else []
    label, origin = rng.integers(2, size=2)
    layers = [snake.line * s.target_contrast for snake in targets] + [snake.line * s.distractor_contrast for snake in distractors]
    layers += [slow_marker(s, targets[origin].pixels[0]), slow_marker(s, targets[origin if label else 1 - origin].pixels[-1])]
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
        "distance": np.linalg.norm(np.asarray(snakes[1].pixels)[0] - np.asarray(snakes[0].pixels)[0]),
        "row of an end": snakes[1].pixels[-1][0],
        "column of a beginning": snakes[0].pixels[0][1],
    }


def unlike(one, other):
    """The features in which two sets differ more than chance allows: 10 tests, none of which should be that rare."""
    return [name for name in one[0] if ks_2samp([f[name] for f in one], [f[name] for f in other]).pvalue < 1e-4]


@pytest.fixture(scope="module")
def slow():
    rng = np.random.default_rng(1)
    return [features(image, targets, distractors) for image, _, targets, distractors in (slow_draw(HARD, rng) for _ in range(40))]


def fast(s, count=1000):
    samples = draw_many(s, np.random.default_rng(2), count)
    return [features(sample.image, sample.targets, len(sample.distractors)) for sample in samples]


def test_images_are_distributed_as_slow_ones(slow):
    assert unlike(slow, fast(HARD)) == []


@pytest.mark.parametrize(
    "change", [{"continuity": 1.25}, {"marker_radius": 2}, {"distractor_contrast": 1.5}, {"seed_distance": 5}, {"distractor_paddles": 16}]
)
def test_other_rules_would_be_noticed(slow, change):
    assert unlike(slow, fast(replace(HARD, **change), 300)) != []


ALL = st.tuples(st.sampled_from([32, 64, 128]), st.sampled_from(list(LEVELS)), st.integers(0, 10**6))


@given(ALL)
@settings(max_examples=12, deadline=None)
def test_snakes_and_markers_are_as_set(drawn):
    resolution, level, seed = drawn
    s = settings_of(resolution, level)
    sample = draw(s, np.random.default_rng(seed))
    assert sample.image.shape == (resolution, resolution)
    assert (sample.image.dtype, sample.image.min(), sample.image.max()) == (np.uint8, 0, 255)
    assert [len(snake) for snake in sample.targets] == 2 * [{"easy": 6, "intermediate": 9, "hard": 14}[level]]
    assert len(sample.distractors) <= s.distractors
    assert {len(snake) for snake in sample.distractors} <= {{"easy": 2, "intermediate": 3, "hard": 4}[level]}
    for snake in (*sample.targets, *sample.distractors):
        assert ((snake.pixels >= 0) & (snake.pixels < resolution)).all()

    beginnings, ends = ([snake.pixels[tip].tolist() for snake in sample.targets] for tip in (0, -1))
    marked = tuple(sample.markers.tolist())
    joined, apart = marked in zip(beginnings, ends, strict=True), marked in zip(beginnings, reversed(ends), strict=True)
    assert joined if sample.label else apart
    assert not (joined and apart) or ends[0] == ends[1]  # one image of 250, as the last paddles do not know of each other


@given(ALL)
@settings(max_examples=12, deadline=None)
def test_no_paddle_lies_on_another(drawn):
    resolution, level, seed = drawn
    s = settings_of(resolution, level)
    sample = draw(s, np.random.default_rng(seed))
    one, other = ([paddle(s, sample.margin, *place)[1] for place in zip(t.pixels, t.angles, strict=True)] for t in sample.targets)
    occupied = border(s, s.padding)
    for late, new in zip(range(s.contour_length - 1), range(1, s.contour_length), strict=True):
        for masks in (one, other):
            assert (occupied + masks[new]).max() < 1.8
            occupied = np.maximum(occupied, masks[late])
    occupied = np.maximum(occupied, other[-1])
    for snake in sample.distractors:
        masks = [paddle(s, sample.margin, *place)[1] for place in zip(snake.pixels, snake.angles, strict=True)]
        assert snake.pixels[0].tolist() in room(s, sample.margin, occupied, snake.angles[0]).tolist()
        for late, new in pairwise(masks):
            assert (occupied + new).max() < 1.8
            occupied = np.maximum(occupied, late)
        occupied = np.maximum(occupied, masks[-1])


@given(ALL)
@settings(max_examples=12, deadline=None)
def test_snakes_turn_no_more_than_their_continuity_allows_and_keep_their_gaps(drawn):
    s = settings_of(*drawn[:2])
    sample = draw(s, np.random.default_rng(drawn[2]))
    for snake in (*sample.targets, *sample.distractors):
        leads = snake.angles - np.pi * (np.arange(len(snake)) > 0)
        turns = np.abs(np.angle(np.exp(1j * np.diff(leads))))
        assert turns.max() < np.pi / 2 / s.continuity + 1e-9
        steps = np.linalg.norm(np.diff(snake.pixels[1:], axis=0), axis=1)
        assert (steps <= s.paddle_length + 2 * sample.margin + 3).all()


@given(ALL)
@settings(max_examples=10, deadline=None)
def test_the_image_shows_its_snakes_and_markers(drawn):
    s = settings_of(*drawn[:2])
    sample = draw(s, np.random.default_rng(drawn[2]))
    layers = [slow_marker(s, marker) for marker in sample.markers]
    for snakes, contrast in ((sample.targets, s.target_contrast), (sample.distractors, s.distractor_contrast)):
        for snake in snakes:
            layers += [contrast * paddle(s, sample.margin, *place)[0] for place in zip(snake.pixels, snake.angles, strict=True)]
    image = np.max(layers, axis=0)
    # Values in the middle between two whole numbers may go either way.
    np.testing.assert_allclose(sample.image, image / image.max() * 255, rtol=0, atol=0.501)


def files(folder: Path) -> dict[str, str]:
    """Names and digests of all that is in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_official_layout(tmp_path):
    seen = []
    statistics = generate_pathfinder(tmp_path, count=130, processes=1, progress=seen.append)
    level = tmp_path / "pathfinder32" / "curv_contour_length_14"
    table = np.loadtxt(level / "metadata" / "0.npy", dtype=str)
    assert (level / "metadata" / "0.npy").read_bytes().endswith(b"\n")
    assert table.shape == (130, 11)
    assert set(table[:, 0]) == {"imgs/0"}
    assert table[:, 2].tolist() == [str(n) for n in range(130)]
    assert {tuple(row) for row in table[:, 4:]} == {("1.0", "14", "4", "2", "0.5", "1", "1")}

    images = []
    for folder, name in table[:, :2]:
        with Image.open(level / folder / name) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "L", (32, 32))
            images.append(np.asarray(image))
    labels = table[:, 3].astype(int)
    assert len(files(level)) == 131
    assert sum(seen) == 130
    distractors = statistics.pop("distractors")
    assert 4 < distractors <= 5
    assert statistics == {
        "images": 130,
        "connected": labels.mean(),
        "mean": pytest.approx(np.mean(images)),
        "lit": pytest.approx(np.mean(np.array(images) > 0)),
        "bright": pytest.approx(np.mean(np.array(images) > 127)),
        "paddles": 14,
        "markers_on_ends": 1,
    }


def test_metadata_has_the_form_of_the_archive(tmp_path):
    generate_pathfinder(tmp_path, level="easy", count=1, processes=1)
    line = (tmp_path / "pathfinder32" / "curv_baseline" / "metadata" / "0.npy").read_text()
    assert line in [f"imgs/0 sample_0.png 0 {label} 1.0 6 2 2 0.5 1 1\n" for label in (0, 1)]  # what stands in the official file


def test_other_resolutions_have_their_own_folders(tmp_path):
    generate_pathfinder(tmp_path, resolution=64, level="easy", count=2, processes=1)
    generate_pathfinder(tmp_path, resolution=128, level="intermediate", count=20, processes=1)
    with Image.open(tmp_path / "pathfinder64/curv_baseline/imgs/0/sample_1.png") as image:
        assert image.size == (64, 64)
    table = np.loadtxt(tmp_path / "pathfinder128/curv_contour_length_9/metadata/0.npy", dtype=str)
    assert set(table[:, 9]) == {"2", "3"}  # margins


def test_statistics_of_many(tmp_path):
    """Means of 1,000 images of the slow drawing, seed 1: 27.71 ± 0.05, 0.4485 ± 0.0009, 0.1113 ± 0.0003, 4.657 ± 0.017."""
    samples = draw_many(HARD, np.random.default_rng(3), 2000)
    images = np.stack([sample.image for sample in samples])
    assert binomtest(sum(sample.label for sample in samples), len(samples)).pvalue > 1e-3
    assert 27.4 < images.mean() < 28.0
    assert 0.444 < (images > 0).mean() < 0.453
    assert 0.1098 < (images > 127).mean() < 0.1128
    assert 4.58 < np.mean([len(sample.distractors) for sample in samples]) < 4.73
    assert len({image.tobytes() for image in images}) == len(images)


def test_label_cannot_be_guessed_from_brightness_or_distractors():
    samples = draw_many(HARD, np.random.default_rng(4), 1000)
    for of in (lambda sample: sample.image.mean(), lambda sample: len(sample.distractors)):
        assert ks_2samp(*([of(sample) for sample in samples if sample.label == label] for label in (0, 1))).pvalue > 1e-3


def test_same_files_with_any_number_of_processes(tmp_path):
    for processes in (1, 2):
        generate_pathfinder(tmp_path / str(processes), level="easy", count=1001, seed=5, processes=processes)
    one = files(tmp_path / "1")
    assert len(one) == 1003
    assert one == files(tmp_path / "2")


def test_more_images_begin_with_the_same_ones_and_seeds_differ(tmp_path):
    for name, count, seed in (("few", 30, 7), ("many", 75, 7), ("other", 30, 8)):
        generate_pathfinder(tmp_path / name, level="easy", count=count, seed=seed, processes=1)
    few, many, other = (files(tmp_path / name) for name in ("few", "many", "other"))
    images = [name for name in few if name.endswith(".png")]
    assert [few[name] for name in images] == [many[name] for name in images]
    assert not {few[name] for name in images} & {other[name] for name in images}


def test_a_failure_leaves_nothing(tmp_path):
    def fail(finished):
        raise RuntimeError("enough")

    for count, processes in ((1, 1), (1001, 2)):
        with pytest.raises(RuntimeError, match="enough"):
            generate_pathfinder(tmp_path, level="easy", count=count, processes=processes, progress=fail)
        assert [path.name for path in tmp_path.rglob("*") if path.suffix != ".lock"] == ["pathfinder32"]


def test_a_kill_leaves_nothing_that_looks_complete(tmp_path):
    code = "import sys; from permuteformer.tasks.generators.pathfinder import *; generate_pathfinder(Path(sys.argv[1]), processes=1)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not any(tmp_path.rglob("sample_9.png")) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert any(tmp_path.rglob("sample_9.png"))
    level = tmp_path / "pathfinder32" / "curv_contour_length_14"
    assert not level.exists()
    assert generate_pathfinder(tmp_path, count=3, processes=1)["images"] == 3
    assert len(files(tmp_path)) == 4


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    generate_pathfinder(tmp_path, level="easy", count=2, processes=1)
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match="curv_baseline"):
        generate_pathfinder(tmp_path, level="easy", count=3, processes=1)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resolution": 48}, "resolution must be 32, 64 or 128; it is 48"),
        ({"resolution": "32"}, "it is '32'"),
        ({"level": "curv_baseline"}, "unknown level 'curv_baseline': there is 'easy', 'hard', 'intermediate'"),
        ({"level": "hardd"}, "did you mean 'hard'"),
        ({"count": 0}, "count must be a whole number from 1 on; it is 0"),
        ({"count": 1.5}, "count must be a whole number"),
        ({"seed": -1}, "seed must be a whole number from 0 on; it is -1"),
        ({"processes": 0}, "processes must be a whole number from 1 on"),
    ],
)
def test_refusals(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_pathfinder(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())
