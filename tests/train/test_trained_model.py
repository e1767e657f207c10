"""Trained models: what is loaded is what was saved, the data is not needed, and damaged folders are refused. Cards of trained models."""

import json
import shutil
from dataclasses import dataclass

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from small_data import ROWS, picture, write
from train.runs import QUIET, tiny

from permuteformer.models.card import model_card
from permuteformer.tasks import TASKS, NotReady
from permuteformer.tasks.digits import Digits
from permuteformer.tasks.inputs import Image
from permuteformer.train.build import build_task
from permuteformer.train.loop import train
from permuteformer.train.trained_model import load


def test_loaded_model_is_the_saved_one(make_run):
    folder = make_run("digits", "permuteformer-image")
    trained = load(folder)
    assert (trained.kind, trained.labels, trained.experiment.task) == ("classify", tuple("0123456789"), "digits")
    assert not trained.model.training
    assert trained.input == Digits().input
    assert isinstance(trained.task, Digits)
    saved = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in trained.model.state_dict().items() if name in saved)
    assert load(folder / "model", device="cpu").folder == folder


def test_data_is_not_needed(text_run, pair_run, words_run, image_run, bytes_run, tmp_path):
    shutil.rmtree(tmp_path / "pictures")
    text, pair, words, image = map(load, (text_run, pair_run, words_run, image_run))
    assert (text.labels, text.input.max_length, text.columns) == (("bad", "good", "ugly"), 64, {"text": "text"})
    assert pair.columns == {"text": "one", "second_text": "other"}
    assert image.input == Image(("cat", "dog"), (6, 6))
    assert words.input.tokenizer.words[:6] == ["<pad>", "<unk>", "</s>", "the", "cat", "number"]
    assert (words.model.config.bos_token_id, load(bytes_run).model.config.bos_token_id) == (2, 1)
    for trained in (text, pair, words, image):
        with pytest.raises(NotReady, match="file not found"):
            trained.task  # noqa: B018
    write(tmp_path / "training.csv", ROWS)
    assert len(load(text_run).task.items("test")) > 0


@pytest.mark.parametrize("unit", ["labels", "words"])
def test_data_with_other_labels_or_words_is_not_evaluated(unit, make_run, tmp_path):
    if unit == "labels":
        path = write(tmp_path / "table.csv", ROWS)
        run = make_run("classify", "permuteformer-text", {"path": path})
        write(tmp_path / "table.csv", [{**row, "label": row["label"] + "!"} for row in ROWS])
    else:
        path = tmp_path / "text.txt"
        path.write_text("the cat sat\n" * 100)
        run = make_run("lm", "permuteformer-lm", {"path": str(path), "unit": "words", "length": 8, "context": 4})
        path.write_text("the dog sat\n" * 100)
    with pytest.raises(ValueError, match=f"the data of {run} has changed: .*{unit}"):
        load(run).task  # noqa: B018


def test_columns_and_baselines_are_described(tmp_path):
    path = write(tmp_path / "mine.parquet", [{**row, "id": f"row {n}"} for n, row in enumerate(ROWS)])
    about = build_task("classify", {"path": path, "id": "id", "max_length": 99}).describe()
    assert about["columns"] == {"text": "text", "id": "id"}
    assert (about["labels"], about["metric"], about["max_length"], about["unit"]) == (["bad", "good", "ugly"], "accuracy", 99, "bytes")
    assert 0.3 < about["baselines"]["most frequent label"] < 0.4
    (tmp_path / "one.png").write_bytes(picture(3))
    (tmp_path / "images.csv").write_text("file,label\n" + "".join(f"one.png,{n % 2}\n" for n in range(40)))
    about = build_task("classify", {"path": str(tmp_path / "images.csv"), "size": 4}).describe()
    assert (about["columns"], about["grid"]) == ({"image": "file"}, [4, 4])


def test_task_from_outside_may_have_its_own_input(make_run):
    class Reversed(Image):
        def encode(self, part):
            return super().encode(part)[::-1]

    @dataclass(kw_only=True, eq=False)
    class UpsideDown(Digits):
        """Digits, upside down."""

        @property
        def input(self):
            return Reversed(tuple("0123456789"), (8, 8))

    Reversed.to_json = lambda self: {"input": "Reversed"}
    TASKS.register("digits-upside-down")(UpsideDown)
    try:
        assert isinstance(load(make_run("digits-upside-down", "permuteformer-image")).input, Reversed)
    finally:
        TASKS.remove("digits-upside-down")


