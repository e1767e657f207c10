"""Tokenizers: bytes for any text, and words for WikiText. Importing this registers the first with ``AutoTokenizer``."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.loading import in_words
from permuteformer.tokens import EOS, PAPER, UNK, word_list

_BYTE_IDS = {chr(byte): byte + PAPER.first for byte in range(256)}
"""The token of a byte is the character of its number."""

_BYTES = {chr(byte): bytes([byte]) for byte in range(256)}


class ByteTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Text as its UTF-8 bytes: PAD is 0, CLS 1, SEP 2, and a byte its number + 3, which makes 259 tokens.

    A text becomes CLS, its bytes, SEP; a pair CLS, first, SEP, second, SEP. Nothing is unknown. ``[CLS]`` and the like within a text are
    bytes as all others; ``split_special_tokens=False`` makes tokens of them. For a model that generates, ``prompts=True`` leaves out SEP,
    which would say that the text is over, and ``padding_side="left"`` makes batches of prompts.

    Half characters (lone surrogates) are taken as well: those that stand for a byte (``errors="surrogateescape"`` when a file is read)
    become that byte.

    Args:
        errors: what decoding makes of bytes that are not UTF-8: ``"replace"`` gives �, ``"ignore"`` nothing, ``"surrogateescape"`` half
            characters that encode to the same bytes again.
        prompts: texts become CLS and their bytes, without SEP: something is to follow.
        pad_token: how token 0 is written.
        cls_token: how token 1 is written; it is also the beginning of a text (``bos_token``).
        sep_token: how token 2 is written; it is also the end of a text (``eos_token``), where generation stops.
        kwargs: of ``PreTrainedTokenizer``. Further special tokens, such as ``mask_token="[MASK]"``, come after the bytes, from 259 on.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer("Hé")["input_ids"]
    [1, 75, 198, 172, 2]
    >>> tokenizer.decode([1, 75, 198, 172, 2], skip_special_tokens=True)
    'Hé'
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        errors: str = "replace",
        prompts: bool = False,
        pad_token: str | AddedToken = "[PAD]",
        cls_token: str | AddedToken = "[CLS]",
        sep_token: str | AddedToken = "[SEP]",
        **kwargs: Any,
    ) -> None:
        if errors not in ("replace", "ignore", "surrogateescape"):
            raise ValueError(f'errors must be "replace", "ignore" or "surrogateescape"; it is {errors!r}')
        names = [str(token) for token in (pad_token, cls_token, sep_token)]
        if len({*names} - {*_BYTE_IDS}) < 3:
            raise ValueError(
                "pad_token, cls_token and sep_token must be three different strings of several characters, as one character is a byte; "
                f"they are {', '.join(map(repr, names))}"
            )
        self.errors = errors
        self.prompts = prompts
        self._added_tokens_decoder = {n: AddedToken(name, special=True, normalized=False) for n, name in enumerate(names)}
        # transformers saves what its own __init__ is given.
        super().__init__(
            **{
                "bos_token": names[1],
                "eos_token": names[2],
                "split_special_tokens": True,
                **kwargs,
                "errors": errors,
                "prompts": prompts,
                "pad_token": names[0],
                "cls_token": names[1],
                "sep_token": names[2],
                "special_tokens_pattern": "bos" if prompts else "cls_sep",
            }
        )

    @property
    def vocab_size(self) -> int:
        """259, without tokens that were added; ``len(tokenizer)`` counts these too."""
        return PAPER.size

    def get_vocab(self) -> dict[str, int]:
        return {**self._added_tokens_encoder, **_BYTE_IDS}

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if not isinstance(tokens, str):
            try:  # all are bytes, but for added tokens: ten times as fast as a call each
                return [_BYTE_IDS[token] for token in tokens]
            except KeyError:
                pass
        return super().convert_tokens_to_ids(tokens)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        text = b"".join(_BYTES[token] if token in _BYTES else token.encode() for token in tokens)
        return text.decode("utf-8", self.errors)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Nothing: bytes need no file."""
        return ()

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> Any:
        self._check("text", text)
        if text_pair is not None:
            self._check("text_pair", text_pair)
        return super()._encode_plus(text, text_pair, **kwargs)

    def _check(self, name: str, value: Any) -> None:
        """Raise unless it is a text, a list of them, or ids. Lists in lists are checked when their turn comes."""
        if isinstance(value, str):
            return
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be a str, or a list of them; it is {_kind(value)}")
        if not value:
            raise ValueError(f"{name} must not be an empty list; an empty text is ''")
        if all(isinstance(entry, int) for entry in value):
            if not 0 <= min(value) <= max(value) < len(self):
                raise ValueError(f"{name} as ids must be from 0 to {len(self) - 1}; they are from {min(value)} to {max(value)}")
            return
        for entry in value:
            if not isinstance(entry, (str, list, tuple)):
                raise TypeError(f"{name} must be a str, or a list of them; in the list there is {_kind(entry)}")

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *arguments: Any, **options: Any) -> Any:
        """As of transformers, but what cannot be read is refused in a sentence."""
        with in_words(source):
            return super().from_pretrained(source, *arguments, **options)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(_utf8(text).decode("latin-1"))

    def _convert_token_to_id(self, token: str) -> int | None:
        return _BYTE_IDS.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        byte = index - PAPER.first
        if not 0 <= byte < 256:
            raise ValueError(f"ids must be from 0 to {len(self) - 1}, the tokens of this tokenizer; there is {index}")
        return chr(byte)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half characters that stand for no byte
        return b"".join(c.encode("utf-8", "surrogateescape" if "\udc80" <= c <= "\udcff" else "surrogatepass") for c in text)


