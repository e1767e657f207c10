"""Data of one's own: labelled items in files, whose columns, labels and splits are found out."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from permuteformer.folders import content_of
from permuteformer.registry import unknown
from permuteformer.tasks.base import Batch, Classification, NotReady, Source
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.archives import MAX_MEMBER_BYTES
from permuteformer.tasks.readers.entries import entries
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import ENDINGS, column_names, rows
from permuteformer.tasks.readers.unpacking import reason
from permuteformer.tasks.splits import Splitter
from permuteformer.texts import printable

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What people call splits."""

LABELS = ("label", "labels", "class", "target", "category", "sentiment", "stars", "rating", "tag", "isduplicate", "y")
"""What columns of labels are called."""

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


@dataclass(frozen=True)
class Told:
    """What the source says of splits before its items are read: which there are, and the labels of the training split."""

    splits: frozenset[str]
    labels: tuple[str, ...] = ()


class OwnClassification(Classification):
    """Labelled items of one's own.

    Splits are those that are given: as files of their own, as files of a folder (``train.csv``, ``test.csv``) or by a column ``split``.
    Where there are none, they are made, with the same shares of every label: a tenth for validation and a tenth for test; where only a
    test split is given, a tenth of the rest for validation. Labels are numbered in their order, numbers by value.
    """

    seed: int

    @property
    def labels(self) -> list[str]:
        return sorted(self.prepare().info["labels"], key=_by_value)

    def recipe(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def learned(self) -> dict[str, Any]:
        return {"labels": list(self._numbers)}

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        if not hasattr(self, "_ranks"):  # labels are stored as numbers in the order in which they came up
            ranks = {label: n for n, label in enumerate(self.labels)}
            self._ranks = [ranks[label] for label in self.prepare().info["labels"]]
        return super().collate([{**item, "label": self._ranks[item["label"]]} for item in items])

    def deal(self, items: Iterable[Item | BadItem], problems: Problems, told: Told) -> Iterator[tuple[str, Row]]:
        """Items with splits made where they have none, and labels numbered. Where splits are told, labels must be those of training."""
        self._numbers = {label: n for n, label in enumerate(told.labels)}
        shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
        if "validation" in told.splits:
            shares = {"train": 1.0}
        elif "test" in told.splits:
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
                number = self._number(item)
            except BadItem as problem:
                problems.add(problem)
                continue
            split = splitter.split_of(item.label, item.row) if item.split in (None, "train") else str(item.split)
            yield split, {**item.row, "label": number}

    def _number(self, item: Item) -> int:
        numbers, label = self._numbers, printable(item.label, 50)
        if item.label not in numbers:
            shown = ", ".join(printable(known, 50) for known in list(numbers)[:10]) + (" …" if len(numbers) > 10 else "")
            if item.split not in (None, "train"):
                raise BadItem(item.path, item.line, f"the label {label!r} is none of the training split's {len(numbers):,}: {shown}")
            if len(numbers) == MAX_LABELS:
                raise ValueError(f"{item.path} has more than {MAX_LABELS:,} labels ({shown}): is this the column of labels?")
            numbers[item.label] = len(numbers)
        return numbers[item.label]


class OwnTable(OwnClassification):
    """Labelled rows of tables."""

    def take(
        self, path: str, validation: str | None, test: str | None, label: str | None, split: str | None, id: str | None
    ) -> tuple[Path, list[str]]:
        """Find the tables and the columns of labels, splits and ids. Gives the first table and its columns."""
        self.files = files_of_splits(path, validation, test, ENDINGS)
        table = self.files[0][1]
        names = column_names(table)
        found = choose_column(table, "label", label, names, LABELS)
        if found is None:
            raise no_column(table, "label", names)
        self.label = found
        self.id = choose_column(table, "id", id, names, ())
        self.split = None if split == "" else choose_column(table, "split", split, names, ("split",))
        if any(split for split, _ in self.files):
            self.split = None
        return table, names

    def needs(self, *columns: str | None) -> None:
        """Raise where a table has not got these columns, or those of labels, splits and ids."""
        for _, path in self.files:
            names = column_names(path)
            for column in (*columns, self.label, self.split, self.id):
                if column is not None and column not in names:
                    raise ValueError(f"{path} {unknown('column', column, names)}; all tables must have the columns of the first")

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "columns": [self.label, self.split, self.id], "splits": [split for split, _ in self.files]}

    def choices(self) -> dict[str, str]:
        given = sorted({split for split, _ in self.files if split})
        splits = f"column {self.split}" if self.split else f"files of {', '.join(given)}" if given else "made"
        return {"label": f"column {self.label}", "splits": splits}

    def sources(self, folder: Path) -> Iterator[Source]:
        paths = tuple(path for _, path in self.files)
        yield Source(", ".join(path.name for path in paths), (*paths, *self.further_files()), self._read)

    def further_files(self) -> Iterable[Path]:
        """Files that the tables lead to."""
        return ()

    @abstractmethod
    def row(self, path: Path, row: Mapping[str, Any]) -> Row:
        """What is stored of a row of the table at ``path``; its label comes by itself."""

    def _read(self, problems: Problems) -> Iterator[tuple[str, Row]]:
        return self.deal(self._items(problems), problems, self._told())

    def _told(self) -> Told:
        if self.split is None:
            return Told(frozenset(split for split, _ in self.files if split))
        splits, labels = set(), {}
        for _, _, row in self._rows(Problems(skip=True)):
            try:
                split, label = self._split(row), label_name(row.get(self.label))
            except ValueError:
                continue  # complaints come in the second reading
            splits.add(split)
            if split == "train":
                labels[label] = True
        return Told(frozenset(splits), tuple(labels))

    def _split(self, row: Mapping[str, Any]) -> str:
        value = str(row.get(str(self.split)))
        if value.lower() not in SPLIT_NAMES:
            raise ValueError(
                f"column {self.split!r} must be one of {', '.join(SPLIT_NAMES)}; it is {printable(value, 50)!r}: if it is not of splits, "
                "say split= (nothing)"
            )
        return SPLIT_NAMES[value.lower()]

    def _rows(self, problems: Problems) -> Iterator[tuple[Path, int, dict[str, Any]]]:
        for _, path in self.files:
            for line, row in rows(path, problems):
                yield path, line, row

    def _items(self, problems: Problems) -> Iterator[Item | BadItem]:
        splits = {path: split for split, path in self.files}
        for path, line, row in self._rows(problems):
            try:
                split = splits[path] if self.split is None else self._split(row)
                identity = None if self.id is None else str(row.get(self.id))
                yield Item(path, line, split, label_name(row.get(self.label)), self.row(path, row), identity)
            except ValueError as error:
                yield BadItem(path, line, str(error))


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
        splits = {split for split, _ in found}
        if splits != {None} and (of_none := [file.name for split, file in found if split is None]):
            raise ValueError(f"files of {path} have splits in their names, but {', '.join(of_none)} has none: move it away, or rename it")
        if splits != {None} and "train" not in splits:
            raise NotReady(f"{path} has {', '.join(file.name for _, file in found)}, but no table to train on, as train{endings[0]}")
    found += [(split, _there(split, given)) for split, given in (("validation", validation), ("test", test)) if given is not None]
    if len(found) > 1 and found[0][0] is None and found[-1][0] is not None:
        found = [(split or "train", file) for split, file in found]
    order = {None: 0, "train": 0, "validation": 1, "test": 2}
    return sorted(found, key=lambda entry: order[entry[0]])


