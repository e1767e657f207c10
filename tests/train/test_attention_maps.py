"""Attention maps: weights give the output, means equal loops over pairs, and padding, mode and chance do not matter."""

import itertools
import json
import re

import pytest
import torch
from checks import assert_close, inputs
from contracts.test_attention import LAYERS, layer_of
from small_data import listops

from permuteformer import ATTENTIONS, Attention, build
from permuteformer.tasks import Batch
from permuteformer.train import attention_maps as module
from permuteformer.train.attention_maps import NoWeights, attention_maps, attention_weights
from permuteformer.train.build import build_config, build_model, build_task

pytestmark = pytest.mark.filterwarnings("ignore:positions on axis")  # heads this small repeat early

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class Squares(Attention):
    """Not linear in its values."""

    def mix(self, q, k, v, tokens, state):
        return v.square(), None


class FixedSize(Attention):
    """Supports values of the size of a head only."""

    def mix(self, q, k, v, tokens, state):
        return v + torch.zeros(self.head_size), None


def small_model(preset, task, **fields):
    return build_model(build_config(preset, {**SMALL, **fields}, task.input), task.input.kind).eval()


def text_batch(lengths, width=None):
    """Return rows of random bytes with padding."""
    mask = torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, torch.randint(3, 259, mask.shape), 0)
    ids[:, 0] = 1
    return Batch(torch.arange(len(lengths)), ids, mask, torch.zeros(len(lengths), dtype=torch.int64))


def some(task, split="train", count=3):
    return task.input.collate(task.items(split)[:count])


def maps_of(preset, task, batch, **fields):
    return attention_maps(small_model(preset, task, **fields), task.input, batch)


@pytest.fixture
def text():
    return build_task("lra-text", {"protocol": "paper"})


@pytest.fixture
def language(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a small text, größer\n" for n in range(200)))
    return build_task("lm", {"path": str(tmp_path / "text.txt"), "length": 40, "context": 20})


@LAYERS
def test_weights_give_the_output_for_all_values_and_add_up_to_one(attention, positions, causal, axes):
    """For as many values as tokens only the right weights do; that the output is that of the paper, tests/attention shows."""
    layer = layer_of(attention, positions, causal, axes).eval()
    (x, at), mask = inputs(layer), torch.arange(21) < torch.tensor([[21], [9]])
    weights = attention_weights(layer, x, positions=at, key_mask=mask)
    for _ in range(2):
        torch.nn.init.normal_(layer.value.weight)
        mixed = weights @ layer.heads(layer.value(x))
        assert_close(layer.output(mixed.transpose(1, 2).flatten(2))[mask], layer(x, positions=at, key_mask=mask)[0][mask])
    assert not weights[1, :, 9:].any()
    assert not weights[1, :, :, 9:].any()
    assert not (causal and weights.triu(1).any())
    if attention not in ("linformer", "nystromformer") and (attention != "linear" or not {"rope", "orthogonal"} & {*positions}):
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 21, dtype=torch.float64))


def test_weights_of_half_precision_are_single():
    layer = build("softmax", hidden_size=24, num_heads=2).bfloat16()
    weights = attention_weights(layer, torch.randn(1, 9, 24, dtype=torch.bfloat16))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 9))


@pytest.mark.parametrize(("kind", "message"), [(Squares, "not linear"), (FixedSize, "size 9")])
def test_attention_without_weights_is_refused(kind, message):
    layer = build("softmax", hidden_size=24, num_heads=2)
    layer.attention = kind(2, 12)
    with pytest.raises(NoWeights, match=message):
        attention_weights(layer, torch.randn(1, 9, 24))


def first_layer_weights(model, batch):
    """Return the weights of the first layer, computed from its input."""
    positions = batch.positions if model.config.axes > 1 else None
    tokens = model.model.tokens(*batch.input_ids.shape, "cpu", batch.mask, positions)
    x = model.model.layers[0].attention_norm(model.model.embed(batch.input_ids, None, tokens))
    return attention_weights(model.model.layers[0].attention, x, positions=positions, key_mask=batch.mask)


