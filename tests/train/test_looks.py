"""Looks: weights against the paper's formula, means against loops over pairs, and what must not matter: padding, mode, chance."""

import itertools
import json

import pytest
import torch
from checks import assert_close, grid
from small_data import csv, listops

from permuteformer import ATTENTIONS, Attention, build
from permuteformer.ops import reference
from permuteformer.ops.feature_map import relu_eps
from permuteformer.tasks import Batch
from permuteformer.train import looks
from permuteformer.train.build import build_config, build_model, build_task
from permuteformer.train.looks import NoWeights, attention_weights, look

pytestmark = pytest.mark.filterwarnings("ignore:positions on axis")  # heads this small repeat early

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}

LAYERS = {
    "softmax": ("softmax", [], {}),
    "softmax-rope": ("softmax", ["rope"], {}),
    "softmax-bias": ("softmax", ["t5_bias"], {}),
    "linear": ("linear", [], {}),
    "linear-permute": ("linear", ["permute"], {"feature_multiplier": 2}),
    "linear-bias": ("linear", ["t5_bias"], {}),
    "linear-rope": ("linear", ["rope"], {}),
    "linear-orthogonal": ("linear", ["orthogonal"], {"normalizer": "transformed"}),
    "linear-decay": ("linear", ["permute", ("decay", {"two_sided": True})], {}),
    "linear-causal": ("linear", ["permute", "decay"], {"causal": True}),
    "softmax-causal": ("softmax", [], {"causal": True}),
    "reformer": ("reformer", [], {"num_buckets": 4, "chunk_size": 4}),
    "reformer-causal": ("reformer", [], {"num_buckets": 4, "chunk_size": 4, "causal": True}),
    "linformer": ("linformer", [], {"max_length": 40, "projected_length": 8}),
    "nystromformer": ("nystromformer", [], {"num_landmarks": 8, "convolution_size": 3}),
}
ROWS_SUM_TO_ONE = [name for name in LAYERS if name not in ("linear-rope", "linformer", "nystromformer")]


def layer_of(name, axes=1):
    attention, positions, arguments = LAYERS[name]
    return build(attention, positions, hidden_size=24, num_heads=2, axes=axes, **arguments).double().eval()


def small_model(preset, task, **fields):
    return build_model(build_config(preset, {**SMALL, **fields}, task), task.kind).eval()


def text_batch(lengths, width=None):
    """Rows of random bytes, of these lengths, and padding up to the width."""
    width = width or max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, torch.randint(3, 259, mask.shape), 0)
    ids[:, 0] = 1
    return Batch(torch.arange(len(lengths)), ids, mask, torch.zeros(len(lengths), dtype=torch.int64))


@pytest.fixture
def text_task():
    return build_task("lra-text", {"protocol": "paper"})


@pytest.fixture
def digits():
    task = build_task("digits", {})
    return task, task.collate(task.dataset("test")[:3])


