"""A pickle under every name that is opened: it is never executed, and the command ends with one message."""

import hashlib
import io
import json
import os
import pickle

import numpy as np
import pytest
import torch
from commands import run
from small_data import ROWS, tar_bytes, write, zip_bytes
from small_tasks import SMALL
from transformers import GPT2Config, GPT2LMHeadModel

from permuteformer.models import ByteTokenizer, PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.cache import PermuteFormerCache
from permuteformer.models.convert import TOKENIZER_FILES, convert
from permuteformer.models.loading import silence_transformers
from permuteformer.tasks import TASKS
from permuteformer.tasks.classify import Classify
from permuteformer.tasks.store import Store, is_complete
from permuteformer.train import checkpoint

TINY = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def bombs(marker):
    """Return pickles in every form in which files of this field hold them."""
    bomb = Bomb(marker)
    zipped, legacy, array, arrays = (io.BytesIO() for _ in range(4))
    torch.save({"a": bomb}, zipped)
    torch.save({"a": bomb}, legacy, _use_new_zipfile_serialization=False)
    np.save(array, np.array([bomb], dtype=object), allow_pickle=True)
    np.savez(arrays, a=np.array([bomb], dtype=object))
    files = {"protocol 0": pickle.dumps(bomb, 0), "protocol 2": pickle.dumps([bomb], 2), "protocol 4": pickle.dumps({"a": bomb}, 4)}
    return {**files, "torch": zipped.getvalue(), "torch, old": legacy.getvalue(), "npy": array.getvalue(), "npz": arrays.getvalue()}


def test_the_pickles_work_if_they_are_executed(tmp_path):
    loaders = {"protocol": pickle.load, "torch": lambda file: torch.load(file, weights_only=False)}
    loaders |= {"npy": lambda file: np.load(file, allow_pickle=True), "npz": lambda file: np.load(file, allow_pickle=True)["a"]}
    for name, data in bombs(tmp_path / "marker").items():
        loaders[name.split()[0].rstrip(",")](io.BytesIO(data))
        assert (tmp_path / "marker").exists(), name
        (tmp_path / "marker").rmdir()


def command(*words):
    """Return what a command prints if it fails, and ``None`` if it succeeds."""
    try:
        output = run(*words, code=1)
    except AssertionError as error:
        if str(error).startswith("exit code 0,"):
            return None
        raise
    assert all(line.isprintable() for line in output.split("\n"))
    return output


def check(tmp_path, file, use, must_fail=True):
    """Call ``use`` with every pickle in the place of a file."""
    before = file.read_bytes() if file.is_file() else None
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, data in bombs(tmp_path / "marker").items():
        file.write_bytes(data)
        try:
            message = use()
        except (ValueError, TypeError, OSError) as error:
            message = str(error)
        assert not (tmp_path / "marker").exists(), name
        assert not must_fail or (isinstance(message, str) and len(message) > 20), name
    file.unlink() if before is None else file.write_bytes(before)


LOADING = ["predict RUN NEW --output OUT.csv", "inspect RUN", "explain RUN --text words", "demo RUN --no-browser --port 0"]
REPORT = ["report RUN --output OUT"]
RUN_FILES = {
    "experiment.json": [LOADING[0], "eval RUN", "resume RUN", *REPORT],
    "model/config.json": LOADING,
    "model/model.safetensors": LOADING,
    "result.json": REPORT,
    "environment.json": REPORT,
    "attention_maps.json": REPORT,
}


@pytest.mark.parametrize("name", [*RUN_FILES, "model/generation_config.json", "metrics.jsonl"])
def test_run_folders(name, text_run, tmp_path):
    """Commands work without the last two files."""
    places = {"RUN": text_run, "NEW": write(tmp_path / "new.csv", ROWS[:3]), "OUT": tmp_path / "out", "OUT.csv": tmp_path / "out.csv"}
    for line in RUN_FILES.get(name, REPORT if name == "metrics.jsonl" else LOADING[:2]):
        words = [places.get(word, word) for word in line.split()]
        check(tmp_path, text_run / name, lambda words=words: command(*words), must_fail=name in RUN_FILES)


@pytest.mark.parametrize("name", ["results.jsonl", "out/report.json", "job.json", "attention_maps.jsonl"])
def test_results_and_jobs(name, tmp_path):
    record = {"format": 1, "kind": "training", "run": "a", "result": {"status": "finished"}}
    (tmp_path / "results.jsonl").write_text(json.dumps(record))
    words = ["run-cell", tmp_path / name] if name == "job.json" else ["report", tmp_path / "results.jsonl", "--output", tmp_path / "out"]
    check(tmp_path, tmp_path / name, lambda: command(*words), must_fail=name != "attention_maps.jsonl")