@pytest.mark.parametrize("causal", [False, True])
def test_kernel_is_a_mean_over_pairs(causal, text, language, monkeypatch):
    monkeypatch.setattr(module, "REACH", 12)
    task, preset = (language, "permuteformer-lm") if causal else (text, "permuteformer-text")
    model, batch = small_model(preset, task), text_batch([30, 21])
    kernel = attention_maps(model, task.input, batch)["kernel"]
    assert kernel["distances"] == list(range(0 if causal else -12, 13))
    weights = first_layer_weights(model, batch)
    for head, (n, distance) in itertools.product(range(2), enumerate(kernel["distances"])):
        of_pairs = [
            weights[row, head, i, i - distance].item()
            for row, length in enumerate([30, 21])
            for i in range(12 if causal else 0, length)
            if 0 <= i - distance < length
        ]
        assert kernel["layers"][0][head][n] == pytest.approx(sum(of_pairs) / len(of_pairs), rel=0.006)


@pytest.mark.parametrize("preset", ["permuteformer-image", "performer-image", "transformer-image"])
def test_kernel_of_images_is_a_mean_over_pixels(preset, digits):
    """Also of models that count pixels along the sequence."""
    model, batch = small_model(preset, digits), some(digits, "test")
    plane = attention_maps(model, digits.input, batch)["kernel_2d"]
    assert plane["rows"] == plane["columns"] == list(range(-7, 8))
    weights = first_layer_weights(model, batch)[:, :, 1:-1, 1:-1].unflatten(2, (8, 8)).unflatten(4, (8, 8))
    for head, (dy, dx) in itertools.product(range(2), [(0, 0), (-7, 7), (3, -2), (0, 5), (7, 0)]):
        of_pairs = [
            weights[b, head, y, x, y - dy, x - dx].item()
            for b, y, x in itertools.product(range(3), range(8), range(8))
            if 0 <= y - dy < 8 and 0 <= x - dx < 8
        ]
        found = plane["layers"][0][head][dy + 7][dx + 7]
        assert found == pytest.approx(sum(of_pairs) / len(of_pairs), rel=0.006)


@pytest.mark.parametrize("causal", [False, True])
def test_kernel_without_positions_is_flat(causal, text, language):
    """Also of a causal model, where early queries have fewer keys."""
    task, preset, batch = (language, "performer-lm", text_batch([40])) if causal else (text, "performer-text", text_batch([40]))
    batch.input_ids[:] = 7
    for positions, is_flat in (([], True), ([{"name": "permute"}], False)):
        found = maps_of(preset, task, batch, position=positions, initializer_range=0.5)
        for head in itertools.chain(*found["kernel"]["layers"]):
            assert (max(head) < 1.02 * min(head)) == is_flat
            assert head[0] == pytest.approx(1 / 40, rel=0.005) or causal or not is_flat


def test_kernel_of_one_token(language, text):
    for task, preset in ((language, "permuteformer-lm"), (text, "permuteformer-text")):
        found = maps_of(preset, task, text_batch([1]))
        assert (found["format"], found["kind"], found["kernel_2d"]) == (1, task.input.kind, None)
        assert found["kernel"] == {"distances": [0], "normalised": True, "layers": [[[1.0], [1.0]]] * 2}


@pytest.mark.parametrize("preset", ["performer-text", "roformer-text", "linformer-text", "reformer-text", "nystromformer-text"])
def test_every_attention_has_maps(preset, text):
    found = maps_of(preset, text, text_batch([30, 17]))
    assert found["reason"] is None
    assert found["kernel"]["normalised"] == (preset not in ("roformer-text", "linformer-text"))


