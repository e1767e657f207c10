"""LRA ListOps: the value of a nested expression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from permuteformer.tasks import protocol as protocols
from permuteformer.tasks.base import TASKS, Classification, Source
from permuteformer.tasks.generators.listops import first_token_answer
from permuteformer.tasks.inputs import Values
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import rows

SYMBOLS = [*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]
SPLIT_NAMES = {"train": "train", "val": "validation", "test": "test"}
"""How the files call splits, and how they are called here."""

PLACES = ("listops-1000", "lra_release/listops-1000", "lra_release/lra_release/listops-1000", "listops")


@TASKS.register("lra-listops")
class LraListops(Classification):
    """MIN, MAX, MED and SM (sum modulo 10) of digits, nested ten deep; ten classes.

    The paper leaves it out: answering 0 to what begins with MIN, 9 to MAX and 4 to the rest, without reading on, is better than what it
    was compared with. That is among its ``baselines``.

    Args:
        protocol: ``"lra"`` or ``"paper"``: whose way of numbering tokens.
        max_length: tokens of the longest input with CLS and SEP; what is longer is cut.
        data: the data folder.
        skip_bad: leave out what cannot be read, and count it.

    >>> LraListops().vocab_size, LraListops().labels[:3]
    (17, ['0', '1', '2'])
    """

    title = "nested MIN, MAX, MED, SM"
    licence = "none stated; generated: yours"
    official_items = 100_000
    layouts = tuple(f"{place}/basic_{{train,val,test}}.tsv" for place in PLACES)
    advice = "make it: permuteformer data generate lra-listops, or get the official one: permuteformer data fetch lra-listops (8 GB)"

    def __init__(self, protocol: str = "lra", max_length: int = 2002, data: str | None = None, skip_bad: bool = False) -> None:
        self.protocol = protocol
        self.input = Values(protocols.alphabet(protocol, len(SYMBOLS)), max_length)
        self.data, self.skip_bad = data, skip_bad

    @property
    def labels(self) -> list[str]:
        return list("0123456789")

    def sources(self, folder: Path) -> Iterator[Source]:
        for place in PLACES:
            files = {split: folder / place / f"basic_{name}.tsv" for name, split in SPLIT_NAMES.items()}
            if all(path.is_file() for path in files.values()):
                yield Source(f"{place}/basic_*.tsv", tuple(files.values()), partial(_read, files))

    def words(self, item: Mapping[str, Any]) -> list[str]:
        return [" ".join(SYMBOLS[n] for n in item["value"])]

    def baselines(self, split: str, chosen: np.ndarray | None = None) -> dict[str, float]:
        items = self.items(split)
        numbers = range(len(items)) if chosen is None else chosen
        right = sum(int(first_token_answer([SYMBOLS[items[n]["value"][0]]]) == items[n]["label"]) for n in numbers)
        return {**super().baselines(split, chosen), "from the first token alone": right / len(numbers)}


def _read(files: dict[str, Path], problems: Problems) -> Iterator[tuple[str, Row]]:
    numbers = {symbol: n for n, symbol in enumerate(SYMBOLS)}
    for split, path in files.items():
        for line, row in rows(path, problems):
            source, target = row.get("Source"), row.get("Target")
            if source is None or target is None:
                raise BadItem(path, 1, f"the columns must be Source and Target; they are {', '.join(row)}")
            try:
                # Brackets of the binary tree say nothing that the others do not.
                value = bytes(numbers[symbol] for symbol in source.split() if symbol not in ("(", ")"))
            except KeyError as error:
                problems.add(BadItem(path, line, f"symbols must be of {' '.join(SYMBOLS)}; there is {error.args[0]!r:.50}"))
                continue
            if len(target) != 1 or target not in "0123456789" or not value:
                problems.add(BadItem(path, line, f"Source must not be empty and Target be a digit; Target is {target!r:.50}"))
                continue
            yield split, {"value": value, "label": int(target)}
