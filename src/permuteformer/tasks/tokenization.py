"""Tokenizers of tasks: text to stored tokens, stored tokens to ids, and back to text."""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from permuteformer.formatting import printable
from permuteformer.storage import read_bytes
from permuteformer.tasks.readers.text import bytes_literal
from permuteformer.tokens import EOS_ID, PAPER, UNK, Alphabet

BLOCK = 2**16
"""Tokens of a document that are stored at a time."""

MAX_SIZE = 2**26
"""Largest id or length that a run folder may define."""


class Tokenizer(ABC):
    """Converts text to tokens. Tasks store tokens as small integers (``encode``); models read ids, which number special tokens too.

    Args:
        vocab_size: number of ids.
        pad_id: id of padding; ``None`` if every id has a meaning of its own.
        start_id: id before a text, or ``None``.
        end_id: id after a text, or ``None``.
        blank_id: id that carries no information; explanations replace others by it.
    """

    unit: ClassVar[str]
    """What a token is: ``"bytes"``, ``"words"`` or ``"symbols"``."""
    stored: ClassVar[str]
    """NumPy type of a stored token."""
    document_end: ClassVar[int | None] = None
    """Stored token after each document of a language model."""

    def __init__(self, *, vocab_size: int, pad_id: int | None, start_id: Any, end_id: Any, blank_id: int) -> None:
        self.vocab_size, self.pad_id, self.start_id, self.end_id, self.blank_id = vocab_size, pad_id, start_id, end_id, blank_id

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text as they are stored."""

    @abstractmethod
    def ids(self, tokens: np.ndarray) -> np.ndarray:
        """Return the ids of stored tokens, int64."""

    @abstractmethod
    def pieces(self, tokens: np.ndarray) -> list[tuple[str, int]]:
        """Return the text of stored tokens in pieces, each with its number of tokens."""

    @abstractmethod
    def name(self, id: int) -> str:
        """Return an id for display."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the fields that ``tokenizer_from_json`` needs."""

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of stored tokens."""
        return " ".join(piece for piece, _ in self.pieces(tokens))

    def encode_prompt(self, prompt: str) -> np.ndarray:
        """Return the tokens of a prompt of a language model."""
        return self.encode(prompt)

    def encode_line(self, line: str) -> np.ndarray:
        """Return the tokens of a line of a document, with its end."""
        return self.encode(f"{line}\n")

    def encode_document(self, lines: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the tokens of a document in blocks, each with its number of bytes of text."""
        block: list[np.ndarray] = []
        tokens = size = 0
        for line in lines:
            block.append(self.encode_line(line))
            tokens, size = tokens + len(block[-1]), size + len(line.encode()) + 1
            if tokens >= BLOCK:
                yield np.concatenate(block), size
                block, tokens, size = [], 0, 0
        end = [] if self.document_end is None else [self.document_end]
        yield np.concatenate([*block, np.array(end, dtype=self.stored)]), size

    def prompt_ids(self, prompt: str) -> np.ndarray:
        """Return the ids of a prompt of a language model, with the one that every text starts with."""
        return np.concatenate([[self.start_id], self.ids(self.encode_prompt(prompt))])

    def prompt_pieces(self, prompt: str) -> list[tuple[str, int]]:
        """Return the text of a prompt in pieces, each with its number of ids; the first id is not counted."""
        return self.pieces(self.encode_prompt(prompt))

    def unknown_words(self, prompt: str) -> list[str]:
        """Return the words of a prompt that have no token of their own."""
        return []

    @property
    def target_ids(self) -> np.ndarray:
        """Ids that a language model can predict."""
        return np.array([id for id in range(self.vocab_size) if id not in (self.pad_id, self.start_id)])

    def decoder(self, prompt: str = "") -> Decoder:
        """Return a decoder of the ids generated after ``prompt``."""
        raise NotImplementedError(f"{type(self).__name__} is not a tokenizer of language models: it has no decoder")


class Decoder(ABC):
    """Turns generated ids into text, one id at a time."""

    @abstractmethod
    def push(self, id: int) -> str:
        """Return the text that is complete with this id."""

    def flush(self) -> str:
        """Return the text of an incomplete character."""
        return ""


