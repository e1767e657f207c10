"""Handwritten digits, 8 x 8 pixels, bundled with the package: a task on a grid that is learned in a minute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from permuteformer.tasks.base import TASKS, Source, Task
from permuteformer.tasks.images import IMAGE_RECIPE
from permuteformer.tasks.inputs import Image
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.readers.tables import rows
from permuteformer.tasks.splits import assign_splits
from permuteformer.tasks.store import Row

FILE = Path(__file__).parent / "embedded" / "digits.csv.gz"
SIDE, SHADES = 8, 16


@TASKS.register("digits")
@dataclass(kw_only=True, eq=False)
class Digits(Task):
    """1,797 handwritten digits (Alpaydin and Kaynak 1998, CC BY 4.0); a tenth is for validation and a fifth for test.

    >>> [len(Digits().items(split)) for split in ("train", "validation", "test")]
    [1259, 178, 360]
    """

    title = "handwritten digits, 8 x 8"
    licence = "CC BY 4.0"
    layouts = ("bundled with the package",)
    recipe = IMAGE_RECIPE

    @property
    def input(self) -> Image:
        return Image(tuple("0123456789"), (SIDE, SIDE))

    def sources(self, folder: Path) -> Iterator[Source]:
        yield Source("digits", (FILE,), lambda errors: assign_splits(_read(errors), {"train": 0.7, "validation": 0.1, "test": 0.2}, seed=0))


def _read(errors: Errors) -> Iterator[tuple[None, Row]]:
    names = [*map(str, range(SIDE * SIDE)), "digit"]
    for _, row in rows(FILE, errors, columns=names):
        *shades, digit = (int(row[name]) for name in names)
        pixels = np.array(shades) * 255 // SHADES
        yield None, {"value": pixels.astype(np.uint8).tobytes(), "label": digit}
