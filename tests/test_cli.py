"""The command line: its options and their defaults, where each goes, errors in one line, and training from a table to a report."""

import dataclasses
import json
import re
from unittest.mock import patch

import pytest
from commands import refused, run

from permuteformer.cli import COMMANDS
from permuteformer.cli.options import FLAT_TASK_OPTIONS, parse
from permuteformer.cli.train import train
from permuteformer.experiments import Experiment
from permuteformer.models import PRESETS, PermuteFormerConfig
from permuteformer.tasks import TASKS

TINY = "--model.hidden-size 16 --model.num-hidden-layers 1 --model.num-attention-heads 2 --model.intermediate-size 16".split()
SHORT = "--steps 3 --batch-size 8 --warmup-steps 1 --validation-items 8 --test-items 8 --track none --quiet".split()
OWN = [name for name in TASKS if "path" in TASKS.options(name)]
"""Tasks on a user's own files."""


def options(*words):
    """Return the options that the help of a command lists, with the text of each, by heading."""
    found, heading, flag = {}, "", ""
    for line in run(*words, "--help").splitlines():
        if title := re.fullmatch(r"(\S.*):", line):
            heading = title[1].partition(" (")[0]
        elif match := re.match(r"  (?:-h, )?(--[\w.-]+)(?:, --\S+)?(.*)", line):
            flag = match[1]
            found.setdefault(heading, {})[flag] = " ".join(match[2].split())
        elif flag and line.startswith("   "):
            found[heading][flag] += f" {line.strip()}"
    return found


def flags(names, prefix=""):
    return {f"--{prefix}{name}".replace("_", "-") for name in names}


@pytest.mark.parametrize("task", list(TASKS))
def test_help_of_train_lists_every_option_with_its_default(task):
    help = options("train", task)
    fields = {field.name for field in dataclasses.fields(Experiment)} - {"task", "model", "task_options", "model_fields"}
    assert set(help["training"]) == flags(fields)
    own = set(TASKS.options(task)) - {"data", "path"}
    assert set(help["task"]) == flags(own & set(FLAT_TASK_OPTIONS)) | flags(own - set(FLAT_TASK_OPTIONS), "task.")
    decided_by_the_task = {"vocab_size", "causal", "pad_token_id", "bos_token_id", "eos_token_id"}
    settable = {name for name in PermuteFormerConfig.__annotations__ if name != "model_type"} - decided_by_the_task
    assert set(help["model"]) <= flags(settable, "model.")
    assert flags(("hidden_size", "num_attention_heads", "attention", "position", "axes", "pooling"), "model.") < set(help["model"])
    for group in help.values():
        for flag, text in group.items():
            takes_a_value = re.match(r"[A-Z]+,?…?\b", text)
            assert "default" in text.lower() or not takes_a_value, (flag, text)
            assert len(text.split()) > 2, (flag, text)
    recipe = TASKS[task].recipe
    preset = {**PRESETS[f"permuteformer-{recipe.preset}"], **recipe.model}
    assert f"(default: {recipe.settings['batch_size']})" in help["training"]["--batch-size"]
    assert f"(default: {preset['hidden_size']})" in help["model"]["--model.hidden-size"]
    assert "(default: 0)" in help["training"]["--seed"]


