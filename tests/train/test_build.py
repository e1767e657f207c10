"""A model for a task: what fits is made to fit, and what does not is refused."""

import pytest
import torch

from permuteformer.models import PRESETS
from permuteformer.tasks.batches import loader
from permuteformer.train.build import build_config, build_model, build_task, inputs, targets

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("protocol", ["lra", "paper"])
def test_a_black_pixel_has_an_embedding_of_its_own(protocol):
    """By LRA's tokens a black pixel is 0, which elsewhere is padding, zero and never trained."""
    task = build_task("digits", {"protocol": protocol})
    model = build_model(build_config("permuteformer-image", TINY, task), task.kind)
    black = {"lra": 0, "paper": 3}[protocol]
    assert model.model.embed_tokens.weight[black].abs().sum() > 0
    batch = next(iter(loader(task, "train", 8)))
    assert (batch.input_ids == black).any()
    model(**inputs(batch, model.config, task.kind), **targets(batch, task.kind)).loss.backward()
    assert model.model.embed_tokens.weight.grad[black].abs().sum() > 0


def test_positions_reach_as_far_as_the_task():
    task = build_task("digits", {})
    for preset in ("performer-image", "linformer-image"):
        config = build_config(preset, TINY, task)
        assert [entry["max_length"] for entry in [config.attention, *config.position] if "max_length" in entry] == [66] * (
            2 if preset == "linformer-image" else 1
        )
    assert PRESETS["performer-image"]["position"][0]["max_length"] == 1026, "the preset itself must stay as it is"


def test_axes_follow_grid_and_preset():
    task = build_task("digits", {})
    batch = next(iter(loader(task, "train", 4)))
    two, one = (build_config(preset, TINY, task) for preset in ("permuteformer-image", "permuteformer-1d-image"))
    assert "position_ids" in inputs(batch, two, "classify")
    assert "position_ids" not in inputs(batch, one, "classify")
    text = build_task("lra-listops", {})
    assert build_config("permuteformer-image", TINY, text).axes == 1
    with pytest.raises(ValueError, match="axes=2 needs a task with a grid"):
        build_config("permuteformer-image", {**TINY, "axes": 2}, text)


def test_a_loss_leaves_the_configuration_as_it_was():
    """Else a run that goes on from its last step, and computes none, saves another one."""
    task = build_task("digits", {})
    model = build_model(build_config("permuteformer-image", TINY, task), task.kind)
    before = model.config.to_dict()
    batch = next(iter(loader(task, "train", 4)))
    model(**inputs(batch, model.config, task.kind), **targets(batch, task.kind))
    assert model.config.to_dict() == before


def test_labels_have_their_names():
    config = build_config("permuteformer-image", TINY, build_task("digits", {}))
    assert (config.num_labels, config.id2label[3], config.label2id["7"]) == (10, "3", 7)


@pytest.mark.parametrize(
    ("task", "preset", "words"),
    [
        ("digits", "permuteformer-lm", "does not fit task 'digits'.*one that is not causal"),
        ("lm-bytes", "permuteformer-text", "does not fit task 'lm-bytes'.*ends in -lm"),
        ("digits", "permutformer-image", "unknown preset 'permutformer-image'.*did you mean 'permuteformer-image'"),
    ],
)
def test_what_does_not_fit_is_refused(task, preset, words):
    with pytest.raises(ValueError, match=words):
        build_config(preset, TINY, build_task(task, {}))


def test_unknown_options_and_missing_paths_are_refused():
    with pytest.raises(TypeError, match="unknown argument of task 'digits'"):
        build_task("digits", {"protocoll": "lra"})
    with pytest.raises(ValueError, match="classify is of your own data: say where it is"):
        build_task("classify", {})


def test_windows_without_padding_need_no_mask():
    task = build_task("lm-bytes", {"corpus": "topics", "length": 64, "context": 32})
    config = build_config("performer-lm", TINY, task)
    items = task.dataset("test")
    whole, cut = task.collate([items[1], items[2]]), task.collate([items[1], items[len(items) - 1]])
    assert "attention_mask" not in inputs(whole, config, "lm")
    assert ("attention_mask" in inputs(cut, config, "lm")) == bool((~cut.key_mask).any())
    model = build_model(config, "lm").eval()
    loss = model(**inputs(whole, config, "lm"), **targets(whole, "lm")).loss
    sums = task.score(model(**inputs(whole, config, "lm"), use_cache=False).logits, whole)
    torch.testing.assert_close(loss.double(), sums["loss"] / sums["tokens"], rtol=1e-5, atol=1e-6)
