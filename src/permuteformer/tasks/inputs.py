"""Inputs of classifiers: texts, pairs of texts and images as batches. Torch is imported where it is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from permuteformer.tasks.readers.images import gray_image
from permuteformer.tasks.store import Items, Row
from permuteformer.tasks.tokenization import ByteTokens, Tokenizer, alphabet_from_json, check_size, tokenizer_from_json
from permuteformer.tokens import PAPER, Alphabet, image_tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UNSCORED = -100
"""Label of a token that has no loss, as in torch's cross entropy."""


@dataclass(frozen=True)
class Batch:
    """Items as tensors.

    >>> from permuteformer.tasks import TASKS
    >>> task = TASKS["digits"]()
    >>> batch = task.input.collate(task.items("train")[:2])
    >>> batch.input_ids.shape, batch.positions.shape, batch.labels.shape
    (torch.Size([2, 66]), torch.Size([2, 66, 2]), torch.Size([2]))
    """

    ids: Tensor
    """``b``: numbers of the items in their split."""
    input_ids: Tensor
    """``b l``."""
    mask: Tensor
    """``b l`` bool, true for real tokens."""
    labels: Tensor
    """``b``; of language models ``b l``: the next token, or -100 if it is not scored."""
    positions: Tensor | None = None
    """``b l a``: coordinates; ``None`` for sequences."""
    second_input_ids: Tensor | None = None
    """``b l'``: the second text of a pair."""
    second_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        return replace(self, **{f.name: x.to(device) for f in fields(self) if (x := getattr(self, f.name)) is not None})


