"""Requests of the page and their answers: JSON in, JSON out. Every field of a request is checked."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from permuteformer.demo.head_view import DEFAULT, HEADS, PERMUTATIONS, Choice, head_view
from permuteformer.formatting import printable
from permuteformer.train.explain import explain, summary
from permuteformer.train.generate import Generation
from permuteformer.train.predict import NewItem, new_item, probabilities
from permuteformer.train.trained_model import TrainedModel
from permuteformer.version import __version__

LONGEST_TEXT = 20_000
"""Longest text, in characters; ``LONGEST_PROMPT`` for a language model."""
LONGEST_PROMPT = 4_000
MOST_TOKENS = 2_000
MOST_FEATURES = 128
LARGEST_SEED = 2**31 - 1

Body = Mapping[str, Any]
Answer = Iterator[dict[str, Any]]
"""Yields the answer: one object, or the pieces of a text. Requests alternate between pieces."""


class Stopping(Exception):
    """The server is shutting down."""


class Api:
    """Answers requests about positions, and about a trained model if one is given.

    A bad request raises ``ValueError`` when its answer is computed; the message is for the user.
    """

    def __init__(self, trained: TrainedModel | None = None) -> None:
        self.trained = trained
        self.stopping = threading.Event()
        """Set at shutdown: explanations end at their next step."""
        self.routes: dict[str, Callable[[Body], Answer]] = {"/api/positions": self.positions}
        if trained is not None:
            self.routes["/api/explain"] = self.explain
            self.routes |= {"/api/generate": self.generate} if trained.kind == "lm" else {"/api/predict": self.predict}

    def about(self) -> dict[str, Any]:
        """Return the version, and what the model is if one is given."""
        if self.trained is None:
            return {"version": __version__, "run": None}
        run = {
            "name": printable(self.trained.folder.resolve().name, 80),
            "kind": self.trained.kind,
            "image": self.trained.input.grid is not None,
            "labels": [printable(label, 60) for label in self.trained.labels],
        }
        return {"version": __version__, "run": run}

    def positions(self, body: Body) -> Answer:
        """Yield what the page shows of a head."""
        _check_names(body, "features permutation seed head r axes causal alike")
        axes = _one_of(body, "axes", 1, 2)
        yield head_view(
            Choice(
                features=_integer(body, "features", 2 * axes, MOST_FEATURES),
                permutation=_one_of(body, "permutation", *PERMUTATIONS),
                seed=_integer(body, "seed", 0, LARGEST_SEED),
                head=_integer(body, "head", 0, HEADS - 1),
                r=body.get("r") if body.get("r") in (None, DEFAULT) else _number(body, "r", 1e-6, 1.0, f"{DEFAULT!r}, null or "),
                axes=axes,
                causal=_one_of(body, "causal", *([False] if axes == 2 else [False, True])),  # images have an encoder
                alike=_one_of(body, "alike", False, True),
            )
        )

    def predict(self, body: Body) -> Answer:
        """Yield the probability of each label."""
        trained, item = self._model, self._item(body)
        assert isinstance(item, NewItem)
        shares = probabilities(trained, [item])[0].tolist()
        labels = [printable(label, 60) for label in trained.labels]
        yield {"probabilities": dict(zip(labels, shares, strict=True)), "cut": item.cut}

    def explain(self, body: Body) -> Answer:
        """Yield the attribution of the answer to the tokens, as ``permuteformer explain`` computes it."""
        found = explain(self._model, self._item(body), progress=self._check_stopping)
        yield {**found.to_json(), "message": summary(found)}

    def generate(self, body: Body) -> Answer:
        """Yield the pieces of a text; at the end, the number of tokens and the seconds."""
        _check_names(body, "prompt tokens temperature seed")
        begin = time.perf_counter()
        generation = Generation(
            self._model,
            _text(body, "prompt", LONGEST_PROMPT),
            _integer(body, "tokens", 1, MOST_TOKENS),
            temperature=_number(body, "temperature", 0.0, 5.0),
            seed=_integer(body, "seed", 0, LARGEST_SEED),
        )
        for piece in generation:
            yield {"text": piece}
        yield {"tokens": generation.tokens, "seconds": round(time.perf_counter() - begin, 3)}

    @property
    def _model(self) -> TrainedModel:
        assert self.trained is not None  # without a model, no route needs it
        return self.trained

    def _item(self, body: Body) -> NewItem | str:
        """Return the item to predict or explain: a text for a language model."""
        trained = self._model
        if trained.kind == "lm":
            _check_names(body, "text")
            return _text(body, "text", LONGEST_PROMPT)
        if trained.input.grid is not None:
            _check_names(body, "image")
            return new_item(trained, [_file(body, "image")], "the image")
        names = ("text", "second") if trained.kind == "match" else ("text",)
        _check_names(body, " ".join(names))
        return new_item(trained, [_text(body, name, LONGEST_TEXT) for name in names], "the text")

    def _check_stopping(self, _: object) -> None:
        if self.stopping.is_set():
            raise Stopping


def _check_names(body: Body, known: str) -> None:
    for name in body:
        if name not in known.split():
            raise ValueError(f"unknown field {printable(name, 40)!r}: the fields are {known}")


def _integer(body: Body, name: str, least: int, most: int) -> int:
    value = body.get(name)
    if type(value) is not int or not least <= value <= most:
        raise _wrong(name, f"an integer from {least:,} to {most:,}", value)
    return value


def _number(body: Body, name: str, least: float, most: float, others: str = "") -> float:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise _wrong(name, f"{others}a number from {least:g} to {most:g}", value)
    return float(value)


def _one_of(body: Body, name: str, *choices: Any) -> Any:
    value = body.get(name)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise _wrong(name, f"one of {', '.join(map(json.dumps, choices))}", value)
    return value


def _text(body: Body, name: str, longest: int) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    if len(value) > longest:
        raise ValueError(f"{name} must have at most {longest:,} characters, got {len(value):,}")
    return value


def _file(body: Body, name: str) -> bytes:
    try:
        return base64.b64decode(body.get(name), validate=True)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _wrong(name, "a file as base64", body.get(name)) from None


def _wrong(name: str, wanted: str, value: Any) -> ValueError:
    return ValueError(f"{name} must be {wanted}, got {printable(repr(value), 60)}")