def test_train_data_and_predict_use_the_same_words():
    trained = {flag for task in OWN for flag in options("train", task)["task"] if not flag.startswith("--task.")}
    assert trained == flags(FLAT_TASK_OPTIONS)
    assert options("data", "check", "classify")["task"] == options("train", "classify")["task"]
    assert options("data", "show", "match")["task"] == options("train", "match")["task"]
    predict = set(options("predict")["options"])
    assert predict & (trained | {"--label"}) == trained - {"--label"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    output = run(*command.split(), "--help")
    assert output.startswith(f"usage: permuteformer {command}")
    assert len(output) > 200


def test_help_lists_the_commands():
    shown = run("--help")
    assert all(f"  {command} " in shown for command in COMMANDS)
    assert "run-cell" not in shown
    assert run(code=2) == shown
    assert "data fetch" in run("data", code=2)
    assert all(task in run("train", "--help") for task in TASKS)


def experiment(*words):
    """Return the experiment that a command line of train describes."""
    with patch("permuteformer.cli.train._run") as started:
        train(**parse(train, "train", list(words)))
    return started.call_args.args[0]


def test_options_reach_training_task_and_model(tmp_path):
    """Also where training and task have options of the same name."""
    table = tmp_path / "table.csv"
    table.write_text("review,label\n" + "".join(f"words {n},{n % 2}\n" for n in range(40)))
    words = "--seed 4 --task.seed 9 --text review --learning-rate 1e-4 --epochs 3 --model.hidden-size=32"
    made = experiment("classify", str(table), *words.split())
    assert (made.seed, made.learning_rate, made.epochs, made.steps) == (4, 1e-4, 3, None)
    assert made.task_options == {"path": str(table), "seed": 9, "text": "review"}
    assert made.model_fields == {**TASKS["classify"].recipe.model, "hidden_size": 32}


def test_steps_replace_the_epochs_of_the_recipe():
    made = experiment("digits", "--steps", "7")
    assert (made.steps, made.epochs) == (7, None)


def test_flags_none_lists_and_json():
    made = experiment(
        *"digits --no-by-length --model.scale-embeddings --gradient-clip none --adam-epsilon 1e-6".split(),
        *("--test-lengths", "512,1024", "--test-lengths", "2048", "--model.pooling", "mean"),
        *("--model.attention", '{"name": "softmax"}', "--model.position", '[{"name": "rope"}]'),
    )
    assert (made.by_length, made.gradient_clip, made.adam_epsilon, made.test_lengths) == (False, None, 1e-6, (512, 1024, 2048))
    fields = {"scale_embeddings": True, "pooling": "mean", "attention": {"name": "softmax"}, "position": [{"name": "rope"}]}
    assert made.model_fields == {**TASKS["digits"].recipe.model, **fields}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train digits --lr 1", "--lr: .*--learning-rate"),
        ("train digits --learnin-rate 1", "--learnin-rate: .*--learning-rate"),
        ("train digits --learning_rate=1", "--learning_rate: .*--learning-rate"),
        ("train digits --hidden-size 8", "--hidden-size: .*--model.hidden-size"),
        ("train lra-text --max-length 8", "--max-length: .*--task.max-length"),
        ("train lra-text --task.protocl lra", "--task.protocl: .*--task.protocol"),
        ("data check match x.csv --second_text b", "--second_text: .*--second-text"),
        ("predict run x.csv --batch 3", "--batch: .*--batch-size"),
        ("reproduce --prest quick", "--prest: .*--preset"),
        ("train digits --model.vocab-size 5", "--model.vocab-size"),
        ("trian digits", "'trian': .*train"),
        ("data lst", "'lst': .*list"),
        ("train digits --steps fast", "--steps.*'fast'"),
        ("train digits --learning-rate fast", "--learning-rate.*'fast'"),
        ("train digits --model.attention softmax", "--model.attention.*JSON.*'softmax'"),
        ("train lm-bytes --test-lengths 256,long", "--test-lengths.*'long'"),
        ("bench scaling --lengths many", "--lengths.*'many'"),
        ("train digits --steps", "--steps"),
        ("train", "TASK"),
        ("train digits a b", "'b'"),
    ],
)
def test_words_that_cannot_be_parsed_are_refused_with_the_nearest_option(words, message):
    assert re.search(message, refused(*words.split(), code=2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train digit", "'digit'.*'digits'"),
        ("train digits --model permutformer-image", "'permutformer-image'.*'permuteformer-image'"),
        ("train digits --warmup-steps -3", "warmup_steps.*-3"),
        ("train digits --model.hidden-size 15", "^hidden_size.*hidden_size=15.*num_heads=4"),
        ("train digits --model.hidden-act rellu", "rellu"),
        ("train digits --epochs 1 --steps 2", "epochs.*steps.*1.*2"),
        ("train digits some.csv", "digits.*'some.csv'.*classify, images, lm, match"),
        ("train digits --track wandbb", "wandbb"),
        ("train classify", "classify.*permuteformer train classify"),
        ("train classify nowhere.csv", "nowhere.csv"),
        ("resume nowhere", "nowhere"),
        ("predict nowhere nothing.csv", "nowhere"),
        ("report nowhere", "nowhere"),
        ("inspect permuteformer-txt", "permuteformer-txt"),
        ("experiments --preset huge", "preset 'huge'"),
        ("reproduce --preset quck", "'quck'.*'quick'"),
        ("reproduce --table 7", "table.*'quick'.*'7'"),
        ("reproduce --seeds 0", "seeds.*0"),
        ("bench ops --lengths 512", "lengths.*scaling.*ops"),
        ("bench train --limit-seconds 3", "limit-seconds.*scaling.*train"),
    ],
)
def test_errors_are_one_line_and_nothing_is_started(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refused(*words.split()))
    assert not list(tmp_path.rglob("experiment.json"))


