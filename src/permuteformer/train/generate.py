"""Text generation by a trained language model, token by token, from a state that does not grow if attention is linear."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from permuteformer.formatting import format_bytes, printable
from permuteformer.models.cache import PermuteFormerCache
from permuteformer.ops.checks import check_integer
from permuteformer.positions.learned import Learned
from permuteformer.tasks.language import Windows
from permuteformer.train.trained_model import TrainedModel

PREFILL = 1024
"""Tokens of the prompt that are read at a time."""

MANY_TOKENS = 10_000
"""From this number of tokens on, a growing state is worth a warning."""


class Generation(Iterator[str]):
    """Generates text after ``prompt``, in pieces of complete characters. The same seed gives the same text.

    As in training, a text starts after the end of another: at the end of a document of bytes a line ends and the next document starts.

    Args:
        trained: a language model, from ``permuteformer.train.trained_model.load``.
        prompt: the start of the text.
        max_new_tokens: how many tokens to generate.
        temperature: below 1 likely tokens become more likely; 0 always picks the most likely one.
        top_k: sample from this number of the most likely tokens.
        top_p: sample from the most likely tokens whose probabilities add up to this.
        seed: seed of the samples.
        stop: stop at the end of the document; with words, at the end of the line.
    """

    def __init__(
        self,
        trained: TrainedModel,
        prompt: str = "",
        max_new_tokens: int = 500,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: bool = False,
    ) -> None:
        self.tokenizer = language_input(trained).tokenizer
        if not trained.model.model.has_state:
            name = trained.model.config.attention["name"]
            raise ValueError(f"attention {name!r} cannot generate token by token: use a model with linear or softmax attention")
        check_integer(max_new_tokens=max_new_tokens)
        check_integer(0, seed=seed)
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature must be a number of at least 0, got {temperature!r}")
        if top_k is not None:
            check_integer(top_k=top_k)
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r}")
        self.tokens = 0
        """Number of tokens generated so far."""
        self.cache = PermuteFormerCache(trained.model.config.num_hidden_layers)
        """The state of the model."""
        self._trained, self._prompt, self._greedy, self._stop = trained, prompt, temperature == 0, stop
        self._max_new_tokens = max_new_tokens
        self._warp = LogitsProcessorList([] if temperature in (0, 1) else [TemperatureLogitsWarper(float(temperature))])
        self._warp += [TopKLogitsWarper(top_k)] if top_k is not None else []
        self._warp += [TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1 else []
        self._random = torch.Generator().manual_seed(seed % 2**63)
        ids = torch.from_numpy(self.tokenizer.prompt_ids(prompt))
        self._length = len(ids) + max_new_tokens
        _check_positions(trained, len(ids), max_new_tokens)
        self._pieces = self._generate(ids)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def notes(self) -> list[str]:
        """Warnings: words of the prompt without a token, and a state that grows."""
        notes = []
        if words := self.tokenizer.unknown_words(self._prompt):
            shown = ", ".join(printable(word, 30) for word in words[:10]) + (" …" if len(words) > 10 else "")
            notes.append(f"words of the prompt that the model does not know: {shown}")
        if self._length >= MANY_TOKENS and (growth := _state_growth(self._trained)):
            notes.append(
                f"the state of this model grows by {format_bytes(growth)} per token, {format_bytes(growth * self._length)} in all, and "
                "tokens take ever longer; linear attention without a bias has a state of constant size"
            )
        return notes

    def _generate(self, ids: Tensor) -> Iterator[str]:
        tokenizer, decoder = self.tokenizer, self.tokenizer.decoder(self._prompt)
        for block in ids.split(PREFILL):
            logits = self._read(block)
        allowed = torch.from_numpy(tokenizer.target_ids)
        while True:
            token = int(allowed[self._sample(logits[allowed])])
            self.tokens += 1
            is_end = token == tokenizer.end_id
            is_last = self.tokens == self._max_new_tokens or (is_end and self._stop)
            piece = ("" if is_end and self._stop else decoder.push(token)) + (decoder.flush() if is_last else "")
            if piece:
                yield piece
            if is_last:
                return
            logits = self._read(torch.tensor([tokenizer.start_id if is_end else token]))

    def _sample(self, logits: Tensor) -> int:
        if not logits.isfinite().all():
            raise ValueError(
                f"token {self.tokens + 1:,} cannot be sampled, as the model's output is not finite: check how its training ended "
                f"({self._trained.folder}), and train again, for example with a lower learning rate"
            )
        if self._greedy:
            return int(logits.argmax())
        scores = self._warp(torch.empty(1, 0, dtype=torch.int64), (logits - logits.max()).unsqueeze(0))
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=self._random))

    @torch.inference_mode()
    def _read(self, ids: Tensor) -> Tensor:
        """Return the logits after further tokens, float64 on the CPU."""
        model = self._trained.model
        out = model(input_ids=ids.to(model.device).unsqueeze(0), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1].cpu().double()
        return logits


def language_input(trained: TrainedModel) -> Windows:
    """Return the input of a language model; raise for a classifier."""
    if not isinstance(trained.input, Windows):
        raise ValueError(f"{trained.folder} is a model of kind {trained.kind!r}, not a language model: use permuteformer predict")
    return trained.input


@torch.inference_mode()
def _state_growth(trained: TrainedModel) -> int:
    """Return the bytes by which the state grows per token."""
    sizes = []
    for length in (1, 2):
        cache = PermuteFormerCache(trained.model.config.num_hidden_layers)
        ids = torch.full((1, length), language_input(trained).tokenizer.end_id, device=trained.model.device)
        trained.model(input_ids=ids, past_key_values=cache, use_cache=True)
        sizes.append(cache.nbytes)
    return sizes[1] - sizes[0]


def _check_positions(trained: TrainedModel, prompt: int, new: int) -> None:
    """Raise if positions are learned and there are not enough of them."""
    for part in trained.model.modules():
        if isinstance(part, Learned) and prompt + new - 1 > part.max_length:  # the last token is not read
            room = part.max_length + 1 - prompt
            advice = f"max_new_tokens can be at most {room:,}" if room > 0 else "use a shorter prompt"
            raise ValueError(
                f"this model has {part.max_length:,} learned positions; a prompt of {prompt:,} tokens and max_new_tokens={new:,} need "
                f"{prompt + new - 1:,}: {advice}"
            )
