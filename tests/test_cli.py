"""The command line from a table to a report, and what it says where something is wrong."""

import json
import re

import pytest
from typer.testing import CliRunner

from permuteformer.cli import app

TINY = ["--hidden-size", "16", "--num-hidden-layers", "1", "--num-attention-heads", "2", "--intermediate-size", "16"]
SHORT = [
    "--steps",
    "3",
    "--batch-size",
    "8",
    "--warmup-steps",
    "1",
    "--validation-items",
    "8",
    "--test-items",
    "8",
    "--track",
    "none",
    "--quiet",
]
COMMANDS = [
    *("train", "resume", "eval", "predict", "generate", "fields", "reproduce", "experiments", "report"),
    *("models", "inspect", "explain", "demo", "convert", "data", "info", "bench"),
]


def run(*words, code=0):
    """The output of a command, which must end with ``code``, on lines that are not broken."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_from_a_table_to_labels_and_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{'good' if n % 2 else 'bad'} film number {n},{'up' if n % 2 else 'down'}\n" for n in range(80))
    (tmp_path / "reviews.csv").write_text("text,label\n" + rows)
    run("train", "classify", "reviews.csv", "--output", "run", "--max-length", "32", *TINY, *SHORT)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "finished"
    assert "accuracy" in run("eval", "run")
    assert json.loads((tmp_path / "run" / "experiment.json").read_text())["task"]["labels"] == ["down", "up"]

    (tmp_path / "new.csv").write_text("text\na good film\na bad one\n")
    run("predict", "run", "new.csv", "--output", "labels.csv")
    lines = (tmp_path / "labels.csv").read_text().splitlines()
    assert lines[0] == "line,id,label,probability,p_down,p_up"
    assert len(lines) == 3

    assert "1 run" in run("report", "run", "--output", "page")
    assert "classify" in (tmp_path / "page" / "index.html").read_text()

    before = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    run("resume", "run")  # it is finished, and nothing happens
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == before
    output = run(
        "train", "classify", "reviews.csv", "--output", "run", "--max-length", "32", "--learning-rate", "1e-5", *TINY, *SHORT, code=1
    )
    assert "another experiment: learning_rate is 0.0005 there and 1e-05 here" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digit"], "unknown task 'digit'.*did you mean 'digits'"),
        (["train", "digits", "--model", "permutformer-image"], "unknown preset 'permutformer-image'.*did you mean 'permuteformer-image'"),
        (["train", "digits", "--learnin-rate", "1"], "unknown field 'learnin_rate'.*did you mean 'learning_rate'"),
        (["train", "digits", "--learning-rate", "nan"], "learning_rate must be a number above 0; it is nan"),
        (["train", "digits", "--hidden-size", "15"], "^hidden_size must be a multiple of num_heads"),
        (
            ["train", "digits", "some.csv"],
            "digits has data of its own, and takes no file; 'some.csv' is for one of classify, images, lm, match",
        ),
        (["train", "digits", "--track", "wandbb"], "wandb"),
        (["train", "lm-bytes", "--test-lengths", "256,long"], "test_lengths must be of type int; it is 'long'"),
        (["train", "classify"], "classify is of your own data: say where it is"),
        (["train", "classify", "nowhere.csv"], "nowhere.csv"),
        (["train", "lra-text"], "no data for lra-text.*permuteformer data fetch"),
        (["resume", "nowhere"], "nowhere is no run folder"),
        (["eval", "nowhere"], "nowhere"),
        (["predict", "nowhere", "nothing.csv"], "nowhere"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere"),
        (["report", "nowhere"], "nowhere is not there"),
        (["fields", "digit"], "unknown task 'digit'"),
        (["experiments", "--preset", "huge"], "unknown preset 'huge'"),
        (["reproduce", "--preset", "quck"], "unknown preset 'quck'.*did you mean 'quick'"),
        (["reproduce", "--table", "7"], "unknown table of preset 'quick': '7'"),
        (["reproduce", "--rows", "permuteformr"], "unknown row of these tables: 'permuteformr'"),
        (["reproduce", "--tasks", "digit"], "unknown task of these tables: 'digit'.*did you mean 'digits'"),
        (["reproduce", "--seeds", "0"], "seeds must be 1 or more; it is 0"),
        (["reproduce", "--preset", "small", "--table", "1", "--tasks", "text"], "no data for lra-text.*permuteformer data fetch"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run(*words, code=1)
    assert re.search(message, output, re.DOTALL), output
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("experiment.json"))


def test_too_large_a_model_is_said_in_a_sentence(tmp_path):
    sizes = ["--hidden-size", "8192", "--intermediate-size", "1048576"]  # a matrix of 32 GiB
    output = run("train", "digits", *sizes, "--output", str(tmp_path / "run"), code=1)
    assert re.search("allocate.*micro-batch-size", output), output


def test_a_run_folder_of_another_version_is_refused(tmp_path):
    (tmp_path / "experiment.json").write_text(json.dumps({"format": 7, "version": "9.0", "experiment": {}}))
    for command in (["resume"], ["eval"], ["report"]):
        assert re.search("format 7|9.0", run(*command, str(tmp_path), code=1))


def test_the_plan_of_quick_without_running_it(tmp_path):
    output = run("reproduce", "--dry-run", "--output", str(tmp_path / "runs"))
    assert "17 of 17 to run" in output
    assert "table4/lm/permuteformer-lm-seed0" in output
    assert not (tmp_path / "runs").exists()


def test_experiments_have_the_papers_numbers_and_the_command():
    output = run("experiments")
    assert "65.95±0.26" in output
    assert "permuteformer reproduce --preset paper --table 1" in output


def test_info_shows_backends_and_reasons(monkeypatch):
    found = run("info")
    assert all(f"backend {name}" in found for name in ("native", "cuda", "torch"))
    assert "not supported" in found
    assert "revision" in found
    monkeypatch.setattr("permuteformer.ops.linear.DEFAULT_BACKEND", "torch")
    assert "PERMUTEFORMER_BACKEND" in run("info")
    monkeypatch.setattr("permuteformer.ops.linear.DEFAULT_BACKEND", "fast")
    assert "'fast'" in run("info", code=1)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    output = run(command, "--help")
    assert "Usage:" in output
    assert len(output) > 300


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench ops --lengths 512", "lengths and limit-seconds are for scaling; ops has its own cases"),
        ("bench train --limit-seconds 3", "lengths and limit-seconds are for scaling"),
        ("bench scaling --dtype bfloat16", "dtype for ops; scaling has models of one task"),
        ("bench scaling --tasks image", "tasks are for train and latency"),
    ],
)
def test_options_of_other_sweeps_are_refused(words, said):
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
