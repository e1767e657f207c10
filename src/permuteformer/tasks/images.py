"""Classification of your own images, a folder a class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from permuteformer.tasks.base import TASKS, NotReady, Source
from permuteformer.tasks.inputs import Pixels
from permuteformer.tasks.own import SPLIT_NAMES, Item, OwnClassification, Told
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.archives import members
from permuteformer.tasks.readers.images import gray_image
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tokens import PAPER

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")


@TASKS.register("images")
class Images(OwnClassification):
    """Images in folders named after their classes, ``cat/1.png``, or after splits and classes, ``train/cat/1.png``.

    Args:
        path: the folder, or a tar or zip of it.
        size: pixels of a side: images are made gray squares of it.
        seed: of the splits, where they are made.
        skip_bad: leave out what cannot be read, and count it.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from PIL import Image
    >>> with TemporaryDirectory() as folder:
    ...     for n in range(20):
    ...         (Path(folder) / "dark light".split()[n % 2]).mkdir(exist_ok=True)
    ...         Image.new("L", (9, 9), 200 * (n % 2) + n).save(Path(folder) / "dark light".split()[n % 2] / f"{n}.png")
    ...     task = Images(folder, size=8)
    ...     task.labels, task.grid
    (['dark', 'light'], (8, 8))
    """

    title = "your images, a folder a class"
    layouts = ("a folder, tar or zip: CLASS/IMAGE, or SPLIT/CLASS/IMAGE",)
    advice = "say where it is: path=FOLDER"

    def __init__(self, path: str, size: int = 32, seed: int = 0, skip_bad: bool = False) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise NotReady(f"path must be a folder or archive that is there; it is {path!r}")
        self.input = Pixels(PAPER, (size, size))
        self.seed, self.skip_bad = seed, skip_bad

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "grid": self.grid}

    def sources(self, folder: Path) -> Iterator[Source]:
        yield Source(self.path.name, (self.path,), self._read)

    def _read(self, problems: Problems) -> Iterator[tuple[str, Row]]:
        # Splits and labels are in the names, so these are looked at first: images of the test split may come before those of training.
        names: list[str] = []

        def note(name: str) -> bool:
            if is_image(name):
                names.append(name)
            return False

        for _ in members(self.path, Problems(skip=True), wanted=note):
            pass
        labels = {label: True for name in names if _split(name) in (None, "train") and (label := _label(name))}
        if labels and all(label.lower() in SPLIT_NAMES for label in labels):
            raise ValueError(f"{self.path} has folders of splits ({', '.join(labels)}) with images in them, but no folders of classes")
        told = Told(frozenset(split for name in names if (split := _split(name))), tuple(labels))
        return self.deal((self._item(*member) for member in members(self.path, problems, wanted=is_image)), problems, told)

    def _item(self, name: str, data: bytes) -> Item | BadItem:
        label = _label(name)
        if label is None:
            return BadItem(self.path / name, None, "an image must be in a folder, whose name is its class")
        try:
            image = gray_image(data, self.grid)
        except ValueError as error:
            return BadItem(self.path / name, None, str(error))
        return Item(self.path / name, None, _split(name), label, {"value": image.tobytes()})


def is_image(name: str) -> bool:
    """Whether a member of a folder or archive is an image, by its ending; nothing hidden, such as Macs put into zip archives.

    >>> is_image("cat/1.PNG"), is_image("__MACOSX/cat/._1.png")
    (True, False)
    """
    return name.lower().endswith(ENDINGS) and not any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)


def _label(name: str) -> str | None:
    """The folder that an image is in."""
    parts = PurePosixPath(name).parts
    return parts[-2] if len(parts) > 1 else None


def _split(name: str) -> str | None:
    """The split that one of the folders above the class tells of."""
    return next((SPLIT_NAMES[part.lower()] for part in PurePosixPath(name).parts[:-2] if part.lower() in SPLIT_NAMES), None)
