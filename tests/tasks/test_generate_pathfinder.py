"""The Pathfinder generator: images against a slow reference, their rules one by one, and the files."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import binomtest, ks_2samp
from slow_pathfinder import border, free_starts, marker, paddle, slow_draw

from permuteformer.tasks import GenerateOptions
from permuteformer.tasks.generators.pathfinder import LEVELS, draw_images, generate_pathfinder, pathfinder_settings

HARD = pathfinder_settings(32, "hard")


def features(image, snakes, distractors):
    """Return measurements by which two sets of images are compared."""
    one, other = (np.asarray(snake.pixels) for snake in snakes)
    travel = [np.arctan2(*np.diff(pixels, axis=0).T) for pixels in (one, other)]
    return {
        "mean": image.mean(),
        "lit": (image > 0).mean(),
        "bright": (image > 127).mean(),
        "brightest third": (image > 85).mean(),
        "distractors": distractors,
        "bend": np.mean(np.abs(np.angle(np.exp(1j * np.diff(travel))))),
        "reach": np.mean([np.linalg.norm(pixels[-1] - pixels[0]) for pixels in (one, other)]),
        "distance": np.linalg.norm(other[0] - one[0]),
        "row of an end": other[-1][0],
        "column of a beginning": one[0][1],
    }


def differences(one, other):
    """Return the features in which two sets differ more than chance allows."""
    return [name for name in one[0] if ks_2samp([f[name] for f in one], [f[name] for f in other]).pvalue < 1e-4]


@pytest.fixture(scope="module")
def slow():
    rng = np.random.default_rng(1)
    return [features(*slow_draw(HARD, rng)) for _ in range(40)]


def fast(s, count=1000):
    samples = draw_images(s, np.random.default_rng(2), count)
    return [features(sample.image, sample.targets, len(sample.distractors)) for sample in samples]


def test_images_are_distributed_as_slow_ones(slow):
    assert differences(slow, fast(HARD)) == []


@pytest.mark.parametrize(
    "change", [{"continuity": 1.25}, {"marker_radius": 2}, {"distractor_contrast": 1.5}, {"seed_distance": 5}, {"distractor_paddles": 16}]
)
def test_other_settings_are_noticed(slow, change):
    assert differences(slow, fast(replace(HARD, **change), 300)) != []


@st.composite
def drawings(draw):
    """Settings of any resolution and level, and an image."""
    s = pathfinder_settings(draw(st.sampled_from([32, 64, 128])), draw(st.sampled_from(list(LEVELS))))
    return s, draw_images(s, np.random.default_rng(draw(st.integers(0, 10**6))), 1)[0]


def masks(s, sample, snake):
    return [paddle(s, sample.margin, *place)[1] for place in zip(snake.pixels, snake.angles, strict=True)]


@given(drawings())
@settings(max_examples=12, deadline=None)
def test_snakes_and_markers(drawing):
    s, sample = drawing
    assert sample.image.shape == (s.resolution, s.resolution)
    assert (sample.image.dtype, sample.image.min(), sample.image.max()) == (np.uint8, 0, 255)
    assert [len(snake.pixels) for snake in sample.targets] == [s.contour_length] * 2
    assert len(sample.distractors) <= s.distractors
    assert {len(snake.pixels) for snake in sample.distractors} <= {{6: 2, 9: 3, 14: 4}[s.contour_length]}
    for snake in (*sample.targets, *sample.distractors):
        assert ((snake.pixels >= 0) & (snake.pixels < s.resolution)).all()
        travel = snake.angles - np.pi * (np.arange(len(snake.angles)) > 0)
        assert np.abs(np.angle(np.exp(1j * np.diff(travel)))).max() < np.pi / 2 / s.continuity + 1e-9
        steps = np.linalg.norm(np.diff(snake.pixels[1:], axis=0), axis=1)
        assert (steps <= s.paddle_length + 2 * sample.margin + 3).all()

    starts, ends = ([snake.pixels[tip].tolist() for snake in sample.targets] for tip in (0, -1))
    marked = tuple(sample.markers.tolist())
    joined, apart = marked in zip(starts, ends, strict=True), marked in zip(starts, reversed(ends), strict=True)
    assert joined if sample.label else apart
    assert not (joined and apart) or ends[0] == ends[1]  # one image in 250: the last paddles of two snakes may meet


@given(drawings())
@settings(max_examples=12, deadline=None)
def test_paddles_do_not_overlap(drawing):
    s, sample = drawing
    one, other = (masks(s, sample, snake) for snake in sample.targets)
    occupied = border(s, s.padding)
    for late, new in zip(range(s.contour_length - 1), range(1, s.contour_length), strict=True):
        for target in (one, other):
            assert (occupied + target[new]).max() < 1.8
            occupied = np.maximum(occupied, target[late])
    occupied = np.maximum(occupied, other[-1])
    for snake in sample.distractors:
        assert snake.pixels[0].tolist() in free_starts(s, sample.margin, occupied, snake.angles[0]).tolist()
        distractor = masks(s, sample, snake)
        for late, new in pairwise(distractor):
            assert (occupied + new).max() < 1.8
            occupied = np.maximum(occupied, late)
        occupied = np.maximum(occupied, distractor[-1])


@given(drawings())
@settings(max_examples=10, deadline=None)
def test_image_shows_its_snakes_and_markers(drawing):
    s, sample = drawing
    layers = [marker(s, centre) for centre in sample.markers]
    for snakes, contrast in ((sample.targets, s.target_contrast), (sample.distractors, s.distractor_contrast)):
        for snake in snakes:
            layers += [contrast * paddle(s, sample.margin, *place)[0] for place in zip(snake.pixels, snake.angles, strict=True)]
    image = np.max(layers, axis=0)
    np.testing.assert_allclose(sample.image, image / image.max() * 255, rtol=0, atol=0.501)  # ties may round either way


def test_neither_brightness_nor_the_number_of_distractors_gives_the_label():
    samples = draw_images(HARD, np.random.default_rng(3), 2000)
    assert binomtest(sum(sample.label for sample in samples), len(samples)).pvalue > 1e-3
    assert len({sample.image.tobytes() for sample in samples}) == len(samples)
    # Means of 1,000 slow images: 27.71 ± 0.05, 0.4485 ± 0.0009, 4.657 ± 0.017.
    assert 27.4 < np.mean([sample.image.mean() for sample in samples]) < 28.0
    assert 0.444 < np.mean([(sample.image > 0).mean() for sample in samples]) < 0.453
    assert 4.58 < np.mean([len(sample.distractors) for sample in samples]) < 4.73
    for measure in (lambda sample: sample.image.mean(), lambda sample: len(sample.distractors)):
        assert ks_2samp(*([measure(sample) for sample in samples if sample.label == label] for label in (0, 1))).pvalue > 1e-3


def options(total, seed=0):
    return GenerateOptions(counts={"train": total - 2, "validation": 1, "test": 1}, seed=seed, processes=1)


def images(folder):
    """Return the contents of all images in a folder by name."""
    return {path.name: path.read_bytes() for path in folder.rglob("*.png")}


def test_official_layout(tmp_path):
    counts = {"train": 100, "validation": 20, "test": 10}
    generated = generate_pathfinder(tmp_path, GenerateOptions(counts=counts, processes=1))
    level = tmp_path / "pathfinder32" / "curv_contour_length_14"
    assert generated.folder == level
    assert json.loads((level / "splits.json").read_text()) == counts
    table = np.loadtxt(level / "metadata" / "0.npy", dtype=str)
    assert (level / "metadata" / "0.npy").read_bytes().endswith(b"\n")
    assert table.shape == (130, 11)
    assert set(table[:, 0]) == {"imgs/0"}
    assert table[:, 2].tolist() == [str(n) for n in range(130)]
    assert {tuple(row) for row in table[:, 4:]} == {("1.0", "14", "4", "2", "0.5", "1", "1")}

    found = []
    for folder, name in table[:, :2]:
        with Image.open(level / folder / name) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "L", (32, 32))
            found.append(np.asarray(image))
    assert len([path for path in level.rglob("*") if path.is_file()]) == 132
    statistics = generated.statistics
    assert 4 < statistics.pop("distractors") <= 5
    assert statistics == {
        "images": 130,
        "connected": table[:, 3].astype(int).mean(),
        "mean": pytest.approx(np.mean(found)),
        "lit": pytest.approx(np.mean(np.array(found) > 0)),
        "bright": pytest.approx(np.mean(np.array(found) > 127)),
        "paddles": 14,
        "markers_on_ends": 1,
    }


@pytest.mark.parametrize(
    ("resolution", "level", "folder", "lines"),
    [
        (32, "easy", "curv_baseline", {"1.0 6 2 2 0.5 1 1"}),  # a line of the official metadata
        (64, "hard", "curv_contour_length_14", {"1.8 14 4 5 1 1 1"}),
        (128, "intermediate", "curv_contour_length_9", {"1.8 9 3 5 1.5 2 1", "1.8 9 3 5 1.5 3 1"}),  # two margins
    ],
)
def test_resolutions_and_levels(tmp_path, resolution, level, folder, lines):
    generate_pathfinder(tmp_path, options(20), resolution, level)
    place = tmp_path / f"pathfinder{resolution}" / folder
    metadata = (place / "metadata" / "0.npy").read_text().splitlines()
    assert metadata[7].split(" ", 4)[:3] == ["imgs/0", "sample_7.png", "7"]
    assert {line.split(" ", 3)[3][0] for line in metadata} == {"0", "1"}
    assert {line.split(" ", 4)[4] for line in metadata} == lines
    with Image.open(place / "imgs" / "0" / "sample_19.png") as image:
        assert image.size == (resolution, resolution)


def test_more_images_start_with_the_same_ones(tmp_path):
    few, many = (generate_pathfinder(tmp_path / str(count), options(count, seed=7), level="easy") for count in (30, 75))
    assert len(images(few.folder)) == 30
    assert images(few.folder).items() < images(many.folder).items()


@pytest.mark.parametrize(("arguments", "message"), [({"resolution": 256}, "32, 64 or 128.*256"), ({"level": "hardd"}, "'hardd'.*'hard'")])
def test_bad_resolution_or_level(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_pathfinder(tmp_path, GenerateOptions(), **arguments)
    assert not list(tmp_path.iterdir())
