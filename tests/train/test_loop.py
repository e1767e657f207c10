"""A run in one process: what is computed, and what is told of it."""

import io
import json
import math
import os
import pty
import re
import struct
import termios
import threading
from dataclasses import replace
from fcntl import ioctl

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from small_data import ROWS, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train_processes import SHARED, Command, digits, fail, text, tiny

from permuteformer.experiments.base import Experiment
from permuteformer.models import PermuteFormerForCausalLM, PermuteFormerForSequenceClassification
from permuteformer.tasks.batches import loader
from permuteformer.train.build import build_config, build_model, build_task, inputs, targets
from permuteformer.train.evaluate import evaluate
from permuteformer.train.feed import chosen
from permuteformer.train.loop import How, Trainer, train
from permuteformer.train.progress import Display
from permuteformer.train.schedule import learning_rate

QUIET = How(quiet=True, track=())


@pytest.fixture(autouse=True)
def prepared(cache, monkeypatch):
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)


def lines(folder, event):
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["event"] == event]


def test_the_learning_rate_is_fairseqs():
    peak, warmup, start = 5e-4, 4000, 1e-7
    rise, decay = (peak - start) / warmup, peak * warmup**0.5
    for update in (1, 2, 1999, 3999, 4000, 4001, 16_000, 50_000):
        expected = start + update * rise if update < warmup else decay * update**-0.5
        assert learning_rate(update, peak=peak, warmup_steps=warmup, warmup_from=start) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(warmup, peak=peak, warmup_steps=warmup) == peak
    assert learning_rate(1, peak=peak, warmup_steps=0) == peak
    assert learning_rate(4, peak=peak, warmup_steps=1) == peak / 2


def adam_by_hand(experiment, task, config):
    """The same training without any of our code for it: plain batches, and Adam as Kingma and Ba, and Loshchilov and Hutter, write it."""
    torch.manual_seed(experiment.seed)
    model = build_model(config, task.kind).train()
    moments = {p: (torch.zeros_like(p, dtype=torch.float64), torch.zeros_like(p, dtype=torch.float64)) for p in model.parameters()}
    weights = {p: p.detach().double() for p in model.parameters()}
    epoch, step, losses = 0, 0, []
    while step < experiment.steps:
        for batch in loader(task, "train", experiment.batch_size, seed=experiment.seed, epoch=epoch, by_length=True):
            step += 1
            loss = model(**inputs(batch, config, task.kind), **targets(batch, task.kind)).loss
            loss.backward()
            losses.append(float(loss.detach()))
            norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
            factor = min(1, experiment.gradient_clip / norm) if experiment.gradient_clip else 1
            rate = experiment.learning_rate * min(step / experiment.warmup_steps, math.sqrt(experiment.warmup_steps / step))
            with torch.no_grad():
                for p, (m, v) in moments.items():
                    g = p.grad.double() * factor
                    m.mul_(experiment.adam_beta1).add_(g, alpha=1 - experiment.adam_beta1)
                    v.mul_(experiment.adam_beta2).addcmul_(g, g, value=1 - experiment.adam_beta2)
                    first, second = m / (1 - experiment.adam_beta1**step), v / (1 - experiment.adam_beta2**step)
                    w = weights[p]
                    w -= rate * (first / (second.sqrt() + experiment.adam_epsilon) + experiment.weight_decay * w)
                    p.copy_(w)
                    p.grad = None
            if step == experiment.steps:
                return model, losses
        epoch += 1
    return None


