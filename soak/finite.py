"""NaN or Inf in a weight, an input, a gradient or the state of Adam is found and named, and nothing of it is kept or trained on.

Tokens are whole numbers, so that inputs are spoiled where they become vectors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from permuteformer.experiments.base import Experiment
from permuteformer.train.checkpoint import load, steps
from permuteformer.train.finite import NotFinite
from permuteformer.train.loop import How, train
from permuteformer.train.update import Updater
from soak.processes import SHARED, TINY, prepared
from soak.scale import share

VALUES = (math.nan, math.inf, -math.inf)
SPOILED = 4
"""The step at which it happens; the checkpoint before is of step 2."""

Spoil = Callable[[Updater, str, float, random.Random], None]


def run(scale: float, folder: Path, seed: int) -> Iterator[dict[str, object]]:
    """A line a place and value."""
    prepared()
    os.environ |= SHARED
    rng = random.Random(seed)
    experiment = Experiment(
        task="digits", model="permuteformer-image", model_fields=TINY, steps=6, evaluate_every=2, batch_size=8, train_items=40,
        validation_items=20, test_items=20,
    )  # fmt: skip
    names = _names(experiment, folder / "whole")
    cases = [(kind, name, value) for kind in ("weight", "gradient", "adam") for name in names for value in VALUES]
    cases += [("input", "model.embed_tokens", value) for value in VALUES]
    rng.shuffle(cases)
    for kind, name, value in share(cases, scale):
        yield _case(experiment, folder / "run", kind, name, value, rng)
        shutil.rmtree(folder / "run")


def _names(experiment: Experiment, folder: Path) -> list[str]:
    """The parameters of the model, and a run that is well."""
    names: list[str] = []
    with _before_update(SPOILED, lambda updater: names.extend(name for name, _ in updater.bare.named_parameters())):
        assert train(experiment, folder, How(quiet=True, track=()))["status"] == "finished"
    return names


def _case(experiment: Experiment, folder: Path, kind: str, name: str, value: float, rng: random.Random) -> dict[str, object]:
    message = ""
    with _before_update(SPOILED, lambda updater: SPOILS[kind](updater, name, value, rng)):
        try:
            train(experiment, folder, How(quiet=True, track=()))
        except NotFinite as error:
            message = str(error)
    kept = [load(folder / "checkpoints", step) for step in steps(folder / "checkpoints")]
    finite = all(bool(torch.isfinite(t).all()) for one in kept for group in one.tensors.values() for t in group.values())
    result = json.loads((folder / "result.json").read_text())
    module = name.rpartition(".")[0]
    named = name in message or f"it began in {module}" in message or f"it began in {name}" in message
    ok = named and finite and [one.step for one in kept] == [2] and result["status"] == "not finite" and not (folder / "model").exists()
    what = f"{value} in {'the ' + kind if kind != 'adam' else 'the state of Adam'} of {name}"
    return {"what": what, "ok": ok, "kind": kind, "named": named, "message": message.partition("; item")[0][:200]}


@contextlib.contextmanager
def _before_update(step: int, change: Callable[[Updater], None]) -> Iterator[None]:
    update = Updater.__call__

    def changed(self: Updater, share: Any, number: int, *rest: Any, **named: Any) -> Any:
        if number == step:
            change(self)
        return update(self, share, number, *rest, **named)

    Updater.__call__ = changed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Updater.__call__ = update  # type: ignore[method-assign]


def _weight(updater: Updater, name: str, value: float, rng: random.Random) -> None:
    weight = updater.bare.get_parameter(name).data.view(-1)
    weight[rng.randrange(len(weight))] = value


def _gradient(updater: Updater, name: str, value: float, rng: random.Random) -> None:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()
        changed.view(-1)[rng.randrange(changed.numel())] = value
        return changed

    updater.bare.get_parameter(name).register_hook(spoil)


def _adam(updater: Updater, name: str, value: float, rng: random.Random) -> None:
    moments = updater.optimizer.state[updater.bare.get_parameter(name)][rng.choice(("exp_avg", "exp_avg_sq"))].view(-1)
    moments[rng.randrange(len(moments))] = value


def _input(updater: Updater, name: str, value: float, rng: random.Random) -> None:
    def spoil(module: torch.nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
        changed = out.clone()
        changed[rng.randrange(len(out)), rng.randrange(out.shape[1]), rng.randrange(out.shape[2])] = value
        return changed

    updater.bare.get_submodule(name).register_forward_hook(spoil)


SPOILS: dict[str, Spoil] = {"weight": _weight, "gradient": _gradient, "adam": _adam, "input": _input}
