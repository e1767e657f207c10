"""A damaged checkpoint is noticed and the one before it is used; a number that is not finite is found, named and never saved."""

import functools
import json
import math
import random
import shutil
import signal

import pytest
import torch
from processes import DIGITS, EVERY_STEP, UPDATE, Command, shared, signal_at, steps
from soak.scale import SEED, sizes
from train import runs

from permuteformer.train.build import build_config, build_model, build_task
from permuteformer.train.checkpoint import load, load_latest
from permuteformer.train.failures import NotFinite
from permuteformer.train.loop import train
from permuteformer.train.step import Updater

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "checksums.json")


@pytest.fixture(scope="session")
def killed(tmp_path_factory):
    """A run that was killed at step 11."""
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    before = functools.partial(signal_at, name=UPDATE, number=11)
    assert Command(*DIGITS, *EVERY_STEP, "--output", folder, before=before).wait() == [-signal.SIGKILL]
    assert {path.name for path in folder.glob("checkpoints/step-000000010/*")} == set(FILES)
    return folder


def damages(content, flips):
    """Yield damaged contents of a file: shorter, one bit flipped, longer, and ``None`` for a file that is removed."""
    rng = random.Random(SEED)
    yield from (content[: len(content) * tenth // 10] for tenth in range(10))
    for bit in rng.sample(range(8 * len(content)), flips):
        yield content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]
    yield from (content[:-1], content + b"\0", None)


@pytest.mark.parametrize("flips", sizes(200, short=10))
@pytest.mark.parametrize("name", FILES)
def test_every_damage_is_noticed_and_the_checkpoint_before_is_used(name, flips, killed, tmp_path, counts):
    folder = tmp_path / "checkpoints"
    shutil.copytree(killed / "checkpoints", folder)
    file, before = folder / "step-000000010" / name, load(folder, 9).tensors
    assert load_latest(folder)[0].step == 10
    for content in damages(file.read_bytes(), flips):
        file.unlink() if content is None else file.write_bytes(content)
        found, problems = load_latest(folder)
        assert ["step-000000010" in problem for problem in problems] == [True]
        assert found.step == 9
        assert all(torch.equal(x, before[group][key]) for group, tensors in found.tensors.items() for key, x in tensors.items())
        counts["damaged files"] = counts.get("damaged files", 0) + 1


@pytest.mark.parametrize("share", [0.02, pytest.param(1.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", runs.SPOILS)
def test_a_number_that_is_not_finite_is_named_and_never_saved(kind, share, tmp_path, monkeypatch, counts):
    for name, value in shared().items():
        monkeypatch.setenv(name, value)
    experiment, task = runs.tiny(steps=6, evaluate_every=2), build_task("digits", {})
    model = build_model(build_config(experiment.model, experiment.model_fields, task.input), task.input.kind)
    names = ["model.embed_tokens"] if kind in ("input", "loss") else [name for name, _ in model.named_parameters()]
    chosen = [(name, value) for name in names for value in (math.nan, math.inf, -math.inf)]
    for name, value in random.Random(SEED).sample(chosen, math.ceil(share * len(chosen))):
        run = tmp_path / "run"
        with monkeypatch.context() as patched:
            patched.setattr(Updater, "update", Updater.update)  # so that it is restored
            runs.spoil(0, kind, name, value, step=4)
            with pytest.raises(NotFinite) as error:
                train(experiment, run, runs.QUIET)
        assert kind == "loss" or name in str(error.value) or name.rpartition(".")[0] in str(error.value)
        assert steps(run) == [2]
        assert all(x.isfinite().all() for tensors in load(run / "checkpoints", 2).tensors.values() for x in tensors.values())
        assert json.loads((run / "result.json").read_text())["status"] == "not finite"
        assert not (run / "model").exists()
        shutil.rmtree(run)
        counts["found and named"] = counts.get("found and named", 0) + 1
