"""A model for a task: its configuration follows from preset and input, and a mismatch is refused."""

import pytest
import torch
from train.runs import SIZES, WINDOWS

from permuteformer.models import PRESETS
from permuteformer.train.build import build_config, build_model, build_task, model_inputs, model_targets


def loss_of(model, batch):
    return model(**model_inputs(batch, model.config), **model_targets(batch)).loss


@pytest.mark.parametrize(("task", "options", "black"), [("digits", {}, 3), ("lra-image", {"protocol": "lra"}, 0)])
def test_black_pixel_has_an_embedding(task, options, black):
    """In LRA's protocol a black pixel is 0, which elsewhere is padding, zero and never trained."""
    input = build_task(task, options).input
    model = build_model(build_config("permuteformer-image", SIZES, input), "classify")
    assert model.model.embed_tokens.weight[black].abs().sum() > 0
    height, width = input.grid
    loss_of(model, input.collate([{"id": 0, "value": bytes(height * width), "label": 1}])).backward()
    assert model.model.embed_tokens.weight.grad[black].abs().sum() > 0


def test_positions_are_as_many_as_the_longest_input(digits):
    for preset, parts in (("performer-image", 1), ("linformer-image", 2)):
        config = build_config(preset, SIZES, digits.input)
        assert [entry["max_length"] for entry in [config.attention, *config.position] if "max_length" in entry] == [66] * parts
    assert PRESETS["performer-image"]["position"][0]["max_length"] == 1026, "the preset itself must not change"


def test_axes_follow_grid_and_preset(digits):
    batch = digits.input.collate(digits.items("train")[:4])
    two, one = (build_config(preset, SIZES, digits.input) for preset in ("permuteformer-image", "permuteformer-1d-image"))
    assert "position_ids" in model_inputs(batch, two)
    assert "position_ids" not in model_inputs(batch, one)
    text = build_task("lra-listops", {}).input
    assert build_config("permuteformer-image", SIZES, text).axes == 1
    with pytest.raises(ValueError, match=r"axes=2.*--model.axes 1"):
        build_config("permuteformer-image", {**SIZES, "axes": 2}, text)


def test_configuration_has_the_names_of_labels_and_does_not_change_with_a_loss(digits):
    """Else a run resumed after its last step, which computes no loss, would save another configuration."""
    config = build_config("permuteformer-image", SIZES, digits.input)
    assert (config.num_labels, config.id2label[3], config.label2id["7"]) == (10, "3", 7)
    model, before = build_model(config, "classify"), config.to_dict()
    loss_of(model, digits.input.collate(digits.items("train")[:4]))
    assert model.config.to_dict() == before


@pytest.mark.parametrize(
    ("task", "options", "preset", "words"),
    [
        ("digits", {}, "permuteformer-lm", "'permuteformer-lm'.*not causal"),
        ("lm-bytes", {"corpus": "topics"}, "permuteformer-text", "'permuteformer-text'.*-lm"),
    ],
)
def test_preset_of_another_kind_is_refused(task, options, preset, words):
    with pytest.raises(ValueError, match=words):
        build_config(preset, SIZES, build_task(task, options).input)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match=r"task 'digits'.*protocoll"):
        build_task("digits", {"protocoll": "lra"})


def test_windows_without_padding_have_no_mask():
    task = build_task("lm-bytes", {"corpus": "topics", **WINDOWS})
    config = build_config("performer-lm", SIZES, task.input)
    items = task.items("test")
    full, padded = task.input.collate([items[1], items[2]]), task.input.collate([items[1], items[len(items) - 1]])
    assert not padded.mask.all()
    assert "attention_mask" not in model_inputs(full, config)
    assert "attention_mask" in model_inputs(padded, config)
    model = build_model(config, "lm").eval()
    for batch in (full, padded):
        sums = task.input.score(model(**model_inputs(batch, config), use_cache=False).logits, batch)
        torch.testing.assert_close(loss_of(model, batch).double(), sums["loss"] / sums["tokens"], rtol=1e-5, atol=1e-6)
