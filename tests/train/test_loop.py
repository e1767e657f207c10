"""A training run in one process: its record and result, its model, and what is refused before it starts."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from processes import DIGITS, TIMES, UPDATE, Command, signal_at
from safetensors.torch import load_file
from small_data import ROWS, write
from train import runs
from train.runs import QUIET, record, result, tiny, words

from permuteformer.experiments.experiment import Experiment
from permuteformer.models import PermuteFormerForCausalLM, PermuteFormerForSequenceClassification
from permuteformer.tasks.digits import Digits
from permuteformer.train.build import build_task
from permuteformer.train.loop import Trainer, train
from permuteformer.train.step import evaluate

STEPS = 21
TEXT = tiny("lm", epochs=3.5, evaluate_every=4, evaluation_batch_size=3, test_lengths=(96,))
"""22 items in batches of 4 are 6 steps per epoch."""


@pytest.fixture
def trained(whole):
    return whole(*words(TEXT))


def test_run_folder_has_the_record_of_the_run(trained):
    files = {"experiment.json", "environment.json", "metrics.jsonl", "result.json", "attention_maps.json", ".lock"}
    assert {path.name for path in trained.iterdir()} - {"log.txt"} == {*files, "tensorboard", "checkpoints", "model"}
    lines, validations = record(trained, "train"), record(trained, "evaluation")
    numbers = {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds", "memory_bytes"}
    assert set(lines[0]) == {"event", "step", "epoch", *numbers}
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["epoch"] == 3.5
    assert [line["step"] for line in validations] == [4, 8, 12, 16, 20, 21]
    assert {line["split"] for line in validations} == {"validation"}
    (test,), (length,) = record(trained, "test"), record(trained, "length")
    assert (length["length"], length["times"]) == (96, 2)
    best = min(validations, key=lambda line: line["metrics"]["perplexity"])
    found = result(trained)
    times = [line["seconds"] for line in lines]
    assert times == sorted(times)
    assert found["seconds"] == times[-1]
    seconds = [after - before for before, after in zip([0, *times], times, strict=False)]
    assert sum(line["tokens_per_second"] * time for line, time in zip(lines, seconds, strict=True)) == pytest.approx(found["tokens"])
    assert {name: value for name, value in found.items() if name not in (*TIMES, "tokens", "parameters")} == {
        "status": "finished",
        "message": None,
        "metric": "perplexity",
        "value": test["metrics"]["perplexity"],
        "validation": best["metrics"],
        "test": test["metrics"],
        "best_step": best["step"],
        "steps": STEPS,
        "epochs": 3.5,
    }


def test_experiment_and_environment_are_recorded(trained):
    content = json.loads((trained / "experiment.json").read_text())
    assert Experiment.from_json(content["experiment"]) == TEXT
    assert content["task"]["kind"] == "lm"
    assert content["config"]["hidden_size"] == 32
    environment = json.loads((trained / "environment.json").read_text())
    assert environment["command"][:3] == ["permuteformer", "train", "lm"]
    assert environment["command"][-2:] == ["--output", "run"]
    assert environment["threads"] == 1
    assert str(trained.parent) not in json.dumps(environment)


def test_model_is_the_best_one_and_has_its_tokenizer(trained):
    from transformers import AutoTokenizer

    model, info = PermuteFormerForCausalLM.from_pretrained(trained / "model", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    metrics = evaluate(model, build_task(TEXT.task, TEXT.task_options), "test", batch_size=3, items=6)
    assert metrics == result(trained)["test"]
    assert AutoTokenizer.from_pretrained(trained / "model")("ab")["input_ids"]


def test_best_step_is_the_first_best_by_the_metric_of_the_task(tmp_path, monkeypatch):
    folder, values, real = tmp_path / "run", iter([0.5, 0.7, 0.7, 0.6]), Trainer._evaluate

    def evaluated(self, split, task=None):
        metrics = real(self, split, task)
        return {**metrics, "accuracy": next(values)} if split == "validation" else metrics

    monkeypatch.setattr(Trainer, "_evaluate", evaluated)
    found = train(tiny(steps=4, evaluate_every=1), folder, QUIET)
    assert (found["best_step"], found["validation"]["accuracy"]) == (2, 0.7)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [f"step-{n:09d}" for n in (2, 3, 4)]
    places = ("model", "checkpoints/step-000000002", "checkpoints/step-000000004")
    model, second, fourth = (load_file(folder / place / "model.safetensors") for place in places)
    assert all(torch.equal(model[name], value) for name, value in second.items())
    assert not all(torch.equal(model[name], value) for name, value in fourth.items())


def test_validation_is_once_per_epoch_by_default(tmp_path):
    found = train(tiny(epochs=2, train_items=17, learning_rate=0.01), tmp_path / "run", QUIET, cell={"row": "first"})
    assert [line["step"] for line in record(tmp_path / "run", "evaluation")] == [3, 6]
    assert found["steps"] == 6
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert json.loads((tmp_path / "run" / "experiment.json").read_text())["cell"] == {"row": "first"}


def test_run_does_not_depend_on_the_one_before(tmp_path):
    """Also of another precision; Accelerate has a state of the whole process."""
    first = train(tiny(steps=2), tmp_path / "first", QUIET)
    train(tiny(steps=2, precision="bfloat16"), tmp_path / "between", QUIET)
    torch.randn(5)
    assert train(tiny(steps=2), tmp_path / "second", QUIET)["test"] == first["test"]


def test_finished_run_is_not_trained_again(trained, monkeypatch):
    monkeypatch.setattr(Trainer, "__init__", lambda *given: pytest.fail("it was trained again"))
    before = (trained / "metrics.jsonl").read_bytes()
    assert train(TEXT, trained, QUIET) == result(trained)
    assert (trained / "metrics.jsonl").read_bytes() == before
    shown = Command("resume", trained).end()
    assert "already finished" in shown
    assert f"{result(trained)['value']:.4f}" in shown
    with pytest.raises(ValueError, match="seed was 0, now 1.*--output"):
        train(replace(TEXT, seed=1), trained, QUIET)


@pytest.mark.parametrize("is_finished", [False, True])
def test_data_that_has_changed_or_is_gone(is_finished, tmp_path):
    table, folder = tmp_path / "table.csv", tmp_path / "run"
    rows = "text,label\n" + "".join(f"text {n},{'ab'[n % 2]}\n" for n in range(60))
    table.write_text(rows)
    sizes = [word for pair in zip(DIGITS[2::2], DIGITS[3::2], strict=True) if "train-items" not in pair[0] for word in pair]
    interrupt = None if is_finished else partial(signal_at, name=UPDATE, number=6, sent=15)
    Command("train", "classify", table, *sizes, "--output", folder, before=interrupt).end(0 if is_finished else 143)
    table.write_text(rows.replace("text 7", "other"))
    assert f"the data of {folder} has changed" in Command("resume", folder).end(1)
    table.unlink()
    shown = Command("resume", folder).end(0 if is_finished else 1)
    assert (f"{result(folder)['value']:.4f}" if is_finished else "table.csv") in shown
    table.write_text(rows)
    Command("resume", folder).end()
    assert result(folder)["steps"] == 13


def test_resuming_with_other_threads_is_reported(tmp_path):
    folder = tmp_path / "run"
    Command(*DIGITS, "--output", folder, before=partial(signal_at, name=UPDATE, number=6, sent=15)).end(143)
    shown = Command("resume", folder, before=partial(runs.use_threads, number=2)).end()
    for text in (shown, (folder / "log.txt").read_text()):
        assert "started with 1 threads, resumed with 2: results will not be bit-identical" in text
    assert json.loads((folder / "environment.json").read_text())["resumed"][0]["threads"] == 2


@pytest.mark.parametrize(
    ("fields", "more", "message"),
    [
        ({}, ["--track", "wandb"], "wandb.*pip install wandb.*--track none"),
        ({}, ["--track", "tensorbord"], "--track.*'tensorbord'.*'tensorboard'"),
        ({"precision": "float16"}, [], "float16 needs a GPU.*bfloat16"),
        ({"test_lengths": (128,)}, [], "test_lengths.*digits.*'classify'"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_training(fields, more, message, tmp_path):
    shown = Command(*words(tiny(steps=1, **fields)), *more, "--output", tmp_path / "run").end(1)
    assert re.search(message, shown)
    assert not (tmp_path / "run").exists()


def test_data_that_does_not_fit_is_refused_before_training(tmp_path, monkeypatch):
    learned = tiny("lm", steps=1, test_lengths=(96,), position=[{"name": "learned", "max_length": 48}])
    path = write(tmp_path / "table.csv", [{**row, "label": "all"} for row in ROWS])
    one_label = Experiment(task="classify", model="permuteformer-text", task_options={"path": path}, steps=1)
    items = Digits.items
    monkeypatch.setattr(Digits, "items", lambda self, split: [] if split == "test" else items(self, split))
    for experiment, message in (
        (learned, "learned.*48 tokens, got 96"),
        (one_label, "classify.*one label, 'all'"),
        (tiny(steps=1), "test split of digits is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            train(experiment, tmp_path / "run", QUIET)
        assert not (tmp_path / "run").exists()


def test_bfloat16_and_the_advice_for_a_cpu(tmp_path):
    advice, settings = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16", {"steps": 3, "learning_rate": 0.01, "warmup_steps": 1}
    command = words(tiny(**settings, precision="bfloat16"))
    advised = Command(*command, "--output", tmp_path / "advised", environment={"ONEDNN_MAX_CPU_ISA": ""})
    advised.wait()  # it may end with an illegal instruction
    assert advice in "".join(advised.text.split("\n"))
    assert advice in (tmp_path / "advised" / "log.txt").read_text()
    assert advice not in Command(*command, "--output", tmp_path / "run", environment={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}).end()
    exact, rounded = train(tiny(**settings), tmp_path / "exact", QUIET), result(tmp_path / "run")
    assert rounded["test"]["loss"] != exact["test"]["loss"]
    assert rounded["test"]["loss"] == pytest.approx(exact["test"]["loss"], abs=0.05)
    model = PermuteFormerForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.dtype == torch.float32
