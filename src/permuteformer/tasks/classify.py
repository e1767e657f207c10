"""Classification of your own texts or images, from a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from permuteformer.tasks.base import TASKS, Recipe
from permuteformer.tasks.images import IMAGE_RECIPE
from permuteformer.tasks.inputs import Image, Text
from permuteformer.tasks.own import TEXT_RECIPE, TableTask, find_column, guess_column


@TASKS.register("classify")
@dataclass(kw_only=True, eq=False)
class Classify(TableTask):
    """Rows of a table with a text, or the path of an image, and a label.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("text,label\\n" + "".join(f"film {n},{'good' if n % 2 else 'bad'}\\n" for n in range(50)))
    ...     file.flush()
    ...     task = Classify(file.name)
    ...     task.input.labels, len(task.items("train"))
    (('bad', 'good'), 40)
    """

    title = "your texts or images, in a table"

    text: str | None = None
    """Column of texts; default: guessed from its name."""
    image: str | None = None
    """Column of image paths, relative to the table; default: guessed if no text column is found."""
    size: int = 32
    """Height and width to which images are scaled, in gray."""

    def choose_parts(self, table: Path, names: Sequence[str]) -> None:
        if self.text is not None and self.image is not None:
            raise ValueError(f"text and image cannot both be given, got {self.text!r} and {self.image!r}: an item is one of them")
        if self.image is None:
            self.text = guess_column(table, names, "text", self.text, Text.parts["text"])
        if self.text is None:
            self.image = guess_column(table, names, "image", self.image, Image.parts["image"])
        if self.image is None:
            self.text = find_column(table, names, "text", self.text, Text.parts["text"])

    def training_recipe(self) -> Recipe:
        return TEXT_RECIPE if self.image is None else IMAGE_RECIPE

    def input_with(self, labels: tuple[str, ...]) -> Text | Image:
        return Text(labels, self.max_length) if self.image is None else Image(labels, (self.size, self.size))