@pytest.mark.parametrize(
    "more",
    [{}, {"weight_decay": 0.5}, {"gradient_clip": 0.05}, {"adam_beta1": 0.5, "adam_beta2": 0.6}],
    ids=["plain", "decay", "clip", "betas"],
)
def test_adam_as_in_the_paper(more, tmp_path):
    exact = {"hidden_dropout": 0, "adam_epsilon": 1e-4, "train_items": None, "evaluate_every": 7}
    experiment = tiny(steps=7, batch_size=300, learning_rate=0.02, warmup_steps=3, **exact, **more)
    train(experiment, tmp_path / "run", QUIET)
    task = build_task("digits", {})
    model, losses = adam_by_hand(experiment, task, build_config(experiment.model, experiment.model_fields, task))
    found = PermuteFormerForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    for (name, p), own in zip(model.named_parameters(), found.parameters(), strict=True):
        assert torch.allclose(p, own, atol=2e-5, rtol=0), name
    recorded = lines(tmp_path / "run", "train")
    assert [line["loss"] for line in recorded] == pytest.approx(losses, rel=1e-4)
    assert [line["learning_rate"] for line in recorded] == [learning_rate(step, peak=0.02, warmup_steps=3) for step in range(1, 8)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a language model, of three epochs and a half, with a bar that nobody sees."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    Command(*text(epochs=3.5, evaluate_every=4, evaluation_batch_size=3), output=folder).succeed()
    return folder


def test_what_a_run_folder_has(trained):
    found = {path.name for path in trained.iterdir()}
    files = {"experiment.json", "environment.json", "metrics.jsonl", "result.json", "looks.json", ".lock"}
    assert found == {*files, "tensorboard", "checkpoints", "model"}
    steps = 21  # 22 items in batches of 4 are 6 steps an epoch
    recorded = lines(trained, "train")
    assert [line["step"] for line in recorded] == list(range(1, steps + 1))
    assert set(recorded[0]) == {
        *("event", "step", "epoch", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds", "memory_bytes")
    }
    assert recorded[-1]["epoch"] == 3.5
    times = [line["seconds"] for line in recorded]
    assert times == sorted(times)
    assert [line["step"] for line in lines(trained, "evaluation")] == [4, 8, 12, 16, 20, 21]
    assert {line["split"] for line in lines(trained, "evaluation")} == {"validation"}
    (test,) = lines(trained, "test")
    (length,) = lines(trained, "length")
    assert (length["length"], length["times"]) == (96, 2)
    result = json.loads((trained / "result.json").read_text())
    best = min(lines(trained, "evaluation"), key=lambda line: line["metrics"]["perplexity"])
    assert result["best_step"] == best["step"]
    assert result["validation"] == best["metrics"]
    assert result["test"] == test["metrics"]
    assert {name: result[name] for name in ("status", "message", "metric", "steps", "epochs")} == {
        "status": "finished",
        "message": None,
        "metric": "perplexity",
        "steps": steps,
        "epochs": 3.5,
    }
    assert result["value"] == test["metrics"]["perplexity"]
    assert result["seconds"] == times[-1]
    since = [after - before for before, after in zip([0, *times], times, strict=False)]
    rates = [line["tokens_per_second"] * seconds for line, seconds in zip(recorded, since, strict=True)]
    assert sum(rates) == pytest.approx(result["tokens"])
    environment = json.loads((trained / "environment.json").read_text())
    assert environment["command"][:2] == ["permuteformer", "train"]
    assert environment["command"][-2:] == ["--output", "run"]
    assert str(trained.parent) not in json.dumps(environment)
    content = json.loads((trained / "experiment.json").read_text())
    assert content["task"]["kind"] == "lm"
    assert content["config"]["hidden_size"] == 32


def test_tokens_are_those_of_the_items(trained):
    content = json.loads((trained / "experiment.json").read_text())["experiment"]
    task = build_task(content["task"], content["task_options"])
    lengths = task.lengths("train")[chosen(len(task.dataset("train")), 22)]
    result = json.loads((trained / "result.json").read_text())
    assert 3 * lengths.sum() < result["tokens"] < 4 * lengths.sum()


def test_the_model_is_the_best_one_and_loads(trained):
    content = json.loads((trained / "experiment.json").read_text())["experiment"]
    task = build_task(content["task"], content["task_options"])
    model, info = PermuteFormerForCausalLM.from_pretrained(trained / "model", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    metrics = evaluate(model, model.config, task, "test", batch_size=3, items=6)
    assert metrics == json.loads((trained / "result.json").read_text())["test"]
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(trained / "model")("ab")["input_ids"]


def test_tensorboard_has_the_record(trained):
    seen = EventAccumulator(str(trained / "tensorboard" / "permuteformer")).Reload()
    for name in ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds", "memory_bytes"):
        assert [event.step for event in seen.Scalars(f"train/{name}")] == list(range(1, 22))
        assert [event.value for event in seen.Scalars(f"train/{name}")] == pytest.approx([line[name] for line in lines(trained, "train")])
    validation = [line["metrics"]["perplexity"] for line in lines(trained, "evaluation")]
    assert [event.value for event in seen.Scalars("validation/perplexity")] == pytest.approx(validation)
    (longer,) = seen.Scalars("test at 96 tokens/perplexity")
    assert longer.value == pytest.approx(lines(trained, "length")[0]["metrics"]["perplexity"])


def test_a_finished_run_is_returned_at_once(trained, monkeypatch):
    monkeypatch.setattr(Trainer, "__init__", lambda *given: pytest.fail("it was trained again"))
    monkeypatch.setattr("permuteformer.train.loop.build_task", lambda *given: pytest.fail("its data was looked for"))
    before = (trained / "metrics.jsonl").read_bytes()
    experiment = Experiment.from_json(json.loads((trained / "experiment.json").read_text())["experiment"])
    assert train(experiment, trained, QUIET) == json.loads((trained / "result.json").read_text())
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_another_experiment_in_the_folder_is_refused(trained):
    said = fail(Command(*text(epochs=3.5, evaluate_every=4, evaluation_batch_size=3, seed=1), output=trained))
    assert "is of another experiment: seed is 0 there and 1 here. Choose another folder with --output" in said


def test_validation_once_an_epoch_unless_told(tmp_path):
    result = train(tiny(epochs=2, train_items=17, learning_rate=0.01), tmp_path / "run", QUIET)
    assert [line["step"] for line in lines(tmp_path / "run", "evaluation")] == [3, 6]
    assert result["steps"] == 6
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_runs_one_after_another_do_not_disturb_each_other(tmp_path):
    """Also of another precision; Accelerate has a state of the whole process."""
    first = train(tiny(steps=2), tmp_path / "first", QUIET)
    train(tiny(steps=2, precision="bfloat16"), tmp_path / "between", QUIET)
    torch.randn(5)
    second = train(tiny(steps=2), tmp_path / "second", QUIET)
    assert first["test"] == second["test"]


def test_the_best_is_by_the_tasks_metric(tmp_path, monkeypatch):
    values = iter([0.5, 0.7, 0.7, 0.6])
    real = Trainer.evaluate

    def evaluated(self, split, task=None):
        metrics = real(self, split, task)
        return {**metrics, "accuracy": next(values)} if split == "validation" else metrics

    monkeypatch.setattr(Trainer, "evaluate", evaluated)
    result = train(tiny(steps=4, evaluate_every=1), tmp_path / "run", QUIET)
    assert result["best_step"] == 2  # the first of those that are alike
    assert result["validation"]["accuracy"] == 0.7
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [f"step-{n:09d}" for n in (2, 3, 4)]
    places = ("model", "checkpoints/step-000000002", "checkpoints/step-000000004")
    model, second, fourth = (load_file(tmp_path / "run" / place / "model.safetensors") for place in places)
    assert all(torch.equal(model[name], value) for name, value in second.items())
    assert not all(torch.equal(model[name], value) for name, value in fourth.items())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (digits(steps=1, track="wandb"), "track: wandb is not installed; pip install wandb, or choose --track none"),
        (digits(steps=1, track="tensorbord"), "unknown tracker (--track) 'tensorbord': did you mean 'tensorboard'? There is"),
        (digits(steps=1, precision="float16"), "precision float16 needs a GPU; on a CPU use float32 or bfloat16"),
        (digits(steps=1, test_lengths=128), "test_lengths are of language models; digits is a task of kind 'classify'"),
    ],
    ids=["wandb", "unknown", "float16", "lengths"],
)
def test_what_cannot_be_is_said_before_anything_is_run(words, told, tmp_path):
    said = fail(Command(*words, output=tmp_path / "run"))
    assert told in said
    assert not (tmp_path / "run").exists()


def test_lengths_that_a_model_does_not_have_are_refused_before_training(tmp_path):
    position = [{"name": "learned", "max_length": 48}]
    experiment = tiny("lm-bytes", steps=1, test_lengths=(96,))
    experiment = replace(experiment, model_fields={**experiment.model_fields, "position": position})
    with pytest.raises(ValueError, match="test_lengths has 96, and learned of this model ends at 48: leave it out"):
        train(experiment, tmp_path / "run", QUIET)


def test_an_empty_split_is_refused_before_training(tmp_path, monkeypatch):
    from permuteformer.tasks.digits import Digits

    whole = Digits.dataset
    monkeypatch.setattr(Digits, "dataset", lambda self, split: [] if split == "test" else whole(self, split))
    with pytest.raises(ValueError, match="the test split of digits is empty: training needs train, validation, test"):
        train(tiny(steps=1), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


def test_bfloat16_and_what_is_said_about_it_on_a_cpu(tmp_path):
    sentence = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 and give the command again"
    words = digits(steps=3, precision="bfloat16", learning_rate=0.01, warmup_steps=1)
    told = Command(*words, output=tmp_path / "told", environment={"ONEDNN_MAX_CPU_ISA": ""})
    told.wait()  # it may end by an illegal instruction here
    assert sentence in " ".join(told.text.split())
    assert sentence in (tmp_path / "told" / "log.txt").read_text()
    run = Command(*words, output=tmp_path / "run", environment={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}).succeed()
    assert sentence not in " ".join(run.text.split())
    exact = train(tiny(steps=3, learning_rate=0.01, warmup_steps=1), tmp_path / "exact", QUIET)
    rounded = json.loads((tmp_path / "run" / "result.json").read_text())
    assert rounded["test"]["loss"] != exact["test"]["loss"]
    assert rounded["test"]["loss"] == pytest.approx(exact["test"]["loss"], abs=0.05)
    model = PermuteFormerForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.dtype == torch.float32


def screen(raw):
    """What stood on a terminal at any time, line by line."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw)
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_bars_fit_80_columns_with_large_numbers():
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    with Display(50_000, "perplexity", False, console) as display:
        display.step(49_998, 12.3456, 9.87e5, 79_900_000_000)
        with display.evaluating("validation", 123_456) as bar:
            bar(200_000)
            display._progress.refresh()
        display.evaluated("validation", 1.5, {"perplexity": 12345.678, "loss": 9.421}, True)
        display.step(49_999, 12.3456, 9.87e5, 79_900_000_000)
        display._progress.refresh()
    shown = screen(out.getvalue())
    assert not [line for line in shown if "…" in line or len(line) > 80]
    assert any("123456/123456" in line for line in shown)  # no more items than there are
    assert "validation, epoch 1.50: perplexity 1.235e+04, loss 9.421 (best)" in shown
    assert any(re.fullmatch(r"training ━+[╸╺]?━* 49999/50000 \S+ left", line) for line in shown), shown
    assert "loss 12.3456 · perplexity 1.235e+04 · 987 k tokens/s · 79.9 GB" in shown


def test_a_terminal_of_80_columns(tmp_path):
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    chunks = []

    def read():
        while True:
            try:
                chunks.append(os.read(master, 65536))
            except OSError:  # nobody has the other end any more
                return

    reader = threading.Thread(target=read)
    reader.start()
    environment = {"TERM": "xterm", "COLUMNS": "80"}
    Command(*digits(steps=30), output=tmp_path / "run", terminal=os.ttyname(slave), environment=environment).succeed()
    os.close(slave)
    reader.join(20)
    os.close(master)
    shown = screen(b"".join(chunks).decode())
    bars = [line for line in shown if "━" in line or "tokens/s" in line]
    assert bars
    assert not [line for line in bars if "…" in line or len(line) > 80]
    assert any(re.fullmatch(r"training ━+ 30/30 0:00:00 left", line) for line in bars)
    assert any(re.fullmatch(r"loss \d\.\d{4} · accuracy 0\.\d+ · [\d,.]+( k)? tokens/s · [\d.]+ [MG]B", line) for line in bars)


def test_quiet(tmp_path):
    assert Command(*digits(steps=2, quiet=True), output=tmp_path / "run").succeed().text == ""


def test_one_label_is_refused(tmp_path):
    table = tmp_path / "table.csv"
    write(table, [{**row, "label": "all"} for row in ROWS])
    with pytest.raises(ValueError, match="classify has one label, 'all': training needs two or more"):
        train(Experiment(task="classify", model="permuteformer-text", task_options={"path": str(table)}, steps=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()
