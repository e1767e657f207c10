"""Labelled items of a user's own data: columns, labels and splits are found in the files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from permuteformer.formatting import printable
from permuteformer.registry import unknown
from permuteformer.tasks.base import Recipe, Source, Task
from permuteformer.tasks.files import SPLIT_NAMES, files_by_split
from permuteformer.tasks.inputs import Classification
from permuteformer.tasks.readers.archives import read_inside
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.readers.tables import ENDINGS, column_names, rows
from permuteformer.tasks.splits import assign_splits
from permuteformer.tasks.store import Row

LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "sentiment", "stars", "rating", "tag", "isduplicate", "y")
"""Usual names of label columns."""

MAX_LABELS = 10_000

TEXT_RECIPE = Recipe("retrieval", {"epochs": 10, "batch_size": 16, "learning_rate": 5e-4, "warmup_steps": 100})


@dataclass(frozen=True)
class Item:
    """A labelled item and its place in the data."""

    path: Path
    line: int | None
    split: str | None
    label: str
    row: Row
    id: str | None = None


@dataclass(kw_only=True, eq=False)
class OwnTask(Task):
    """Labelled items of the user's own. Labels are numbered in their order, numbers by value.

    Splits that the data does not give are made, with the same share of every label: a tenth for validation and a tenth for test.
    """

    path: str = field(kw_only=False)
    """File or folder of the data."""
    seed: int = 0
    """Seed of the splits that are made."""

    @abstractmethod
    def input_with(self, labels: tuple[str, ...]) -> Classification:
        """Return the input for these labels."""

    @cached_property
    def input(self) -> Classification:
        return self.input_with(self.store.labels)

    @property
    def columns(self) -> Mapping[str, str]:
        return self.input_with(()).columns

    def metadata(self) -> dict[str, Any]:
        return {"labels": list(self._numbers)}

    def number_labels(self, items: Iterable[Item], errors: Errors, training_labels: Iterable[str] = ()) -> Iterator[tuple[str | None, Row]]:
        """Yield splits and rows with labels numbered by appearance.

        Labels of other splits must occur in training: before, or in ``training_labels``.
        """
        self._numbers = {label: n for n, label in enumerate(training_labels)}
        seen: set[str | None] = set()
        for item in items:
            with errors.at(item.path, item.line):
                if item.id is not None and item.id in seen:
                    raise ValueError(f"the id {printable(item.id, 50)!r} occurs twice")
                number = self._number(item)
                seen.add(item.id)
                yield item.split, {**item.row, "label": number}
            if len(self._numbers) > MAX_LABELS:
                raise ValueError(f"{item.path} has more than {MAX_LABELS:,} labels ({self._shown_labels()}): is this the column of labels?")

    def make_splits(self, rows: Iterator[tuple[str | None, Row]], given: Collection[str]) -> Iterator[tuple[str, Row]]:
        """Yield rows with splits; those that the data does not give are a tenth of the training items each."""
        missing = [split for split in ("validation", "test") if split not in given]
        shares = {"train": 1 - 0.1 * len(missing), **dict.fromkeys(missing, 0.1)} if missing else {}
        return assign_splits(rows, shares, self.seed)

    def _number(self, item: Item) -> int:
        if item.label not in self._numbers and item.split not in (None, "train"):
            raise ValueError(f"the label {printable(item.label, 50)!r} does not occur in training, which has {self._shown_labels()}")
        return self._numbers.setdefault(item.label, len(self._numbers))

    def _shown_labels(self) -> str:
        labels = list(self._numbers)
        return ", ".join(printable(label, 50) for label in labels[:10]) + (" …" if len(labels) > 10 else "")


@dataclass(kw_only=True, eq=False)
class TableTask(OwnTask):
    """Labelled rows of tables: CSV, TSV, JSON lines or Parquet."""

    layouts = ("a table: .csv, .tsv, .jsonl or .parquet",)
    recipe = TEXT_RECIPE

    max_length: int = 4096
    """Tokens of the longest text, with those around it; longer ones are cut."""
    validation: str | None = None
    """Table of the validation split."""
    test: str | None = None
    """Table of the test split."""
    label: str | None = None
    """Column of labels; default: guessed from its name."""
    id: str | None = None
    """Column in which no value may occur twice."""
    split_column: str | None = None
    """Column of splits; default: "split" if there is one. Empty for none."""

    def __post_init__(self) -> None:
        self.files = files_by_split(self.path, self.validation, self.test, ENDINGS)
        table = self.files[0][1]
        names = column_names(table)
        self.label = find_column(table, names, "label", self.label, LABEL_COLUMNS)
        self.id = guess_column(table, names, "id", self.id, ())
        split = None if self.split_column == "" else guess_column(table, names, "split_column", self.split_column, ("split",))
        self.split_column = None if any(split for split, _ in self.files) else split
        self.choose_parts(table, names)
        for _, path in self.files:
            columns = column_names(path)
            for column in (*self.parts.values(), self.label, self.split_column, self.id):
                if column is not None and column not in columns:
                    raise ValueError(f"{path}: {unknown('column', column, columns)}; all tables need the columns of the first")

    @abstractmethod
    def choose_parts(self, table: Path, names: Sequence[str]) -> None:
        """Set the options that name columns of texts or images."""

    @property
    def parts(self) -> dict[str, str]:
        """Columns by option: ``"text"``, ``"second_text"`` or ``"image"``."""
        return {part: str(getattr(self, part)) for part in self.input_with(()).parts}

    def column_names(self) -> dict[str, str]:
        return {**self.parts, **({} if self.id is None else {"id": self.id})}

    def guessed_options(self) -> dict[str, str]:
        given = sorted({split for split, _ in self.files if split})
        splits = f"column {self.split_column}" if self.split_column else f"files of {', '.join(given)}" if given else "made"
        return {**{name: f"column {column}" for name, column in {**self.parts, "label": self.label}.items()}, "splits": splits}

    def sources(self, folder: Path) -> Iterator[Source]:
        paths = tuple(path for _, path in self.files)
        title = ", ".join(path.name for path in paths)
        yield Source(title, (*paths, *self._image_files()), self._read)

    def _read(self, errors: Errors) -> Iterator[tuple[str, Row]]:
        splits, labels = self._given_splits()
        return self.make_splits(self.number_labels(self._items(errors), errors, labels), splits)

    def _rows(self, errors: Errors) -> Iterator[tuple[str | None, Path, int, dict[str, Any]]]:
        for split, path in self.files:
            for line, row in rows(path, errors):
                yield split, path, line, row

    def _given_splits(self) -> tuple[set[str], list[str]]:
        """Return the splits that the data gives and, if a column names them, the labels of the train split."""
        if self.split_column is None:
            return {split for split, _ in self.files if split}, []
        splits, labels = set[str](), dict[str, None]()
        for _, _, _, row in self._rows(Errors(skip=True)):
            try:
                split, label = self._split(row), label_name(row.get(str(self.label)))
            except ValueError:
                continue  # reported when the rows are read
            splits.add(split)
            if split == "train":
                labels[label] = None
        return splits, list(labels)

    def _split(self, row: Mapping[str, Any]) -> str:
        value = str(row.get(str(self.split_column)))
        if value.lower() not in SPLIT_NAMES:
            raise ValueError(
                f"column {self.split_column!r} must be one of {', '.join(SPLIT_NAMES)}, got {printable(value, 50)!r}; "
                "if it is not a column of splits, set split_column to an empty text"
            )
        return SPLIT_NAMES[value.lower()]

    def _items(self, errors: Errors) -> Iterator[Item]:
        input, parts = self.input_with(()), self.parts
        for file_split, path, line, row in self._rows(errors):
            with errors.at(path, line):
                split = file_split if self.split_column is None else self._split(row)
                values = [read_part(part, row.get(column), column, path.parent) for part, column in parts.items()]
                identity = None if self.id is None else str(row.get(self.id))
                yield Item(path, line, split, label_name(row.get(str(self.label))), input.row(values), identity)

    def _image_files(self) -> Iterable[Path]:
        """Return the image files that the tables name: if one changes, the data is read again."""
        if (column := self.parts.get("image")) is None:
            return ()
        found = {path.parent / str(row.get(column)) for _, path, _, row in self._rows(Errors(skip=True))}
        return sorted(path for path in found if "\0" not in str(path) and len(path.name) < 256 and path.is_file())


def guess_column(path: Path, names: Sequence[str], option: str, asked: str | None, guesses: Sequence[str]) -> str | None:
    """Return the column ``asked`` for, else the first of ``guesses`` that exists."""
    if asked is not None:
        if asked not in names:
            raise ValueError(f"{option}: {unknown(f'column of {path.name}', asked, names)}")
        return asked
    folded = {name.strip().lower().replace("_", "").replace(" ", ""): name for name in reversed(names)}
    return next((folded[guess] for guess in guesses if guess in folded), None)


def find_column(path: Path, names: Sequence[str], option: str, asked: str | None, guesses: Sequence[str]) -> str:
    """Do the same, but raise if there is none."""
    found = guess_column(path, names, option, asked, guesses)
    if found is None:
        flag = option.replace("_", "-")
        raise ValueError(f"which column of {path} is the {option}? It has {', '.join(map(repr, names))}: use --{flag} NAME")
    return found


def read_part(part: str, value: object, column: str, folder: Path) -> Any:
    """Return a cell of a table as ``Classification.encode`` takes it: a text, or the content of the image file it names."""
    if part == "image":
        if not isinstance(value, str) or not value:
            raise ValueError(f"column {column!r} must be the path of an image, got {value!r:.50}")
        return read_inside(value, folder)
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} must be text, got {'nothing' if value is None else type(value).__name__}")
    return value


def label_name(value: object) -> str:
    """Return a label as text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("the label is missing")
    if isinstance(value, float) and value.is_integer():  # integers become floats in a column where some are missing
        value = int(value)
    if isinstance(value, (str, bool, int, float)):
        return str(value).strip()
    raise ValueError(f"a label must be text or a number, got {type(value).__name__}")
