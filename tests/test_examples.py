"""The examples and the notebook run and show what they claim.

``python tests/test_examples.py [NAME …]`` runs the examples on one core and writes their output and time to ``results/examples``.
"""

import json
import os
import re
import resource
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import run_notebook

from permuteformer.machine import environment

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "examples"
NAMES = ("layer", "swap_attention", "finetune_csv", "streaming", "image_2d", "sequence_parallel")
TOUR = ROOT / "examples" / "tour.ipynb"


@pytest.fixture
def example(tmp_path):
    """Runs an example from a folder that has nothing to do with it; gives what it printed."""

    def run_there(name, *arguments):
        return run(name, *arguments, folder=tmp_path)

    return run_there


@pytest.fixture
def example_here(monkeypatch, capsys, tmp_path):
    """Runs an example in this process, which has imported most of what it needs; returns its exit code and output."""

    def run_here(name, *arguments):
        path = ROOT / "examples" / f"{name}.py"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        code = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        assert not list(tmp_path.iterdir())
        return code, "".join(capsys.readouterr())

    return run_here


def run(name, *arguments, folder):
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def percentages(printed):
    return [float(number) for number in re.findall(r"([\d.]+) % right", printed)]


def test_recall_trains_prints_and_plots(example, tmp_path):
    printed = example("recall", "--steps", "60", "--output", "out")
    record = json.loads((tmp_path / "out" / "recall.json").read_text())
    accuracy = {name: result["accuracy"] for name, result in record["results"].items()}
    assert min(accuracy["PermuteFormer"]) > 0.9, "a minute's task is not learned"
    assert max(accuracy["Performer"]) < 0.5
    assert (tmp_path / "out" / "recall.png").stat().st_size > 10_000
    assert "PermuteFormer" in printed


def test_the_layer_learns_a_distance_and_performer_does_not(example_here):
    _, printed = example_here("layer", "--steps", "100")
    ours, ours_longer, performer, performer_longer = percentages(printed)
    assert min(ours, ours_longer) > 95
    assert max(performer, performer_longer) < 60
    assert float(re.search(r"logits differ by (\S+) at most", printed)[1]) < 1e-4


def test_swapped_attention_keeps_weights_and_mask(example_here):
    _, printed = example_here("swap_attention", "--steps", "100")
    softmax, swapped, trained = percentages(printed)
    assert softmax > 80, "the BERT itself has learned nothing"
    assert swapped < softmax, "another attention computes something else"
    assert trained > swapped
    assert float(re.search(r"padded to 48: logits differ by (\S+)", printed)[1]) < 1e-5
    ratios = [float(ratio) for ratio in re.findall(r"takes ([\d.]+) times", printed)]
    assert ratios[-1] > ratios[0], "softmax attention is quadratic, linear attention is not"


def test_fine_tuning_is_better_than_beginning_anew(example, tmp_path):
    topics, _, tuned, new = percentages(example("finetune_csv", "--output", "out"))
    assert topics > 60
    assert tuned > 95
    assert tuned > new + 5
    assert (tmp_path / "out" / "pretrained" / "model.safetensors").exists()


def test_two_processes_write_what_one_does(example, tmp_path):
    printed = example("streaming", "--steps", "20", "--output", "out")
    assert "from out/state.safetensors: the same" in printed
    text = (tmp_path / "out" / "text.bin").read_bytes()
    assert len(text) == 200
    assert printed.startswith(text.decode(errors="replace"))
    assert len(set(text)) > 8, "the same byte again and again would be the same from any state"
    small, large = re.findall(r"tokens: ([\d,]+) bytes", printed)
    assert small == large
    assert int(small.replace(",", "")) > 1000


def test_two_axes_carry_to_larger_images(example_here):
    two, two_larger, _, one_larger = percentages(example_here("image_2d")[1])
    assert min(two, two_larger) > 95
    assert one_larger < 75


def test_two_processes_have_the_gradients_of_one(example):
    printed = example("sequence_parallel")
    losses = re.findall(r"loss ([\d.]+) on two processes, ([\d.]+) on one; gradients differ by (\S+) at most", printed)
    assert len(losses) == 2
    for together, alone, apart in losses:
        assert float(together) == pytest.approx(float(alone), abs=1e-10)
        assert float(apart) < 1e-12
    short, long = re.findall(r"bytes sent: (.*)", printed)
    assert short == long, "what is sent depends on the length"
    assert int(short.split(", ")[0].replace(",", "")) > 1000


@pytest.mark.parametrize("name", ["layer", "swap_attention", "streaming", "image_2d", "recall"])
def test_no_steps_are_refused(name, example_here):
    code, output = example_here(name, "--steps", "0")
    assert code == 2
    assert re.search(r"--steps must be at least \d; it is 0", output)


def is_alike(text, known):
    """Whether they say the same, with numbers that are nearly the same: another processor rounds otherwise, and a training feels it."""
    number = re.compile(r"\d[\d,]*\.?\d*(?:e-?\d+)?")
    found, wanted = ([float(each.replace(",", "")) for each in number.findall(x)] for x in (text, known))
    return number.sub("#", text) == number.sub("#", known) and found == pytest.approx(wanted, rel=0.03)


def test_texts_that_are_not_alike():
    assert is_alike("1,024 tokens: 99% right, 5.1e-06 off", "1,024 tokens: 100% right, 5.2e-06 off")
    assert not is_alike("1,024 tokens: 90% right", "1,024 tokens: 100% right")
    assert not is_alike("1,024 tokens: 100% left", "1,024 tokens: 100% right")


def test_the_notebook_gives_what_stands_in_it(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "run_notebook.py"), str(TOUR), "--print"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    shown = 0
    for cell, outputs in zip(cells, json.loads(done.stdout), strict=True):
        there = cell.get("outputs", [])
        for text, known in zip(run_notebook.texts(outputs), run_notebook.texts(there), strict=True):
            assert is_alike(text, known), f"run: python tests/run_notebook.py examples/tour.ipynb; {text!r} is not {known!r}"
        assert len(run_notebook.pictures(outputs)) == len(run_notebook.pictures(there))
        assert all(picture.startswith(b"\x89PNG") for picture in run_notebook.pictures(there))
        shown += len(there)
    assert shown >= 8
    assert TOUR.stat().st_size < 100_000


def measure(names):
    """Run examples as they stand; note what they print, and the seconds that processors were at it, those of their processes too."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = RESULTS / "seconds.jsonl"
    rows = {row["example"]: row for row in map(json.loads, record.read_text().splitlines() if record.exists() else ())}
    for name in names:
        with TemporaryDirectory() as folder:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            (RESULTS / f"{name}.txt").write_text(run(name, folder=folder))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows[name] = {"example": name, "cpu_seconds": round(seconds, 1), "environment": {**environment(), "threads": 1}}
    record.write_text("".join(json.dumps(rows[name]) + "\n" for name in NAMES if name in rows))


if __name__ == "__main__":
    measure(sys.argv[1:] or NAMES)