class Input(ABC):
    """How the rows of a task become batches, scores and text for display. It holds all that a model needs to know of a task.

    >>> from permuteformer.tasks import TASKS
    >>> input = TASKS["lra-text"]().input
    >>> input.kind, input.metric, input.unit, input.vocab_size, input.labels
    ('classify', 'accuracy', 'bytes', 259, ('neg', 'pos'))
    """

    kind: ClassVar[str]
    """``"classify"``, ``"match"`` or ``"lm"``."""
    metric: ClassVar[str]
    """The entry of ``summarize`` by which models are selected."""
    greater_is_better: ClassVar[bool] = True

    labels: tuple[str, ...]
    """Names of the classes in the order of their numbers; none for language models."""
    grid: tuple[int, int] | None
    """Height and width if tokens have two coordinates."""
    max_length: int
    """Tokens of the longest sequence."""
    tokenizer: Tokenizer
    """Of texts; images have none."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocab_size

    @property
    def pad_id(self) -> int | None:
        """Id of padding; ``None`` if every id has a meaning of its own."""
        return self.tokenizer.pad_id

    @property
    def start_id(self) -> Any:
        """Id before a text."""
        return self.tokenizer.start_id

    @property
    def unit(self) -> str:
        """What a token is: ``"bytes"``, ``"words"``, ``"symbols"`` or ``"pixels"``."""
        return self.tokenizer.unit

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, str]:
        """Stored columns and their Arrow types."""

    def items(self, stored: Items, training: bool) -> Sequence[Row]:
        """Return the items of a split from its stored rows."""
        return stored

    @abstractmethod
    def token_counts(self, items: Any) -> np.ndarray:
        """Return the number of tokens of every item, before it is cut to ``max_length``."""

    @abstractmethod
    def collate(self, items: Sequence[Row], *, training: bool = False, seed: int = 0) -> Batch:
        """Return a batch of items. In training, ``seed`` decides what is drawn at random."""

    @abstractmethod
    def score(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return sums over the batch, which add up over batches and processes."""

    @abstractmethod
    def summarize(self, sums: Mapping[str, float], split: str) -> dict[str, float]:
        """Return the metrics of a split from its sums."""

    @abstractmethod
    def texts(self, item: Row) -> list[str]:
        """Return the texts of an item for display; none for an image."""

    def name_token(self, id: int) -> str:
        """Return a token for display."""
        return self.tokenizer.name(id)

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the fields that ``input_from_json`` needs."""

    def random_batch(self, size: int, length: int) -> Batch:
        """Return a batch of random tokens without padding, to time models on."""
        import torch

        random = torch.Generator().manual_seed(0)

        def draw(count: int, *shape: int) -> Tensor:
            return torch.randint(count, shape, generator=random)

        ids, mask = draw(self.vocab_size, size, length), torch.ones(size, length, dtype=torch.bool)
        labels = draw(self.vocab_size, size, length) if self.kind == "lm" else draw(len(self.labels), size)
        batch = Batch(torch.arange(size), ids, mask, labels)
        if self.kind == "match":
            return replace(batch, second_input_ids=draw(self.vocab_size, size, length), second_mask=mask)
        return batch


class Classification(Input):
    """Items with one label each, which consist of one or two parts."""

    kind = "classify"
    metric = "accuracy"

    parts: ClassVar[Mapping[str, Sequence[str]]]
    """Options that name the columns of a table, ``"text"``, ``"second_text"`` or ``"image"``, and usual names of such columns."""
    stored: ClassVar[tuple[str, ...]] = ("value",)
    """Stored columns of the parts."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {**dict.fromkeys(self.stored, "binary"), "label": "int32"}

    @abstractmethod
    def encode(self, part: Any) -> bytes:
        """Return a part of an item as it is stored: of a text, or of the content of an image file.

        Raises:
            ValueError: it cannot be used.
        """

    @abstractmethod
    def pieces(self, value: bytes) -> list[tuple[str, int]]:
        """Return the tokens of a stored part for display, as far as the model reads them, each with its number of ids."""

    @abstractmethod
    def blank_id(self, value: bytes) -> int:
        """Return the id that explanations put in the place of the tokens of a stored part."""

    def row(self, parts: Sequence[Any]) -> Row:
        """Return the stored row of an item without its label."""
        return dict(zip(self.stored, map(self.encode, parts), strict=True))

    def is_cut(self, row: Row) -> bool:
        """Return whether an item is longer than ``max_length``."""
        return False

    def score(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        import torch
        from torch.nn.functional import cross_entropy

        return {
            "loss": cross_entropy(logits.double(), batch.labels, reduction="sum"),
            "correct": (logits.argmax(-1) == batch.labels).sum(),
            "items": torch.tensor(len(batch), device=logits.device),
        }

    def summarize(self, sums: Mapping[str, float], split: str) -> dict[str, float]:
        return {"accuracy": sums["correct"] / sums["items"], "loss": sums["loss"] / sums["items"]}


@dataclass(frozen=True)
class Text(Classification):
    """A text with a label: the start id, the tokens that fit, the end id.

    >>> batch = Text(("no", "yes"), max_length=4).collate([{"id": 0, "value": b"Hello"}, {"id": 1, "value": b"i"}])
    >>> batch.input_ids.tolist(), batch.mask.tolist()
    ([[1, 75, 104, 2], [1, 108, 2, 0]], [[True, True, True, True], [True, True, True, False]])
    """

    labels: tuple[str, ...]
    max_length: int
    tokenizer: Tokenizer = field(default_factory=ByteTokens)

    parts: ClassVar = {"text": ("text", "review", "sentence", "content", "document", "body", "comment", "message", "description", "title")}
    grid = None

    def __post_init__(self) -> None:
        if self.max_length <= self.special_tokens:
            raise ValueError(f"max_length must be above {self.special_tokens}, the tokens around a text, got {self.max_length}")

    @property
    def special_tokens(self) -> int:
        """Number of tokens around a text."""
        return (self.tokenizer.start_id is not None) + (self.tokenizer.end_id is not None)

    def encode(self, part: str) -> bytes:
        value = self.tokenizer.encode(part).tobytes()
        if not value and not self.special_tokens:
            raise ValueError("the text is empty, and this model has no tokens around a text")
        return value

    def is_cut(self, row: Row) -> bool:
        longest = max(len(row[name]) for name in self.stored) // np.dtype(self.tokenizer.stored).itemsize
        return longest + self.special_tokens > self.max_length

    def token_counts(self, items: Items) -> np.ndarray:
        longest = np.max([items.byte_lengths(name) for name in self.stored], axis=0)
        counts: np.ndarray = longest // np.dtype(self.tokenizer.stored).itemsize + self.special_tokens
        return counts

    def collate(self, items: Sequence[Row], *, training: bool = False, seed: int = 0) -> Batch:
        return Batch(_numbers(items, "id"), *self._pad([item["value"] for item in items]), _numbers(items, "label"))

    def _pad(self, values: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        import torch

        tokenizer = self.tokenizer
        start, end = (np.array([] if id is None else [id], dtype=np.int64) for id in (tokenizer.start_id, tokenizer.end_id))
        texts = [np.concatenate([start, tokenizer.ids(self._tokens(value)), end]) for value in values]
        lengths = np.array([len(ids) for ids in texts])
        input_ids = np.full((len(texts), lengths.max()), tokenizer.pad_id or 0, dtype=np.int64)
        for row, ids in zip(input_ids, texts, strict=True):
            row[: len(ids)] = ids
        return torch.from_numpy(input_ids), torch.from_numpy(np.arange(input_ids.shape[1]) < lengths[:, None])

    def _tokens(self, value: bytes, cut: bool = True) -> np.ndarray:
        tokens = np.frombuffer(value, dtype=self.tokenizer.stored)
        return tokens[: self.max_length - self.special_tokens] if cut else tokens

    def texts(self, item: Row) -> list[str]:
        return [self.tokenizer.decode(self._tokens(item[name], cut=False)) for name in self.stored]

    def pieces(self, value: bytes) -> list[tuple[str, int]]:
        return self.tokenizer.pieces(self._tokens(value))

    def blank_id(self, value: bytes) -> int:
        return self.tokenizer.blank_id

    def to_json(self) -> dict[str, Any]:
        return {"input": type(self).__name__, "max_length": self.max_length, **self.tokenizer.to_json()}


@dataclass(frozen=True)
class Pair(Text):
    """Two texts with a label, read side by side.

    >>> batch = Pair(("no", "yes"), max_length=8).collate([{"id": 0, "first": b"a", "second": b"bc", "label": 1}])
    >>> batch.input_ids.tolist(), batch.second_input_ids.tolist()
    ([[1, 100, 2]], [[1, 101, 102, 2]])
    """

    kind = "match"
    parts: ClassVar = {
        "text": ("text1", "first", "texta", "sentence1", "document1", "doc1", "question1", "premise", "query", "left", "a"),
        "second_text": ("text2", "second", "textb", "sentence2", "document2", "doc2", "question2", "hypothesis", "document", "right", "b"),
    }
    stored = ("first", "second")

    def collate(self, items: Sequence[Row], *, training: bool = False, seed: int = 0) -> Batch:
        input_ids, mask = self._pad([item["first"] for item in items])
        second_input_ids, second_mask = self._pad([item["second"] for item in items])
        labels = _numbers(items, "label")
        return Batch(_numbers(items, "id"), input_ids, mask, labels, second_input_ids=second_input_ids, second_mask=second_mask)


@dataclass(frozen=True)
class Image(Classification):
    """A gray image with a label, row by row; positions are column and row.

    >>> batch = Image(("no", "yes"), (1, 2)).collate([{"id": 0, "value": bytes([0, 255]), "label": 1}])
    >>> batch.input_ids.tolist(), batch.positions[0, 1:3].tolist()
    ([[1, 3, 258, 2]], [[0, 0], [1, 0]])
    """

    labels: tuple[str, ...]
    grid: tuple[int, int]
    """Height and width."""
    alphabet: Alphabet = PAPER

    parts: ClassVar = {"image": ("image", "imagepath", "img", "picture", "photo", "file", "filename", "filepath", "path")}
    unit = "pixels"

    def __post_init__(self) -> None:
        if min(self.grid) < 1:
            raise ValueError(f"an image must have at least 1 x 1 pixels, got {self.grid[0]} x {self.grid[1]}")

    @property
    def max_length(self) -> int:  # type: ignore[override]
        return self.grid[0] * self.grid[1] + self.alphabet.specials

    @property
    def vocab_size(self) -> int:
        return self.alphabet.size

    @property
    def pad_id(self) -> int | None:
        return self.alphabet.padding

    def encode(self, part: bytes) -> bytes:
        return gray_image(part, self.grid).tobytes()

    def token_counts(self, items: Items) -> np.ndarray:
        return np.full(len(items), self.max_length)

    def collate(self, items: Sequence[Row], *, training: bool = False, seed: int = 0) -> Batch:
        import torch

        pixels = np.frombuffer(b"".join(item["value"] for item in items), dtype=np.uint8).reshape(len(items), *self.grid)
        ids, positions = image_tokens(torch.from_numpy(pixels.copy()), self.alphabet)
        return Batch(_numbers(items, "id"), ids, torch.ones_like(ids, dtype=torch.bool), _numbers(items, "label"), positions)

    def random_batch(self, size: int, length: int) -> Batch:
        if length != self.max_length:
            raise ValueError(f"length must be {self.max_length} for images of {self.grid[0]} x {self.grid[1]} pixels, got {length}")
        pixels = np.random.default_rng(0).integers(0, 256, (size, *self.grid), dtype=np.uint8)
        return self.collate([{"id": n, "value": image.tobytes(), "label": n % len(self.labels)} for n, image in enumerate(pixels)])

    def texts(self, item: Row) -> list[str]:
        return []

    def pieces(self, value: bytes) -> list[tuple[str, int]]:
        return [(str(shade), 1) for shade in value]

    def blank_id(self, value: bytes) -> int:
        """Return the mean shade of the image."""
        return self.alphabet.first + round(sum(value) / len(value))

    def name_token(self, id: int) -> str:
        value = id - self.alphabet.first
        return str(value) if 0 <= value < 256 else {self.alphabet.cls: "[CLS]", self.alphabet.sep: "[SEP]"}.get(id, str(id))

    def to_json(self) -> dict[str, Any]:
        return {"input": "Image", "grid": list(self.grid), "alphabet": asdict(self.alphabet)}


def classification_from_json(content: Mapping[str, Any], labels: tuple[str, ...], folder: Path) -> Classification:
    """Return the input that ``to_json`` describes; ``folder`` is that of the model.

    Raises:
        ValueError, TypeError, KeyError: the content is damaged.
    """
    if content["input"] == "Image":
        height, width = (check_size(side) for side in content["grid"])
        check_size(height * width)
        return Image(labels, (height, width), alphabet_from_json(content["alphabet"]))
    kind = {"Text": Text, "Pair": Pair}[content["input"]]
    return kind(labels, check_size(content["max_length"]), tokenizer_from_json(content, folder))


def _numbers(items: Sequence[Row], name: str) -> Tensor:
    import torch

    return torch.tensor([item.get(name, 0) for item in items], dtype=torch.int64)