@pytest.fixture
def language(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a small text, größer\n" for n in range(200)))
    task = build_task("lm", {"path": str(tmp_path / "text.txt"), "length": 40, "context": 20})
    return task, task.collate(task.dataset("train")[:3])


class TestWeights:
    @pytest.mark.parametrize("name", LAYERS)
    def test_they_make_the_output(self, name):
        layer, x = layer_of(name), torch.randn(2, 21, 24, dtype=torch.float64)
        mask = torch.arange(21) < torch.tensor([[21], [9]])
        weights = attention_weights(layer, x, key_mask=mask)
        expected, _ = layer(x, key_mask=mask)
        mixed = weights @ layer.heads(layer.value(x))
        assert_close(layer.output(mixed.transpose(1, 2).flatten(2))[mask], expected[mask])
        assert not weights[1, :, 9:].any()
        assert not weights[1, :, :, 9:].any()

    @pytest.mark.parametrize("name", ROWS_SUM_TO_ONE)
    def test_rows_sum_to_one(self, name):
        layer = layer_of(name)
        weights = attention_weights(layer, torch.randn(2, 21, 24, dtype=torch.float64))
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 21, dtype=torch.float64))
        if layer.attention.causal:
            assert not weights.triu(1).any()

    @pytest.mark.parametrize(("causal", "axes"), list(itertools.product([False, True], [1, 2])))
    def test_they_are_the_paper(self, causal, axes):
        encodings = ["permute", "decay"] if causal else ["permute"]
        layer = build("linear", encodings, hidden_size=32, num_heads=2, causal=causal, axes=axes).double()
        x = torch.randn(2, 45, 32, dtype=torch.float64)
        permute = layer.attention.position.encodings[0]
        identity = torch.arange(16).expand(2, -1)
        positions = torch.arange(45).view(1, -1, 1) if axes == 1 else grid(layer, 2, 45)
        expected = reference.attention(
            layer.heads(layer.query(x)),
            layer.heads(layer.key(x)),
            torch.eye(45, dtype=torch.float64).expand(2, 2, -1, -1),
            permutations=[torch.where(permute.axis == axis, permute.permutation, identity) for axis in range(axes)],
            positions=positions.expand(2, -1, -1),
            visible=torch.ones(45, 45, dtype=torch.bool).tril(0 if causal else 45),
            feature_map=relu_eps,
            decay=reference.decay_weights(layer.attention.position.encodings[1].r, torch.arange(45).expand(1, 2, -1)) if causal else None,
        )
        assert_close(attention_weights(layer, x, positions=None if axes == 1 else positions), expected)

    @pytest.mark.parametrize("causal", [False, True])
    def test_of_tokens_all_alike_only_the_distance_counts(self, causal):
        """A query's weights differ by its normaliser, but their ratios are those of every other query."""
        layer = build("linear", ["permute", "decay"] if causal else ["permute"], hidden_size=64, num_heads=2, causal=causal).double()
        weights = attention_weights(layer, torch.randn(1, 1, 64, dtype=torch.float64).expand(1, 30, -1))
        ratios = weights / weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        for distance in range(30) if causal else range(-29, 30):
            along = ratios.diagonal(-distance, -2, -1)
            assert_close(along, along[..., :1].expand_as(along))
        assert ratios[..., -1, :].std(-1).min() > 1e-3

    def test_in_half_precision_they_are_of_single(self):
        layer = build("softmax", hidden_size=24, num_heads=2).bfloat16()
        weights = attention_weights(layer, torch.randn(1, 9, 24, dtype=torch.bfloat16))
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 9))

    def test_an_attention_that_is_not_linear_has_none(self):
        class Squares(Attention):
            def mix(self, q, k, v, tokens, state):
                return v.square(), None

        class Stubborn(Attention):
            def mix(self, q, k, v, tokens, state):
                return v + torch.zeros(self.head_size), None

        for kind, message in ((Squares, "not linear"), (Stubborn, "does not mix values of size 9")):
            layer = build("softmax", hidden_size=24, num_heads=2)
            layer.attention = kind(2, 12)
            with pytest.raises(NoWeights, match=message):
                attention_weights(layer, torch.randn(1, 9, 24))


