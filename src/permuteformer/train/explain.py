"""Which bytes, words or pixels a trained model's answer came from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from permuteformer.models.attribution import MOST, Attribution, Question, integrated_gradients, without_spans
from permuteformer.registry import unknown
from permuteformer.texts import printable
from permuteformer.tokens import EOS_ID, PAPER, SEP, UNK, Alphabet
from permuteformer.train.build import inputs
from permuteformer.train.generate import prompt_tokens
from permuteformer.train.predict import batch_of
from permuteformer.train.saved import Trained
from permuteformer.train.unlabelled import Unlabelled, parts_of

MEASURED = 64
"""Spans that are blanked out, at most: half of them those with the largest share in the answer, the others evenly from the rest."""
LONGEST_WORD = 24
"""Characters; what is longer is several spans."""
PATCHES = 8
"""Patches along the longer side of an image."""
ANSWERS = 5
"""Answers whose probabilities are told."""
WORK = MOST + MEASURED
"""Steps that ``progress`` is told of, at most."""


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens: a word with the blanks after it, or a patch of an image."""

    places: tuple[int, ...]
    """Numbers of its tokens in their part."""
    text: str
    value: float
    """The sum of its tokens' values."""
    measured: float | None = None
    """How much the log-odds fell when it was blanked out; ``None`` where that was not tried."""


@dataclass(frozen=True)
class Part:
    """A text, one of two texts, or an image."""

    name: str
    tokens: tuple[str, ...]
    """Characters (of bytes that are none: their numbers), words, symbols, or the shades of pixels, row by row."""
    values: tuple[float, ...]
    """Of each token, what it added to the answer's log-odds. Bytes of one character are added up."""
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Explanation:
    """Why a model gave an answer."""

    kind: str
    """As of the task."""
    unit: str
    """What tokens are: ``"bytes"``, ``"words"``, ``"symbols"`` or ``"pixels"``."""
    answer: str
    """The label, or the token that comes next."""
    probability: float
    answers: dict[str, float]
    """The likeliest answers, with their probabilities."""
    log_odds: float
    """Of the answer: log p − log(1 − p)."""
    without: float
    """The same for a blank item: bytes are blanks, words unknown, pixels of the image's mean shade. The values of all tokens add up to the
    difference of the two, but for what is missing."""
    missing: float
    exact: bool
    """Whether what is missing is within the tolerance."""
    parts: tuple[Part, ...]
    grid: tuple[int, int] | None
    """Height and width of an image."""
    cut: bool
    """Whether the item was longer than the model reads."""
    agreement: float | None
    """The rank correlation of values and measurements of the spans that were blanked out; ``None`` where one of them is all the same."""
    gradients: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As plain data, for files and reports."""
        return {"format": 1, **asdict(self)}


def explain(
    trained: Trained,
    item: Unlabelled | str,
    *,
    answer: str | None = None,
    measured: int = MEASURED,
    progress: Callable[[int], None] | None = None,
) -> Explanation:
    """Share the answer of a model out among the tokens of an item, and measure the largest shares by blanking them out.

    Args:
        trained: of ``permuteformer.train.saved.load``.
        item: of ``permuteformer.train.unlabelled``; for a language model a text, whose next token is explained.
        answer: the label, or the next character or word, to explain; the likeliest unless told.
        measured: spans to blank out, at most.
        progress: gets the number of further steps, of which there are ``WORK`` at most.
    """
    begun = time.perf_counter()
    asked = _of_prompt(trained, item) if isinstance(item, str) else _of_item(trained, item)
    if not any(piece.tokens for piece in asked.pieces):
        raise ValueError("there is nothing to explain, as the text is empty: give one with a character at least")
    model = trained.model
    question = Question(model, {name: x.to(model.device) for name, x in asked.inputs.items()}, asked.blank, None, asked.allowed)
    if answer is not None:
        question = question.about(_answer(asked.names, question, answer))
    found = integrated_gradients(question, progress)
    parts, agreement = _parts(asked, question, found, measured, progress)
    likeliest = question.probabilities.topk(min(ANSWERS, len(question.probabilities)))
    answers = zip(question.answers[likeliest.indices].tolist(), likeliest.values.tolist(), strict=True)
    return Explanation(
        kind=trained.kind,
        unit=asked.unit,
        answer=asked.names(question.answer),
        probability=question.probability,
        answers={asked.names(number): probability for number, probability in answers},
        log_odds=found.log_odds,
        without=found.without,
        missing=found.missing,
        exact=found.exact,
        parts=parts,
        grid=asked.grid,
        cut=asked.cut,
        agreement=agreement,
        gradients=found.gradients,
        seconds=time.perf_counter() - begun,
    )


@dataclass(frozen=True)
class _Pieces:
    """A part of an item: its tokens for people, and where each begins among the model's."""

    name: str
    tokens: list[str]
    starts: list[int]
    """One more than there are tokens: the last is where they end."""


