"""Run folders, opened again."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_data import ROWS, listops, picture, write

import permuteformer
from permuteformer.models import ByteTokenizer
from permuteformer.tasks import NotReady, Task
from permuteformer.tasks.base import TASKS, Classification
from permuteformer.tasks.digits import Digits
from permuteformer.tasks.inputs import Pixels, Values
from permuteformer.tokens import PAPER
from permuteformer.train.build import build_task
from permuteformer.train.saved import describe, load


def test_a_run_is_what_was_saved(make_run):
    folder = make_run("digits", "permuteformer-image")
    trained = load(folder)
    assert trained.kind == "classify"
    assert trained.labels == tuple("0123456789")
    assert not trained.model.training
    assert trained.experiment.task == "digits"
    assert trained.input == Digits().input == Pixels(PAPER, (8, 8))
    assert isinstance(trained.task, Digits)
    saved = load_file(folder / "model" / "model.safetensors")
    for name, weight in trained.model.state_dict().items():
        if name in saved:
            assert torch.equal(weight, saved[name])
    assert torch.equal(load(folder, device="cpu").model.classifier.weight, trained.model.classifier.weight)


def test_the_data_may_be_gone(text_run, pair_run, words_run, image_run, tmp_path):
    shutil.rmtree(tmp_path / "pictures")
    assert load(text_run).labels == ("bad", "good", "ugly")
    assert load(text_run).input == Values(PAPER, 64)
    assert load(text_run).columns == {"text": "text"}
    assert load(pair_run).columns == {"first": "one", "second": "other"}
    assert load(image_run).input == Pixels(PAPER, (6, 6))
    assert load(words_run).words[:6] == ["<pad>", "<unk>", "</s>", "the", "cat", "number"]
    for folder in (text_run, pair_run, words_run, image_run):
        with pytest.raises(NotReady, match="path must be"):
            load(folder).task  # noqa: B018
    write(tmp_path / "training.csv", ROWS)
    assert isinstance(load(text_run).task, Task), "with the data back, the task is there"


def test_tasks_describe_what_is_needed_to_use_their_models(tmp_path):
    table = write(tmp_path / "mine.parquet", [{**row, "id": f"row {n}"} for n, row in enumerate(ROWS)])
    entry = describe(build_task("classify", {"path": table, "id": "id", "max_length": 99}))
    assert entry["columns"] == {"text": "text", "id": "id"}
    assert entry["input"] == {"alphabet": {"count": 256, "pad": 0, "first": 3, "cls": 1, "sep": 2}, "max_length": 99}
    assert entry["labels"] == ["bad", "good", "ugly"]
    assert (entry["kind"], entry["metric"], entry["greater_is_better"], entry["grid"], entry["unit"]) == (
        "classify",
        "accuracy",
        True,
        None,
        None,
    )
    assert 0.3 < entry["baselines"]["always the label most frequent in training"] < 0.4
    (tmp_path / "one.png").write_bytes(picture(3))
    rows = "".join(f"one.png,{n % 2}\n" for n in range(40))
    (tmp_path / "images.csv").write_text("file,label\n" + rows)
    entry = describe(build_task("classify", {"path": str(tmp_path / "images.csv"), "size": 4}))
    assert entry["columns"] == {"image": "file"}
    assert entry["grid"] == entry["input"]["grid"] == [4, 4]
    listops(tmp_path, [("[MAX 1 2 ]", "2")] * 3)
    entry = describe(build_task("lra-listops", {"data": str(tmp_path)}))
    assert entry["input"]["symbols"][-1] == "]"
    assert entry["columns"] == {"text": "Source"}
    entry = describe(build_task("lm-bytes", {"corpus": "topics"}))
    assert entry["unit"] == "bytes"
    assert (entry["input"], entry["columns"], entry["labels"], entry["max_length"]) == (None, {}, [], 512)
    assert "text of Python" in entry["notes"][0]
    assert json.loads(json.dumps(entry)) == entry


def test_without_a_test_split_baselines_are_of_validation(tmp_path):
    table = "text,label,split\n" + "".join(
        f"t{n},{'ab'[n % 4 == 0 or n % 8 == 1]},{'train' if n % 2 else 'validation'}\n" for n in range(40)
    )
    (tmp_path / "mine.csv").write_text(table)
    entry = describe(build_task("classify", {"path": str(tmp_path / "mine.csv")}))
    assert entry["baselines"] == {"always the label most frequent in training": 0.5}


def test_a_task_from_outside_may_have_an_input_of_its_own(make_run):
    class Reversed(Pixels):
        def encode(self, values):
            return super().encode([value[::-1] for value in values])

    class Cover:
        """Passes on to what it covers, and is of no known kind."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    @TASKS.register("digits-upside-down")
    class UpsideDown(Digits):
        def __init__(self):
            super().__init__()
            self.input = Cover(Reversed(PAPER, (8, 8)))

    try:
        folder = make_run("digits-upside-down", "permuteformer-image")
        assert json.loads((folder / "experiment.json").read_text())["task"]["input"] is None
        assert isinstance(load(folder).task, Classification)
        assert load(folder).input.grid == (8, 8)
    finally:
        TASKS.remove("digits-upside-down")


def change(folder, **fields):
    path = folder / "experiment.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **fields}))


def test_folders_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere: give one that permuteformer train made"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"is no run folder, there is no experiment\.json in it"):
        load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load(tmp_path / "file")