class TestKernels:
    @pytest.mark.parametrize("causal", [False, True])
    def test_the_kernel_is_a_mean_over_pairs(self, causal, text_task, language, monkeypatch):
        monkeypatch.setattr(looks, "REACH", 12)
        task, preset = (language[0], "permuteformer-lm") if causal else (text_task, "permuteformer-text")
        model, batch = small_model(preset, task), text_batch([30, 21])
        kernel = look(model, task, batch)["kernel"]
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
    def test_the_plane_is_a_mean_over_pixels(self, preset, digits):
        """Also of models that count pixels along the sequence."""
        task, batch = digits
        model = small_model(preset, task)
        plane = look(model, task, batch)["kernel_2d"]
        assert plane["rows"] == plane["columns"] == list(range(-7, 8))
        weights = first_layer_weights(model, batch)[:, :, 1:-1, 1:-1].unflatten(2, (8, 8)).unflatten(4, (8, 8))
        for head, (dy, dx) in itertools.product(range(2), [(0, 0), (-7, 7), (3, -2), (0, 5), (7, 0)]):
            of_pairs = [
                weights[b, head, y, x, y - dy, x - dx].item()
                for b, y, x in itertools.product(range(3), range(8), range(8))
                if 0 <= y - dy < 8 and 0 <= x - dx < 8
            ]
            found = plane["layers"][0][head][plane["rows"].index(dy)][plane["columns"].index(dx)]
            assert found == pytest.approx(sum(of_pairs) / len(of_pairs), rel=0.006)

    def test_pixels_of_the_other_protocol(self):
        """There CLS is 256 and a pixel's token its shade, 0 too."""
        task = build_task("digits", {"protocol": "lra"})
        batch = task.collate(task.dataset("test")[:2])
        found = look(small_model("permuteformer-image", task), task, batch)
        assert found["length"] == 65
        assert found["maps"]["tokens"][:3] == ["[CLS]", "0", "0"]
        assert all(value > 0 for row in found["kernel_2d"]["layers"][0][0] for value in row)

    @pytest.mark.parametrize("causal", [False, True])
    def test_without_positions_it_is_flat(self, causal, text_task, language):
        """Also of a causal model, where early queries have fewer keys. With positions it is not: the test can tell."""
        task = language[0] if causal else text_task
        batch = text_batch([40])
        batch.input_ids[:] = 7
        for positions, is_flat in (([], True), ([{"name": "permute"}], False)):
            model = small_model("performer-lm" if causal else "performer-text", task, position=positions, initializer_range=0.5)
            for head in itertools.chain(*look(model, task, batch)["kernel"]["layers"]):
                assert (max(head) < 1.02 * min(head)) == is_flat
                if is_flat and not causal:
                    assert head[0] == pytest.approx(1 / 40, rel=0.005)

    def test_text_without_a_grid_has_no_plane(self, text_task):
        assert look(small_model("permuteformer-text", text_task), text_task, text_batch([9]))["kernel_2d"] is None

    def test_of_one_token(self, language, text_task):
        for task, preset in ((language[0], "permuteformer-lm"), (text_task, "permuteformer-text")):
            found = look(small_model(preset, task), task, text_batch([1]))
            assert found["kernel"]["distances"] == [0]
            assert found["kernel"]["layers"] == [[[1.0], [1.0]]] * 2

    @pytest.mark.parametrize("preset", ["performer-text", "roformer-text", "linformer-text", "reformer-text", "nystromformer-text"])
    def test_every_kind_has_one(self, preset, text_task):
        found = look(small_model(preset, text_task), text_task, text_batch([30, 17]))
        assert found["reason"] is None
        assert found["kernel"]["normalised"] == (preset not in ("roformer-text", "linformer-text"))


class TestLook:
    def test_padding_does_not_matter(self, text_task):
        model = small_model("permuteformer-text", text_task)
        alone = text_batch([17])
        padded = text_batch([17], width=31)
        padded.input_ids[:, :17] = alone.input_ids
        padded.input_ids[:, 17:] = 99
        assert alike(look(model, text_task, padded), look(model, text_task, alone))
        other = text_batch([17])
        assert not alike(look(model, text_task, other), look(model, text_task, alone))

    @pytest.mark.parametrize("mode", [True, False])
    def test_the_model_is_left_as_it_was(self, mode, digits):
        task, batch = digits
        model = small_model("performer-image", task).train(mode)
        model.model.layers[1].train(not mode)
        before = [module.training for module in model.modules()]
        state, weights = torch.get_rng_state(), {name: p.clone() for name, p in model.named_parameters()}
        found = look(model, task, batch)
        assert [module.training for module in model.modules()] == before
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in model.named_parameters())
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert torch.is_grad_enabled()
        assert look(model.eval(), task, batch) == found  # dropout did not happen, either

    def test_it_is_json(self, digits, language):
        for (task, batch), preset in ((digits, "permuteformer-image"), (language, "permuteformer-lm")):
            found = look(small_model(preset, task), task, batch)
            assert json.loads(json.dumps(found, allow_nan=False)) == found
            assert {"format", "kind", "length", "kernel", "kernel_2d", "maps"} <= found.keys()
            assert found["kind"] == task.kind

    def test_weights_that_are_not_finite_are_left_out(self, digits):
        task, batch = digits
        model = small_model("permuteformer-image", task)
        with torch.no_grad():
            model.model.layers[1].attention.query.weight[0, 0] = torch.nan
        found = look(model.train(), task, batch)
        assert found["reason"] == "layer 1: the weights of attention 'linear' are not finite"
        assert found["kernel"] is found["kernel_2d"] is found["maps"] is None
        assert model.training
        json.dumps(found, allow_nan=False)

    def test_an_attention_from_outside_without_weights(self, digits):
        task, batch = digits

        @ATTENTIONS.register("squares")
        class Squares(Attention):
            def mix(self, q, k, v, tokens, state):
                return v.square(), None

        try:
            model = small_model("performer-image", task, attention={"name": "squares"})
            assert look(model, task, batch)["reason"] == "layer 0: attention 'squares' is not linear in its values, so it has no weights"
        finally:
            ATTENTIONS.remove("squares")

    def test_long_texts_and_batches_are_cut(self, text_task):
        found = look(small_model("permuteformer-text", text_task), text_task, text_batch([300] * 12))
        assert found["length"] == 256
        assert found["items"] == 8
        assert found["kernel"]["distances"] == list(range(-128, 129))
        assert len(found["maps"]["tokens"]) == len(found["maps"]["layers"][0]) == len(found["maps"]["layers"][0][0]) == 64

    def test_of_pairs_the_first_is_seen(self):
        task = build_task("lra-retrieval", {"protocol": "paper"})
        batch = task.collate([{"id": 0, "label": 1, "first": b"one text", "second": b"another one"}])
        found = look(small_model("permuteformer-retrieval", task), task, batch)
        assert found["kind"] == "match"
        assert found["maps"]["tokens"] == ["[CLS]", *"one text", "[SEP]"]

    def test_a_batch_of_nothing_is_refused(self, text_task):
        batch = text_batch([4, 4])
        batch.key_mask[1] = False
        with pytest.raises(ValueError, match="every item of batch must have a real token; they have 4, 0"):
            look(small_model("permuteformer-text", text_task), text_task, batch)

    def test_a_wrapper_is_refused(self, digits):
        task, batch = digits
        with pytest.raises(TypeError, match="without a wrapper around it; it is Sequential"):
            look(torch.nn.Sequential(small_model("permuteformer-image", task)), task, batch)

    def test_it_stays_small(self):
        """Four layers of eight heads on an image of 32 x 32."""
        task = build_task("lra-pathfinder", {"protocol": "paper"})
        batch = task.collate([{"id": 0, "label": 0, "value": bytes(n * 7 % 256 for n in range(1024))}])
        found = look(build_model(build_config("permuteformer-pathfinder", {}, task), task.kind), task, batch)
        assert found["length"] == 1026
        assert len(found["kernel_2d"]["rows"]) == 17
        assert len(json.dumps(found, separators=(",", ":"))) < 300_000