def test_files_of_users(text_run, image_run, words_run, tmp_path):
    """A text may have any bytes; an image may not."""
    file = tmp_path / "file"
    check(tmp_path, file, lambda: command("explain", text_run, "--file", file), must_fail=False)
    check(tmp_path, file, lambda: command("explain", image_run, "--image", file))
    check(tmp_path, file, lambda: command("generate", words_run, "--prompt-file", file, "--max-new-tokens", 2), must_fail=False)
    check(tmp_path, words_run / "model" / "tokenizer.json", lambda: command("generate", words_run, "--max-new-tokens", 2))


def test_saved_states_and_tokenizers(tmp_path):
    check(tmp_path, tmp_path / "state.safetensors", lambda: PermuteFormerCache.load(tmp_path / "state.safetensors"))
    ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        file = tmp_path / "tokenizer" / name
        check(tmp_path, file, lambda: ByteTokenizer.from_pretrained(tmp_path / "tokenizer"), must_fail=False)


INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "model.safetensors", *INDICES])
def test_weights_are_safetensors_only(name, tmp_path):
    """The pickle of older models is not read, not even if there is nothing else."""
    folder = tmp_path / "model"
    PermuteFormerForCausalLM(PermuteFormerConfig(**TINY, causal=True)).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with silence_transformers():
        check(tmp_path, folder / name, lambda: PermuteFormerForCausalLM.from_pretrained(folder))
        check(tmp_path, folder / name, lambda: command("inspect", folder))


@pytest.mark.parametrize("name", ["config.json", "pytorch_model.bin", "model.safetensors", *INDICES, *TOKENIZER_FILES])
def test_models_to_convert(name, tmp_path):
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2)).save_pretrained(folder)
    if name in ("pytorch_model.bin", *INDICES):
        (folder / "model.safetensors").unlink()
    is_read = name not in TOKENIZER_FILES  # those are copied
    with silence_transformers():
        check(tmp_path, folder / name, lambda: convert(folder), is_read)
        check(tmp_path, folder / name, lambda: command("convert", folder, tmp_path / "converted"), is_read)


def test_configurations_that_ask_for_code_are_refused(tmp_path):
    """For some fields transformers downloads kernels, which are programs."""
    own, other = tmp_path / "own", tmp_path / "gpt2"
    PermuteFormerForCausalLM(PermuteFormerConfig(**TINY, causal=True)).save_pretrained(own)
    GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2)).save_pretrained(other)
    fields = ["attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"]
    changes = [({field: "somebody/kernel"}, f"{field}='somebody/kernel'") for field in fields]
    for folder, load in ((own, PermuteFormerForCausalLM.from_pretrained), (other, convert)):
        content = json.loads((folder / "config.json").read_text())
        for change, message in [*changes, ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config")]:
            (folder / "config.json").write_text(json.dumps({**content, **change}))
            with pytest.raises(ValueError, match=message):
                load(folder)


@pytest.mark.parametrize("name", ["checksums.json", "state.json", "model.safetensors", "optimizer.safetensors"])
def test_checkpoints(name, tmp_path):
    tensors = {"w": torch.zeros(2)}
    path = checkpoint.save(tmp_path / "checkpoints", 1, {"a": 1}, {"model": tensors, "optimizer": tensors})

    def load():
        if name != "checksums.json":  # who changes a file can change its checksum
            sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir() if file.name != "checksums.json"}
            (path / "checksums.json").write_text(json.dumps(sums))
        return checkpoint.load(tmp_path / "checkpoints", 1)

    check(tmp_path, path / name, load)


def test_stores(tmp_path):
    folder = Classify(write(tmp_path / "table.csv", ROWS)).store.folder
    check(tmp_path, folder / "info.json", lambda: None if is_complete(folder) else "it is not complete, and prepared again")
    check(tmp_path, folder / "train.arrow", lambda: Store(folder).rows("train"))


OWN = {f"table{ending}": "classify" for ending in (".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz", ".jsonl.xz", ".tsv.bz2")}
OWN |= dict.fromkeys(["a.tar", "a.tar.gz", "a.zip"], "images")


@pytest.mark.parametrize("name", OWN)
def test_tables_and_archives(name, tmp_path):
    check(tmp_path, tmp_path / name, lambda: command("data", "check", OWN[name], tmp_path / name))


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("digits", "lm-bytes")])
def test_files_of_tasks(name, tmp_path):
    options = SMALL[name](tmp_path)
    is_text = TASKS[name](**options).input.kind == "lm" or name == "lra-text"
    for path in {path.suffix: path for path in tmp_path.rglob("*") if path.is_file()}.values():
        check(tmp_path, path, lambda: TASKS[name](**options).prepare(), must_fail=not is_text)


def test_members_of_archives(tmp_path):
    bomb = pickle.dumps({"data": Bomb(tmp_path / "marker"), "labels": [1]}, 2)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(tar_bytes([("cifar-10-batches-py/data_batch_1", bomb)], "w:gz"))
    (tmp_path / "images.zip").write_bytes(zip_bytes([("cat/a.png", bomb)]))
    assert "do not trust this file" in command("data", "check", "lra-image", "--data", tmp_path)
    assert "not an image" in command("data", "check", "images", tmp_path / "images.zip")
    assert not (tmp_path / "marker").exists()