@dataclass(frozen=True)
class _Asked:
    inputs: dict[str, Tensor]
    blank: Tensor
    allowed: Tensor | None
    pieces: list[_Pieces]
    names: Callable[[int], str]
    unit: str
    grid: tuple[int, int] | None = None
    cut: bool = False


def _of_item(trained: Trained, item: Unlabelled) -> _Asked:
    batch = batch_of(trained, [item])
    alphabet, grid = trained.input.alphabet, trained.input.grid
    symbols = (trained.about.get("input") or {}).get("symbols")
    unit = "pixels" if grid is not None else "symbols" if symbols is not None or alphabet.count < 256 else "bytes"
    documents = [ids[0] for ids in (batch.input_ids, batch.second_input_ids) if ids is not None]
    pieces, start = [], 0
    for name, content, ids in zip(parts_of(trained), item.values, documents, strict=True):
        if unit == "bytes":
            tokens = list(characters(content))
        else:
            tokens = [(str(symbols[value]) if symbols else str(value), 1) for value in content]
        pieces.append(_located(name, tokens, start + (alphabet.cls is not None)))
        start += len(ids)
    blank = torch.cat(documents).clone()
    for piece, content in zip(pieces, item.values, strict=True):
        blank[piece.starts[0] : piece.starts[-1]] = _blank(alphabet, unit, content)

    def label(number: int) -> str:
        return trained.labels[number]

    return _Asked(inputs(batch, trained.model.config, trained.kind), blank, None, pieces, label, unit, grid, item.cut)


def _blank(alphabet: Alphabet, unit: str, content: bytes) -> int:
    """The token that says nothing: a blank, the mean shade of an image, padding in place of a symbol."""
    if unit == "bytes":
        return alphabet.first + ord(" ")
    return alphabet.first + round(sum(content) / len(content)) if unit == "pixels" else alphabet.pad


def _of_prompt(trained: Trained, prompt: str) -> _Asked:
    ids, allowed = prompt_tokens(trained, prompt)
    if trained.unit == "words":
        pieces = _located("text", [("\n" if n == EOS_ID else trained.words[n], 1) for n in ids[1:].tolist()], 1)
    else:
        pieces = _located("text", list(characters(bytes((ids[1:] - PAPER.first).tolist()))), 1)
    blank = torch.full_like(ids, trained.words.index(UNK) if trained.unit == "words" else _blank(PAPER, "bytes", b""))
    blank[0] = ids[0]  # what every text begins with

    def token(number: int) -> str:
        if trained.unit == "words":
            return "[end of line]" if number == EOS_ID else trained.words[number]
        return "[end of text]" if number == SEP else next(characters(bytes([number - PAPER.first])))[0]

    return _Asked({"input_ids": ids.unsqueeze(0)}, blank, allowed, [pieces], token, trained.unit)


def _located(name: str, tokens: Sequence[tuple[str, int]], start: int) -> _Pieces:
    starts = [start]
    for _, length in tokens:
        starts.append(starts[-1] + length)
    return _Pieces(name, [text for text, _ in tokens], starts)


def characters(content: bytes) -> Iterator[tuple[str, int]]:
    """The characters of UTF-8 and how many bytes each is; a byte that is of none by its number.

    >>> list(characters("né".encode() + b"\\xff"))
    [('n', 1), ('é', 2), ('\\\\xff', 1)]
    """
    place = 0
    while place < len(content):
        lead = content[place]
        length = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        try:
            yield content[place : place + length].decode(), length
            place += length
        except UnicodeDecodeError:
            yield f"\\x{lead:02x}", 1
            place += 1


def _answer(names: Callable[[int], str], question: Question, answer: str) -> int:
    numbers = {names(number): number for number in question.answers.tolist()}
    if answer not in numbers:
        raise ValueError(unknown("answer", answer, list(numbers)))
    return int(numbers[answer])


