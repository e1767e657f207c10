"""Language modelling: a text as one long sequence of tokens, cut into windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from permuteformer.tasks.base import Task
from permuteformer.tasks.inputs import UNSCORED, Batch, Input
from permuteformer.tasks.lra import check_choice
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.readers.text import lines
from permuteformer.tasks.store import Items, Row
from permuteformer.tasks.tokenization import ByteTokens, Tokenizer, WordTokens, check_size, tokenizer_from_json
from permuteformer.tokens import PAPER, word_list

if TYPE_CHECKING:
    from torch import Tensor

Documents = Callable[[Errors], Iterator[tuple[str, Iterable[str]]]]
"""Yields each document in order: its split and its lines. It may be called twice."""


@dataclass(frozen=True)
class Windows(Input):
    """Windows of a long text, whose next tokens are predicted.

    Training windows of ``length`` tokens lie side by side. In evaluation every token is scored once: windows start with up to ``context``
    tokens that are only read.

    Perplexity is per token. To compare units, there are also bits per byte of the text and perplexity per word; words are separated by
    white space, and the end of a line is one, as in WikiText.

    >>> windows = Windows(length=512, context=256)
    >>> windows.max_length, windows.vocab_size, windows.name_token(windows.tokenizer.prompt_ids("a")[-1])
    (512, 259, 'a')
    """

    length: int
    context: int
    tokenizer: Tokenizer = field(default_factory=ByteTokens)
    bytes_per_token: Mapping[str, float] = field(default_factory=dict)
    """Bytes of text per token, by split."""

    kind = "lm"
    metric = "perplexity"
    greater_is_better = False
    labels = ()
    grid = None

    @property
    def max_length(self) -> int:  # type: ignore[override]
        return self.length

    @property
    def columns(self) -> Mapping[str, str]:
        return {"token": self.tokenizer.stored}

    def items(self, stored: Items, training: bool) -> Sequence[Row]:
        return WindowItems(stored, self.length, 0 if training else self.context)

    def token_counts(self, items: WindowItems) -> np.ndarray:
        return items.lengths()

    def collate(self, items: Sequence[Row], *, training: bool = False, seed: int = 0) -> Batch:
        import torch

        shape = len(items), max(len(item["targets"]) for item in items)
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels, mask = np.full(shape, UNSCORED), np.zeros(shape, dtype=bool)
        tokens = self.tokenizer
        for row, item in enumerate(items):
            targets, before, first = item["targets"], item["before"], item["first_scored"]
            n = len(targets)
            ids, is_end = tokens.ids(targets), targets == tokens.document_end
            starts = before is None or before == tokens.document_end
            input_ids[row, 0] = tokens.start_id if starts else tokens.ids(np.array([before]))[0]
            input_ids[row, 1:n] = np.where(is_end, tokens.start_id, ids)[:-1]
            labels[row, first:n] = np.where(is_end, tokens.end_id, ids)[first:]
            mask[row, :n] = True
        numbers = torch.tensor([item["id"] for item in items])
        return Batch(numbers, torch.from_numpy(input_ids), torch.from_numpy(mask), torch.from_numpy(labels))

    def score(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        from torch.nn.functional import cross_entropy

        scored = batch.labels != UNSCORED
        labels, before = batch.labels[scored], batch.input_ids[scored]
        loss = cross_entropy(logits[scored].float(), labels, reduction="none").double().sum()
        return {"loss": loss, "tokens": scored.sum(), "words": self._count_words(before, labels)}

    def _count_words(self, before: Tensor, labels: Tensor) -> Tensor:
        """Return how many words the tokens ``labels`` are, each after one of ``before``; the end of a line is one."""
        import torch

        if self.unit == "words":
            return torch.tensor(labels.numel(), device=labels.device)
        space = torch.zeros(PAPER.size, dtype=torch.bool, device=labels.device)
        space[[PAPER.first + byte for byte in b" \t\n\r\v\f"] + [self.tokenizer.start_id, self.tokenizer.end_id]] = True
        starts = ~space[labels] & space[before]
        return (starts | labels.eq(PAPER.first + ord("\n"))).sum()

    def summarize(self, sums: Mapping[str, float], split: str) -> dict[str, float]:
        loss = sums["loss"] / sums["tokens"]
        return {
            "perplexity": _exp(loss),
            "loss": loss,
            "bits_per_byte": loss / math.log(2) / self.bytes_per_token[split],
            "word_perplexity": _exp(sums["loss"] / max(sums["words"], 1)),
        }

    def texts(self, item: Row) -> list[str]:
        return [self.tokenizer.decode(item["targets"])]

    def to_json(self) -> dict[str, Any]:
        return {"input": "Windows", "length": self.length, "context": self.context, **self.tokenizer.to_json()}


class WindowItems(Sequence[Row]):
    """Windows over stored tokens: each scores ``length - context`` of them, after up to ``context`` that it only reads.

    An item has ``targets``, the tokens; ``before``, the one before the first, or ``None``; and ``first_scored``.
    """

    def __init__(self, stored: Items, length: int, context: int) -> None:
        self.stored, self.length, self.context = stored, length, context
        self._step = length - context

    def __len__(self) -> int:
        return -(-len(self.stored) // self._step)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        index %= len(self)
        scored = index * self._step
        start = max(scored - self.context, 0)
        tokens = self.stored.column("token", max(start - 1, 0), min(scored + self._step, len(self.stored)))
        before = int(tokens[0]) if start else None
        return {"id": index, "before": before, "targets": tokens[1:] if start else tokens, "first_scored": scored - start}

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of every window."""
        scored = np.arange(len(self)) * self._step
        return np.minimum(scored + self._step, len(self.stored)) - np.maximum(scored - self.context, 0)


