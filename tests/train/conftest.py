"""Run folders as training writes them, with random weights."""

import pytest
import torch
from processes import Command, shared
from small_data import ROWS, picture, write

from permuteformer.experiments.experiment import Experiment
from permuteformer.models.tokenizer import tokenizer_of_words
from permuteformer.tasks.tokenization import WordTokens
from permuteformer.train.build import build_config, build_model, build_task
from permuteformer.train.run_folder import RunFolder
from permuteformer.train.trained_model import load

SPEAKS = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "attention": {"name": "linear", "feature_multiplier": 4},
    "tie_word_embeddings": False,
}
"""Fields of a language model whose permutations have a period of 62,832 tokens, and which does not repeat one token."""

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def prepared(cache, monkeypatch):
    """Data that is prepared once for all tests and commands."""
    for name, value in shared().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def digits():
    return build_task("digits", {})


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Return ``whole(*words, processes=1)``, the folder of an undisturbed run; each is run once."""
    folders = {}

    def run(*words, processes=1):
        key = (*map(str, words), processes)
        if key not in folders:
            folder = tmp_path_factory.mktemp("whole") / "run"
            Command(*words, "--output", folder, processes=processes).end()
            folders[key] = folder
        return folders[key]

    return run


@pytest.fixture
def make_run(tmp_path):
    """Return ``make_run(task, preset, {option: value}, field=value, …)``, which writes a finished run and returns its folder."""

    def make(name, preset, options=None, spread=1.5, **fields):
        experiment = Experiment(task=name, model=preset, task_options=options or {}, model_fields={**SMALL, **fields}, steps=1)
        task = build_task(name, experiment.task_options)
        config = build_config(preset, experiment.model_fields, task.input)
        folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        with RunFolder(folder, experiment, {"cell": None, "task": task.describe(), "config": config.to_dict()}):
            model = build_model(config, task.input.kind)
            with torch.no_grad():
                for weight in model.parameters():  # far from each other, so that answers differ
                    weight.add_(spread * torch.randn_like(weight) / weight.shape[-1] ** 0.5)
            model.save_pretrained(folder / "model")
            tokenizer = getattr(task.input, "tokenizer", None)
            if isinstance(tokenizer, WordTokens):
                tokenizer_of_words(tokenizer.words).save_pretrained(folder / "model")
        return folder

    return make


@pytest.fixture
def text_run(make_run, tmp_path):
    """A classifier of texts; its table was deleted."""
    table = tmp_path / "training.csv"
    write(table, ROWS)
    folder = make_run("classify", "permuteformer-text", {"path": str(table), "max_length": 64})
    table.unlink()
    return folder


@pytest.fixture
def pair_run(make_run, tmp_path):
    """A matcher of texts whose columns have unusual names; its table was deleted."""
    table = tmp_path / "pairs.csv"
    table.write_text("one,other,same\n" + "".join(f"a{n},b{n % 7},{'yes' if n % 2 else 'no'}\n" for n in range(60)))
    folder = make_run("match", "permuteformer-retrieval", {"path": str(table), "text": "one", "second_text": "other", "label": "same"})
    table.unlink()
    return folder


@pytest.fixture
def image_run(make_run, tmp_path):
    """A classifier of images of 6 x 6 pixels; its folder exists."""
    pictures = tmp_path / "pictures"
    for label in ("cat", "dog"):
        (pictures / label).mkdir(parents=True)
        for n in range(20):
            (pictures / label / f"{n:02}.png").write_bytes(picture(12 * n + (label == "dog")))
    return make_run("images", "permuteformer-image", {"path": str(pictures), "size": 6})


@pytest.fixture
def bytes_run(make_run):
    """A language model of bytes."""
    return make_run("lm-bytes", "permuteformer-lm", {"corpus": "topics", "length": 64, "context": 32}, **SPEAKS)


@pytest.fixture
def words_run(make_run, tmp_path):
    """A language model of words; its text was deleted."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the cat number {n} sat on a mat\n\nand slept\n" for n in range(100)))
    folder = make_run("lm", "permuteformer-lm", {"path": str(text), "unit": "words", "length": 32, "context": 16}, **SPEAKS)
    text.unlink()
    return folder


@pytest.fixture
def trained_text(text_run):
    return load(text_run)
