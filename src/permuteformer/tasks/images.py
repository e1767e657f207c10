"""Classification of your own images, one folder per class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from permuteformer.tasks.base import TASKS, Recipe, Source
from permuteformer.tasks.files import SPLIT_NAMES, existing
from permuteformer.tasks.inputs import Image
from permuteformer.tasks.own import Item, OwnTask
from permuteformer.tasks.readers.archives import members, names
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.store import Row

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")

IMAGE_RECIPE = Recipe("image", {"epochs": 20, "batch_size": 32, "learning_rate": 2e-3, "warmup_steps": 100}, {"hidden_dropout": 0.1})


@TASKS.register("images")
@dataclass(kw_only=True, eq=False)
class Images(OwnTask):
    """Images in folders named after their classes, ``cat/1.png``, or splits and classes, ``train/cat/1.png``; or a tar or zip of them.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from PIL import Image
    >>> with TemporaryDirectory() as folder:
    ...     for n in range(20):
    ...         (Path(folder) / "dark light".split()[n % 2]).mkdir(exist_ok=True)
    ...         Image.new("L", (9, 9), 200 * (n % 2) + n).save(Path(folder) / "dark light".split()[n % 2] / f"{n}.png")
    ...     task = Images(folder, size=8)
    ...     task.input.labels, task.input.grid
    (('dark', 'light'), (8, 8))
    """

    title = "your images, one folder per class"
    layouts = ("a folder, tar or zip: CLASS/IMAGE, or SPLIT/CLASS/IMAGE",)
    recipe = IMAGE_RECIPE

    size: int = 32
    """Height and width to which images are scaled, in gray."""

    def __post_init__(self) -> None:
        existing(self.path)

    def input_with(self, labels: tuple[str, ...]) -> Image:
        return Image(labels, (self.size, self.size))

    def sources(self, folder: Path) -> Iterator[Source]:
        path = existing(self.path)
        yield Source(path.name, (path,), partial(self._read, path))

    def _read(self, path: Path, errors: Errors) -> Iterator[tuple[str, Row]]:
        found = names(path, Errors(skip=True), is_image)  # test images may come before training images
        labels = {label: None for name in found if _split(name) in (None, "train") and (label := _label(name))}
        if labels and all(label.lower() in SPLIT_NAMES for label in labels):
            raise ValueError(f"{path} has folders of splits ({', '.join(labels)}) with images, but no folders of classes in them")
        rows = self.number_labels(self._items(path, errors), errors, labels)
        return self.make_splits(rows, {split for name in found if (split := _split(name))})

    def _items(self, path: Path, errors: Errors) -> Iterator[Item]:
        input = self.input_with(())
        for name, data in members(path, errors, is_image):
            with errors.at(path / name):
                if (label := _label(name)) is None:
                    raise ValueError("an image must be in a folder named after its class")
                yield Item(path / name, None, _split(name), label, input.row([data]))


def is_image(name: str) -> bool:
    """Return whether a file is an image by its ending; hidden files, such as macOS puts into zip archives, are not.

    >>> is_image("cat/1.PNG"), is_image("__MACOSX/cat/._1.png")
    (True, False)
    """
    return name.lower().endswith(ENDINGS) and not any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)


def _label(name: str) -> str | None:
    """Return the folder of an image."""
    parts = PurePosixPath(name).parts
    return parts[-2] if len(parts) > 1 else None


def _split(name: str) -> str | None:
    """Return the split that one of the folders above the class names."""
    return next((SPLIT_NAMES[part.lower()] for part in PurePosixPath(name).parts[:-2] if part.lower() in SPLIT_NAMES), None)
