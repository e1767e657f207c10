"""Classification of your own images, a folder a class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from permuteformer.tasks.base import TASKS, NotReady, Source
from permuteformer.tasks.inputs import Pixels
from permuteformer.tasks.own import SPLIT_NAMES, Item, OwnClassification
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
    """

    layouts = ("a folder, tar or zip: CLASS/IMAGE, or SPLIT/CLASS/IMAGE",)
    advice = "say which: path=FOLDER"

    def __init__(self, path: str, size: int = 32, seed: int = 0, skip_bad: bool = False) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise NotReady(f"path must be a folder or archive that is there; it is {path!r}")
        self.input = Pixels(PAPER, (size, size))
        self.seed, self.skip_bad = seed, skip_bad

    def recipe(self) -> dict[str, Any]:
        return {"seed": self.seed, "grid": self.grid}

    def sources(self, folder: Path) -> Iterator[Source]:
        folders = [place for place in sorted(self.path.rglob("*")) if place.is_dir()] if self.path.is_dir() else []
        yield Source(self.path.name, (self.path, *folders), lambda problems: self.deal(self._items(problems), problems))

    def _items(self, problems: Problems) -> Iterator[Item | BadItem]:
        # Splits are told by folders' names, so the names are looked at first.
        self.given = frozenset(split for name in self._names() if (split := _split(name)))
        for wanted in ("train", None, "validation", "test"):
            if wanted is not None and wanted not in self.given:
                continue
            for name, data in members(self.path, problems, wanted=lambda name, wanted=wanted: _wanted(name) and _split(name) == wanted):  # type: ignore[misc]
                yield self._item(name, data)

    def _names(self) -> Iterator[str]:
        names: list[str] = []
        for _ in members(self.path, Problems(skip=True), wanted=lambda name: bool(names.append(name)) if _wanted(name) else False):
            pass
        return iter(names)

    def _item(self, name: str, data: bytes) -> Item | BadItem:
        parts = PurePosixPath(name).parts
        if len(parts) < 2 or (_split(name) and len(parts) < 3):
            return BadItem(self.path / name, None, "an image must be in a folder, whose name is its class")
        try:
            image = gray_image(data, self.grid)
        except ValueError as error:
            return BadItem(self.path / name, None, str(error))
        return Item(self.path / name, None, _split(name), parts[-2], {"value": image.tobytes()})


def _wanted(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def _split(name: str) -> str | None:
    """The split that one of the folders above the class tells of."""
    return next((SPLIT_NAMES[part.lower()] for part in PurePosixPath(name).parts[:-2] if part.lower() in SPLIT_NAMES), None)
