"""Memory, file descriptors and threads do not grow with training steps or generated tokens."""

import functools
import itertools
import json
import os
import statistics
from pathlib import Path

import pytest
from processes import DIGITS, UPDATE, Command, at_call, scratch
from soak.scale import sizes
from train.runs import tiny, words

LOOKS = 120
MAX_GROWTH = 4
"""MiB by which a straight line through the resident memory may rise over the last two thirds of a run."""
READ = "permuteformer.train.generate.Generation._read"

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="memory is read from /proc")


@functools.cache
def language_model():
    """Return the folder of a trained language model."""
    Command(*words(tiny("lm", steps=20)), "--output", scratch() / "language-model").end()
    return scratch() / "language-model"


@pytest.mark.parametrize("number", sizes(20_000, short=LOOKS))
def test_training_steps(number, tmp_path, counts):
    options = ["--steps", number, "--evaluate-every", number // 20, "--learning-rate", 1e-4, "--output", tmp_path / "run"]
    Command(*DIGITS[:-4], *options, before=functools.partial(look_at_calls, UPDATE, number, tmp_path / "looks")).end(seconds=7200)
    assert_flat(tmp_path / "looks", counts)


@pytest.mark.parametrize("number", sizes(100_000, short=LOOKS))
def test_tokens_of_one_text(number, tmp_path, counts):
    options = ["--max-new-tokens", number, "--output", tmp_path / "text"]
    before = functools.partial(look_at_calls, READ, number, tmp_path / "looks")
    Command("generate", language_model(), *options, before=before).end(seconds=7200)
    assert_flat(tmp_path / "looks", counts)


def look_at_calls(name, number, path, rank):
    """Look at this process at the calls of a function, of which there will be ``number``."""
    calls = itertools.count(1)
    at_call(name, None, lambda: look(path, next(calls), number))


def look(path, done, number):
    """Append the memory, file descriptors and threads of this process to a file, ``LOOKS`` times in all."""
    if done % (number // LOOKS) == 0:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found = {"done": done, "MiB": int(status["VmRSS"].split()[0]) / 1024, "threads": int(status["Threads"])}
        with open(path, "a") as file:
            file.write(json.dumps({**found, "files": len(os.listdir("/proc/self/fd"))}) + "\n")


def assert_flat(path, counts):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    later = found[len(found) // 3 :]
    slope, _ = statistics.linear_regression([one["done"] for one in later], [one["MiB"] for one in later])
    growth = slope * (later[-1]["done"] - later[0]["done"])
    counts.update(later[-1], growth=round(growth, 2))
    assert len(found) >= LOOKS
    assert growth < MAX_GROWTH
    assert later[-1]["files"] <= later[0]["files"]
    assert later[-1]["threads"] <= later[0]["threads"]
