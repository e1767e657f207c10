"""LRA Image: what does a small picture show, from its pixels in a row?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from permuteformer.tasks.base import TASKS, Recipe, Source
from permuteformer.tasks.inputs import Image
from permuteformer.tasks.lra import LraTask
from permuteformer.tasks.readers.archives import members
from permuteformer.tasks.readers.cifar import cifar_batch
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.readers.images import gray_image, gray_of_rgb
from permuteformer.tasks.store import Row
from permuteformer.tokens import IMAGE_SIDE

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
PICTURE = re.compile(rf"(?:^|/)(train|test)/({'|'.join(LABELS)})/[^/]+\.(?:png|jpe?g|bmp)$", re.IGNORECASE)
LOSSY = "CIFAR-10 from a JPEG copy (lossy), not the original pixels"


@TASKS.register("lra-image")
@dataclass(kw_only=True, eq=False)
class LraImage(LraTask):
    """CIFAR-10 in gray: 32 x 32 pixels as 1,024 tokens, ten classes.

    >>> LraImage().input.max_length, LraImage(protocol="lra").input.max_length
    (1026, 1025)
    """

    title = "CIFAR-10 in gray"
    licence = "none stated; cite Krizhevsky 2009"
    recipe = Recipe("image", {"batch_size": 256, "epochs": 50, "learning_rate": 1e-2, "warmup_steps": 200})
    official_items = {"train": 50_000, "test": 10_000}  # noqa: RUF012
    layouts = (
        "cifar-10-batches-py/{data_batch_1 … 5, test_batch}",
        "cifar-10-python.tar.gz",
        "cifar10/{train,test}/<class>/*.png (or .jpg)",
        "cifar10/*.tar[.gz, .xz] of such a folder",
    )
    advice = "download it: permuteformer data fetch lra-image"

    @property
    def input(self) -> Image:
        return Image(LABELS, (IMAGE_SIDE, IMAGE_SIDE), self.alphabet(pixels=True))

    def sources(self, folder: Path) -> Iterator[Source]:
        batches = tuple(folder / "cifar-10-batches-py" / name for name in BATCHES)
        if all(batch.is_file() for batch in batches):
            yield Source("cifar-10-batches-py", batches, partial(_read_batches, folder / "cifar-10-batches-py"))
        if (packed := folder / "cifar-10-python.tar.gz").is_file():
            yield Source(packed.name, (packed,), partial(_read_batches, packed))
        pictures = folder / "cifar10"
        places = tuple(pictures / split / label for split in ("train", "test") for label in LABELS)
        if all(place.is_dir() for place in places):
            note = _note(next(places[0].iterdir(), pictures))
            yield Source("cifar10, folders", places, partial(_read_pictures, pictures), note=note)
        for archive in sorted(pictures.glob("*.tar*")):
            yield Source(archive.name, (archive,), partial(_read_pictures, archive), note=_note(archive))


def _note(path: Path) -> str:
    return LOSSY if re.search(r"jpe?g", path.name, re.IGNORECASE) else ""


def _read_batches(path: Path, errors: Errors) -> Iterator[tuple[str, Row]]:
    for name, data in members(path, errors, lambda name: name.rsplit("/", 1)[-1] in BATCHES):
        split = "test" if name.endswith("test_batch") else "train"
        with errors.at(path / name):
            pixels, labels = cifar_batch(data)
            images = gray_of_rgb(pixels.reshape(-1, 3, IMAGE_SIDE, IMAGE_SIDE).transpose(0, 2, 3, 1))
            yield from ((split, {"value": image.tobytes(), "label": label}) for image, label in zip(images, labels, strict=True))


def _read_pictures(path: Path, errors: Errors) -> Iterator[tuple[str, Row]]:
    for name, data in members(path, errors, lambda name: PICTURE.search(name) is not None):
        split, label = PICTURE.findall(name)[0]
        with errors.at(path / name):
            image = gray_image(data)
            if image.shape != (IMAGE_SIDE, IMAGE_SIDE):
                raise ValueError(f"the picture must have {IMAGE_SIDE} x {IMAGE_SIDE} pixels, got {image.shape[1]} x {image.shape[0]}")
            yield split.lower(), {"value": image.tobytes(), "label": LABELS.index(label.lower())}
