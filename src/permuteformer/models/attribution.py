"""What of an input a model's answer came from: integrated gradients that say how exact they are, and spans blanked out as a second opinion.

The path goes from a blank input to the input, by their embeddings, and the gradients along it add up to the difference of the
two answers (Sundararajan et al., 2017). How far they are from adding up is known of every piece of the path, as the answers at its two ends
are: pieces that are off are halved, until all together are exact enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.models.causal_lm import PermuteFormerForCausalLM

TOLERANCE = 0.02
"""Gradients are followed until what is missing of the difference is at most this share of it."""
LEAST = 0.1
"""Below this difference of log-odds the tolerance is a share of this: nothing was decided, and rounding would never do."""
MOST = 200
"""Gradients at most; 4 a piece of the path."""
SECONDS = 20.0
"""No piece is halved that would take longer, and no further span is blanked out; what is missing then is told."""
TOKENS = 16_384
"""Tokens that are computed at a time."""

FIRST_EDGES = (0.0, 1 / 2, 1.0)
NODES = (0.06943184420297371, 0.33000947820757187, 0.6699905217924281, 0.9305681557970263)
WEIGHTS = (0.17392742256872693, 0.32607257743127307, 0.32607257743127307, 0.17392742256872693)
"""Gauss and Legendre's, of four points from 0 to 1."""

Progress = Callable[[int], None]


class Question:
    """One item and one answer: what its log-odds are, log p − log(1 − p), by the embeddings of the item's tokens.

    Args:
        model: a classifier, a matcher or a language model of ``permuteformer.models``, in evaluation mode.
        inputs: its arguments for a batch of one item.
        blank: ``l``: what each token is where nothing is said, as a blank for a letter. Tokens that say nothing (CLS, SEP, padding) are
            themselves, and their share is exactly zero. Of two documents, both in a row.
        answer: the number of the label, or of the token that comes next; ``None`` for the likeliest.
        allowed: answers that count; all unless told.
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
        """Numbers of those that count."""
        self.probabilities: Tensor = self._logits(self.tokens.unsqueeze(0))[0].detach().cpu().double().softmax(-1)
        """Of ``answers``, float64."""
        self._place = int(self.probabilities.argmax()) if answer is None else self._place_of(answer)

    def about(self, answer: int) -> Question:
        """The same item, and another answer."""
        other = copy(self)
        other._place = self._place_of(answer)
        return other

    def _place_of(self, answer: int) -> int:
        place = (self.answers == answer).nonzero().flatten()
        if place.numel() != 1:
            raise ValueError(f"answer must be one of the {len(self.answers):,} that the model can give; it is {answer}")
        return int(place)

    @property
    def answer(self) -> int:
        """Its number."""
        return int(self.answers[self._place])

    @property
    def probability(self) -> float:
        """Of the answer."""
        return float(self.probabilities[self._place])

    @property
    def rows(self) -> int:
        """How many variants of the item are computed at a time."""
        return max(1, TOKENS // len(self.tokens))

    def log_odds(self, embeddings: Tensor) -> Tensor:
        """``b`` of embeddings ``b l d`` in the tokens' place."""
        logits = self._logits(embeddings)
        if logits.shape[-1] == 1:
            return logits[:, 0]
        others = torch.cat([logits[:, : self._place], logits[:, self._place + 1 :]], dim=-1)
        return logits[:, self._place] - others.logsumexp(-1)

    def _logits(self, embeddings: Tensor) -> Tensor:
        rows = {name: x.expand(len(embeddings), *x.shape[1:]) for name, x in self._inputs.items()}
        with _in_place_of(self.model.get_input_embeddings(), embeddings.split(self._lengths, dim=1)):
            logits: Tensor = self.model(**rows).logits
        logits = logits[:, -1] if logits.dim() == 3 else logits
        logits = logits[:, self.answers.to(logits.device)]
        if not logits.isfinite().all():
            raise ValueError("the model's answer is not a number: look at how its training ended, and train it anew")
        return logits


@dataclass(frozen=True)
class Attribution:
    """How much of the answer's log-odds came from each token."""

    values: Tensor
    """``l`` float64; exactly zero for what is its own blank."""
    log_odds: float
    """Of the answer, given the item."""
    without: float
    """The same, given the blank item."""
    missing: float
    """What the sum of the values is off the difference of the two, which it should be."""
    exact: bool
    """Whether that is within the tolerance."""
    gradients: int
    """How many it took."""


