"""Explanations: how much each byte, word or pixel contributed to the answer of a trained model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from permuteformer.formatting import printable
from permuteformer.models.attribution import MOST, Attribution, Question, integrated_gradients, without_spans
from permuteformer.registry import unknown
from permuteformer.tasks.inputs import Input
from permuteformer.train.build import model_inputs
from permuteformer.train.generate import language_input
from permuteformer.train.predict import NewItem, classifier_input
from permuteformer.train.trained_model import TrainedModel

MEASURED = 64
"""Spans that are blanked at most: half of them with the largest contributions, the others evenly from the rest."""
MAX_WORD = 24
"""Characters of a span; longer words are several."""
PATCHES = 8
"""Patches along the longer side of an image."""
ANSWERS = 5
"""Answers whose probabilities are reported."""
WORK = MOST + MEASURED
"""Largest number of steps that ``progress`` receives."""


@dataclass(frozen=True)
class Span:
    """Adjacent tokens: a word with the blanks after it, or a patch of an image."""

    places: tuple[int, ...]
    """Numbers of its tokens in their part."""
    text: str
    value: float
    """Sum of its tokens' values."""
    measured: float | None = None
    """Drop of the log-odds when it is blanked; ``None`` if that was not measured."""


@dataclass(frozen=True)
class Part:
    """A text, one of two texts, or an image."""

    name: str
    tokens: tuple[str, ...]
    """Characters (bytes that are not UTF-8 by their number), words, symbols, or shades of pixels, row by row."""
    values: tuple[float, ...]
    """Contribution of each token to the log-odds of the answer; bytes of a character are added up."""
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Explanation:
    """Contributions of the tokens of an item to an answer."""

    kind: str
    """``"classify"``, ``"match"`` or ``"lm"``."""
    unit: str
    """What a token is: ``"bytes"``, ``"words"``, ``"symbols"`` or ``"pixels"``."""
    answer: str
    """The label, or the next token."""
    probability: float
    answers: dict[str, float]
    """The most likely answers and their probabilities."""
    log_odds: float
    """Of the answer: log p − log(1 − p)."""
    without: float
    """Log-odds of a blank item: bytes are blanks, words unknown, pixels have the image's mean shade. The values of all tokens add up to
    the difference of the two, except for ``missing``."""
    missing: float
    exact: bool
    """Whether ``missing`` is within the tolerance."""
    parts: tuple[Part, ...]
    grid: tuple[int, int] | None
    """Height and width of an image."""
    cut: bool
    """Whether the item was longer than the model reads."""
    agreement: float | None
    """Rank correlation of values and measured drops of the spans that were blanked; ``None`` if one of them is constant."""
    gradients: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, for files and reports."""
        return {"format": 1, **asdict(self)}


def explain(
    trained: TrainedModel,
    item: NewItem | str,
    *,
    answer: str | None = None,
    measured: int = MEASURED,
    progress: Callable[[int], None] | None = None,
) -> Explanation:
    """Attribute the answer of a model to the tokens of an item (integrated gradients), and measure the largest by blanking them.

    Args:
        trained: from ``permuteformer.train.trained_model.load``.
        item: from ``permuteformer.train.predict``; for a language model a text, whose next token is explained.
        answer: the label, or the next character or word, to explain; default: the most likely one.
        measured: largest number of spans to blank.
        progress: receives the number of further steps, at most ``WORK`` in all.
    """
    began = time.perf_counter()
    asked = _ask_prompt(trained, item) if isinstance(item, str) else _ask_item(trained, item)
    if not any(piece.tokens for piece in asked.pieces):
        raise ValueError("there is nothing to explain, the text is empty: give at least one character")
    question = asked.question
    if answer is not None:
        numbers = {asked.name_answer(number): number for number in question.answers.tolist()}
        if answer not in numbers:
            raise ValueError(unknown("answer", answer, list(numbers)))
        question = question.about(numbers[answer])
    found = integrated_gradients(question, progress)
    parts, agreement = _parts(asked.pieces, trained.input, question, found, measured, progress)
    likeliest = question.probabilities.topk(min(ANSWERS, len(question.probabilities)))
    answers = zip(question.answers[likeliest.indices].tolist(), likeliest.values.tolist(), strict=True)
    return Explanation(
        kind=trained.kind,
        unit=trained.input.unit,
        answer=asked.name_answer(question.answer),
        probability=question.probability,
        answers={asked.name_answer(number): probability for number, probability in answers},
        log_odds=found.log_odds,
        without=found.without,
        missing=found.missing,
        exact=found.exact,
        parts=parts,
        grid=trained.input.grid,
        cut=asked.cut,
        agreement=agreement,
        gradients=found.gradients,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Pieces:
    """A part of an item: its tokens for display, and where each starts among the model's ids."""

    name: str
    tokens: list[str]
    starts: list[int]
    """One more than there are tokens: the last is where they end."""

    @classmethod
    def of(cls, name: str, tokens: Sequence[tuple[str, int]], start: int) -> _Pieces:
        """Return the pieces of tokens, given with their numbers of ids; the first one is at ``start``."""
        return cls(name, [text for text, _ in tokens], list(accumulate((count for _, count in tokens), initial=start)))


@dataclass(frozen=True)
class _Asked:
    """An item as a question to the model."""

    question: Question
    pieces: list[_Pieces]
    name_answer: Callable[[int], str]
    cut: bool = False


