"""What the page may ask, and what it is answered: plain data in, plain data out, and a sentence for what is wrong."""

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
"""Characters."""
LONGEST_PROMPT = 4_000
MOST_TOKENS = 2_000
MOST_FEATURES = 128

Body = Mapping[str, Any]


class Refused(ValueError):
    """What was asked cannot be answered; the sentence says why."""


class Answers:
    """Answers about positions, and about one trained model if there is one."""

    def __init__(self, trained: Trained | None, turns: Turns | None = None) -> None:
        self.trained, self.turns = trained, turns or Turns()
        self.routes: dict[str, Callable[[Body], Any]] = {"/api/positions": self.positions}
        if trained is not None and trained.kind == "lm":
            self.routes |= {"/api/explain": self.explain, "/api/generate": self.generate}
        elif trained is not None:
            self.routes |= {"/api/explain": self.explain, "/api/predict": self.predict}

    def about(self) -> dict[str, Any]:
        """What there is to play with."""
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
        """One head: see ``playground.look``."""
        given = _Fields(body, ("features", "permutation", "seed", "head", "r", "axes", "alike"))
        axes = given.whole("axes", 1, 2)
        r = body.get("r")
        if r != playground.PAPER and r is not None:
            r = given.number("r", 1e-6, 1.0)
        if axes == 2 and r is not None:
            raise Refused("r must be left out where there are two axes: it counts tokens of a text, and the paper has it there only")
        choice = playground.Choice(
            features=given.whole("features", 2 * axes, MOST_FEATURES),
            permutation=given.one_of("permutation", playground.KINDS),
            seed=given.whole("seed", 0, 2**31 - 1),
            head=given.whole("head", 0, playground.HEADS - 1),
            r=r,
            axes=axes,
            alike=given.flag("alike"),
        )
        with self.turns.turn():
            return playground.look(choice)

    def predict(self, body: Body) -> dict[str, Any]:
        """The labels' probabilities."""
        trained, item = self._known, self._item(body, ("texts", "image"))
        assert isinstance(item, Unlabelled)
        with self.turns.turn():
            found = probabilities(trained, [item])[0].tolist()
        shares = dict(zip((printable(label, 60) for label in trained.labels), found, strict=True))
        return {"probabilities": shares, "cut": item.cut}

    def explain(self, body: Body) -> dict[str, Any]:
        """What the answer came from, as ``permuteformer explain`` has it."""
        trained, item = self._known, self._item(body, ("texts", "image"))
        with self.turns.turn():
            found = explain(trained, item, progress=self.turns.check)
        return {**found.to_json(), "told": in_words(found)}

    def generate(self, body: Body) -> Iterator[dict[str, Any]]:
        """A text as it comes; others have their turns between its tokens."""
        given = _Fields(body, ("prompt", "tokens", "temperature", "seed"))
        prompt, tokens = given.text("prompt", LONGEST_PROMPT), given.whole("tokens", 1, MOST_TOKENS)
        temperature, seed = given.number("temperature", 0.0, 5.0), given.whole("seed", 0, 2**31 - 1)
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
        assert self.trained is not None  # else there is no such path
        return self.trained

    def _item(self, body: Body, names: tuple[str, ...]) -> Unlabelled | str:
        given, trained = _Fields(body, names), self._known
        if ("texts" in body) == ("image" in body):
            raise Refused("give texts, a list of one or two, or image, a file as base64: one of them")
        if "image" in body:
            if trained.kind == "lm":
                raise Refused("image must be left out: the model reads a text")
            return item_of_image(trained, given.file("image"))
        texts = body["texts"]
        if not isinstance(texts, list) or not 1 <= len(texts) <= 2:
            raise Refused("texts must be a list of one text, or of two")
        found = [_Fields({"texts": text}, ("texts",)).text("texts", LONGEST_TEXT) for text in texts]
        if trained.kind != "lm":
            return item_of_texts(trained, found)
        if len(found) != 1 or len(found[0]) > LONGEST_PROMPT:
            raise Refused(f"texts must be one text of at most {LONGEST_PROMPT:,} characters")
        return found[0]


class _Fields:
    """Fields of a request, each of the kind and in the bounds that it must have."""

    def __init__(self, body: Body, known: tuple[str, ...]) -> None:
        for name in body:
            if name not in known:
                raise Refused(f"unknown field {printable(name, 40)!r}; there is {', '.join(known)}")
        self.body = body

    def _get(self, name: str) -> Any:
        if name not in self.body:
            raise Refused(f"{name} is missing")
        return self.body[name]

    def whole(self, name: str, least: int, most: int) -> int:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Refused(f"{name} must be a whole number from {least:,} to {most:,}; it is {_short(value)}")
        return value

    def number(self, name: str, least: float, most: float) -> float:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise Refused(f"{name} must be a number from {least:g} to {most:g}; it is {_short(value)}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise Refused(f"{name} must be true or false; it is {_short(value)}")
        return value

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        value = self._get(name)
        if not isinstance(value, str) or value not in choices:
            raise Refused(f"{name} must be one of {', '.join(choices)}; it is {_short(value)}")
        return value

    def text(self, name: str, longest: int) -> str:
        value = self._get(name)
        if not isinstance(value, str) or len(value) > longest:
            told = f"a text of {len(value):,}" if isinstance(value, str) else _short(value)
            raise Refused(f"{name} must be a text of at most {longest:,} characters; it is {told}")
        return value

    def file(self, name: str) -> bytes:
        value = self._get(name)
        try:
            return base64.b64decode(value, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise Refused(f"{name} must be a file as base64; it is {_short(value)}") from None


def _short(value: Any) -> str:
    return printable(repr(value), 60)
