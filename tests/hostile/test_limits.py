"""Small files that would become much: models and checkpoints. The limits of readers are tested with them, in ``tests/tasks``."""

import json

import pytest
import torch

from permuteformer.models import PermuteFormerConfig, PermuteFormerModel
from permuteformer.train import checkpoint

TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11}


@pytest.fixture
def model_folder(tmp_path):
    PermuteFormerModel(PermuteFormerConfig(**TINY)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 10**8}, "800,000,4"),
        ({"vocab_size": 10**12}, "vocab_size.*1,000,000,000,000"),
        ({"num_hidden_layers": 2000}, "num_hidden_layers=2,000"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers.*1,000,000"),
        ({"hidden_size": 10**6}, "hidden_size.*1,000,000"),
        ({"num_labels": 10**9}, "num_labels.*1,000,000,000"),
        ({"position": [{"name": "learned", "max_length": 10**9}]}, "8,000,000,"),
        ({"position": [{"name": "permute"}] * 1000}, "position.*16"),
        ({"position": [{"name": "permute", "permutation": "max_order"}], "hidden_size": 8192}, "feature_size.*2,048"),
        ({"attention": {"name": "linear", "feature_multiplier": 10**5}}, "feature_size.*2 heads"),
        ({"attention": {"name": "linear", "feature_multiplier": 2**32}, "position": [{"name": "rope"}]}, "feature_multiplier.*hidden_size"),
        ({"attention": {"name": "linformer", "max_length": 10**9}, "position": []}, "config.json"),
        ({"dtype": "load"}, "dtype.*load"),
        ({"id2label": [1]}, "id2label"),
        ({"pad_token_id": 10**9}, "AssertionError"),
    ],
)
def test_a_configuration_much_larger_than_its_weights_is_refused(model_folder, change, message):
    content = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(ValueError, match=message) as error:
        PermuteFormerModel.from_pretrained(model_folder)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "3", "", "\ud800"])
def test_a_configuration_that_is_no_object_is_refused(model_folder, text):
    (model_folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"config\.json"):
        PermuteFormerModel.from_pretrained(model_folder)


@pytest.mark.parametrize("name", ["../part.safetensors", "/etc/passwd", 3])
def test_parts_of_a_model_are_in_its_folder(model_folder, name):
    (model_folder / "model.safetensors").rename(model_folder / "part.safetensors")
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="weight_map"):
        PermuteFormerModel.from_pretrained(model_folder)


@pytest.mark.parametrize("name", ["/dev/zero", "../../etc/passwd", "missing"])
def test_files_of_a_checkpoint_are_in_its_folder(tmp_path, name):
    """A name such as /dev/zero would be read forever."""
    path = checkpoint.save(tmp_path, 1, {}, {"model": {"w": torch.zeros(1)}})
    (path / "checksums.json").write_text(json.dumps({name: "0", "state.json": "0"}))
    with pytest.raises(checkpoint.Damaged, match=r"checksums\.json names a file"):
        checkpoint.load(tmp_path, 1)


@pytest.mark.parametrize("shape", [(1,), (), (3, 2)])
def test_weights_of_another_shape_are_not_broadcast(shape):
    model = torch.nn.Linear(3, 2)
    tensors = {**checkpoint.model_tensors(model), "weight": torch.zeros(shape)}
    with pytest.raises(ValueError, match="weight"):
        checkpoint.load_model(model, tensors)
