"""Tasks: where data comes from, which input it becomes, and how it is trained on by default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from permuteformer.registry import Registry
from permuteformer.storage import data_folder
from permuteformer.tasks.generators.base import Generated, GenerateOptions
from permuteformer.tasks.inputs import Input
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.store import Items, Row, Store, prepare, sample_numbers

TASKS: Registry[type[Task]] = Registry("task", "permuteformer.tasks")

SPLITS = ("train", "validation", "test")

NOT_STORED = ("data", "path", "skip_bad", "protocol", "validate_on", "max_length", "length", "context")
"""Options that do not change the stored rows."""


@dataclass(frozen=True)
class Recipe:
    """Default hyperparameters of a task. They are written here only.

    >>> recipe = TASKS["lra-image"].recipe
    >>> recipe.preset, recipe.settings["batch_size"], recipe.settings["epochs"]
    ('image', 256, 50)
    """

    preset: str
    """The presets for this task are ``ROW-preset``; the default is ``permuteformer-preset``."""
    settings: Mapping[str, Any]
    """Fields of an experiment: batch size, epochs, learning rate, …"""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that differ from the preset's."""


@dataclass(frozen=True)
class Source:
    """Data found on disk.

    >>> source = TASKS["digits"]().source
    >>> source.title, next(source.rows(Errors()))[0] in SPLITS
    ('digits', True)
    """

    title: str
    paths: tuple[Path, ...]
    """Files and folders the data depends on: if one changes, the data is read again."""
    rows: Callable[[Errors], Iterator[tuple[str, Row]]]
    """Yields every item in order: its split and its row."""
    note: str = ""
    """A remark to print beside every number from this data."""


class NotReady(FileNotFoundError):
    """The data of a task was not found.

    >>> TASKS["lra-text"](data="nowhere").source    # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    permuteformer.tasks.base.NotReady: ...
    """