def integrated_gradients(question: Question, progress: Progress | None = None, most: int = MOST) -> Attribution:
    """The answer shared out among the tokens. ``progress`` gets the number of further gradients, of ``most`` at most."""
    edges = dict(zip(FIRST_EDGES, _at(question, FIRST_EDGES), strict=True))
    done: dict[tuple[float, float], tuple[Tensor, float]] = {}  # of each piece, its share and what is missing in it
    fresh = list(pairwise(FIRST_EDGES))
    tolerance = TOLERANCE * max(abs(edges[1.0] - edges[0.0]), LEAST)
    gradients, begun = 0, time.monotonic()
    while True:
        for piece, share in zip(fresh, _shares(question, fresh, progress), strict=True):
            done[piece] = share, abs(float(share.sum()) - (edges[piece[1]] - edges[piece[0]]))
        gradients += len(fresh) * len(NODES)
        off = sum(missing for _, missing in done.values())
        spent = time.monotonic() - begun
        in_time = int((SECONDS - spent) / spent * gradients) if spent else most  # at the pace of those so far
        room = min(most - gradients, in_time) // (2 * len(NODES))
        if off <= tolerance or room < 1:
            break
        worst = sorted(done, key=lambda piece: -done[piece][1])
        halved = [piece for piece in worst if done[piece][1] > tolerance / (2 * len(done))][:room]
        middles = [(begin + end) / 2 for begin, end in halved]
        edges.update(zip(middles, _at(question, middles), strict=True))
        fresh = []
        for (begin, end), middle in zip(halved, middles, strict=True):
            del done[begin, end]
            fresh += [(begin, middle), (middle, end)]
    values = torch.stack([share for share, _ in done.values()]).sum(0)
    missing = abs(float(values.sum()) - (edges[1.0] - edges[0.0]))
    return Attribution(values, edges[1.0], edges[0.0], missing, missing <= tolerance, gradients)


@torch.no_grad()
def without_spans(question: Question, spans: Sequence[Tensor], progress: Progress | None = None, seconds: float = SECONDS) -> list[float]:
    """How much the answer's log-odds fall when a span is blank, measured; ``spans`` are places of tokens. Then no more are tried."""
    whole, begun = float(question.log_odds(question.tokens.unsqueeze(0))), time.monotonic()
    found: list[float] = []
    for first in range(0, len(spans), question.rows):
        if found and time.monotonic() - begun > seconds:
            break
        some = spans[first : first + question.rows]
        rows = question.tokens.repeat(len(some), 1, 1)
        for row, span in zip(rows, some, strict=True):
            row[span] = question.blank[span]
        found += [whole - value for value in question.log_odds(rows).cpu().double().tolist()]
        if progress is not None:
            progress(len(some))
    return found


def _between(question: Question, shares: Sequence[float]) -> Tensor:
    """``b l d``: so far on the way from the blank item to the item."""
    factor = torch.tensor(shares, dtype=question.tokens.dtype, device=question.tokens.device)
    between: Tensor = question.blank + factor[:, None, None] * (question.tokens - question.blank)
    return between


@torch.no_grad()
def _at(question: Question, shares: Sequence[float]) -> list[float]:
    answers: list[float] = []
    for first in range(0, len(shares), question.rows):
        answers += question.log_odds(_between(question, shares[first : first + question.rows])).cpu().double().tolist()
    return answers


def _shares(question: Question, pieces: Sequence[tuple[float, float]], progress: Progress | None) -> Iterator[Tensor]:
    """``l`` float64 for each piece of the path: the integral of the gradient over it, times the way."""
    places = [begin + node * (end - begin) for begin, end in pieces for node in NODES]
    weights = [weight * (end - begin) for begin, end in pieces for weight in WEIGHTS]
    shares: list[Tensor] = []
    for first in range(0, len(places), question.rows):
        some = slice(first, first + question.rows)
        embeddings = _between(question, places[some]).requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(question.log_odds(embeddings).sum(), embeddings)
        along = (gradient.cpu().double() * (question.tokens - question.blank).cpu().double()).sum(-1)  # b l
        shares += list(along * torch.tensor(weights[some], dtype=torch.float64)[:, None])
        if progress is not None:
            progress(len(along))
    for first in range(0, len(shares), len(NODES)):
        yield torch.stack(shares[first : first + len(NODES)]).sum(0)


@contextmanager
def _in_place_of(embedding: nn.Module, given: Sequence[Tensor]) -> Iterator[None]:
    """What is looked up, document after document, is ``given``: so all models are asked alike, also those of two documents."""
    left = list(given)

    def hook(*_: Any) -> Tensor:
        return left.pop(0)

    handle = embedding.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
