"""Tokenizers: bytes for any text, and words for WikiText. Importing this registers ``ByteTokenizer`` with ``AutoTokenizer``."""

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
from permuteformer.models.loading import readable_errors
from permuteformer.tokens import EOS, PAPER, UNK, word_list

BYTE_IDS = {chr(byte): byte + PAPER.first for byte in range(256)}
"""The token of byte n is the character with code n."""
BYTES = {chr(byte): bytes([byte]) for byte in range(256)}

Source = os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""Lines (``str``), files of lines (``Path``), or one file."""


class ByteTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Encodes text as its UTF-8 bytes: PAD is 0, CLS 1, SEP 2, and byte n is n + 3, 259 tokens in all.

    A text becomes CLS, its bytes, SEP; a pair CLS, first, SEP, second, SEP. Any text can be encoded. ``[CLS]`` within a text is encoded as
    bytes; ``split_special_tokens=False`` makes it a special token. Lone surrogates are encoded too: those that stand for a byte
    (``errors="surrogateescape"`` when a file is read) become that byte.

    Args:
        errors: how to decode bytes that are not UTF-8: ``"replace"`` gives �, ``"ignore"`` nothing, ``"surrogateescape"`` lone surrogates
            that encode to the same bytes again.
        prompts: encode prompts of generation: CLS and the bytes, without SEP. Use ``padding_side="left"`` for batches of prompts.
        pad_token: the name of token 0.
        cls_token: the name of token 1; it is the ``bos_token`` too.
        sep_token: the name of token 2; it is the ``eos_token`` too, where generation stops.
        kwargs: for ``PreTrainedTokenizer``. Further special tokens, such as ``mask_token="[MASK]"``, have ids from 259 on.

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
            raise ValueError(f'errors must be "replace", "ignore" or "surrogateescape", got {errors!r}')
        pad, cls, sep = names = [str(token) for token in (pad_token, cls_token, sep_token)]
        if len({*names} - {*BYTE_IDS}) < 3:
            raise ValueError(
                f"pad_token, cls_token and sep_token must be different and longer than one character, got {', '.join(map(repr, names))}"
            )
        self.errors = errors
        self.prompts = prompts
        self._added_tokens_decoder = {n: AddedToken(name, special=True, normalized=False) for n, name in enumerate(names)}
        defaults = {"bos_token": cls, "eos_token": sep, "split_special_tokens": True}
        saved = {"errors": errors, "prompts": prompts, "pad_token": pad, "cls_token": cls, "sep_token": sep}  # by save_pretrained
        super().__init__(**{**defaults, **kwargs, **saved, "special_tokens_pattern": "bos" if prompts else "cls_sep"})

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *arguments: Any, **options: Any) -> Any:
        """Load as transformers does, with errors of one line."""
        with readable_errors(source):
            return super().from_pretrained(source, *arguments, **options)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Save nothing: bytes need no vocabulary file."""
        return ()

    @property
    def vocab_size(self) -> int:
        """259, without added tokens; ``len(tokenizer)`` includes them."""
        return PAPER.size

    def get_vocab(self) -> dict[str, int]:
        return {**self._added_tokens_encoder, **BYTE_IDS}

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if not isinstance(tokens, str):
            try:  # without added tokens: ten times as fast as one call per token
                return [BYTE_IDS[token] for token in tokens]
            except KeyError:
                pass
        return super().convert_tokens_to_ids(tokens)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(BYTES[token] if token in BYTES else token.encode() for token in tokens).decode("utf-8", self.errors)

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> Any:
        self._check("text", text)
        if text_pair is not None:
            self._check("text_pair", text_pair)
        return super()._encode_plus(text, text_pair, **kwargs)

    def _check(self, name: str, value: Any) -> None:
        """Raise unless ``value`` is a text, a list of texts, or ids. transformers encodes lists within lists by further calls."""
        if isinstance(value, (list, tuple)):
            if not value:
                raise ValueError(f"{name} must not be an empty list: an empty text is ''")
            if all(isinstance(entry, int) for entry in value):
                if not 0 <= min(value) <= max(value) < len(self):
                    raise ValueError(f"ids in {name} must be from 0 to {len(self) - 1}, got {min(value)} to {max(value)}")
                return
            wrong = [entry for entry in value if not isinstance(entry, (str, list, tuple))]
        else:
            wrong = [] if isinstance(value, str) else [value]
        if wrong:
            hint = ": decode it, with errors='surrogateescape' if it is not UTF-8" if isinstance(wrong[0], (bytes, bytearray)) else ""
            raise TypeError(f"{name} must be a str or a list of str, got {type(wrong[0]).__name__}{hint}")

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        try:
            encoded = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # lone surrogates that stand for no byte
            encoded = b"".join(c.encode("utf-8", "surrogateescape" if "\udc80" <= c <= "\udcff" else "surrogatepass") for c in text)
        return list(encoded.decode("latin-1"))

    def _convert_token_to_id(self, token: str) -> int | None:
        return BYTE_IDS.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        byte = index - PAPER.first
        if not 0 <= byte < 256:
            raise ValueError(f"ids must be from 0 to {len(self) - 1}, got {index}")
        return chr(byte)