def text_files(folder: Path, pattern: str, problems: Problems) -> list[Path]:
    """Files of a folder and its folders whose names are of the pattern, sorted. Hidden ones do not count, and empty ones have no text."""
    files = []
    for entry in entries(folder):
        name = PurePosixPath(entry.name)
        if any(part.startswith(".") for part in name.parts) or not (fnmatch(name.name, pattern) or entry.hides):
            continue
        if entry.kind != "file":
            problems.add(BadItem(entry.place, None, f"it is {entry.kind}"))
        elif entry.size:
            files.append(folder / name)
    return sorted(files)


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
    """A label as text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("there is no label")
    if isinstance(value, float) and value.is_integer():  # numbers become floats in a column where some are missing
        value = int(value)
    if isinstance(value, (str, bool, int, float)):
        return str(value).strip()
    raise ValueError(f"a label must be a text or a number; it is {type(value).__name__}")


def text_bytes(value: object, column: str) -> bytes:
    """A text as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} must be text; it is {'empty' if value is None else type(value).__name__}")
    return value.encode("utf-8", "surrogatepass")


def inside(path: Path, folder: Path) -> Path:
    """The file, which must not lead out of the folder: neither by its name nor by links."""
    try:
        file, root = (folder / path).resolve(), folder.resolve()
        file.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, NUL
        raise ValueError(f"{printable(str(path))!r} cannot be followed ({reason(error)})") from None
    if not file.is_relative_to(root):
        raise ValueError(f"{printable(str(path))!r} leads out of the folder {folder}: it must be inside")
    return file


def image_bytes(name: str, folder: Path) -> bytes:
    """The file of an image that a table in the folder names."""
    file = inside(Path(name), folder)
    if not file.is_file():
        raise ValueError(f"there is no image {name!r:.100}")
    try:
        return content_of(file, MAX_MEMBER_BYTES)
    except OSError as error:
        raise ValueError(f"the image {name!r:.100} cannot be read: {reason(error)}") from None


def _there(option: str, name: str) -> Path:
    path = Path(name).expanduser()
    if not path.exists():
        raise NotReady(f"{option} must be a file or folder that is there; it is {name!r}")
    return path


def _by_value(label: str) -> tuple[float, str]:
    try:
        number = float(label)
    except ValueError:
        number = math.inf
    return (number if math.isfinite(number) else math.inf), label
