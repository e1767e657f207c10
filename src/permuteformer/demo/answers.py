"""Requests of the page and their answers: plain data in, plain data out, and a readable message for a bad request."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from permuteformer.demo import playground
from permuteformer.demo.turns import Turns
from permuteformer.texts import printable
from permuteformer.train.explain import explain, in_words
from permuteformer.train.generate import generate
from permuteformer.train.predict import probabilities
from permuteformer.train.saved import Trained
from permuteformer.train.unlabelled import Unlabelled, item_of_image, item_of_texts
from permuteformer.version import __version__

LONGEST_TEXT = 20_000
"""Longest text, in characters. Likewise ``LONGEST_PROMPT``."""
LONGEST_PROMPT = 4_000
MOST_TOKENS = 2_000
MOST_FEATURES = 128

Body = Mapping[str, Any]


class Refused(ValueError):
    """A bad request; the message says why."""


class Answers:
    """Answers requests about positions, and about a trained model if one is given."""

    def __init__(self, trained: Trained | None, turns: Turns | None = None) -> None:
        self.trained, self.turns = trained, turns or Turns()
        self.routes: dict[str, Callable[[Body], Any]] = {"/api/positions": self.positions}
        if trained is not None and trained.kind == "lm":
            self.routes |= {"/api/explain": self.explain, "/api/generate": self.generate}
        elif trained is not None:
            self.routes |= {"/api/explain": self.explain, "/api/predict": self.predict}

    def about(self) -> dict[str, Any]:
        """Describe the demo: version, limits, and the run if one is given."""
        content: dict[str, Any] = {"version": __version__, "run": None, "limits": {"text": LONGEST_TEXT, "prompt": LONGEST_PROMPT}}
        if self.trained is not None:
            grid = None if self.trained.kind == "lm" else self.trained.input.grid
            content["run"] = {
                "name": printable(self.trained.folder.resolve().name, 80),
                "kind": self.trained.kind,
                "image": grid is not None,
                "labels": [printable(label, 60) for label in self.trained.labels],
                "unit": self.trained.unit if self.trained.kind == "lm" else None,
            }
        return content

    def positions(self, body: Body) -> dict[str, Any]:
        """Describe one head: see ``playground.look``. Without ``causal``, a text has a language model and an image an encoder."""
        given = _Fields(body, ("features", "permutation", "seed", "head", "r", "axes", "causal", "alike"))
        axes = given.integer("axes", 1, 2)
        causal = given.flag("causal") if "causal" in body else axes == 1
        if causal and axes == 2:
            raise Refused("causal must be false with axes=2: images have an encoder")
        r = body.get("r")
        if r is not None and r != playground.DEFAULT:
            r = given.number("r", 1e-6, 1.0, f"{playground.DEFAULT!r}, null or ")
        choice = playground.Choice(
            features=given.integer("features", 2 * axes, MOST_FEATURES),
            permutation=given.one_of("permutation", playground.PERMUTATIONS),
            seed=given.integer("seed", 0, 2**31 - 1),
            head=given.integer("head", 0, playground.HEADS - 1),
            r=r,
            axes=axes,
            causal=causal,
            alike=given.flag("alike"),
        )
        with self.turns.turn():
            return playground.look(choice)

    def predict(self, body: Body) -> dict[str, Any]:
        """Return the probability of each label."""
        trained, item = self._known, self._item(body, ("texts", "image"))
        assert isinstance(item, Unlabelled)
        with self.turns.turn():
            found = probabilities(trained, [item])[0].tolist()
        shares = dict(zip((printable(label, 60) for label in trained.labels), found, strict=True))
        return {"probabilities": shares, "cut": item.cut}

    def explain(self, body: Body) -> dict[str, Any]:
        """Return the attribution of the answer to the tokens, as ``permuteformer explain`` computes it."""
        trained, item = self._known, self._item(body, ("texts", "image"))
        with self.turns.turn():
            found = explain(trained, item, progress=self.turns.check)
        return {**found.to_json(), "message": in_words(found)}

    def generate(self, body: Body) -> Iterator[dict[str, Any]]:
        """Yield a text piece by piece. Other requests can run between its tokens."""
        given = _Fields(body, ("prompt", "tokens", "temperature", "seed"))
        prompt, tokens = given.text("prompt", LONGEST_PROMPT), given.integer("tokens", 1, MOST_TOKENS)
        temperature, seed = given.number("temperature", 0.0, 5.0), given.integer("seed", 0, 2**31 - 1)
        generation = generate(self._known, prompt, tokens, temperature=temperature, seed=seed)
        return self._pieces(generation)

    def _pieces(self, generation: Any) -> Iterator[dict[str, Any]]:
        begun = time.perf_counter()
        while True:
            with self.turns.turn():
                piece = next(generation, None)
            if piece is None:
                break
            yield {"text": piece}
        yield {"tokens": generation.tokens, "seconds": round(time.perf_counter() - begun, 3)}

    @property
    def _known(self) -> Trained:
        assert self.trained is not None  # without a model, no route leads here
        return self.trained

    def _item(self, body: Body, names: tuple[str, ...]) -> Unlabelled | str:
        given, trained = _Fields(body, names), self._known
        if ("texts" in body) == ("image" in body):
            raise Refused("the request needs either texts, a list of one or two, or image, a file as base64")
        if "image" in body:
            if trained.kind == "lm":
                raise Refused("image is not allowed: the model reads text")
            return item_of_image(trained, given.file("image"))
        texts = body["texts"]
        if not isinstance(texts, list) or not 1 <= len(texts) <= 2:
            raise Refused("texts must be a list of one or two texts")
        found = [_Fields({"texts": text}, ("texts",)).text("texts", LONGEST_TEXT) for text in texts]
        if trained.kind != "lm":
            return item_of_texts(trained, found)
        if len(found) != 1 or len(found[0]) > LONGEST_PROMPT:
            raise Refused(f"texts must be one text of at most {LONGEST_PROMPT:,} characters")
        return found[0]


class _Fields:
    """Fields of a request, checked for type and bounds."""

    def __init__(self, body: Body, known: tuple[str, ...]) -> None:
        for name in body:
            if name not in known:
                raise Refused(f"unknown field {printable(name, 40)!r}: the fields are {', '.join(known)}")
        self.body = body

    def _get(self, name: str) -> Any:
        if name not in self.body:
            raise Refused(f"{name} is missing")
        return self.body[name]

    def integer(self, name: str, least: int, most: int) -> int:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Refused(f"{name} must be an integer from {least:,} to {most:,}, got {_short(value)}")
        return value

    def number(self, name: str, least: float, most: float, others: str = "") -> float:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise Refused(f"{name} must be {others}a number from {least:g} to {most:g}, got {_short(value)}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise Refused(f"{name} must be true or false, got {_short(value)}")
        return value

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        value = self._get(name)
        if not isinstance(value, str) or value not in choices:
            raise Refused(f"{name} must be one of {', '.join(choices)}, got {_short(value)}")
        return value

    def text(self, name: str, longest: int) -> str:
        value = self._get(name)
        if not isinstance(value, str) or len(value) > longest:
            got = f"{len(value):,}" if isinstance(value, str) else _short(value)
            raise Refused(f"{name} must be a text of at most {longest:,} characters, got {got}")
        return value

    def file(self, name: str) -> bytes:
        value = self._get(name)
        try:
            return base64.b64decode(value, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise Refused(f"{name} must be a file as base64, got {_short(value)}") from None


def _short(value: Any) -> str:
    return printable(repr(value), 60)