def change(folder, **fields):
    path = folder / "experiment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_later_version_of_the_same_format_is_loaded(text_run):
    change(text_run, version="9.9.9")
    assert load(text_run).kind == "classify"


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("task", lambda task: None),
        ("task", lambda task: {"kind": "sums"}),
        ("task", lambda task: {**task, "labels": ["bad", "good"]}),
        ("task", lambda task: {**task, "columns": 3}),
        ("task", lambda task: {**task, "input": {"max_length": 5}}),
        ("task", lambda task: {**task, "input": {**task["input"], "alphabet": {"count": 256}}}),
        ("task", lambda task: {**task, "input": {**task["input"], "max_length": 1}}),
        ("task", lambda task: {**task, "input": {**task["input"], "max_length": 10**12}}),
        ("experiment", lambda experiment: None),
        ("experiment", lambda experiment: 3),
        ("experiment", lambda experiment: {"task": "classify"}),
        ("experiment", lambda experiment: {**experiment, "colour": 2}),
    ],
)
def test_damaged_description_is_refused(part, damage, text_run):
    change(text_run, **{part: damage(json.loads((text_run / "experiment.json").read_text())[part])})
    with pytest.raises(ValueError, match=f"{text_run} cannot be loaded"):
        load(text_run)


def test_run_without_a_model_is_refused(text_run):
    shutil.rmtree(text_run / "model")
    with pytest.raises(FileNotFoundError, match=f"not finished: permuteformer resume {text_run}"):
        load(text_run)
    (text_run / "result.json").write_text(json.dumps({"status": "not finite", "message": "the loss of step 3 is nan"}))
    with pytest.raises(FileNotFoundError, match=r"'not finite' \(the loss of step 3 is nan\)"):
        load(text_run)
    with pytest.raises(FileNotFoundError, match="run folder not found"):
        load(text_run / "nowhere")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_or_missing_file_of_the_model_is_refused(name, text_run):
    path = text_run / "model" / name
    content = path.read_bytes()
    torch.save({}, text_run / "model" / "pytorch_model.bin")  # not used: reading a pickle may run anything
    for damaged in (content[: len(content) // 2], b"", b"x" * 100, None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{text_run} cannot be loaded"):
            load(text_run)


def test_weights_of_another_model_are_refused(text_run):
    path = text_run / "model" / "model.safetensors"
    tensors = {name: x.clone() for name, x in load_file(path).items()}  # the file is mapped, and written over below
    for other, message in (
        ({name: x for name, x in tensors.items() if name != "classifier.weight"}, r"missing keys: classifier\.weight"),
        ({**tensors, "extra": torch.zeros(1)}, "unexpected keys: extra"),
    ):
        save_file(other, path, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(text_run)


def test_damaged_missing_or_other_words_are_refused(words_run):
    path = words_run / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    content["model"]["vocab"] = {**words, "one": len(words), "more": len(words) + 1}
    for changed, message in ((json.dumps(content), f"{len(words) + 2:,} tokens"), ("{", "cannot be read")):
        path.write_text(changed)
        with pytest.raises(ValueError, match=message):
            load(words_run)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        load(words_run)


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "meta"])
def test_device_that_does_not_exist_is_refused(text_run, device):
    with pytest.raises(ValueError, match=f"device.*'{device}'"):
        load(text_run, device=device)


@pytest.mark.parametrize(("task", "tag"), [("digits", "image-classification"), ("lm-bytes", "text-generation")])
def test_run_writes_a_card(task, tag, tmp_path):
    experiment = tiny(task, steps=2, evaluate_every=1)
    result = train(experiment, tmp_path / "run", QUIET)
    _, front, body = (tmp_path / "run" / "model" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == tag
    for name, value in result["test"].items():
        assert f"| {name} | {value:.4g} |" in body
    about = json.loads((tmp_path / "run" / "experiment.json").read_text())["task"]
    for part in (f"{result['parameters']:,} parameters", f"seed {experiment.seed}", f"{about['max_length']:,} tokens", "|---|---|"):
        assert part in body


def test_text_from_data_is_escaped_in_the_card():
    labels = ["<script>alert(1)</script>", "`tick`", "red \x1b[31m", *(f"label {n}" for n in range(40))]
    task = {"name": "classify", "kind": "classify", "title": "your table", "grid": None, "max_length": 10, "labels": labels}
    task |= {"notes": ["<b>*note*</b>"], "metric": "accuracy", "baselines": {}}
    result = {"parameters": 5, "test": {"accuracy": 0.5}, "best_step": None, "steps": 3}
    card = model_card("Model", task, tiny(steps=3).to_json(), result, ["permuteformer", "train", "a\nb"])
    for part in ("`<script>alert(1)</script>`", "`'tick'`", "and 23 more", "step 3 of 3", r"&lt;b&gt;\*note\*&lt;/b&gt;", r"a\nb"):
        assert part in card
    assert "\x1b" not in card
