import json
import subprocess
import sys

import pytest


@pytest.fixture
def examples(request):
    return request.config.rootpath / "examples"


def test_recall_trains_prints_and_plots(examples, tmp_path):
    command = [sys.executable, str(examples / "recall.py"), "--steps", "60", "--output", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads((tmp_path / "out" / "recall.json").read_text())
    accuracy = {name: result["accuracy"] for name, result in record["results"].items()}
    assert min(accuracy["PermuteFormer"]) > 0.9, "a minute's task is not learned"
    assert max(accuracy["Performer"]) < 0.5
    assert (tmp_path / "out" / "recall.png").stat().st_size > 10_000
    assert "PermuteFormer" in run.stdout
    assert "UserWarning" not in run.stderr


def test_recall_refuses_no_steps(examples):
    run = subprocess.run([sys.executable, str(examples / "recall.py"), "--steps", "0"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "--steps must be at least 1; it is 0" in run.stderr
