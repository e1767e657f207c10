"""Stored values to tokens: sequences, and images on their grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from permuteformer.tokens import Alphabet, image_tokens


class Input(Protocol):
    """How values become tokens."""

    @property
    def alphabet(self) -> Alphabet: ...

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def grid(self) -> tuple[int, int] | None: ...

    def lengths(self, counts: np.ndarray) -> np.ndarray:
        """The number of tokens of sequences of so many values."""
        ...

    def encode(self, values: Sequence[bytes]) -> tuple[Tensor, Tensor, Tensor | None]:
        """``input_ids``, ``key_mask`` and ``positions`` of a batch."""
        ...


@dataclass(frozen=True)
class Values:
    """A sequence of bytes or other small numbers: CLS, as many as fit, SEP; then padding up to the longest of the batch.

    >>> ids, mask, _ = Values(Alphabet.paper(256), max_length=4).encode([b"Hello", b"i"])
    >>> ids.tolist(), mask.tolist()
    ([[1, 75, 104, 2], [1, 108, 2, 0]], [[True, True, True, True], [True, True, True, False]])
    """

    alphabet: Alphabet
    max_length: int
    grid: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.max_length <= self.alphabet.specials:
            raise ValueError(f"max_length must be above {self.alphabet.specials}, the tokens around a sequence; it is {self.max_length}")

    def lengths(self, counts: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = np.minimum(counts + self.alphabet.specials, self.max_length)
        return lengths

    def encode(self, values: Sequence[bytes]) -> tuple[Tensor, Tensor, None]:
        a = self.alphabet
        start, room = int(a.cls is not None), self.max_length - a.specials
        lengths = self.lengths(np.array([len(value) for value in values]))
        ids = np.full((len(values), lengths.max()), a.pad, dtype=np.int64)
        for row, value in zip(ids, values, strict=True):
            kept = value[:room]
            row[start : start + len(kept)] = np.frombuffer(kept, dtype=np.uint8).astype(np.int64) + a.first
        if a.cls is not None:
            ids[:, 0] = a.cls
        if a.sep is not None:
            ids[np.arange(len(ids)), lengths - 1] = a.sep
        return torch.from_numpy(ids), torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None]), None


@dataclass(frozen=True)
class Pixels:
    """A gray image, row by row, with column and row as positions."""

    alphabet: Alphabet
    grid: tuple[int, int]
    """Height and width."""

    def __post_init__(self) -> None:
        if min(self.grid) < 1:
            raise ValueError(f"an image must have a side of 1 pixel or more; it is {self.grid[0]} x {self.grid[1]}")

    @property
    def max_length(self) -> int:
        return self.grid[0] * self.grid[1] + self.alphabet.specials

    def lengths(self, counts: np.ndarray) -> np.ndarray:
        return counts + self.alphabet.specials

    def encode(self, values: Sequence[bytes]) -> tuple[Tensor, Tensor, Tensor]:
        images = np.frombuffer(b"".join(values), dtype=np.uint8).reshape(len(values), *self.grid)
        ids, positions = image_tokens(torch.from_numpy(images.copy()), self.alphabet)
        return ids, torch.ones_like(ids, dtype=torch.bool), positions
