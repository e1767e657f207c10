"""Token ids of text and images, shared by models and tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TEXT_LENGTH = 4000
"""Tokens of the longest text in Long-Range Arena, CLS and SEP included."""
IMAGE_SIDE = 32
"""Height and width of images in Long-Range Arena."""

CLS, SEP = 1, 2
"""Ids before and after a text, as the paper's authors number them."""
UNK, EOS, EOS_ID = "<unk>", "</s>", 2
"""Special words of a vocabulary of words."""


@dataclass(frozen=True)
class Alphabet:
    """Maps values 0 … count − 1 (bytes, pixels, symbols) to token ids, next to the ids of special tokens.

    >>> Alphabet.paper(256)
    Alphabet(count=256, pad=0, first=3, cls=1, sep=2)
    >>> Alphabet.paper(256).size, Alphabet.lra(256).size
    (259, 258)
    """

    count: int
    pad: int
    first: int
    """The id of value 0."""
    cls: int | None = None
    sep: int | None = None

    @classmethod
    def paper(cls, count: int) -> Alphabet:
        """Return the ids of the paper's authors: PAD 0, CLS 1, SEP 2, values from 3 on."""
        return cls(count, pad=0, first=3, cls=CLS, sep=SEP)

    @classmethod
    def lra(cls, count: int) -> Alphabet:
        """Return the ids of Long-Range Arena for text: PAD 0, values from 1 on. CLS, which its models prepend, is the last id here."""
        return cls(count, pad=0, first=1, cls=count + 1)

    @classmethod
    def lra_pixels(cls) -> Alphabet:
        """Return the ids of Long-Range Arena for images: the pixels themselves, and CLS 256. All images have one size: no padding."""
        return cls(256, pad=0, first=0, cls=256)

    @property
    def size(self) -> int:
        """Number of ids."""
        return max(self.pad, self.first + self.count - 1, self.cls or 0, self.sep or 0) + 1

    @property
    def padding(self) -> int | None:
        """The padding id; ``None`` if it is the id of a value too.

        >>> Alphabet.paper(256).padding, Alphabet.lra_pixels().padding
        (0, None)
        """
        return None if self.first <= self.pad < self.first + self.count else self.pad

    @property
    def specials(self) -> int:
        """Number of tokens added around a sequence."""
        return (self.cls is not None) + (self.sep is not None)


PAPER = Alphabet.paper(256)
"""Bytes and pixels of the paper's models and of ``ByteTokenizer``."""


def image_tokens(images: Tensor, alphabet: Alphabet = PAPER) -> tuple[Tensor, Tensor]:
    """Return tokens ``b l`` and positions ``b l 2`` (column, row) of gray images ``b height width`` with values 0 … 255.

    Pixels are in raster order. CLS is at (0, 0) and SEP at the last pixel, as in the paper's models, if the alphabet has them.

    >>> import torch
    >>> tokens, positions = image_tokens(torch.tensor([[[0, 255], [7, 8]]], dtype=torch.uint8))
    >>> tokens.tolist(), positions[0].tolist()
    ([[1, 3, 258, 10, 11, 2]], [[0, 0], [0, 0], [1, 0], [0, 1], [1, 1], [1, 1]])
    """
    import torch

    if images.dim() != 3 or images.is_floating_point() or images.is_complex():
        raise ValueError(
            f"images must be integers of shape (batch, height, width), got {images.dtype} of shape {tuple(images.shape)}: convert colours "
            "to gray and scale values to 0 … 255"
        )
    tokens = images.flatten(1).long()
    if tokens.numel() and (tokens.amin() < 0 or tokens.amax() > 255):
        raise ValueError(f"images must have values from 0 to 255, got {int(tokens.amin())} to {int(tokens.amax())}")
    batch, height, width = images.shape
    tokens = tokens + alphabet.first
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1)  # l 2
    if alphabet.cls is not None:
        tokens = torch.cat([tokens.new_full((batch, 1), alphabet.cls), tokens], dim=1)
        positions = torch.cat([torch.zeros(1, 2, dtype=torch.int64), positions])
    if alphabet.sep is not None:
        tokens = torch.cat([tokens, tokens.new_full((batch, 1), alphabet.sep)], dim=1)
        positions = torch.cat([positions, torch.tensor([[width - 1, height - 1]])])
    return tokens, positions.to(tokens.device).expand(batch, -1, -1)


def word_list(lines: Iterable[str], *, min_frequency: int = 1, pad_token: str | None = "<pad>", pad_to_multiple_of: int = 8) -> list[str]:
    """Return the vocabulary of a text: PAD 0, ``<unk>`` 1, ``</s>`` 2, then words by falling frequency, ties by first appearance.

    Unused tokens fill it up to the multiple. ``pad_token=None`` chooses ``<pad>``, or ``<pad1>``, … if the text has that word.

    >>> word_list(["the cat and", "", "the dog"])
    ['<pad>', '<unk>', '</s>', 'the', 'cat', 'and', 'dog', '<unused0>']
    """
    for name, value in {"min_frequency": min_frequency, "pad_to_multiple_of": pad_to_multiple_of}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split())
    if pad_token is None:
        pad_token = next(token for n in count() if (token := f"<pad{n or ''}>") not in counts)
    if pad_token in counts or pad_token in (UNK, EOS) or pad_token.split() != [pad_token]:
        raise ValueError(f"pad_token must be a word that the text does not have, nor {UNK!r} or {EOS!r}, got {pad_token!r}: try '[PAD]'")
    words = [word for word, frequency in counts.most_common() if frequency >= min_frequency and word not in (UNK, EOS)]
    if not words:
        most = max(counts.values(), default=0)
        raise ValueError(
            f"the vocabulary is empty: source has {counts.total()} words, the most frequent {most} times; min_frequency={min_frequency}"
        )
    tokens = [pad_token, UNK, EOS, *words]
    unused = (token for n in count() if (token := f"<unused{n}>") not in counts)
    return tokens + [next(unused) for _ in range(-len(tokens) % pad_to_multiple_of)]