class TestTokens:
    def test_bytes(self, language):
        task, batch = language
        tokens = look(small_model("permuteformer-lm", task), task, batch)["maps"]["tokens"]
        assert tokens[:9] == ["[CLS]", *"line 0 o"]
        assert tokens[25:34] == [*"gr", "\\xc3", "\\xb6", "\\xc3", "\\x9f", *"er", "\\n"]

    def test_words(self, tmp_path):
        (tmp_path / "text.txt").write_text("the cat sat\nthe dog sat\n" * 100)
        task = build_task("lm", {"path": str(tmp_path / "text.txt"), "unit": "words", "length": 8, "context": 4})
        batch = task.collate(task.dataset("train")[:2])
        assert look(small_model("permuteformer-lm", task), task, batch)["maps"]["tokens"] == [
            "</s>",
            "the",
            "cat",
            "sat",
            "</s>",
            "the",
            "dog",
            "sat",
        ]

    def test_symbols(self, tmp_path):
        listops(tmp_path, [("( ( ( [MAX 2 ) 9 ) ] )", "9")] * 10)
        task = build_task("lra-listops", {"protocol": "paper"}, data=str(tmp_path))
        batch = task.collate(task.dataset("train")[:1])
        tokens = look(small_model("permuteformer-text", task), task, batch)["maps"]["tokens"]
        assert tokens == ["[CLS]", "[MAX", "2", "9", "]", "[SEP]"]

    def test_texts_of_a_table(self, tmp_path):
        (tmp_path / "table.csv").write_text(csv([{"text": "a\tb", "label": str(n % 2)} for n in range(30)]))
        task = build_task("classify", {"path": str(tmp_path / "table.csv")})
        tokens = look(small_model("permuteformer-text", task), task, task.collate(task.dataset("train")[:1]))["maps"]["tokens"]
        assert tokens == ["[CLS]", "a", "\\t", "b", "[SEP]"]


def first_layer_weights(model, batch):
    """By hand, from what goes into the first layer."""
    axes = model.config.axes
    tokens = model.model.tokens(*batch.input_ids.shape, "cpu", batch.key_mask, batch.positions if axes > 1 else None)
    x = model.model.layers[0].attention_norm(model.model.embed(batch.input_ids, None, tokens))
    layer = model.model.layers[0].attention
    return attention_weights(layer, x, positions=batch.positions if axes > 1 else None, key_mask=batch.key_mask)


def alike(one, other):
    """Equal but for the last digit, which rounding may turn."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other or (isinstance(one, (int, float)) and one == pytest.approx(other, rel=0.011))
