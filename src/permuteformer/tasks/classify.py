"""Classification of your own texts or images, from a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from permuteformer.tasks.base import TASKS, Source
from permuteformer.tasks.inputs import Pixels, Values
from permuteformer.tasks.own import (
    SPLIT_NAMES,
    Item,
    OwnClassification,
    choose_column,
    files_of_splits,
    id_of,
    inside,
    label_name,
    no_column,
    text_bytes,
)
from permuteformer.tasks.readers.images import gray_image
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import ENDINGS, column_names, rows
from permuteformer.tokens import PAPER

TEXTS = ("text", "review", "sentence", "content", "document", "body", "comment", "message", "description", "title")
IMAGES = ("image", "imagepath", "img", "picture", "photo", "file", "filename", "filepath", "path")
LABELS = ("label", "labels", "class", "target", "category", "sentiment", "tag", "y")


@TASKS.register("classify")
class Classify(OwnClassification):
    """Rows of a table with a label: CSV, TSV, JSON lines or Parquet. What has a label is a text, or an image that a path leads to.

    Args:
        path: the table, or a folder of tables named after their splits.
        validation: the table of the validation split, if there is one.
        test: that of the test split.
        text: the column of texts; guessed from its name unless told.
        image: the column of paths of images, from the table's own folder; what it is, if there is no text.
        label: the column of labels; guessed too.
        id: a column in which no value may come twice.
        max_length: bytes of the longest text, with CLS and SEP; what is longer is cut. Images are made squares of ``size`` pixels.
        size: pixels of a side of an image.
        seed: of the splits, where they are made.
        skip_bad: leave out what cannot be read, and count it.
    """

    title = "your texts or images, in a table"
    layouts = ("a table: .csv, .tsv, .jsonl or .parquet",)
    advice = "say where it is: path=FILE"

    def __init__(
        self,
        path: str,
        validation: str | None = None,
        test: str | None = None,
        text: str | None = None,
        image: str | None = None,
        label: str | None = None,
        id: str | None = None,
        max_length: int = 4096,
        size: int = 32,
        seed: int = 0,
        skip_bad: bool = False,
    ) -> None:
        if text is not None and image is not None:
            raise ValueError(f"text and image cannot both be given, an item is one of them; they are {text!r} and {image!r}")
        self.files = files_of_splits(path, validation, test, ENDINGS)
        first = self.files[0][1]
        names = column_names(first)
        self.text = None if image is not None else choose_column(first, "text", text, names, TEXTS)
        self.image = None if self.text is not None else choose_column(first, "image", image, names, IMAGES)
        found = choose_column(first, "label", label, names, LABELS)
        if found is None:
            raise no_column(first, "label", names)
        self.label = found
        if self.text is None and self.image is None:
            raise no_column(first, "text", names)
        by_column = choose_column(first, "split", None, names, ("split",))
        self.split = by_column if all(split is None for split, _ in self.files) else None
        self.given = frozenset(split for split, _ in self.files if split) if self.split is None else frozenset(SPLIT_NAMES.values())
        self.input = Values(PAPER, max_length) if self.text is not None else Pixels(PAPER, (size, size))
        self.id = choose_column(first, "id", id, names, ())
        self.seed, self.skip_bad = seed, skip_bad

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "columns": [self.text, self.image, self.label, self.split, self.id], "grid": self.grid}

    def sources(self, folder: Path) -> Iterator[Source]:
        paths = tuple(path for _, path in self.files)
        yield Source(", ".join(path.name for path in paths), paths, lambda problems: self.deal(self._items(problems), problems))

    def _items(self, problems: Problems) -> Iterator[Item | BadItem]:
        for split, path in self.files:
            for line, row in rows(path, problems):
                try:
                    if self.split is not None:
                        split = _split(row.get(self.split))
                    yield Item(path, line, split, label_name(row.get(self.label)), {"value": self._value(path, row)}, id_of(row, self.id))
                except ValueError as error:
                    yield BadItem(path, line, str(error))

    def _value(self, path: Path, row: dict[str, Any]) -> bytes:
        if self.text is not None:
            return text_bytes(row.get(self.text), self.text)
        assert self.image is not None
        name = row.get(self.image)
        if not isinstance(name, str) or not name:
            raise ValueError(f"column {self.image!r} must be the path of an image; it is {name!r:.50}")
        file = inside(Path(name), path.parent)
        if not file.is_file():
            raise ValueError(f"there is no image {name!r:.100}")
        return gray_image(file.read_bytes(), self.grid).tobytes()


def _split(value: object) -> str:
    if str(value).lower() not in SPLIT_NAMES:
        raise ValueError(f"split must be one of {', '.join(SPLIT_NAMES)}; it is {value!r:.50}")
    return SPLIT_NAMES[str(value).lower()]
