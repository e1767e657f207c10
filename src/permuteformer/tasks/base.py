"""The contract of a task: what a batch is, where items come from, and what is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from permuteformer.folders import data_folder
from permuteformer.registry import Registry
from permuteformer.tasks.inputs import Input
from permuteformer.tasks.prepare import Items, Prepared, Row, prepare
from permuteformer.tasks.readers.problems import Problems
from permuteformer.tokens import PAPER

TASKS: Registry[type[Task]] = Registry("task", "permuteformer.tasks")

SPLITS = ("train", "validation", "test")

UNSCORED = -100
"""The label of a token that does not count, as in torch's cross entropy."""


@dataclass(frozen=True)
class Batch:
    """Items as tensors.

    >>> task = TASKS["digits"]()
    >>> batch = task.collate([task.dataset("train")[n] for n in (0, 1)])
    >>> batch.input_ids.shape, batch.positions.shape, batch.labels.shape
    (torch.Size([2, 66]), torch.Size([2, 66, 2]), torch.Size([2]))
    """

    ids: Tensor
    """``b``: the items' numbers in their split."""
    input_ids: Tensor
    """``b l``."""
    key_mask: Tensor
    """``b l`` bool, true for real tokens."""
    labels: Tensor
    """``b``; of language models ``b l``: the token after each, or -100 where it does not count."""
    positions: Tensor | None = None
    """``b l a``: coordinates; ``None`` where tokens stand in a row."""
    second_input_ids: Tensor | None = None
    """``b l'``: the second of two documents."""
    second_key_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        return replace(self, **{f.name: x.to(device) for f in fields(self) if (x := getattr(self, f.name)) is not None})


@dataclass(frozen=True)
class Source:
    """Data in one of the layouts that a task reads, as it was found.

    >>> TASKS["digits"]().source().title
    'digits'
    """

    title: str
    paths: tuple[Path, ...]
    """Files and folders that the data depends on: when one of them changes, it is prepared anew."""
    read: Callable[[Problems], Iterator[tuple[str, Row]]]
    """Every item in order: its split and what is stored of it."""
    note: str = ""
    """What must be said beside a number from this data."""


class NotReady(FileNotFoundError):
    """A task's data is not there.

    >>> TASKS["lra-text"](data="nowhere").source()    # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    permuteformer.tasks.base.NotReady: ...
    """


class Task(ABC):
    """Data, vocabulary, grid of positions and metric. It knows no model.

    A subclass says what its items are by ``kind`` (of ``Classification``, ``Matching`` and ``LanguageModelling``) and where they are by
    ``sources``; its constructor's parameters are its options.

    >>> task = TASKS["digits"]()
    >>> task.kind, task.vocab_size, task.max_length, task.grid, len(task.labels)
    ('classify', 259, 66, (8, 8), 10)
    >>> len(task.dataset("train"))
    1259
    """

    title: ClassVar[str]
    """What it is, in a few words."""
    kind: ClassVar[str]
    """``"classify"``, ``"match"`` or ``"lm"``."""
    metric: ClassVar[str]
    """The entry of ``summarize`` that models are chosen by."""
    greater_is_better: ClassVar[bool] = True
    official_items: ClassVar[int | None] = None
    """How many the official data has: another number is said beside results."""
    layouts: ClassVar[Sequence[str]] = ()
    """What ``sources`` looks for, for people."""
    advice: ClassVar[str] = ""
    """How to come by the data."""
    licence: ClassVar[str] = "yours"

    data: str | None = None
    """The data folder; ``None`` for that of ``PERMUTEFORMER_DATA`` or the user's cache."""
    skip_bad: bool = False
    validate_on: str = "given"
    """The validation split: ``"given"`` by the source, a tenth held out of ``"train"``, or the ``"test"`` split."""

    _source: Source | None = None

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, str]:
        """What is stored of an item: names, and types as Arrow calls them."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """How many different tokens there are."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Tokens of the longest sequence."""

    @property
    def grid(self) -> tuple[int, int] | None:
        """Height and width, where tokens have two coordinates."""
        return None

    @property
    def padding(self) -> int | None:
        """The token that says nothing; ``None`` where nothing is padded and every token means something."""
        return PAPER.pad

    @abstractmethod
    def sources(self, folder: Path) -> Iterator[Source]:
        """The data in ``folder``, in the layouts that are there, best first."""

    def recipe(self) -> dict[str, Any]:
        """Options that change what is stored: another recipe is another entry of the cache."""
        return {"held_out": self.validate_on == "train"}

    def learned(self) -> dict[str, Any]:
        """What reading the data has shown, to be kept with it: names of labels, a vocabulary."""
        return {}

    @property
    def name(self) -> str:
        """The name in the registry."""
        return TASKS.name_of(type(self))

    def source(self) -> Source:
        """The first of ``sources``; raises ``NotReady``, with what was looked for and how to get it, if there is none."""
        if self._source is not None:
            return self._source
        folder = data_folder(self.data)
        for source in self.sources(folder):
            self._source = source
            return source
        wanted = "".join(f"\n  {layout}" for layout in self.layouts)
        raise NotReady(f"no data for {self.name} in {folder}; it may be any of{wanted}\n{self.advice}".rstrip())

    def prepare(self, progress: Callable[[int], None] | None = None) -> Prepared:
        """Read, tokenise and store the data, unless that was done before. ``progress`` gets the number of further items."""
        if not hasattr(self, "_prepared"):
            self._prepared = prepare(self, self.source(), progress)
        return self._prepared

    def dataset(self, split: str) -> Sequence[dict[str, Any]]:
        """The items of a split, from the disk as they are asked for."""
        return self.items(split)

    def items(self, split: str) -> Items:
        """What is stored of a split."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}; it is {split!r}")
        return self.prepare().open("test" if split == "validation" and self.validate_on == "test" else split)

    @abstractmethod
    def lengths(self, split: str) -> np.ndarray:
        """The number of tokens of every item, to batch items of a length."""

    @abstractmethod
    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        """A batch of items. Coordinates and the place of CLS are decided here and nowhere else."""

    @abstractmethod
    def score(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Sums over the batch, to be added up over batches and processes."""

    @abstractmethod
    def summarize(self, sums: Mapping[str, float], split: str) -> dict[str, float]:
        """What the sums over a split mean."""

    @abstractmethod
    def words(self, item: Mapping[str, Any]) -> list[str]:
        """An item as texts that a person can read; none for an image."""

    @property
    def labels(self) -> list[str]:
        """Names of the labels, in the order of their numbers; none for language models."""
        return []

    @property
    def num_labels(self) -> int:
        """How many labels there are."""
        return len(self.labels)

    def choices(self) -> dict[str, str]:
        """What was guessed or made where nobody said it, for people."""
        return {}

    def baselines(self, split: str, chosen: np.ndarray | None = None) -> dict[str, float]:
        """What the metric is for answers that need no model, on all items or those of the ``chosen`` numbers: names to values."""
        return {}

    def notes(self) -> list[str]:
        """What must be said beside a number: of the data, what is missing of it, and where models are chosen on the test split."""
        info = self.prepare().info
        notes = [info["note"]] if info["note"] else []
        items = sum(info["splits"].values())
        if not info["note"] and self.official_items not in (None, items):
            notes.append(f"{items:,} items, where the official data has {self.official_items:,}")
        if info["problems"]["count"]:
            notes.append(f"left out, as they could not be read: {info['problems']['count']:,} items")
        if self.validate_on == "test":
            notes.append("validated on the test split, as the paper's authors did: no figure for comparison with others")
        return notes