def _ask_item(trained: TrainedModel, item: NewItem) -> _Asked:
    input, model = classifier_input(trained), trained.model
    batch = input.collate([{"id": 0, **item.row}])
    documents = [ids[0] for ids in (batch.input_ids, batch.second_input_ids) if ids is not None]
    blank, pieces, start = torch.cat(documents).clone(), [], 0
    for name, column, ids in zip(input.parts, input.stored, documents, strict=True):
        tokens = input.pieces(item.row[column])
        before = (len(ids) - sum(count for _, count in tokens) + 1) // 2  # CLS before them, and SEP after them in some protocols
        pieces.append(_Pieces.of(name, tokens, start + before))
        blank[pieces[-1].starts[0] : pieces[-1].starts[-1]] = input.blank_id(item.row[column])
        start += len(ids)
    question = Question(model, model_inputs(batch.to(model.device), model.config), blank)
    return _Asked(question, pieces, trained.labels.__getitem__, item.cut)


def _ask_prompt(trained: TrainedModel, prompt: str) -> _Asked:
    tokenizer, model = language_input(trained).tokenizer, trained.model
    ids = torch.from_numpy(tokenizer.prompt_ids(prompt))
    blank = torch.full_like(ids, tokenizer.blank_id)
    blank[0] = ids[0]  # every text starts with it
    allowed = torch.from_numpy(tokenizer.target_ids)
    question = Question(model, {"input_ids": ids.unsqueeze(0).to(model.device)}, blank, allowed=allowed)

    def name(id: int) -> str:
        return "[end]" if id == tokenizer.end_id else tokenizer.name(id)

    return _Asked(question, [_Pieces.of("text", tokenizer.prompt_pieces(prompt), 1)], name)


def _parts(
    pieces: list[_Pieces], input: Input, question: Question, found: Attribution, measured: int, progress: Callable[[int], None] | None
) -> tuple[tuple[Part, ...], float | None]:
    """Return the parts with values and spans, some of them measured, and the rank correlation of the two."""
    numbers = found.values.tolist()
    of_tokens = [[sum(numbers[first:last]) for first, last in pairwise(piece.starts)] for piece in pieces]
    spans = [(part, places) for part, piece in enumerate(pieces) for places in _spans(piece, input)]
    values = [sum(of_tokens[part][n] for n in places) for part, places in spans]
    chosen = _chosen(values, measured)
    blanked = []
    for part, places in (spans[s] for s in chosen):
        starts = pieces[part].starts
        blanked.append(torch.tensor([id for n in places for id in range(starts[n], starts[n + 1])]))
    drops = dict(zip(chosen, without_spans(question, blanked, progress), strict=False))  # until time runs out
    of_spans: list[list[Span]] = [[] for _ in pieces]
    for s, (part, places) in enumerate(spans):
        text = "" if input.grid is not None else "".join(pieces[part].tokens[n] for n in places)
        of_spans[part].append(Span(tuple(places), text, values[s], drops.get(s)))
    parts = zip(pieces, of_tokens, of_spans, strict=True)
    made = tuple(Part(piece.name, tuple(piece.tokens), tuple(own), tuple(its_spans)) for piece, own, its_spans in parts)
    return made, rank_correlation([values[s] for s in drops], list(drops.values()))


def _spans(piece: _Pieces, input: Input) -> Iterator[list[int]]:
    """Yield the tokens of each span; every token is in one of them."""
    if input.grid is not None:
        height, width = input.grid
        side = -(-max(height, width) // PATCHES)
        for top in range(0, height, side):
            for left in range(0, width, side):
                yield [y * width + x for y in range(top, min(top + side, height)) for x in range(left, min(left + side, width))]
        return
    if input.unit != "bytes":
        yield from ([n] for n in range(len(piece.tokens)))
        return
    span: list[int] = []
    for n, token in enumerate(piece.tokens):
        ends_a_word = span and piece.tokens[span[-1]].isspace() and not token.isspace()
        if ends_a_word or len(span) == MAX_WORD:
            yield span
            span = []
        span.append(n)
    if span:
        yield span


def _chosen(values: Sequence[float], count: int) -> list[int]:
    """Return the numbers of the spans that are measured, those with the largest values first."""
    by_size = sorted(range(len(values)), key=lambda n: -abs(values[n]))
    few = min(count // 2, max(0, len(by_size) - count // 2))
    top, rest = by_size[: count - few], sorted(by_size[count - few :])
    return [*top, *(rest[n * len(rest) // few] for n in range(few) if rest)]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; ``None`` if all numbers of one are equal.

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


def summary(explanation: Explanation) -> str:
    """Return the explanation in a few sentences."""
    e = explanation
    answer = f"{printable(e.answer, 60)} ({100 * e.probability:.1f} %)"
    what = f"The next {e.unit.removesuffix('s')} is {answer}" if e.kind == "lm" else f"The answer is {answer}"
    difference = e.log_odds - e.without
    share = f"{e.missing / abs(difference):.1%} of it" if difference else "all of it"
    sentences = [
        f"{what}; its log-odds are {e.log_odds:+.3f}, and {e.without:+.3f} for a blank item.",
        f"The {e.unit} add up to the difference of {difference:+.3f}, except for {e.missing:.3f} ({share}).",
    ]
    if not e.exact:
        sentences.append(f"That error is large after {e.gradients} gradients: do not trust small contributions.")
    if e.agreement is not None:
        sentences.append(f"Blanking spans instead ranks them with a correlation of {e.agreement:.2f} (1 is the same order).")
    if e.cut:
        sentences.append("The text was longer than the model reads, and was cut.")
    return " ".join(sentences)
