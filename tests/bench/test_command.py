"""`permuteformer bench`: from a sweep to ratios, tables, lines and figures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run

from permuteformer.bench import sweeps


def test_models_side_by_side(tmp_path):
    words = ("--tasks", "image", "--against", "performer,formula", "--turns", "1", "--threads", "1")
    first = run("bench", "latency", *words, "--output", tmp_path).strip().splitlines()[0]
    assert re.match(r"image.*: PermuteFormer is .* Performer", first)  # ratios come first
    lines = [json.loads(line) for line in (tmp_path / "latency.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == ["permuteformer", "performer", "formula"]
    for line in lines:
        assert (line["result"]["status"], line["result"]["threads"]) == ("finished", 1)
        assert line["command"].startswith("permuteformer")
        assert {"revision", "clean", "threads", "backend"} <= line["environment"].keys()
    assert (tmp_path / "bench-latency-image.svg").exists()


def test_by_length(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "CAUSAL", {**sweeps.CAUSAL, "heads": 1})
    words = ("--lengths", "16,32,64", "--against", "performer", "--turns", "1", "--threads", "1", "--output", tmp_path)
    shown = run("bench", "scaling", *words)
    assert re.search("model: PermuteFormer is .* Performer at 64", shown)
    assert "matrix product" not in shown
    assert {path.name for path in tmp_path.iterdir()} >= {"scaling.jsonl", "bench-scaling-model.svg", "bench-scaling-causal-attention.svg"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("opps", "'opps'.*'ops'"),
        ("ops --tasks text", "tasks.*ops"),
        ("ops --dtype float8", "'float8'"),
        ("ops --turns 0", "turns.*0"),
        ("latency --dtype bfloat16", "dtype.*latency"),
        ("train --tasks txt", "'txt'.*'text'"),
        ("train --against performr", "'performr'.*'performer'"),
        ("scaling --lengths 1", "lengths.*4.*1"),
    ],
)
def test_wrong_values_are_refused(words, message, tmp_path):
    assert re.search(message, run("bench", *words.split(), "--output", tmp_path, code=1))
    assert not list(tmp_path.iterdir())


def test_times_of_ops_can_be_taken():
    """The benchmarks of `make bench`, without timing."""
    file = Path(__file__).parents[2] / "benchmarks" / "test_ops.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-disable", str(file), "-k", "one or image"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=file.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