class AlphabetTokens(Tokenizer):
    """Tokens that are values of an alphabet: bytes or symbols."""

    stored = "uint8"

    def __init__(self, alphabet: Alphabet, blank_id: int) -> None:
        self.alphabet = alphabet
        super().__init__(vocab_size=alphabet.size, pad_id=alphabet.padding, start_id=alphabet.cls, end_id=alphabet.sep, blank_id=blank_id)

    def ids(self, tokens: np.ndarray) -> np.ndarray:
        return tokens.astype(np.int64) + self.alphabet.first

    def name(self, id: int) -> str:
        value = id - self.alphabet.first
        if 0 <= value < self.alphabet.count:
            return printable(self.pieces(np.array([value], dtype=np.uint8))[0][0], 30)
        return {self.alphabet.cls: "[CLS]", self.alphabet.sep: "[SEP]", self.alphabet.pad: "[PAD]"}.get(id, str(id))


class ByteTokens(AlphabetTokens):
    """UTF-8 bytes.

    Args:
        alphabet: ids of bytes and special tokens.
        literals: whether a text may be a Python bytes literal, as in the files of LRA's retrieval task.

    >>> ByteTokens().ids(ByteTokens().encode("Hé")).tolist()
    [75, 198, 172]
    """

    unit = "bytes"
    document_end = 0xFF  # no UTF-8 text has this byte

    def __init__(self, alphabet: Alphabet = PAPER, literals: bool = False) -> None:
        super().__init__(alphabet, alphabet.first + ord(" "))
        self.literals = literals

    def encode(self, text: str) -> np.ndarray:
        is_literal = self.literals and text.startswith(("b'", 'b"'))
        content = bytes_literal(text) if is_literal else text.encode("utf-8", "surrogatepass")
        return np.frombuffer(content, dtype=np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        return tokens.tobytes().replace(bytes([self.document_end]), b"").decode("utf-8", "replace")

    def pieces(self, tokens: np.ndarray) -> list[tuple[str, int]]:
        """Return characters; a byte that is not UTF-8 is shown as its number.

        >>> ByteTokens().pieces(np.frombuffer("né".encode() + b"\\xff", dtype=np.uint8))
        [('n', 1), ('é', 2), ('\\\\xff', 1)]
        """
        content, found, at = tokens.tobytes(), [], 0
        while at < len(content):
            lead = content[at]
            size = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            try:
                found.append((content[at : at + size].decode(), size))
            except UnicodeDecodeError:
                size = 1
                found.append((f"\\x{lead:02x}", size))
            at += size
        return found

    def encode_prompt(self, prompt: str) -> np.ndarray:
        try:
            content = prompt.encode("utf-8", "surrogateescape")  # bytes of a command line that are not UTF-8
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt has half a character, {prompt[error.start]!r} at {error.start:,}: it cannot be encoded") from None
        return np.frombuffer(content, dtype=np.uint8)

    def decoder(self, prompt: str = "") -> Decoder:
        """Return a decoder that holds back characters of several bytes until they are complete."""
        return _ByteDecoder(self.alphabet)

    def to_json(self) -> dict[str, Any]:
        return {"tokenizer": "bytes", "alphabet": asdict(self.alphabet), "literals": self.literals}


class SymbolTokens(AlphabetTokens):
    """Symbols separated by blanks, as in ListOps. Parentheses are dropped.

    >>> SymbolTokens(["0", "1", "[MAX", "]"], Alphabet.paper(4)).encode("( [MAX 0 1 ] )").tolist()
    [2, 0, 1, 3]
    """

    unit = "symbols"

    def __init__(self, symbols: Sequence[str], alphabet: Alphabet) -> None:
        super().__init__(alphabet, alphabet.pad)
        self.symbols = list(symbols)
        self._numbers = {symbol: n for n, symbol in enumerate(symbols)}

    def encode(self, text: str) -> np.ndarray:
        try:
            tokens = [self._numbers[symbol] for symbol in text.split() if symbol not in ("(", ")")]
        except KeyError as error:
            raise ValueError(f"unknown symbol {error.args[0]!r:.50}: use {' '.join(self.symbols)}") from None
        if not tokens:
            raise ValueError(f"the expression is empty: use {' '.join(self.symbols)}")
        return np.array(tokens, dtype=np.uint8)

    def pieces(self, tokens: np.ndarray) -> list[tuple[str, int]]:
        return [(self.symbols[token], 1) for token in tokens.tolist()]

    def to_json(self) -> dict[str, Any]:
        return {"tokenizer": "symbols", "alphabet": asdict(self.alphabet), "symbols": self.symbols}


class WordTokens(Tokenizer):
    """Words separated by white space; the end of a line is a word too, as in WikiText.

    >>> tokens = WordTokens(["<pad>", "<unk>", "</s>", "the", "cat"])
    >>> tokens.encode("the dog").tolist(), tokens.prompt_ids("the cat").tolist()
    ([3, 1], [2, 3, 4])
    """

    unit = "words"
    stored = "int32"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._numbers = {word: n for n, word in enumerate(self.words)}
        super().__init__(vocab_size=len(self.words), pad_id=0, start_id=EOS_ID, end_id=EOS_ID, blank_id=self._numbers.get(UNK, 0))

    def encode(self, text: str) -> np.ndarray:
        return np.array([self._numbers.get(word, self.blank_id) for word in text.split()], dtype=self.stored)

    def encode_line(self, line: str) -> np.ndarray:
        return np.append(self.encode(line), np.int32(EOS_ID))

    def ids(self, tokens: np.ndarray) -> np.ndarray:
        return tokens.astype(np.int64)

    def pieces(self, tokens: np.ndarray) -> list[tuple[str, int]]:
        return [("\n" if token == EOS_ID else self.words[token], 1) for token in tokens.tolist()]

    def name(self, id: int) -> str:
        return printable(self.words[id], 30)

    def encode_prompt(self, prompt: str) -> np.ndarray:
        *lines, last = prompt.split("\n")
        return np.concatenate([*map(self.encode_line, lines), self.encode(last)])

    def unknown_words(self, prompt: str) -> list[str]:
        return list(dict.fromkeys(word for word in prompt.split() if word not in self._numbers))

    @property
    def target_ids(self) -> np.ndarray:
        """Ids that a language model can predict: no padding and no unused words."""
        return np.array([n for n, word in enumerate(self.words) if n and not re.fullmatch(r"<unused\d+>", word)])

    def decoder(self, prompt: str = "") -> Decoder:
        """Return a decoder that puts blanks between words."""
        return _WordDecoder(self.words, " " if re.search(r"\S$", prompt) else "")

    def to_json(self) -> dict[str, Any]:
        return {"tokenizer": "words"}  # the words are in tokenizer.json, beside the model


class _ByteDecoder(Decoder):
    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        if id == self._alphabet.sep:
            return self.flush() + "\n"
        return self._decoder.decode(bytes([id - self._alphabet.first]))

    def flush(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class _WordDecoder(Decoder):
    def __init__(self, words: Sequence[str], blank: str) -> None:
        self._words, self._blank = words, blank

    def push(self, id: int) -> str:
        if id == EOS_ID:
            self._blank = ""
            return "\n"
        text, self._blank = self._blank + self._words[id], " "
        return text


def tokenizer_from_json(content: Mapping[str, Any], folder: Path) -> Tokenizer:
    """Return the tokenizer that ``to_json`` describes; ``folder`` is that of the model, which holds the words of a vocabulary.

    Raises:
        ValueError, TypeError, KeyError: the content is damaged.
    """
    if content["tokenizer"] == "words":
        return WordTokens(read_words(folder / "tokenizer.json"))
    alphabet = alphabet_from_json(content["alphabet"])
    if content["tokenizer"] == "symbols":
        return SymbolTokens([str(symbol) for symbol in content["symbols"]], alphabet)
    return ByteTokens(alphabet, bool(content["literals"]))


def alphabet_from_json(content: Mapping[str, Any]) -> Alphabet:
    """Return the alphabet of a run folder; raise if it is damaged."""
    for number in content.values():
        if number is not None:
            check_size(number)
    return Alphabet(**content)


def check_size(number: Any) -> int:
    """Return ``number`` if it is an integer that a run folder may define."""
    if type(number) is not int or not 0 <= number <= MAX_SIZE:
        raise ValueError(f"sizes and ids must be integers from 0 to {MAX_SIZE:,}, got {number!r:.50}")
    return number


def read_words(path: Path) -> list[str]:
    """Return the words of a tokenizer file of Hugging Face, in the order of their ids."""
    from tokenizers import Tokenizer as Saved

    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which has the words of this model: copy the whole folder again")
    try:
        ids: dict[str, int] = Saved.from_buffer(read_bytes(path)).get_vocab()
    except BaseException as error:  # the library raises plain exceptions, and panics that are no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise ValueError(f"{path} cannot be read ({printable(str(error))}): copy it again") from None
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path} has gaps in the ids of its words: copy it again")
    return sorted(ids, key=ids.__getitem__)