def _parts(
    asked: _Asked, question: Question, found: Attribution, measured: int, progress: Callable[[int], None] | None
) -> tuple[tuple[Part, ...], float | None]:
    """The parts with their values and spans, some of them measured, and how far the two agree."""
    numbers = found.values.tolist()
    of_tokens = [[sum(numbers[first:last]) for first, last in pairwise(piece.starts)] for piece in asked.pieces]
    spans = [(part, places) for part, piece in enumerate(asked.pieces) for places in _spans(piece, asked)]
    values = [sum(of_tokens[part][n] for n in places) for part, places in spans]
    chosen = _chosen(values, measured)
    tried = [torch.tensor([p for n in spans[s][1] for p in _places(asked.pieces[spans[s][0]], n)]) for s in chosen]
    falls = dict(zip(chosen, without_spans(question, tried, progress), strict=False))  # as many as there was time for
    parts: list[list[Span]] = [[] for _ in asked.pieces]
    for s, (part, places) in enumerate(spans):
        text = "" if asked.grid is not None else "".join(asked.pieces[part].tokens[n] for n in places)
        parts[part].append(Span(tuple(places), text, values[s], falls.get(s)))
    agreement = rank_correlation([values[s] for s in falls], list(falls.values()))
    made = [
        Part(piece.name, tuple(piece.tokens), tuple(of_part), tuple(of_spans))
        for piece, of_part, of_spans in zip(asked.pieces, of_tokens, parts, strict=True)
    ]
    return tuple(made), agreement


def _places(piece: _Pieces, token: int) -> range:
    return range(piece.starts[token], piece.starts[token + 1])


def _spans(piece: _Pieces, asked: _Asked) -> Iterator[list[int]]:
    """Every token is in one of them."""
    if asked.grid is not None:
        height, width = asked.grid
        side = -(-max(height, width) // PATCHES)
        for top in range(0, height, side):
            for left in range(0, width, side):
                yield [y * width + x for y in range(top, min(top + side, height)) for x in range(left, min(left + side, width))]
        return
    if asked.unit != "bytes":
        yield from ([n] for n in range(len(piece.tokens)))
        return
    span: list[int] = []
    for n, token in enumerate(piece.tokens):
        ends_a_word = span and piece.tokens[span[-1]].isspace() and not token.isspace()
        if ends_a_word or len(span) == LONGEST_WORD:
            yield span
            span = []
        span.append(n)
    if span:
        yield span


def _chosen(values: Sequence[float], count: int) -> list[int]:
    """Numbers of the spans that are measured, those with the largest values first."""
    by_size = sorted(range(len(values)), key=lambda n: -abs(values[n]))
    few = min(count // 2, max(0, len(by_size) - count // 2))
    top, rest = by_size[: count - few], sorted(by_size[count - few :])
    return [*top, *(rest[n * len(rest) // few] for n in range(few) if rest)]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's, with equal numbers of one rank; ``None`` where all of one are equal.

    >>> rank_correlation([1, 2, 3], [10, 20, 15]), rank_correlation([1, 1], [1, 2])
    (0.5, None)
    """
    a, b = (_ranks(numbers) for numbers in (first, second))
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return None if not size else round(float(a @ b) / size, 12)


def _ranks(numbers: Sequence[float]) -> Tensor:
    x = torch.tensor(numbers, dtype=torch.float64)
    return ((x[:, None] > x).sum(1) + (x[:, None] >= x).sum(1)).double() / 2


def in_words(explanation: Explanation) -> str:
    """What was found, in a few sentences."""
    e = explanation
    told = f"{printable(e.answer, 60)} ({100 * e.probability:.1f} %)"
    what = f"The next {e.unit.removesuffix('s')} is {told}" if e.kind == "lm" else f"The answer is {told}"
    difference = e.log_odds - e.without
    share = f"{e.missing / abs(difference):.1%} of it" if difference else "all of it"
    sentences = [
        f"{what}; its log-odds are {e.log_odds:+.3f}, and {e.without:+.3f} where its {e.unit} are blank.",
        f"The {e.unit} add up to the difference of {difference:+.3f}, but for {e.missing:.3f} ({share}).",
    ]
    if not e.exact:
        sentences.append(f"That is more than is meant to be missing after {e.gradients} gradients: take small shares with care.")
    if e.agreement is not None:
        sentences.append(f"Blanking spans out instead orders them alike by {e.agreement:.2f} (rank correlation; 1 is the same order).")
    if e.cut:
        sentences.append("The text was longer than the model reads, and was cut.")
    return " ".join(sentences)