def test_another_format_is_refused_with_both_versions(text_run):
    change(text_run, format=7, version="9.9.9")
    with pytest.raises(ValueError, match=r"made by permuteformer 9\.9\.9 \(format 7\)") as caught:
        load(text_run)
    assert f"this is permuteformer {permuteformer.__version__}, which reads format 1" in str(caught.value)
    assert "install permuteformer 9.9.9, or train it anew" in str(caught.value)


def test_a_later_version_of_the_same_format_is_fine(text_run):
    change(text_run, version="9.9.9")
    assert load(text_run).kind == "classify"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"format": 1, "exper', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[]", "is not that of a run folder"),
        (b"{}", "is not that of a run folder"),
        (b'{"format": 1}', "does not say what its task is: unknown kind None"),
        (b'{"format": 1, "task": {"kind": "sums"}}', "unknown kind 'sums'"),
        (b'{"format": 1, "task": {"kind": "lm"}}', "has no experiment that can be used"),
        (b'{"format": 1, "task": {"kind": "lm"}, "experiment": {"task": "x", "model": "y", "steps": 1, "colour": 2}}', "'colour'"),
        (b'{"format": 1, "task": {"kind": "lm"}, "experiment": 3}', "has no experiment that can be used"),
    ],
)
def test_broken_notes_of_the_experiment(text_run, content, told):
    (text_run / "experiment.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"experiment\.json") as caught:
        load(text_run)
    assert told in str(caught.value)


def test_a_run_without_its_end(text_run):
    shutil.rmtree(text_run / "model")
    with pytest.raises(FileNotFoundError, match=r"is not finished, there is no model in it: .* permuteformer resume .*run-0"):
        load(text_run)
    (text_run / "result.json").write_text(json.dumps({"status": "not finite", "message": "the loss of step 3 is nan"}))
    with pytest.raises(FileNotFoundError, match=r"ended with 'not finite' \(the loss of step 3 is nan\)"):
        load(text_run)


def test_a_model_that_is_not_whole(text_run):
    weights = text_run / "model" / "model.safetensors"
    tensors = {name: x.clone() for name, x in load_file(weights).items()}  # the file is mapped, and written over below
    whole = weights.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"x" * 100):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=r"model cannot be loaded .*copy the folder again"):
            load(text_run)
    save_file({name: x for name, x in tensors.items() if name != "classifier.weight"}, weights, {"format": "pt"})
    with pytest.raises(ValueError, match=r"are not those of its configuration \(missing keys: classifier\.weight\)"):
        load(text_run)
    save_file({**tensors, "extra": torch.zeros(1)}, weights, {"format": "pt"})
    with pytest.raises(ValueError, match="unexpected keys: extra"):
        load(text_run)
    weights.unlink()
    with pytest.raises(ValueError, match="model cannot be loaded"):
        load(text_run)


def test_a_pickle_is_not_read(text_run):
    """Not even one that would load: reading a pickle may run anything."""
    weights = text_run / "model" / "model.safetensors"
    torch.save(load_file(weights), text_run / "model" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ValueError, match="model cannot be loaded"):
        load(text_run)


def test_a_model_without_its_configuration(text_run):
    (text_run / "model" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="model cannot be loaded"):
        load(text_run)
    (text_run / "model" / "config.json").unlink()
    with pytest.raises(ValueError, match="model cannot be loaded"):
        load(text_run)


def test_labels_must_be_those_of_the_model(text_run):
    entry = json.loads((text_run / "experiment.json").read_text())["task"]
    change(text_run, task={**entry, "labels": ["bad", "good"]})
    with pytest.raises(ValueError, match="names 2 labels, and the model has 3"):
        load(text_run)


def test_an_input_that_is_broken(text_run):
    entry = json.loads((text_run / "experiment.json").read_text())["task"]
    for wrong in ({"max_length": 5}, {"alphabet": {"count": 256}, "max_length": 5}, {**entry["input"], "max_length": 1}):
        change(text_run, task={**entry, "input": wrong})
        with pytest.raises(ValueError, match="the task's input cannot be used"):
            load(text_run).input  # noqa: B018


def test_words_are_beside_the_model(words_run):
    (words_run / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load(words_run).words  # noqa: B018
    (words_run / "model" / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*tokenizer\.json, which has the words"):
        load(words_run).words  # noqa: B018


def test_words_of_another_model_are_refused(words_run):
    path = words_run / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {**vocabulary, "one": len(vocabulary), "more": len(vocabulary) + 1}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="they are of two runs"):
        load(words_run).words  # noqa: B018


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "meta"])
def test_devices_that_are_not_there(text_run, device):
    with pytest.raises(ValueError, match="device must be one that"):
        load(text_run, device=device)


def test_data_whose_labels_are_others_is_not_evaluated(make_run, tmp_path):
    write(tmp_path / "table.csv", ROWS)
    run = make_run("classify", "permuteformer-text", {"path": str(tmp_path / "table.csv"), "max_length": 64})
    assert len(load(run).same_task.dataset("test")) > 0
    write(tmp_path / "table.csv", [{**row, "label": row["label"] + "!"} for row in ROWS])
    with pytest.raises(ValueError, match="has changed: it has the labels bad!, good!, ugly!, and the model bad, good, ugly; bring back"):
        _ = load(run).same_task


def test_a_model_of_bytes_begins_texts_as_its_tokenizer_does(bytes_run, words_run):
    assert load(bytes_run).model.config.bos_token_id == ByteTokenizer().bos_token_id == 1
    assert load(words_run).model.config.bos_token_id == 2
