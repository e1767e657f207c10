"""Rows, batches and trained weights of every task equal those on record: a change of code must not change what is trained.

``PYTHONPATH=tests python tests/contracts/test_golden.py`` writes the record again; the CHANGELOG says why whenever it changes.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_tasks import SMALL

from permuteformer.experiments.experiment import Experiment, RunOptions
from permuteformer.tasks import SPLITS, TASKS
from permuteformer.tasks.store import Items
from permuteformer.train.data import BatchSampler
from permuteformer.train.loop import train

RECORD = Path(__file__).with_name("golden.json")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "hidden_dropout": 0.0}
TRAINED = {
    "classify": "permuteformer-text",
    "match": "permuteformer-retrieval",
    "images": "permuteformer-image",
    "lm": "permuteformer-lm",
    "digits": "performer-image",
    "lra-text": "transformer-text",
    "lra-listops": "roformer-text",
    "wiki-en": "performer-lm",
}
"""A preset for each task that is trained."""


def hash_of(values) -> str:
    digest = hashlib.sha256()
    for value in values:
        value = value.numpy() if isinstance(value, torch.Tensor) else value
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()[:16]


def rows(task, split) -> str:
    items = Items(task.rows(split).path)  # labels as they are stored
    step = max(len(items) // 500, 1)
    return hash_of([len(items), *(value for n in range(0, len(items), step) for value in items[n].values())])


def batches(task, split) -> str:
    dataset, found = task.items(split), []
    for by_length in (False, True):
        lengths = task.lengths(split) if by_length else None
        order = BatchSampler(len(dataset), 4, seed=3, epoch=1, shuffle=split == "train", lengths=lengths)
        for ids in list(order)[:5]:
            batch = task.input.collate([dataset[n] for n in ids])
            parts = (
                batch.ids,
                batch.input_ids,
                batch.mask,
                batch.labels,
                batch.positions,
                batch.second_input_ids,
                batch.second_mask,
            )
            found += [part for part in parts if part is not None]
    return hash_of(found)


def options(name, folder):
    """Long-Range Arena's own tokens, which the record was made with."""
    found = SMALL[name](folder)
    return {**found, "protocol": "lra"} if name.startswith("lra-") else found


def data(name, folder) -> dict[str, dict[str, str]]:
    task = TASKS[name](**options(name, folder))
    return {split: {"rows": rows(task, split), "batches": batches(task, split)} for split in SPLITS}


def weights(name, folder) -> dict[str, float]:
    """Norms of the weights after eight updates, by parameter."""
    from safetensors.torch import load_file

    settings = {"steps": 8, "batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 2}
    experiment = Experiment(task=name, model=TRAINED[name], task_options=options(name, folder), model_fields=SIZES, **settings)
    train(experiment, folder / "run", RunOptions(quiet=True, track=()))
    found = load_file(folder / "run" / "model" / "model.safetensors")
    return {key: round(float(x.double().norm()), 6) for key, x in sorted(found.items()) if x.is_floating_point()}


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize("name", SMALL)
def test_rows_and_batches(name, tmp_path, record):
    assert data(name, tmp_path) == record["data"][name]


@pytest.mark.parametrize("name", TRAINED)
def test_weights(name, tmp_path, record):
    assert weights(name, tmp_path) == pytest.approx(record["weights"][name], rel=1e-4, abs=1e-5)


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    def each(measure, names):
        found = {}
        for name in names:
            with TemporaryDirectory() as folder:
                found[name] = measure(name, Path(folder))
        return found

    torch.set_num_threads(1)
    made = {"data": each(data, SMALL), "weights": each(weights, TRAINED)}
    RECORD.write_text(json.dumps(made, indent=1) + "\n")
