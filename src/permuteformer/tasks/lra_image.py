"""LRA Image: what is in a small picture, from its pixels in a row?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from permuteformer.tasks import protocol as protocols
from permuteformer.tasks.base import TASKS, Classification, Source
from permuteformer.tasks.inputs import Pixels
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.archives import members
from permuteformer.tasks.readers.images import cifar_batch, gray_image, gray_of_rgb
from permuteformer.tasks.readers.problems import BadItem, Problems

LABELS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SIDE = 32
BATCHES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
PICTURE = re.compile(rf"(?:^|/)(train|test)/({'|'.join(LABELS)})/[^/]+\.(?:png|jpe?g|bmp)$", re.IGNORECASE)
LOSSY = "CIFAR-10 from a JPEG copy (lossy), not the original pixels"


@TASKS.register("lra-image")
class LraImage(Classification):
    """CIFAR-10 in gray: 32 x 32 pixels as 1,024 tokens, ten classes.

    Args:
        protocol: ``"lra"`` or ``"paper"``: whose tokens.
        validate_on: ``"train"`` holds out a tenth of the training split, ``"test"`` is what the paper's authors did, and the default of
            their protocol.
        data: the data folder.
        skip_bad: leave out what cannot be read, and count it.

    >>> LraImage().max_length, LraImage(protocol="paper").max_length
    (1025, 1026)
    """

    title = "CIFAR-10 in gray"
    licence = "none stated; cite Krizhevsky 2009"
    official_items = 60_000
    layouts = (
        "cifar-10-batches-py/{data_batch_1 … 5, test_batch}",
        "cifar-10-python.tar.gz",
        "cifar10/{train,test}/<class>/*.png (or .jpg)",
        "cifar10/*.tar[.gz, .xz] of such a folder",
    )
    advice = "get it: permuteformer data fetch lra-image"

    def __init__(self, protocol: str = "lra", validate_on: str | None = None, data: str | None = None, skip_bad: bool = False) -> None:
        self.protocol = protocol
        self.validate_on = protocols.validation(protocol, validate_on, "train")
        self.input = Pixels(protocols.alphabet(protocol, pixels=True), (SIDE, SIDE))
        self.data, self.skip_bad = data, skip_bad

    @property
    def labels(self) -> list[str]:
        return LABELS

    def sources(self, folder: Path) -> Iterator[Source]:
        batches = tuple(folder / "cifar-10-batches-py" / name for name in BATCHES)
        if all(batch.is_file() for batch in batches):
            yield Source("cifar-10-batches-py", batches, partial(_batches, folder / "cifar-10-batches-py"))
        if (packed := folder / "cifar-10-python.tar.gz").is_file():
            yield Source(packed.name, (packed,), partial(_batches, packed))
        pictures = folder / "cifar10"
        places = tuple(pictures / split / label for split in ("train", "test") for label in LABELS)
        if all(place.is_dir() for place in places):
            yield Source("cifar10, folders", places, partial(_pictures, pictures), _note(next(places[0].iterdir(), pictures)))
        for archive in sorted(pictures.glob("*.tar*")):
            yield Source(archive.name, (archive,), partial(_pictures, archive), _note(archive))


def _note(path: Path) -> str:
    return LOSSY if re.search(r"jpe?g", path.name, re.IGNORECASE) else ""


def _batches(path: Path, problems: Problems) -> Iterator[tuple[str, Row]]:
    for name, data in members(path, problems, wanted=lambda name: name.rsplit("/", 1)[-1] in BATCHES):
        try:
            pixels, labels = cifar_batch(data)
        except ValueError as error:
            problems.add(BadItem(path / name, None, str(error)))
            continue
        images = gray_of_rgb(pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))
        for image, label in zip(images, labels, strict=True):
            yield "test" if name.endswith("test_batch") else "train", {"value": image.tobytes(), "label": label}


def _pictures(path: Path, problems: Problems) -> Iterator[tuple[str, Row]]:
    for name, data in members(path, problems, wanted=lambda name: PICTURE.search(name) is not None):
        match = PICTURE.search(name)
        assert match is not None
        try:
            image: np.ndarray = gray_image(data)
            if image.shape != (SIDE, SIDE):
                raise ValueError(f"the picture must be {SIDE} x {SIDE} pixels; it is {image.shape[1]} x {image.shape[0]}")
        except ValueError as error:
            problems.add(BadItem(path / name, None, str(error)))
            continue
        yield match[1].lower(), {"value": image.tobytes(), "label": LABELS.index(match[2].lower())}
