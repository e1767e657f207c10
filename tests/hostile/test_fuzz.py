"""The short form of the soak's fuzzing: a few inputs of every target, in one process, with the same limits; and the judge can tell."""

import contextlib
import json
import subprocess
import sys
from random import Random

import pytest
from soak.fuzz import surroundings
from soak.fuzzing.judge import Wrong, judged
from soak.fuzzing.mutation import changed_bytes, changed_data, changed_json
from soak.fuzzing.shard import TOLD, targets

INPUTS = 25


def test_a_few_inputs_of_every_target(tmp_path):
    names = list(targets())
    assert len(names) >= 19
    command = [sys.executable, "-m", "soak.fuzzing.shard", ",".join(names), "1", "0", str(INPUTS), "1", str(tmp_path / "place")]
    done = subprocess.run(command, env=surroundings(tmp_path / "place"), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in (tmp_path / "place" / TOLD).read_text().splitlines()]
    assert [line["what"] for line in told] == names
    for line in told:
        assert line["inputs"] == INPUTS
        assert not line["findings"], line


class Does:
    def __init__(self, action):
        self.attempt = action


def raising(error):
    def attempt(random):
        raise error

    return attempt


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (ValueError("a must be b; it is c"), None),
        (FileNotFoundError("there is no a"), None),
        (ValueError(""), "it says nothing"),
        (ValueError("red \x1b[31m"), "it cannot be printed"),
        (ValueError("x" * 5000), "5000 characters"),
        (KeyError("a"), "not an error of ours"),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "b"), "not an error of ours"),
        (json.JSONDecodeError("a", "b", 0), "not an error of ours"),
        (RecursionError("a"), "not an error of ours"),
        (MemoryError("a"), "not an error of ours"),
        (Wrong("a"), "not an error of ours"),
    ],
)
def test_the_judge_tells_a_refusal_from_a_fault(error, wrong):
    taken, finding = judged(Does(raising(error)), Random(0), [])
    assert not taken
    assert (finding and finding["why"]) == wrong


def test_the_judge_finds_what_hangs_and_what_reaches_out(monkeypatch):
    monkeypatch.setattr("soak.fuzzing.judge.SECONDS", 0.2)

    def forever(random):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    assert judged(Does(forever), Random(0), [])[1]["error"].startswith("Slow")
    effects = ["os.system ('ls',)"]
    assert judged(Does(lambda random: True), Random(0), effects)[1]["why"] == "an effect that no input may have"
    assert not effects
    assert judged(Does(lambda random: True), Random(0), []) == (True, None)


def test_a_process_that_reaches_out_is_stopped(tmp_path):
    script = (
        "import os, pickle, sys; from pathlib import Path; from soak.fuzzing.judge import watch\n"
        "effects = watch(Path(sys.argv[1]))\n"
        "open(Path(sys.argv[1]) / 'inside', 'w').close()\n"
        "for act in (lambda: open(sys.argv[2], 'w'), lambda: os.system('true'), lambda: os.mkdir(sys.argv[2]), "
        "lambda: pickle.loads(b'cos\\nsystem\\n.')):\n"
        "    try:\n        act()\n    except PermissionError:\n        pass\n"
        "print(len(effects))"
    )
    (tmp_path / "in").mkdir()
    command = [sys.executable, "-c", script, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, env=surroundings(tmp_path / "in"), capture_output=True, text=True)
    assert (done.stdout, (tmp_path / "out").exists()) == ("4\n", False), done.stderr


def test_changes_follow_from_the_seed_and_change():
    data, content = bytes(range(256)), {"a": [1, {"b": "c"}], "d": None}
    assert changed_bytes(Random(3), data) == changed_bytes(Random(3), data)
    assert len({changed_bytes(Random(n), data) for n in range(200)}) > 180
    assert len({changed_json(Random(n), content) for n in range(200)}) > 120
    for n in range(300):
        changed_data(Random(n), content)
    assert content == {"a": [1, {"b": "c"}], "d": None}