AutoTokenizer.register(PermuteFormerConfig, tokenizer_class=ByteTokenizer, exist_ok=True)


def word_tokenizer(
    source: Source, *, min_frequency: int = 1, pad_token: str = "<pad>", pad_to_multiple_of: int = 8
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words of a text, for WikiText: split at white space, ``</s>`` at the end of every line.

    Ids are those of ``permuteformer.tokens.word_list``; ``<unk>`` and ``</s>`` in the text are these special tokens. Encode one line per
    call, or a whole text by ``encode_lines``. Encode prompts with ``add_special_tokens=False``, so that they do not end with ``</s>``.
    Decode with ``skip_special_tokens=False``, since ``<unk>`` is a word of WikiText.

    Args:
        source: lines (``str``) or files (``Path``, UTF-8), or one file.
        min_frequency: words that occur less often become ``<unk>``.
        pad_token: the name of token 0, not a word of the text.
        pad_to_multiple_of: the size of the vocabulary is a multiple of this.

    >>> tokenizer = word_tokenizer(["the cat and", "", "the dog"])
    >>> tokenizer("the dog the bird")["input_ids"], len(tokenizer)
    ([3, 6, 3, 1, 2], 8)
    """
    words = word_list(_lines(source), min_frequency=min_frequency, pad_token=pad_token, pad_to_multiple_of=pad_to_multiple_of)
    return tokenizer_of_words(words)


def tokenizer_of_words(words: list[str]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a vocabulary of ``permuteformer.tokens.word_list``."""
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\x1c-\x1f]+"), behavior="removed")  # Python's white space has four more separators
    tokenizer.post_processor = TemplateProcessing(single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, words.index(EOS))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=words[0],
        unk_token=UNK,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "x<unk>" is one word; <unk> alone is found in the vocabulary
        model_input_names=["input_ids", "attention_mask"],
    )


def encode_lines(tokenizer: Any, source: Source) -> Tensor:
    """Return the ids of a text, ``n`` int64, with the end token after each line, blank lines included.

    Args:
        tokenizer: a tokenizer of Hugging Face with an ``eos_token``, such as that of ``word_tokenizer``.
        source: lines (``str``) or files (``Path``, UTF-8), or one file.

    >>> lines = ["the cat and", "", "the dog"]
    >>> encode_lines(word_tokenizer(lines), lines).tolist()
    [3, 4, 5, 2, 2, 3, 6, 2]
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"tokenizer must have an eos_token to end lines with, got a {type(tokenizer).__name__} without one")
    ids = array("q")  # a quarter of the memory of a list, for corpora of 100 million words
    lines = _lines(source)
    while batch := list(islice(lines, 1000)):
        for line in tokenizer(batch, add_special_tokens=False, return_attention_mask=False)["input_ids"]:
            ids.extend(line)
            ids.append(end)
    return torch.frombuffer(ids, dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64)


def _lines(source: Source) -> Iterator[str]:
    """Yield each line without its line break."""
    if isinstance(source, (str, bytes)) or not isinstance(source, (os.PathLike, Iterable)):
        raise TypeError(
            f"source must be lines (a list of str) or files (Path), got {type(source).__name__}: split a text into lines, or pass a Path"
        )
    for entry in [source] if isinstance(source, os.PathLike) else source:
        if isinstance(entry, os.PathLike):
            with open(entry, encoding="utf-8", newline="\n") as file:  # str.splitlines() would split at other characters too
                yield from (line.removesuffix("\n") for line in file)
        elif not isinstance(entry, str):
            raise TypeError(f"source must hold lines (str) or files (Path), got {type(entry).__name__}: {entry!r:.50}")
        elif "\n" in (line := entry.removesuffix("\n")):
            raise ValueError(f"a line of source must not contain line breaks, got {line!r:.50}: split it with .split('\\n')")
        else:
            yield line