def alike(one, other):
    """Return whether JSON is equal except for the last digit, which depends on rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other or (isinstance(one, (int, float)) and one == pytest.approx(other, rel=0.011))


def test_padding_does_not_matter(text):
    model = small_model("permuteformer-text", text)
    alone, padded, other = text_batch([17]), text_batch([17], width=31), text_batch([17])
    padded.input_ids[:, :17] = alone.input_ids
    padded.input_ids[:, 17:] = 99
    found, of_padded, of_other = (attention_maps(model, text.input, batch) for batch in (alone, padded, other))
    assert alike(of_padded, found)
    assert not alike(of_other, found)


def test_model_is_not_changed_and_maps_are_json(digits):
    model, batch = small_model("performer-image", digits), some(digits)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    found = attention_maps(model, digits.input, batch)
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_reason_is_given_if_there_are_no_weights(digits):
    ATTENTIONS.register("squares")(Squares)
    try:
        outside = small_model("performer-image", digits, attention={"name": "squares"})
    finally:
        ATTENTIONS.remove("squares")
    bad = small_model("permuteformer-image", digits)
    bad.model.layers[1].attention.query.weight.data[0, 0] = torch.nan
    for model, reason in ((outside, "layer 0: .*quares' is not linear"), (bad, "layer 1: .*'linear' are not finite")):
        found = attention_maps(model, digits.input, some(digits))
        assert re.match(reason, found["reason"])
        assert found["kernel"] is found["kernel_2d"] is found["maps"] is None
        assert not any(module._forward_pre_hooks for module in model.modules())
        json.dumps(found, allow_nan=False)


def test_long_texts_are_cut(text):
    found = maps_of("permuteformer-text", text, text_batch([300]))
    assert found["length"] == 256
    assert found["kernel"]["distances"] == list(range(-128, 129))
    assert len(found["maps"]["tokens"]) == len(found["maps"]["layers"][0]) == len(found["maps"]["layers"][0][0]) == 64


def test_maps_of_large_images_are_small_and_a_shade_is_no_special_token():
    """Four layers of eight heads on an image of 32 x 32, in a protocol in which shades have the numbers of special tokens elsewhere."""
    task = build_task("lra-image", {"protocol": "lra"})
    batch = task.input.collate([{"id": 0, "label": 1, "value": bytes(n * 7 % 256 for n in range(1024))}])
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8}
    found = attention_maps(build_model(build_config("permuteformer-image", sizes, task.input), "classify").eval(), task.input, batch)
    assert found["maps"]["tokens"][:3] == ["[CLS]", "0", "7"]
    assert len(found["kernel_2d"]["rows"]) == 17
    assert all(value > 0 for row in found["kernel_2d"]["layers"][0][0] for value in row)
    assert len(json.dumps(found, separators=(",", ":"))) < 300_000


def test_tokens_are_named(tmp_path, language):
    listops(tmp_path, [("( ( ( [MAX 2 ) 9 ) ] )", "9")] * 10)
    (tmp_path / "words.txt").write_text("the cat sat\nthe dog sat\n" * 100)
    words = build_task("lm", {"path": str(tmp_path / "words.txt"), "unit": "words", "length": 8, "context": 4})
    expressions = build_task("lra-listops", {"protocol": "paper"}, data=str(tmp_path))
    shown = maps_of("permuteformer-lm", language, some(language, count=1))["maps"]["tokens"]
    assert shown[:9] == ["[CLS]", *"line 0 o"]
    assert shown[25:34] == [*"gr", "\\xc3", "\\xb6", "\\xc3", "\\x9f", *"er", "\\n"]
    names = ["</s>", "the", "cat", "sat", "</s>", "the", "dog", "sat"]
    assert maps_of("permuteformer-lm", words, some(words, count=1))["maps"]["tokens"] == names
    assert maps_of("permuteformer-text", expressions, some(expressions))["maps"]["tokens"] == ["[CLS]", "[MAX", "2", "9", "]", "[SEP]"]


def test_of_pairs_the_first_text_is_used():
    pairs = build_task("lra-retrieval", {"protocol": "paper"})
    batch = pairs.input.collate([{"id": 0, "label": 1, "first": b"one text", "second": b"another one"}])
    assert maps_of("permuteformer-retrieval", pairs, batch)["maps"]["tokens"] == ["[CLS]", *"one text", "[SEP]"]