@pytest.mark.parametrize("words", ["train lra-text", "reproduce --preset small --table 1 --tasks text"])
def test_missing_data_is_told_with_the_command_that_gets_it(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run(*words.split(), code=1)
    assert "permuteformer data fetch lra-text" in output
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_program_is_not_hidden():
    with patch("permuteformer.machine.environment", side_effect=KeyError("fault")), pytest.raises(KeyError):
        run("info")


def test_from_a_table_to_predictions_and_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{'good' if n % 2 else 'bad'} film number {n},{'up' if n % 2 else 'down'}\n" for n in range(80))
    (tmp_path / "reviews.csv").write_text("review,label\n" + rows)
    command = ["train", "classify", "reviews.csv", "--text", "review", "--output", "run", "--task.max-length", "32", *TINY, *SHORT]
    run(*command)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "finished"
    assert json.loads((tmp_path / "run" / "experiment.json").read_text())["task"]["labels"] == ["down", "up"]
    assert "accuracy" in run("eval", "run")

    (tmp_path / "new.csv").write_text("review\na good film\na bad one\n")
    run("predict", "run", "new.csv", "--output", "labels.csv")
    lines = (tmp_path / "labels.csv").read_text().splitlines()
    assert lines[0] == "line,id,label,probability,p_down,p_up"
    assert len(lines) == 3

    assert "1 run" in run("report", "run", "--output", "page")
    assert "classify" in (tmp_path / "page" / "index.html").read_text()

    assert re.search("learning_rate.*1e-05", run(*command, "--learning-rate", "1e-5", code=1))


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path):
    output = run("reproduce", "--dry-run", "--table", "1,speed", "--output", tmp_path / "runs")
    assert "12 of 12" in output
    assert "table1/digits/permuteformer-seed0" in output
    assert "tablespeed/8192/transformer-lm-seed0" in output
    assert not (tmp_path / "runs").exists()


def test_experiments_shows_the_papers_numbers_and_the_command():
    output = run("experiments")
    assert "65.95±0.26" in output
    assert "permuteformer reproduce --preset paper --table 1" in output


def test_info_shows_the_backends_and_the_revision(monkeypatch):
    shown = run("info")
    assert all(f"backend {name}" in shown for name in ("native", "cuda", "torch"))
    assert "revision" in shown
    monkeypatch.setattr("permuteformer.ops.linear.DEFAULT_BACKEND", "torch")
    assert "torch, by PERMUTEFORMER_BACKEND" in run("info")
    monkeypatch.setattr("permuteformer.ops.linear.DEFAULT_BACKEND", "fast")
    assert "'fast'" in run("info", code=1)