def _kind(value: Any) -> str:
    hint = ": decode it, with errors='surrogateescape' if it is not UTF-8" if isinstance(value, (bytes, bytearray)) else ""
    return f"{type(value).__name__}{hint}"


AutoTokenizer.register(PermuteFormerConfig, tokenizer_class=ByteTokenizer, exist_ok=True)

Source = os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""Lines (``str``), files of lines (``Path``), or one file."""


def word_tokenizer(
    source: Source, *, min_frequency: int = 1, pad_token: str = "<pad>", pad_to_multiple_of: int = 8
) -> PreTrainedTokenizerFast:
    """A tokenizer of the words in a text, for WikiText: split on white space, ``</s>`` at the end of every line.

    PAD is 0, ``<unk>`` 1, ``</s>`` 2; then come words by falling frequency, equally frequent ones as they appear first, and unused tokens
    up to the multiple. ``<unk>`` and ``</s>`` as words of the text are these tokens. One call takes a line: ``encode_lines`` takes a text.
    For prompts, which must not end with ``</s>``, give ``add_special_tokens=False``. As ``<unk>`` is a word of WikiText, decode with
    ``skip_special_tokens=False``, or it is left out.

    Args:
        source: lines (``str``) or files (``Path``, UTF-8), or one file.
        min_frequency: leave out words that occur less often: they become ``<unk>``.
        pad_token: how padding is written; no word of the text.
        pad_to_multiple_of: the size of the vocabulary is a multiple of this.

    >>> tokenizer = word_tokenizer(["the cat and", "", "the dog"])
    >>> tokenizer("the dog the bird")["input_ids"], len(tokenizer)
    ([3, 6, 3, 1, 2], 8)
    """
    tokens = word_list(_lines(source), min_frequency=min_frequency, pad_token=pad_token, pad_to_multiple_of=pad_to_multiple_of)
    return tokenizer_of_words(tokens)


def tokenizer_of_words(tokens: list[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a vocabulary as ``permuteformer.tokens.word_list`` makes it."""
    tokenizer = Tokenizer(WordLevel({token: n for n, token in enumerate(tokens)}, unk_token=UNK))
    # White space as Python has it: four separators more than Unicode's.
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\x1c-\x1f]+"), behavior="removed")
    tokenizer.post_processor = TemplateProcessing(single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, tokens.index(EOS))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=tokens[0],
        unk_token=UNK,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "x<unk>" is one word; <unk> by itself is found as a word is
        model_input_names=["input_ids", "attention_mask"],
    )


def encode_lines(tokenizer: Any, source: Source) -> Tensor:
    """The ids of a text, ``n`` int64: line by line, with the end token after each, blank lines included.

    Args:
        tokenizer: of ``word_tokenizer``, or any other of Hugging Face with an ``eos_token``.
        source: lines (``str``) or files (``Path``, UTF-8), or one file.

    >>> lines = ["the cat and", "", "the dog"]
    >>> encode_lines(word_tokenizer(lines), lines).tolist()
    [3, 4, 5, 2, 2, 3, 6, 2]
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"tokenizer must have an eos_token, to end lines with; this {type(tokenizer).__name__} has none")
    ids = array("q")  # a list of Python's numbers would need four times the memory, and a corpus has 100 million
    lines = _lines(source)
    while batch := list(islice(lines, 1000)):
        for line in tokenizer(batch, add_special_tokens=False, return_attention_mask=False)["input_ids"]:
            ids.extend(line)
            ids.append(end)
    return torch.frombuffer(ids, dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64)


def _lines(source: Source) -> Iterator[str]:
    """Each line without its end."""
    if isinstance(source, (str, bytes)) or not isinstance(source, (os.PathLike, Iterable)):
        raise TypeError(
            f"source must be lines (a list of str) or files (Path); it is a {type(source).__name__}: split a text into lines, and turn a "
            "file's name into a Path"
        )
    for entry in [source] if isinstance(source, os.PathLike) else source:
        if isinstance(entry, os.PathLike):
            # Only "\n" ends a line: text has other characters that str.splitlines() takes for an end.
            with open(entry, encoding="utf-8", newline="\n") as file:
                yield from (line.removesuffix("\n") for line in file)
        elif not isinstance(entry, str):
            raise TypeError(f"source must be lines (str) or files (Path); there is a {type(entry).__name__}: {entry!r:.50}")
        elif "\n" in (line := entry.removesuffix("\n")):
            raise ValueError(f"a line of source must not hold line breaks: {line!r:.50} is several; split it with .split('\\n')")
        else:
            yield line
