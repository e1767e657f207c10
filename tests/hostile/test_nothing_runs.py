"""A pickle under every name that is opened: it is never run, and what is wrong is said in a sentence."""

import io
import json
import pickle
import shutil
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from hostile.bombs import Bomb, bombs
from small_data import ROWS, write
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from permuteformer.cli import app
from permuteformer.models import ByteTokenizer, PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.cache import PermuteFormerCache
from permuteformer.models.convert import TOKENIZER_FILES, convert
from permuteformer.models.loading import silence_transformers
from permuteformer.tasks.classify import Classify
from permuteformer.tasks.prepare import Prepared, is_whole
from permuteformer.train import checkpoint

TINY = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
OWN = (ValueError, TypeError, FileNotFoundError, FileExistsError)


def test_the_bombs_go_off_where_they_are_run(tmp_path):
    """Else the others would prove nothing."""
    marker = tmp_path / "marker"
    files = bombs(marker)
    for name, data in files.items():
        if name.startswith("protocol"):
            pickle.loads(data)
        elif name.startswith("torch"):
            torch.load(io.BytesIO(data), weights_only=False)
        elif name == "npy":
            np.load(io.BytesIO(data), allow_pickle=True)
        else:
            np.load(io.BytesIO(data), allow_pickle=True)["a"]
        assert marker.exists(), name
        marker.rmdir()


