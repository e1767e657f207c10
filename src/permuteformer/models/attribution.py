"""Integrated gradients (Sundararajan et al., 2017): which tokens an answer comes from, with a known error; and blanking of spans.

The path is a straight line from the embeddings of a blank input to those of the input. Gradients along it add up to the difference of the
log-odds at its ends. The log-odds at the ends of each piece of the path give the error of that piece: pieces with the largest errors are
halved until the sum is accurate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.models.heads import PermuteFormerForCausalLM

TOLERANCE = 0.02
"""Accepted error of the sum, as a share of the difference of log-odds."""
LEAST = 0.1
"""Smallest difference of log-odds that the tolerance is a share of: below it, rounding would never be accurate enough."""
MOST = 200
"""Limit of the number of gradients."""
SECONDS = 20.0
"""Limit of the time, of integration and of blanking spans each."""
TOKENS = 16_384
"""Tokens per forward pass."""

NODES = (0.06943184420297371, 0.33000947820757187, 0.6699905217924281, 0.9305681557970263)
WEIGHTS = (0.17392742256872693, 0.32607257743127307, 0.32607257743127307, 0.17392742256872693)
"""Gauss-Legendre quadrature with four nodes from 0 to 1."""

Progress = Callable[[int], None]


class Question:
    """An input and an answer: computes the log-odds of the answer, log p − log(1 − p), from embeddings of the input's tokens.

    Args:
        model: a classifier, a matcher or a language model of ``permuteformer.models``, in evaluation mode.
        inputs: its arguments for a batch of one input.
        blank: ``l``: the token that replaces each token in a blank input. Tokens without content (CLS, SEP, padding) are their own blanks,
            so that their share is exactly zero. Two documents are concatenated.
        answer: the label or the next token; ``None`` for the most probable one.
        allowed: possible answers; default: all.
    """

    def __init__(
        self,
        model: PermuteFormerPreTrainedModel,
        inputs: Mapping[str, Tensor],
        blank: Tensor,
        answer: int | None = None,
        allowed: Tensor | None = None,
    ) -> None:
        self.model, self._inputs = model, dict(inputs)
        documents = [inputs[name] for name in ("input_ids", "second_input_ids") if name in inputs]
        self._lengths = [ids.shape[1] for ids in documents]
        with torch.no_grad():
            embed = model.get_input_embeddings()
            self.tokens = torch.cat([embed(ids[0]) for ids in documents])  # l d
            self.blank = embed(blank.to(self.tokens.device))
        count = model.config.vocab_size if isinstance(model, PermuteFormerForCausalLM) else model.config.num_labels
        self.answers = torch.arange(count) if allowed is None else allowed
        """Possible answers."""
        self.probabilities: Tensor = self._logits(self.tokens.unsqueeze(0))[0].detach().cpu().double().softmax(-1)
        """Probabilities of ``answers``, float64."""
        self._index = int(self.probabilities.argmax()) if answer is None else self._index_of(answer)

    def about(self, answer: int) -> Question:
        """Return the question about another answer to the same input."""
        other = copy(self)
        other._index = self._index_of(answer)
        return other

    def _index_of(self, answer: int) -> int:
        index = (self.answers == answer).nonzero().flatten()
        if index.numel() != 1:
            raise ValueError(f"answer must be one of the {len(self.answers):,} answers of the model, got {answer}")
        return int(index)

    @property
    def answer(self) -> int:
        """The label or token."""
        return int(self.answers[self._index])

    @property
    def probability(self) -> float:
        """The probability of the answer."""
        return float(self.probabilities[self._index])

    def log_odds(self, embeddings: Tensor) -> Tensor:
        """Return the log-odds ``b`` of the answer, with embeddings ``b l d`` in place of the tokens."""
        logits = self._logits(embeddings)
        if logits.shape[-1] == 1:
            return logits[:, 0]
        others = torch.cat([logits[:, : self._index], logits[:, self._index + 1 :]], dim=-1)
        return logits[:, self._index] - others.logsumexp(-1)

    def _logits(self, embeddings: Tensor) -> Tensor:
        rows = {name: x.expand(len(embeddings), *x.shape[1:]) for name, x in self._inputs.items()}
        with _embeddings_replaced(self.model.get_input_embeddings(), embeddings.split(self._lengths, dim=1)):
            logits: Tensor = self.model(**rows).logits
        logits = logits[:, -1] if logits.dim() == 3 else logits
        logits = logits[:, self.answers.to(logits.device)]
        if not logits.isfinite().all():
            raise ValueError("the model's logits must be finite, got NaN or infinity: check how its training ended, and train it again")
        return logits

    def batches(self, rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Split a sequence, one entry per variant of the input, into parts for one forward pass each."""
        size = max(1, TOKENS // len(self.tokens))
        return (rows[first : first + size] for first in range(0, len(rows), size))


@dataclass(frozen=True)
class Attribution:
    """The contribution of each token to the log-odds of an answer."""

    values: Tensor
    """``l`` float64; exactly zero for tokens that are their own blank."""
    log_odds: float
    """Log-odds of the answer to the input."""
    without: float
    """Log-odds of the answer to the blank input."""
    missing: float
    """Error of the sum of ``values``, which should be ``log_odds - without``."""
    exact: bool
    """Whether ``missing`` is within the tolerance."""
    gradients: int
    """Number of gradients computed."""


def integrated_gradients(question: Question, progress: Progress | None = None, most: int = MOST) -> Attribution:
    """Attribute the log-odds of the answer to the tokens, with at most ``most`` gradients; ``progress`` gets the number of each batch."""
    begun, gradients = time.monotonic(), 0
    pieces: list[_Piece] = []
    intervals = [(0.0, 0.5), (0.5, 1.0)]
    odds: dict[float, float] = {}
    while True:
        pieces += _integrate(question, intervals, odds, progress)
        gradients += len(intervals) * len(NODES)
        difference = odds[1.0] - odds[0.0]
        tolerance = TOLERANCE * max(abs(difference), LEAST)
        spent = time.monotonic() - begun
        in_time = int((SECONDS - spent) / spent * gradients) if spent else most
        can_halve = min(most - gradients, in_time) // (2 * len(NODES))
        if sum(piece.error for piece in pieces) <= tolerance or can_halve < 1:
            break
        pieces.sort(reverse=True)  # by their errors
        worst = [piece for piece in pieces[:can_halve] if piece.error > tolerance / (2 * len(pieces))]
        pieces = pieces[len(worst) :]
        intervals = []
        for _, start, end, _ in worst:
            intervals += [(start, (start + end) / 2), ((start + end) / 2, end)]
    values = torch.stack([piece.values for piece in pieces]).sum(0)
    missing = abs(float(values.sum()) - difference)
    return Attribution(values, odds[1.0], odds[0.0], missing, missing <= tolerance, gradients)


@torch.no_grad()
def without_spans(question: Question, spans: Sequence[Tensor], progress: Progress | None = None, seconds: float = SECONDS) -> list[float]:
    """Return how much the log-odds of the answer fall when each span is blanked; fewer than ``spans`` if the time is over.

    Args:
        question: the input and the answer.
        spans: indices of the tokens of each span.
        progress: gets the number of spans of each batch.
        seconds: start no further batch after this time.
    """
    complete, begun = float(question.log_odds(question.tokens.unsqueeze(0))), time.monotonic()
    falls: list[float] = []
    for batch in question.batches(spans):
        if falls and time.monotonic() - begun > seconds:
            break
        rows = question.tokens.repeat(len(batch), 1, 1)
        for row, span in zip(rows, batch, strict=True):
            row[span] = question.blank[span]
        falls += [complete - value for value in question.log_odds(rows).cpu().double().tolist()]
        if progress is not None:
            progress(len(batch))
    return falls


class _Piece(NamedTuple):
    """A piece of the path: the integral of the gradient over it, ``l``, and the error of its sum."""

    error: float
    start: float
    end: float
    values: Tensor


def _integrate(
    question: Question, intervals: Sequence[tuple[float, float]], odds: dict[float, float], progress: Progress | None
) -> list[_Piece]:
    """Integrate over intervals of the path. ``odds`` keeps the log-odds at their ends."""
    edges = sorted({edge for interval in intervals for edge in interval} - odds.keys())
    with torch.no_grad():
        for batch in question.batches(edges):
            odds |= zip(batch, question.log_odds(_on_path(question, batch)).cpu().double().tolist(), strict=True)
    step = (question.tokens - question.blank).cpu().double()
    along: list[Tensor] = []
    for batch in question.batches([start + node * (end - start) for start, end in intervals for node in NODES]):
        embeddings = _on_path(question, batch).requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(question.log_odds(embeddings).sum(), embeddings)
        along.append((gradient.cpu().double() * step).sum(-1))  # b l
        if progress is not None:
            progress(len(batch))
    widths = torch.tensor([end - start for start, end in intervals], dtype=torch.float64)
    values = widths[:, None] * (torch.tensor(WEIGHTS, dtype=torch.float64) @ torch.cat(along).unflatten(0, (-1, len(NODES))))  # pieces l
    rises = torch.tensor([odds[end] - odds[start] for start, end in intervals], dtype=torch.float64)
    errors = (values.sum(1) - rises).abs().tolist()
    return [_Piece(error, *interval, value) for error, interval, value in zip(errors, intervals, values, strict=True)]


def _on_path(question: Question, shares: Sequence[float]) -> Tensor:
    """Return embeddings ``b l d`` at these shares of the path from the blank input to the input."""
    factor = torch.tensor(shares, dtype=question.tokens.dtype, device=question.tokens.device)
    return torch.lerp(question.blank, question.tokens, factor[:, None, None])


@contextmanager
def _embeddings_replaced(embedding: nn.Module, given: Sequence[Tensor]) -> Iterator[None]:
    """Make ``embedding`` return the given tensors, one per call: models of two documents look up twice."""
    left = list(given)

    def hook(*_: Any) -> Tensor:
        return left.pop(0)

    handle = embedding.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
