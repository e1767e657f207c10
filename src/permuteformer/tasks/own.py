"""Data of one's own: labelled items in files, whose columns, labels and splits are found out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permuteformer.registry import unknown
from permuteformer.tasks.base import Batch, Classification, NotReady
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.problems import BadItem, Problems, printable
from permuteformer.tasks.splits import Splitter

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What people call splits."""

MAX_LABELS = 10_000


@dataclass(frozen=True)
class Item:
    """One labelled thing: where it is from, and what is stored of it."""

    path: Path
    line: int | None
    split: str | None
    """``None``: one is to be made."""
    label: str
    row: Row
    id: str | None = None
    """Must be another one for every item, if it is told."""


class OwnClassification(Classification):
    """Labelled items of one's own.

    Splits are those that are given: as files of their own, as files of a folder (``train.csv``, ``test.csv``) or by a column ``split``.
    Where there are none, they are made, with the same shares of every label: a tenth for validation and a tenth for test; where only a
    test split is given, a tenth of the rest for validation. Labels are numbered in their order, numbers by value.
    """

    seed: int
    given: frozenset[str]
    """Splits that the source has."""

    @property
    def labels(self) -> list[str]:
        return sorted(self.prepare().info["labels"], key=_by_value)

    def recipe(self) -> dict[str, Any]:
        return {"seed": self.seed, "given": sorted(self.given)}

    def learned(self) -> dict[str, Any]:
        return {"labels": list(self._numbers)}

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        if not hasattr(self, "_ranks"):  # labels are stored as numbers in the order in which they came up
            ranks = {label: n for n, label in enumerate(self.labels)}
            self._ranks = [ranks[label] for label in self.prepare().info["labels"]]
        return super().collate([{**item, "label": self._ranks[item["label"]]} for item in items])

    def deal(self, items: Iterable[Item | BadItem], problems: Problems, labels: Iterable[str] = ()) -> Iterator[tuple[str, Row]]:
        """Items with splits made where they have none, and labels numbered.

        Where splits are given, a label must occur in training: be one of ``labels``, or of an item before.
        """
        self._numbers = {label: n for n, label in enumerate(labels)}
        shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
        if "validation" in self.given:
            shares = {"train": 1.0}
        elif "test" in self.given:
            shares = {"train": 0.9, "validation": 0.1}
        splitter = Splitter(shares, self.seed)
        seen: set[str] = set()
        for item in items:
            try:
                if isinstance(item, BadItem):
                    raise item
                if item.id is not None:
                    if item.id in seen:
                        raise BadItem(item.path, item.line, f"the id {printable(item.id, 50)!r} was there before")
                    seen.add(item.id)
                made = item.split is None or (item.split == "train" and "validation" not in self.given)
                number = self._number(item, new=made or item.split == "train")
            except BadItem as problem:
                problems.add(problem)
                continue
            yield splitter.split_of(item.label) if made else str(item.split), {**item.row, "label": number}

    def _number(self, item: Item, new: bool) -> int:
        numbers, label = self._numbers, printable(item.label, 50)
        if item.label not in numbers:
            shown = ", ".join(printable(known, 50) for known in list(numbers)[:10]) + (" …" if len(numbers) > 10 else "")
            if not new:
                raise BadItem(item.path, item.line, f"the label {label!r} is none of the training split's {len(numbers):,}: {shown}")
            if len(numbers) == MAX_LABELS:
                raise ValueError(f"{item.path} has more than {MAX_LABELS:,} labels ({shown}): is this the column of labels?")
            numbers[item.label] = len(numbers)
        return numbers[item.label]


def files_of_splits(path: str, validation: str | None, test: str | None, endings: Sequence[str]) -> list[tuple[str | None, Path]]:
    """Every file and the split it is of, training files first; ``None`` where nothing says which.

    Args:
        path: a file, or a folder of files, which may have their split in their name.
        validation: a file of validation items.
        test: a file of test items.
        endings: what names of files end in.
    """
    main = _there("path", path)
    found: list[tuple[str | None, Path]] = [(None, main)]
    if main.is_dir():
        tables = sorted(file for file in main.iterdir() if file.is_file() and file.name.lower().endswith(tuple(endings)))
        if not tables:
            raise NotReady(f"{path} has no file that ends in {', '.join(endings)}")
        for file in tables:
            inside(Path(file.name), main)
        found = [(split_named(file.name), file) for file in tables]
        if any(split for split, _ in found) and (of_none := [file.name for split, file in found if split is None]):
            raise ValueError(f"files of {path} have splits in their names, but {', '.join(of_none)} has none: move it away, or rename it")
    found += [(split, _there(split, given)) for split, given in (("validation", validation), ("test", test)) if given is not None]
    order = {None: 0, "train": 0, "validation": 1, "test": 2}
    return sorted(found, key=lambda entry: order[entry[0]])


def split_named(name: str) -> str | None:
    """The split that a name tells of.

    >>> split_named("wiki.valid.raw.xz"), split_named("reviews.csv")
    ('validation', None)
    """
    return next((SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_NAMES), None)


def choose_column(path: Path, option: str, asked: str | None, names: Sequence[str], guesses: Sequence[str]) -> str | None:
    """The column that ``option`` asks for, else the first of ``guesses`` that is there."""
    if asked is not None:
        if asked not in names:
            raise ValueError(f"{option}: {unknown(f'column of {path.name}', asked, names)}")
        return asked
    folded = {name.strip().lower().replace("_", "").replace(" ", ""): name for name in reversed(names)}
    return next((folded[guess] for guess in guesses if guess in folded), None)


def no_column(path: Path, option: str, names: Sequence[str]) -> ValueError:
    """The error for a column that could not be guessed."""
    return ValueError(f"which column of {path} is the {option}? There is {', '.join(map(repr, names))}; say {option}=NAME")


def label_name(value: object) -> str:
    """A label as text: ``1``, ``1.0`` and ``"1"`` of different kinds of files are as they are written there."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("there is no label")
    if isinstance(value, (str, bool, int, float)):
        return str(value).strip()
    raise ValueError(f"a label must be a text or a number; it is {type(value).__name__}")


def text_bytes(value: object, column: str) -> bytes:
    """A text as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} must be text; it is {'empty' if value is None else type(value).__name__}")
    return value.encode("utf-8", "surrogatepass")


def id_of(row: Mapping[str, Any], column: str | None) -> str | None:
    """What the column of ids has, if there is such a column."""
    return None if column is None else str(row.get(column))


def inside(path: Path, folder: Path) -> Path:
    """The file, which must not lead out of the folder: neither by its name nor by links."""
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise ValueError(f"{printable(str(path))!r} leads out of the folder {folder}: it must be inside")
    return file


def _there(option: str, name: str) -> Path:
    path = Path(name).expanduser()
    if not path.exists():
        raise NotReady(f"{option} must be a file or folder that is there; it is {name!r}")
    return path


def _by_value(label: str) -> tuple[float, str]:
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label