class Classification(Task):
    """A label for a sequence: stored are its values, bytes or pixels or symbols, and its label's number."""

    kind = "classify"
    metric = "accuracy"

    input: Input

    @property
    def columns(self) -> Mapping[str, str]:
        return {"value": "binary", "label": "int32"}

    @property
    def vocab_size(self) -> int:
        return self.input.alphabet.size

    @property
    def max_length(self) -> int:
        return self.input.max_length

    @property
    def grid(self) -> tuple[int, int] | None:
        return self.input.grid

    @property
    def padding(self) -> int | None:
        return self.input.alphabet.padding

    def lengths(self, split: str) -> np.ndarray:
        return self.input.lengths(self.items(split).byte_lengths("value"))

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        input_ids, key_mask, positions = self.input.encode([item["value"] for item in items])
        return Batch(_column(items, "id"), input_ids, key_mask, _column(items, "label"), positions)

    def score(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {
            "loss": cross_entropy(logits.double(), batch.labels, reduction="sum"),
            "correct": (logits.argmax(-1) == batch.labels).sum(),
            "items": torch.tensor(len(batch), device=logits.device),
        }

    def summarize(self, sums: Mapping[str, float], split: str) -> dict[str, float]:
        return {"accuracy": sums["correct"] / sums["items"], "loss": sums["loss"] / sums["items"]}

    def baselines(self, split: str, chosen: np.ndarray | None = None) -> dict[str, float]:
        training, labels = (self.items(name).column("label") for name in ("train", split))
        labels = labels if chosen is None else labels[chosen]
        return {"always the label most frequent in training": float((labels == np.bincount(training).argmax()).mean())}

    def words(self, item: Mapping[str, Any]) -> list[str]:
        if self.grid is not None:
            return []
        return [item[name].decode("utf-8", "replace") for name, kind in self.columns.items() if kind == "binary"]


class Matching(Classification):
    """A label for two texts."""

    kind = "match"

    @property
    def columns(self) -> Mapping[str, str]:
        return {"first": "binary", "second": "binary", "label": "int32"}

    def lengths(self, split: str) -> np.ndarray:
        items = self.items(split)
        first, second = (self.input.lengths(items.byte_lengths(column)) for column in ("first", "second"))
        longer: np.ndarray = np.maximum(first, second)
        return longer

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        input_ids, key_mask, _ = self.input.encode([item["first"] for item in items])
        second_input_ids, second_key_mask, _ = self.input.encode([item["second"] for item in items])
        return Batch(
            _column(items, "id"),
            input_ids,
            key_mask,
            _column(items, "label"),
            second_input_ids=second_input_ids,
            second_key_mask=second_key_mask,
        )


def _column(items: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    return torch.tensor([item[name] for item in items], dtype=torch.int64)
