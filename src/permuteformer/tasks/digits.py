"""Hand-written digits, 8 x 8 pixels, which come with the package: a task with two coordinates that is learned in a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from permuteformer.tasks import protocol as protocols
from permuteformer.tasks.base import TASKS, Classification, Source
from permuteformer.tasks.inputs import Pixels
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.problems import Problems
from permuteformer.tasks.readers.tables import rows
from permuteformer.tasks.splits import Splitter

FILE = Path(__file__).parent / "embedded" / "digits.csv.gz"
SIDE = 8
SHADES = 16


@TASKS.register("digits")
class Digits(Classification):
    """1,797 digits by hand (Alpaydin and Kaynak 1998, CC BY 4.0), of which a tenth is for validation and a fifth for test.

    Args:
        protocol: ``"lra"`` or ``"paper"``: whose tokens.

    >>> Digits().labels
    ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']
    """

    title = "hand-written digits, 8 x 8"
    licence = "CC BY 4.0"
    layouts = ("comes with the package",)

    def __init__(self, protocol: str = "paper") -> None:
        self.input = Pixels(protocols.alphabet(protocol, pixels=True), (SIDE, SIDE))

    @property
    def labels(self) -> list[str]:
        return list("0123456789")

    def recipe(self) -> dict[str, Any]:
        return {}

    def sources(self, folder: Path) -> Iterator[Source]:
        yield Source("digits", (FILE,), _read)


def _read(problems: Problems) -> Iterator[tuple[str, Row]]:
    splitter = Splitter({"train": 0.7, "validation": 0.1, "test": 0.2}, seed=0)
    names = [*map(str, range(SIDE * SIDE)), "digit"]
    for _, row in rows(FILE, problems, columns=names):
        *shades, digit = (int(row[name]) for name in names)
        pixels = np.array(shades) * 255 // SHADES
        yield splitter.split_of(digit), {"value": pixels.astype(np.uint8).tobytes(), "label": digit}