def command(*words):
    """Run a command; what it said, if it refused."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert all(line.isprintable() for line in result.output.split("\n"))
    return result.output if result.exit_code else None


def refused(action):
    """The sentence of a refusal, by one of our own errors."""
    try:
        said = action()
    except OWN as error:
        said = str(error)
    return said if isinstance(said, str) else None


def tried(tmp_path, file, action, must_refuse=True):
    """Every bomb under one name."""
    marker = tmp_path / "marker"
    before = file.read_bytes() if file.is_file() else None
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, data in bombs(marker).items():
        file.write_bytes(data)
        said = refused(action)
        assert not marker.exists(), name
        assert not must_refuse or (said and len(said) > 20), name
    file.unlink() if before is None else file.write_bytes(before)


@pytest.mark.parametrize("name", ["experiment.json", "model/config.json", "model/model.safetensors", "model/generation_config.json"])
def test_run_folders(name, text_run, tmp_path):
    table = tmp_path / "new.csv"
    write(table, ROWS[:3])
    needed = name != "model/generation_config.json"
    tried(tmp_path, text_run / name, lambda: command("predict", text_run, table, "--output", tmp_path / "labels.csv"), needed)
    if name == "experiment.json":
        for verb in ("eval", "resume", "report"):
            tried(tmp_path, text_run / name, lambda verb=verb: command(verb, text_run))
    elif needed:
        for words in (("inspect",), ("explain", "--text", "a text"), ("demo", "--no-browser", "--port", 0)):
            tried(tmp_path, text_run / name, lambda words=words: command(words[0], text_run, *words[1:]))


def test_what_is_to_be_explained(text_run, image_run, tmp_path):
    """A text may be anything; an image may not."""
    for run, option, is_image in ((text_run, "--file", False), (image_run, "--image", True)):
        tried(tmp_path, tmp_path / "given", lambda run=run, option=option: command("explain", run, option, tmp_path / "given"), is_image)


def test_a_saved_state(tmp_path):
    tried(tmp_path, tmp_path / "state.safetensors", lambda: PermuteFormerCache.load(tmp_path / "state.safetensors"))


INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "model.safetensors", *INDICES])
def test_weights_are_safetensors_alone(name, tmp_path):
    """The pickle that older models come as is not looked at, also where it is all there is."""
    folder = tmp_path / "model"
    PermuteFormerForCausalLM(PermuteFormerConfig(**TINY, causal=True)).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with silence_transformers():
        tried(tmp_path, folder / name, lambda: PermuteFormerForCausalLM.from_pretrained(folder))
        tried(tmp_path, folder / name, lambda: command("inspect", folder))


@pytest.mark.parametrize("name", ["config.json", "pytorch_model.bin", "model.safetensors", *INDICES, *TOKENIZER_FILES])
def test_models_of_others(name, tmp_path):
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2)).save_pretrained(folder)
    if name in ("pytorch_model.bin", *INDICES):
        (folder / "model.safetensors").unlink()
    needed = name not in TOKENIZER_FILES  # which are copied, and not read
    with silence_transformers():
        tried(tmp_path, folder / name, lambda: convert(folder) and None, needed)
        tried(tmp_path, folder / name, lambda: command("convert", folder, tmp_path / "converted"), needed)


def test_configurations_that_ask_for_code(tmp_path):
    """transformers fetches kernels from the hub, which are programs, where a configuration names them."""
    own, other = tmp_path / "own", tmp_path / "gpt2"
    PermuteFormerForCausalLM(PermuteFormerConfig(**TINY, causal=True)).save_pretrained(own)
    GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2)).save_pretrained(other)
    for folder, load in ((own, PermuteFormerForCausalLM.from_pretrained), (other, convert)):
        content = json.loads((folder / "config.json").read_text())
        for field in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"):
            (folder / "config.json").write_text(json.dumps({**content, field: "somebody/kernel"}))
            with pytest.raises(ValueError, match=r"somebody/kernel.* may ask for code of others"):
                load(folder)
        (folder / "config.json").write_text(json.dumps({**content, "quantization_config": {"quant_method": "bitsandbytes"}}))
        with pytest.raises(ValueError, match="quantized"):
            load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_tokenizers(name, tmp_path):
    ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
    tried(tmp_path, tmp_path / "tokenizer" / name, lambda: ByteTokenizer.from_pretrained(tmp_path / "tokenizer"), must_refuse=False)


def test_the_words_of_a_language_model(words_run, tmp_path):
    tried(tmp_path, words_run / "model" / "tokenizer.json", lambda: command("generate", words_run, "--tokens", 2))
    tried(
        tmp_path,
        tmp_path / "prompt.txt",
        lambda: command("generate", words_run, "--prompt-file", tmp_path / "prompt.txt"),
        must_refuse=False,
    )


@pytest.mark.parametrize("name", ["sums.json", "state.json", "model.safetensors", "optimizer.safetensors"])
def test_checkpoints(name, tmp_path):
    tensors = {"w": torch.zeros(2)}
    path = checkpoint.save(tmp_path / "checkpoints", 1, {"a": 1}, {"model": tensors, "optimizer": tensors})

    def load():
        if name != "sums.json":  # whoever changes a file can change its sum too
            sums = {file.name: checkpoint._sum(file) for file in path.iterdir() if file.name != "sums.json"}
            (path / "sums.json").write_text(json.dumps(sums))
        return checkpoint.load(tmp_path / "checkpoints", 1)

    tried(tmp_path, path / name, load)


@pytest.mark.parametrize("name", ["result.json", "environment.json", "metrics.jsonl", "looks.json", "experiment.json"])
def test_reports_of_run_folders(name, text_run, tmp_path):
    tried(tmp_path, text_run / name, lambda: command("report", text_run, "--output", tmp_path / "report"), name != "metrics.jsonl")


@pytest.mark.parametrize("name", ["results.jsonl", "looks.jsonl", "report/report.json", "job.json"])
def test_other_files_of_ours(name, text_run, tmp_path):
    record = {"format": 1, "kind": "training", "run": "a", "result": {"status": "finished"}}
    (tmp_path / "results.jsonl").write_text(json.dumps(record))
    words = ("run-cell", tmp_path / name) if name == "job.json" else ("report", tmp_path / "results.jsonl", "--output", tmp_path / "report")
    tried(tmp_path, tmp_path / name, lambda: command(*words), must_refuse=name != "looks.jsonl")


@pytest.mark.parametrize("name", ["info.json", "train.arrow"])
def test_prepared_data(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PERMUTEFORMER_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "table.csv", ROWS)
    folder = Classify(str(tmp_path / "table.csv")).prepare().folder

    def read():
        if name == "info.json":
            return None if is_whole(folder) else "it is not whole, and is made anew"
        return Prepared(folder).open("train")

    tried(tmp_path, folder / name, read)


ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz", ".jsonl.xz", ".tsv.bz2")


@pytest.mark.parametrize(
    "name", [*(f"table{ending}" for ending in ENDINGS), "a.tar", "a.tar.gz", "a.zip", "images/a/b.png", "images/a/b.tif"]
)
def test_data_of_ones_own(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PERMUTEFORMER_CACHE", str(tmp_path / "cache"))
    file = tmp_path / name
    kind, path = ("images", tmp_path / "images") if "images" in name else ("images", file) if "a." in name else ("classify", file)
    tried(tmp_path, file, lambda: command("data", "check", kind, path))


def test_pairs_and_texts_of_ones_own(tmp_path, monkeypatch):
    """Bytes are a text, too."""
    monkeypatch.setenv("PERMUTEFORMER_CACHE", str(tmp_path / "cache"))
    tried(tmp_path, tmp_path / "pairs.csv", lambda: command("data", "check", "match", tmp_path / "pairs.csv"))
    tried(tmp_path, tmp_path / "text.txt", lambda: command("data", "check", "lm", tmp_path / "text.txt"), must_refuse=False)


@pytest.mark.parametrize(
    "name",
    [
        *(f"cifar-10-batches-py/{batch}" for batch in ("data_batch_1", "test_batch")),
        "cifar-10-python.tar.gz",
        "pathfinder32/curv_contour_length_14/metadata/0.npy",
        "pathfinder32/curv_contour_length_14/splits.json",
        "listops-1000/basic_train.tsv",
        "tsv_data/new_aan_pairs.train.tsv",
        "acl_pairs/acl_pairs.train.tsv.gz",
        "imdb/train.jsonl",
        "aclImdb/train/neg/0_3.txt",
        "aclImdb_v1.tar.gz",
        "wikitext-2/wiki.train.tokens",
        "wiki_en/wiki.train.raw.xz",
    ],
)
def test_official_data(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PERMUTEFORMER_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    layouts = {
        "cifar": ("lra-image", [f"cifar-10-batches-py/data_batch_{n}" for n in range(1, 6)] + ["cifar-10-batches-py/test_batch"]),
        "pathf": (
            "lra-pathfinder",
            ["pathfinder32/curv_contour_length_14/metadata/0.npy", "pathfinder32/curv_contour_length_14/imgs/0/a.png"],
        ),
        "listo": ("lra-listops", [f"listops-1000/basic_{split}.tsv" for split in ("train", "val", "test")]),
        "tsv_d": ("lra-retrieval", [f"tsv_data/new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")]),
        "acl_p": ("lra-retrieval", [f"acl_pairs/acl_pairs.{split}.tsv.gz" for split in ("train", "eval", "test")]),
        "imdb/": ("lra-text", [f"imdb/{split}.jsonl" for split in ("train", "test")]),
        "aclIm": ("lra-text", [f"aclImdb/{split}/{label}/0_3.txt" for split in ("train", "test") for label in ("neg", "pos")]),
        "wikit": ("wikitext-2", [f"wikitext-2/wiki.{split}.tokens" for split in ("train", "valid", "test")]),
        "wiki_": ("wiki-en", [f"wiki_en/wiki.{split}.raw.xz" for split in ("train", "valid", "test")]),
    }
    task, files = layouts[name[:5]]
    for file in files if not name.endswith(".tar.gz") else []:
        (data / file).parent.mkdir(parents=True, exist_ok=True)
        (data / file).write_bytes(b"x\n")
    tried(tmp_path, data / name, lambda: command("data", "check", task, "--data", data), must_refuse=not name.endswith((".tokens", ".txt")))


def test_members_of_archives(tmp_path, monkeypatch):
    """A bomb as a batch of CIFAR-10 within its archive, and as an image within a zip."""
    monkeypatch.setenv("PERMUTEFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    bomb, marker = pickle.dumps({"data": Bomb(tmp_path / "marker"), "labels": [1]}, 2), tmp_path / "marker"
    with tarfile.open(tmp_path / "data" / "cifar-10-python.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        info.size = len(bomb)
        tar.addfile(info, io.BytesIO(bomb))
    assert "do not trust this file" in command("data", "check", "lra-image", "--data", tmp_path / "data")
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("cat/a.png", bomb)
    assert "no image" in command("data", "check", "images", tmp_path / "images.zip")
    assert not marker.exists()


def test_extension_types_of_arrow_are_refused(tmp_path):
    """Old versions of Arrow made Python objects of them; datasets opens paths that its own name."""
    import pyarrow as pa

    plain = pa.array([b"a"])
    for metadata in (
        {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(Bomb(tmp_path / "marker"))},
        {b"huggingface": json.dumps({"info": {"features": {"value": {"_type": "Image"}}}}).encode()},
    ):
        of_field = metadata if b"ARROW:extension:name" in metadata else None
        schema = pa.schema([pa.field("value", pa.binary() if of_field else pa.string(), metadata=of_field)], metadata=metadata)
        folder = tmp_path / "prepared"
        folder.mkdir()
        with (folder / "train.arrow").open("wb") as file, pa.ipc.new_stream(file, schema) as stream:
            stream.write_batch(pa.record_batch([plain.cast(schema.field(0).type)], schema=schema))
        (folder / "info.json").write_text(json.dumps({"splits": {"train": 1}}))
        said = refused(lambda folder=folder: Prepared(folder).open("train")[0] and None)
        assert of_field or "was not written here" in said
        assert not (tmp_path / "marker").exists()
        shutil.rmtree(folder)
