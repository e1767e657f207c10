"""`permuteformer bench`: from a sweep to a table, lines and figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from permuteformer.bench import sweeps
from permuteformer.cli import app


def run(*words, code=0):
    result = CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_models_side_by_side(tmp_path):
    words = ("--tasks", "image", "--against", "performer,formula", "--turns", "1", "--threads", "1")
    shown = run("latency", *words, "--output", str(tmp_path))
    assert "formula, eager" in shown
    assert "permuteformer against performer" in shown
    lines = [json.loads(line) for line in (tmp_path / "latency.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == ["permuteformer", "performer", "formula"]
    assert all(line["result"]["status"] == "finished" and line["result"]["threads"] == 1 for line in lines)
    assert lines[0]["command"].startswith("permuteformer")
    assert (tmp_path / "bench-latency-image.png").stat().st_size > 1000
    assert (tmp_path / "bench-latency-image.svg").exists()


def test_by_length(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "CAUSAL", {**sweeps.CAUSAL, "heads": 1})
    words = ("--lengths", "16,32,64", "--against", "performer", "--turns", "1", "--threads", "1", "--output", str(tmp_path))
    shown = run("scaling", *words)
    assert "power of the length" in shown
    assert "matrix product" not in shown
    assert {path.name for path in tmp_path.iterdir()} >= {"scaling.jsonl", "bench-scaling-model.png", "bench-scaling-causal-attention.svg"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("opps",), "unknown sweep 'opps'"),
        (("ops", "--tasks", "text"), "tasks and against are for train, latency and scaling"),
        (("ops", "--dtype", "float8"), "unknown dtype 'float8'"),
        (("latency", "--dtype", "bfloat16"), "dtype is for ops"),
        (("train", "--tasks", "txt"), "unknown task 'txt'"),
        (("train", "--against", "performr"), "did you mean 'performer'"),
        (("scaling", "--lengths", "many"), "lengths must be whole numbers"),
        (("scaling", "--lengths", "1"), "lengths must be 4 or more"),
    ],
)
def test_wrong_words(words, message, tmp_path):
    assert message in run(*words, "--output", str(tmp_path), code=1)
    assert not list(tmp_path.iterdir())


def test_times_of_ops_can_be_taken():
    """What `make bench` runs, without its times."""
    file = Path(__file__).parents[2] / "benchmarks" / "test_ops.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-disable", str(file), "-k", "one or image"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=file.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
