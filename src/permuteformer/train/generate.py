"""A text that a trained language model goes on with, token by token, from a state that does not grow where attention is linear."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from permuteformer.models.cache import PermuteFormerCache
from permuteformer.positions.learned import Learned
from permuteformer.texts import printable
from permuteformer.tokens import CLS, EOS_ID, PAPER, SEP, UNK
from permuteformer.train.saved import Trained
from permuteformer.words import size_in_words

PREFILL = 1024
"""Tokens of the prompt that are read at a time."""

MANY = 10_000
"""From so many tokens on it is said that a state grows."""


def generate(
    trained: Trained,
    prompt: str = "",
    tokens: int = 500,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: bool = False,
) -> Generation:
    """Go on with ``prompt``: gives pieces of text as soon as their characters are whole. The same seed gives the same text.

    As in training, a text begins after the end of another one: where a document of bytes is over a line ends, and the next document
    begins. Words are parted by blanks, and the end of a line is a line break.

    Args:
        trained: a language model, of ``permuteformer.train.saved.load``.
        prompt: what is gone on with; nothing is the beginning of a text.
        tokens: how many are generated.
        temperature: below 1 likely tokens become more likely; 0 always takes the most likely one.
        top_k: choose among so many of the likeliest tokens.
        top_p: choose among the likeliest tokens whose probabilities come to this.
        seed: of the random choices.
        stop: end with the document; of words, with the line.
    """
    text = _text_of(trained)
    if not trained.model.model.has_state:
        name = trained.model.config.attention["name"]
        raise ValueError(f"attention {name!r} has no state to go on from, token by token: take a model of linear or softmax attention")
    _check_integer(1, tokens=tokens)
    _check_integer(0, seed=seed)
    given = text.begin(prompt)
    _check_positions(trained, len(given), tokens)
    return Generation(trained, text, given, tokens, _Choice(temperature, top_k, top_p, seed), stop)


def prompt_tokens(trained: Trained, prompt: str) -> tuple[Tensor, Tensor]:
    """The tokens of a prompt, after the one that a text begins with; and the tokens that may come next."""
    text = _text_of(trained)
    return text.begin(prompt), text.allowed(trained.model.config.vocab_size)


def _text_of(trained: Trained) -> _Text:
    if trained.kind != "lm":
        raise ValueError(f"{trained.folder} is no language model, but of kind {trained.kind!r}: permuteformer predict gives its labels")
    return _Words(trained.words) if trained.unit == "words" else _Bytes()


class Generation(Iterator[str]):
    """Pieces of a text, made as they are asked for."""

    def __init__(self, trained: Trained, text: _Text, given: Tensor, tokens: int, choice: _Choice, stop: bool) -> None:
        self.tokens = 0
        """How many have been generated."""
        self.cache = PermuteFormerCache(trained.model.config.num_hidden_layers)
        """The state of the model."""
        self._trained, self._text, self._choice = trained, text, choice
        self._length = len(given) + tokens
        self._pieces = self._run(given, tokens, stop)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def notes(self) -> list[str]:
        """What is to be said beforehand: words of the prompt that are not known, and memory that will grow."""
        notes = []
        if unknown := self._text.unknown:
            shown = ", ".join(printable(word, 30) for word in unknown[:10]) + (" …" if len(unknown) > 10 else "")
            notes.append(f"words of the prompt that are none of the model's are read as {UNK}: {shown}")
        if self._length >= MANY and (growth := _growth(self._trained)):
            notes.append(
                f"the state of this model grows with the text, {size_in_words(growth)} a token, {size_in_words(growth * self._length)} in "
                "all, and a token takes ever longer; that of linear attention without a bias is of constant size"
            )
        return notes

    def _run(self, given: Tensor, tokens: int, stop: bool) -> Iterator[str]:
        for block in given.split(PREFILL):
            logits = self._read(block)
        allowed = self._text.allowed(logits.numel())
        del given
        while True:
            chosen = logits[allowed]
            if not chosen.isfinite().all():
                raise ValueError(
                    f"token {self.tokens + 1:,} cannot be chosen, as the model's answer is not a number: look at how its training ended "
                    f"({self._trained.folder}), and train it anew, as with a lower learning rate"
                )
            token = int(allowed[self._choice(chosen)])
            self.tokens += 1
            ended = token == self._text.end
            last = self.tokens == tokens or (ended and stop)
            piece = "" if ended and stop else self._text.piece(token)
            if last:
                piece += self._text.rest()
            if piece:
                yield piece
            if last:
                return
            logits = self._read(torch.tensor([self._text.begins if ended else token]))

    @torch.inference_mode()
    def _read(self, ids: Tensor) -> Tensor:
        """The logits after further tokens, float64 in the memory of the computer."""
        model = self._trained.model
        out = model(input_ids=ids.to(model.device).unsqueeze(0), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1].cpu().double()
        return logits


class _Text(Protocol):
    """How tokens are a text."""

    end: int
    """The token that a document, or a line, ends with."""
    begins: int
    """What is read in its place when it goes on."""
    unknown: list[str]
    """Words of the prompt that there is no token for."""

    def begin(self, prompt: str) -> Tensor:
        """The tokens of a prompt: one at least."""
        ...

    def allowed(self, size: int) -> Tensor:
        """Those of ``size`` tokens that training had as targets."""
        ...

    def piece(self, token: int) -> str:
        """The text that is whole with this token."""
        ...

    def rest(self) -> str:
        """What is left at the very end."""
        ...


class _Bytes:
    """Characters of several bytes are held back until they are whole; what is not UTF-8 is shown as �."""

    end, begins = SEP, CLS

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, prompt: str) -> Tensor:
        try:
            # Bytes of a command line that are not UTF-8 come as half characters.
            content = prompt.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt holds half a character, {prompt[error.start]!r} at {error.start:,}: it cannot be encoded") from None
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return torch.cat([torch.tensor([CLS]), values.long() + PAPER.first])

    def allowed(self, size: int) -> Tensor:
        return torch.arange(SEP, PAPER.size)

    def piece(self, token: int) -> str:
        return self.rest() + "\n" if token == SEP else self._decoder.decode(bytes([token - PAPER.first]))

    def rest(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class _Words:
    """Words with blanks between them."""

    end = begins = EOS_ID

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self.unknown: list[str] = []
        self._open = False
        """Whether a blank is due before the next word."""

    def begin(self, prompt: str) -> Tensor:
        numbers = {word: n for n, word in enumerate(self._words)}
        ids = []
        for line in prompt.split("\n"):
            ids += [EOS_ID, *(numbers.get(word, numbers[UNK]) for word in line.split())]
        self.unknown = list(dict.fromkeys(word for word in prompt.split() if word not in numbers))
        self._open = ids[-1] != EOS_ID and not prompt[-1].isspace()
        return torch.tensor(ids)

    def allowed(self, size: int) -> Tensor:
        unused = re.compile(r"<unused\d+>")
        return torch.tensor([n for n, word in enumerate(self._words) if n and not unused.fullmatch(word)])

    def piece(self, token: int) -> str:
        if token == EOS_ID:
            self._open = False
            return "\n"
        blank, self._open = " " if self._open else "", True
        return blank + self._words[token]

    def rest(self) -> str:
        return ""


@dataclass
class _Choice:
    """Chooses a token by its logit."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 or a number above it; it is {self.temperature!r}")
        if self.top_k is not None:
            _check_integer(1, top_k=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; it is {self.top_p!r}")
        self._random = torch.Generator().manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        values, order = ((logits - logits.max()) / self.temperature).sort(descending=True, stable=True)
        probabilities = values[: self.top_k].softmax(-1)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities  # the likeliest is kept always
            probabilities = probabilities[before < self.top_p]
        return int(order[torch.multinomial(probabilities, 1, generator=self._random)])


@torch.inference_mode()
def _growth(trained: Trained) -> int:
    """Bytes that the state grows by with a token; 0 where it does not."""
    sizes = []
    for length in (1, 2):
        cache = PermuteFormerCache(trained.model.config.num_hidden_layers)
        trained.model(input_ids=torch.full((1, length), EOS_ID, device=trained.model.device), past_key_values=cache, use_cache=True)
        sizes.append(cache.nbytes)
    return sizes[1] - sizes[0]


def _check_positions(trained: Trained, given: int, tokens: int) -> None:
    """Raise where positions are learned, and there are not enough of them."""
    for part in trained.model.modules():
        if isinstance(part, Learned) and given + tokens - 1 > part.max_length:  # the last token is not read
            room = part.max_length + 1 - given
            advice = f"tokens may be {room:,} at most" if room > 0 else "the prompt must be shorter"
            raise ValueError(
                f"this model has learned {part.max_length:,} positions, and a prompt of {given:,} tokens (with the one before it) and "
                f"tokens={tokens:,} need {given + tokens - 1:,}: {advice}"
            )


def _check_integer(least: int, **numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise ValueError(f"{name} must be a whole number from {least} on; it is {value!r}")