@dataclass(kw_only=True, eq=False)
class LanguageTask(Task):
    """A task of language modelling; ``documents`` of the subclass yields its text."""

    usual_min_frequency: ClassVar[int] = 1

    unit: str = "bytes"
    """Tokens: "bytes", or "words" separated by white space, with the end of every line as one."""
    min_frequency: int | None = None
    """Words that occur less often in training become <unk>; default: 1, of wiki-en 3."""
    length: int = 512
    """Tokens per window."""
    context: int = 256
    """Tokens at the start of an evaluation window that are read but not scored."""

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, ("bytes", "words"))
        if self.length < 1 or not 0 <= self.context < self.length:
            raise ValueError(f"length must be at least 1 and context from 0 to length - 1, got {self.length} and {self.context}")
        if self.min_frequency is None:
            self.min_frequency = self.usual_min_frequency if self.unit == "words" else 1
        if self.min_frequency != 1 and self.unit != "words":
            raise ValueError(f"min_frequency={self.min_frequency} needs unit='words', got {self.unit!r}")

    @property
    def columns(self) -> Mapping[str, str]:
        return self.input_without_data(1).columns

    @cached_property
    def input(self) -> Windows:
        info = self.store.info
        tokens = {split: info["bytes"][split] / count for split, count in self.store.splits.items()}
        return Windows(self.length, self.context, self._tokenizer(info.get("vocabulary", [])), tokens)

    def input_without_data(self, vocab_size: int) -> Windows:
        return Windows(self.length, self.context, self._tokenizer([str(n) for n in range(vocab_size)]))

    def _tokenizer(self, words: Sequence[str]) -> Tokenizer:
        return ByteTokens() if self.unit == "bytes" else WordTokens(words)

    def metadata(self) -> dict[str, Any]:
        return {"bytes": self._bytes, **({"vocabulary": self._words} if self.unit == "words" else {})}

    def encode(self, documents: Documents, errors: Errors) -> Iterator[tuple[str, Row]]:
        """Yield the tokens of documents. A vocabulary of words is made of those of the train split first."""
        self._bytes: dict[str, int] = {}
        self._words: list[str] = []
        if self.unit == "words":
            training = (document for split, document in documents(Errors(skip=errors.skip)) if split == "train")
            self._words = word_list(chain.from_iterable(training), min_frequency=self.min_frequency or 1, pad_token=None)
        tokenizer = self._tokenizer(self._words)
        for split, document in documents(errors):
            for tokens, size in tokenizer.encode_document(document):
                self._bytes[split] = self._bytes.get(split, 0) + size
                yield split, {"token": tokens}


def file_documents(files: Sequence[tuple[str, Path]], errors: Errors) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield text files, given with their splits, as documents."""
    for split, path in files:
        yield split, (line for _, line in lines(path, errors))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def windows_from_json(content: Mapping[str, Any], folder: Path) -> Windows:
    """Return the input that ``Windows.to_json`` describes; ``folder`` is that of the model.

    Raises:
        ValueError, TypeError, KeyError: the content is damaged.
    """
    length, context = check_size(content["length"]), check_size(content["context"])
    return Windows(length, context, tokenizer_from_json(content, folder))
