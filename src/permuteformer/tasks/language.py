"""Language modelling: a text as one long row of bytes or words, cut into windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from permuteformer.tasks.base import UNSCORED, Batch, Task
from permuteformer.tasks.prepare import Items, Row
from permuteformer.tasks.readers.problems import Problems
from permuteformer.tokens import CLS, EOS, EOS_ID, PAPER, SEP, UNK, word_list

END_OF_DOCUMENT = 0xFF
"""Stored between documents of bytes: no text in UTF-8 has this byte. To predict it is to predict SEP; after it a text begins, with CLS."""

UNITS = ("bytes", "words")

BLOCK = 2**16
"""Tokens that are stored at a time."""

Documents = Callable[[Problems], Iterator[tuple[str, Iterable[str]]]]
"""Each document in order: its split and its lines. It may be asked for twice."""


class LanguageModelling(Task):
    """The next token of a text.

    Training takes windows side by side, of ``length`` tokens. Evaluation scores every token once: windows of ``length`` tokens of which the
    first ``context`` are read only, so that no token but those at the very beginning is predicted from less.

    Perplexity is that of a token. So that units can be compared, there are also bits a byte of the text and the perplexity of a word; words
    are split by white space, and as in WikiText the end of a line is one.
    """

    kind = "lm"
    metric = "perplexity"
    greater_is_better = False

    unit: str = "bytes"
    length: int = 512
    context: int = 256
    min_frequency: int = 1

    def check_options(self) -> None:
        """Raise where the options make no sense; constructors call it."""
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}; it is {self.unit!r}")
        if self.length < 1 or not 0 <= self.context < self.length:
            raise ValueError(f"length must be 1 or more and context from 0 to length - 1; they are {self.length} and {self.context}")
        if self.min_frequency != 1 and self.unit != "words":
            raise ValueError(f"min_frequency is of words; unit is {self.unit!r}, and min_frequency {self.min_frequency}")

    @property
    def columns(self) -> Mapping[str, str]:
        return {"token": "uint8" if self.unit == "bytes" else "int32"}

    @property
    def max_length(self) -> int:
        return self.length

    @property
    def vocab_size(self) -> int:
        return PAPER.size if self.unit == "bytes" else len(self.vocabulary)

    @property
    def vocabulary(self) -> list[str]:
        """The words, in the order of their ids; none for bytes."""
        words: list[str] = self.prepare().info.get("vocabulary", [])
        return words

    def recipe(self) -> dict[str, Any]:
        return {"unit": self.unit, "min_frequency": self.min_frequency}

    def learned(self) -> dict[str, Any]:
        words = {"vocabulary": self._words} if self.unit == "words" else {}
        return {"bytes": self._bytes, **words}

    def encode_documents(self, documents: Documents, problems: Problems) -> Iterator[tuple[str, Row]]:
        """What is stored of documents. A vocabulary of words is made of those of the training split first."""
        ids: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        if self.unit == "words":
            training = (lines for split, lines in documents(Problems(skip=problems.skip)) if split == "train")
            self._words = word_list(chain.from_iterable(training), min_frequency=self.min_frequency, pad_token=None)
            ids = {word: n for n, word in enumerate(self._words)}
        for split, lines in documents(problems):
            for tokens, size in _words(lines, ids) if self.unit == "words" else _bytes(lines):
                self._bytes[split] = self._bytes.get(split, 0) + size
                yield split, {"token": tokens}

    def dataset(self, split: str) -> Windows:
        return Windows(self.items(split), self.length, 0 if split == "train" else self.context)

    def lengths(self, split: str) -> np.ndarray:
        return self.dataset(split).lengths()

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        length = max(len(item["targets"]) for item in items)
        input_ids = torch.full((len(items), length), PAPER.pad)
        labels = torch.full((len(items), length), UNSCORED)
        key_mask = torch.zeros(len(items), length, dtype=torch.bool)
        for row, item in enumerate(items):
            targets, before = item["targets"].astype(np.int64), item["before"]
            n, first = len(targets), item["first_scored"]
            inputs = np.concatenate([[-1 if before is None else before], targets[:-1]])
            input_ids[row, :n] = torch.from_numpy(self._input_ids(inputs))
            labels[row, first:n] = torch.from_numpy(self._target_ids(targets[first:]))
            key_mask[row, :n] = True
        return Batch(torch.tensor([item["id"] for item in items]), input_ids, key_mask, labels)

    def _input_ids(self, tokens: np.ndarray) -> np.ndarray:
        if self.unit == "words":  # a line ends before the text begins
            return np.where(tokens < 0, EOS_ID, tokens)
        return np.where((tokens < 0) | (tokens == END_OF_DOCUMENT), CLS, tokens + PAPER.first)

    def _target_ids(self, tokens: np.ndarray) -> np.ndarray:
        return tokens if self.unit == "words" else np.where(tokens == END_OF_DOCUMENT, SEP, tokens + PAPER.first)

    def score(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        scored = batch.labels != UNSCORED
        labels, before = batch.labels[scored], batch.input_ids[scored]
        loss = cross_entropy(logits[scored].float(), labels, reduction="none").double().sum()
        return {"loss": loss, "tokens": scored.sum(), "words": self._count_words(before, labels)}

    def summarize(self, sums: Mapping[str, float], split: str) -> dict[str, float]:
        loss = sums["loss"] / sums["tokens"]
        bytes_a_token = self.prepare().info["bytes"][split] / len(self.items(split))
        return {
            "perplexity": _exp(loss),
            "loss": loss,
            "bits_per_byte": loss / math.log(2) / bytes_a_token,
            "word_perplexity": _exp(sums["loss"] / max(sums["words"], 1)),
        }

    def words(self, item: Mapping[str, Any]) -> list[str]:
        if self.unit == "words":
            return [" ".join("\n" if (word := self.vocabulary[n]) == EOS else word for n in item["targets"].tolist())]
        return [item["targets"].tobytes().replace(bytes([END_OF_DOCUMENT]), b"").decode("utf-8", "replace")]

    def _count_words(self, before: Tensor, labels: Tensor) -> Tensor:
        """How many words the tokens ``labels`` are, each of them after one of ``before``; the end of a line is one."""
        if self.unit == "words":
            return torch.tensor(labels.numel(), device=labels.device)
        space = torch.zeros(PAPER.size, dtype=torch.bool, device=labels.device)
        space[[PAPER.first + byte for byte in b" \t\n\r\v\f"]] = True
        space[[CLS, SEP]] = True
        begun = ~space[labels] & space[before]
        return (begun | labels.eq(PAPER.first + ord("\n"))).sum()


class Windows(Sequence[dict[str, Any]]):
    """Windows over a row of tokens: each scores ``length - context`` of them, after up to ``context`` that it reads only.

    An item has ``targets``, the tokens; ``before``, the one before the first, or ``None``; and ``first_scored``.
    """

    def __init__(self, items: Items, length: int, context: int) -> None:
        self.items, self.length, self.context = items, length, context
        self._step = length - context

    def __len__(self) -> int:
        return -(-len(self.items) // self._step)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        index %= len(self)
        scored = index * self._step
        start = max(scored - self.context, 0)
        tokens = self.items.column("token", max(start - 1, 0), min(scored + self._step, len(self.items)))
        before = int(tokens[0]) if start else None
        return {"id": index, "before": before, "targets": tokens[1:] if start else tokens, "first_scored": scored - start}

    def lengths(self) -> np.ndarray:
        """Tokens of every window."""
        scored = np.arange(len(self)) * self._step
        return np.minimum(scored + self._step, len(self.items)) - np.maximum(scored - self.context, 0)


Blocks = Iterator[tuple[np.ndarray, int]]
"""Tokens, and how many bytes of the text they are."""


def _words(lines: Iterable[str], ids: Mapping[str, int]) -> Blocks:
    unknown, end = ids[UNK], ids[EOS]
    block: list[int] = []
    size = 0
    for line in lines:
        block += [ids.get(word, unknown) for word in line.split()]
        block.append(end)
        size += len(line.encode()) + 1
        if len(block) >= BLOCK:
            yield np.array(block, dtype=np.int32), size
            block, size = [], 0
    yield np.array(block, dtype=np.int32), size


def _bytes(lines: Iterable[str]) -> Blocks:
    block = bytearray()
    for line in lines:
        block += line.encode()
        block += b"\n"
        if len(block) >= BLOCK:
            yield np.frombuffer(block, dtype=np.uint8), len(block)
            block = bytearray()
    size = len(block)
    block.append(END_OF_DOCUMENT)
    yield np.frombuffer(block, dtype=np.uint8), size


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