@dataclass(kw_only=True, eq=False)
class Task(ABC):
    """Data, its input, and default hyperparameters; a task knows no model.

    The fields of a subclass are its options, and their docstrings the help on the command line. A subclass defines ``input`` and
    ``sources``.

    >>> task = TASKS["digits"]()
    >>> task.input.kind, task.input.vocab_size, task.input.max_length, task.input.grid, len(task.input.labels)
    ('classify', 259, 66, (8, 8), 10)
    >>> len(task.items("train"))
    1259
    """

    title: ClassVar[str]
    """What it is, in a few words."""
    recipe: ClassVar[Recipe]
    licence: ClassVar[str] = "yours"
    official_items: ClassVar[Mapping[str, int]] = {}
    """Splits of the official data and their sizes."""
    layouts: ClassVar[Sequence[str]] = ()
    """Files that ``sources`` looks for."""
    advice: ClassVar[str] = ""
    """How to get the data."""

    data: str | None = None
    """Data folder; default: PERMUTEFORMER_DATA, else the user's cache."""
    skip_bad: bool = False
    """Skip items that cannot be read, and count them."""

    @property
    @abstractmethod
    def input(self) -> Input:
        """How rows become batches."""

    @abstractmethod
    def sources(self, folder: Path) -> Iterator[Source]:
        """Yield the data found in the data folder, best first."""

    @property
    def validation_split(self) -> str:
        """The validation split: ``"given"`` by the source, a tenth of ``"train"``, or ``"test"``."""
        return "given"

    @property
    def columns(self) -> Mapping[str, str]:
        """Stored columns and their Arrow types; known before the data is read."""
        return self.input.columns

    def cache_key(self) -> dict[str, Any]:
        """Return the options that change the stored rows."""
        options = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in NOT_STORED}
        return {**options, "held_out": self.validation_split == "train"}

    def training_recipe(self) -> Recipe:
        """Return the default hyperparameters for this task's options."""
        return self.recipe

    def metadata(self) -> dict[str, Any]:
        """Return what reading the data has shown and the input needs: names of labels, a vocabulary."""
        return {}

    @property
    def name(self) -> str:
        """The name in the registry."""
        return TASKS.name_of(type(self))

    @cached_property
    def source(self) -> Source:
        """The first of ``sources``; raises ``NotReady`` if there is none."""
        folder = data_folder(self.data)
        for source in self.sources(folder):
            return source
        wanted = "".join(f"\n  {layout}" for layout in self.layouts)
        raise NotReady(f"no data for {self.name} in {folder}; it can be any of{wanted}\n{self.advice}".rstrip())

    @cached_property
    def store(self) -> Store:
        """The stored rows, read from the source at the first call."""
        return prepare(self)

    def prepare(self, progress: Callable[[int], None] | None = None) -> Store:
        """Return the store; while it is written, ``progress`` receives the number of further items."""
        if "store" not in self.__dict__:
            self.__dict__["store"] = prepare(self, progress)
        return self.store

    def rows(self, split: str) -> Items:
        """Return the stored rows of a split."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        return self.store.rows("test" if split == "validation" and self.validation_split == "test" else split)

    def items(self, split: str) -> Sequence[Row]:
        """Return the items of a split, for ``input.collate``."""
        return self.input.items(self.rows(split), training=split == "train")

    def lengths(self, split: str) -> np.ndarray:
        """Return the number of tokens of every item."""
        counts: np.ndarray = np.minimum(self.input.token_counts(self.items(split)), self.input.max_length)
        return counts

    def baselines(self, split: str, numbers: np.ndarray | None = None) -> dict[str, float]:
        """Return the metric of answers that need no model, on all items or those of the given ``numbers``."""
        if self.input.kind == "lm":
            return {}
        training, labels = self.rows("train").column("label"), self.rows(split).column("label")
        labels = labels if numbers is None else labels[numbers]
        return {"most frequent label": float((labels == np.bincount(training).argmax()).mean())}

    def notes(self) -> list[str]:
        """Return remarks to print beside every number: on the data, missing items, and selection on the test split."""
        info = self.store.info
        notes = [info["note"]] if info["note"] else []
        items, official = sum(self.store.splits.values()), sum(self.official_items.values())
        if not info["note"] and official and items != official:
            notes.append(f"{items:,} items; the official data has {official:,}")
        if info["errors"]["count"]:
            notes.append(f"{info['errors']['count']:,} items were skipped because they cannot be read")
        if self.validation_split == "test":
            notes.append("validated on the test split, as the paper's authors did: not comparable with other numbers")
        return notes

    def guessed_options(self) -> dict[str, str]:
        """Return options that were guessed from the data."""
        return {}

    def describe(self, test_items: int | None = None) -> dict[str, Any]:
        """Return what a run folder records of its task, as JSON: enough for reports, and to use the model without the data.

        ``test_items`` is the number of items on which models are tested; baselines are computed on the same ones.
        """
        splits, input = self.store.splits, self.input
        tested = next((split for split in reversed(SPLITS) if split in splits), None)
        has_baselines = tested is not None and "train" in splits
        return {
            "name": self.name,
            "title": self.title,
            "kind": input.kind,
            "metric": input.metric,
            "greater_is_better": input.greater_is_better,
            "notes": self.notes(),
            "labels": list(input.labels),
            "baselines": self.baselines(str(tested), sample_numbers(splits[str(tested)], test_items)) if has_baselines else {},
            "grid": None if input.grid is None else list(input.grid),
            "max_length": input.max_length,
            "unit": input.unit,
            "input": input.to_json(),
            "columns": self.column_names(),
            "digest": self.store.digest,
        }

    def column_names(self) -> dict[str, str]:
        """Return the columns of the tables that items are read from, by option."""
        return {}

    def input_without_data(self, vocab_size: int) -> Input:
        """Return the input where the data is not needed, as for random tokens; ``vocab_size`` counts if it depends on the data."""
        return self.input

    def generate(self, options: GenerateOptions) -> Generated:
        """Generate the data of the task in the data folder."""
        raise ValueError(f"the data of {self.name} cannot be generated; {self.advice or 'it needs files of yours'}")
