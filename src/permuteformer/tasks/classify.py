"""Classification of your own texts or images, from a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from permuteformer.tasks.base import TASKS
from permuteformer.tasks.inputs import Pixels, Values
from permuteformer.tasks.own import OwnTable, choose_column, image_bytes, inside, no_column, text_bytes
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.images import gray_image
from permuteformer.tasks.readers.problems import Problems
from permuteformer.tokens import PAPER

TEXTS = ("text", "review", "sentence", "content", "document", "body", "comment", "message", "description", "title")
IMAGES = ("image", "imagepath", "img", "picture", "photo", "file", "filename", "filepath", "path")


@TASKS.register("classify")
class Classify(OwnTable):
    """Rows of a table with a label: CSV, TSV, JSON lines or Parquet. What has a label is a text, or an image that a path leads to.

    Args:
        path: the table, or a folder of tables named after their splits.
        validation: the table of the validation split, if there is one.
        test: that of the test split.
        text: the column of texts; guessed from its name unless told.
        image: the column of paths of images, from the table's own folder; what it is, if there is no text.
        label: the column of labels; guessed too.
        split: the column of splits; ``split`` if there is one. Nothing (``split=``) for none.
        id: a column in which no value may come twice.
        max_length: bytes of the longest text, with CLS and SEP; what is longer is cut.
        size: pixels of a side: images are made gray squares of it.
        seed: of the splits, where they are made.
        skip_bad: leave out what cannot be read, and count it.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("text,label\\n" + "".join(f"film {n},{'good' if n % 2 else 'bad'}\\n" for n in range(50)))
    ...     file.flush()
    ...     task = Classify(file.name)
    ...     task.labels, len(task.dataset("train"))
    (['bad', 'good'], 40)
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
        split: str | None = None,
        id: str | None = None,
        max_length: int = 4096,
        size: int = 32,
        seed: int = 0,
        skip_bad: bool = False,
    ) -> None:
        if text is not None and image is not None:
            raise ValueError(f"text and image cannot both be given, an item is one of them; they are {text!r} and {image!r}")
        table, names = self.take(path, validation, test, label, split, id)
        self.text = None if image is not None else choose_column(table, "text", text, names, TEXTS)
        self.image = None if self.text is not None else choose_column(table, "image", image, names, IMAGES)
        if self.text is None and self.image is None:
            raise no_column(table, "text", names)
        self.needs(self.text, self.image)
        self.input = Values(PAPER, max_length) if self.text is not None else Pixels(PAPER, (size, size))
        self.seed, self.skip_bad = seed, skip_bad

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "value": [self.text, self.image, self.grid]}

    def choices(self) -> dict[str, str]:
        value = {"image": f"column {self.image}"} if self.text is None else {"text": f"column {self.text}"}
        return {**value, **super().choices()}

    def further_files(self) -> Iterable[Path]:
        if self.image is None:
            return ()
        found = set()
        for path, _, row in self._rows(Problems(skip=True)):
            with suppress(ValueError):  # complaints come when they are read
                found.add(inside(Path(str(row.get(self.image))), path.parent))
        return sorted(path for path in found if path.is_file())

    def row(self, path: Path, row: Mapping[str, Any]) -> Row:
        if self.text is not None:
            return {"value": text_bytes(row.get(self.text), self.text)}
        assert self.image is not None
        name = row.get(self.image)
        if not isinstance(name, str) or not name:
            raise ValueError(f"column {self.image!r} must be the path of an image; it is {name!r:.50}")
        return {"value": gray_image(image_bytes(name, path.parent), self.grid).tobytes()}
