import copy
import pickle
import warnings

import pytest
import torch
from checks import CHECKS, assert_close
from torch import nn

from permuteformer import Compose, Decay, LinearState, MultiHeadAttention, Permute, PermuteFormerAttention, build
from permuteformer.attention.linear import LinearAttention
from permuteformer.ops import reference
from permuteformer.ops.backend import in_use
from permuteformer.ops.feature_map import FEATURE_MAPS, relu_eps


def layer_of(**options):
    return PermuteFormerAttention(32, num_heads=2, **{"feature_multiplier": 2, **options}).double()


@pytest.mark.parametrize("check", ["causal", "no_poison", "padding", "hidden_keys", "all_hidden", "batch", "resume", "packed", "relative"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": None},
        {"decay": 0.9},
        {"decay": Decay(2, learnable=True)},
        {"permutation": "max_order"},
        {"permutation": torch.stack([torch.randperm(32), torch.randperm(32)])},
        {"axes": 2},
        {"feature_map": "favor"},
        {"feature_map": "elu", "feature_multiplier": 1},
    ],
    ids=lambda options: ",".join(options) or "default",
)
@pytest.mark.filterwarnings("ignore:positions on axis")
def test_causal(options, check):
    CHECKS[check](layer_of(causal=True, **options))


@pytest.mark.parametrize("check", ["no_poison", "padding", "hidden_keys", "all_hidden", "batch", "packed", "relative"])
@pytest.mark.parametrize(
    "options", [{}, {"decay": Decay(2, two_sided=True)}, {"axes": 2}, {"axes": 3}, {"feature_map": "favor"}], ids=lambda o: ",".join(o)
)
@pytest.mark.filterwarnings("ignore:positions on axis")
def test_bidirectional(options, check):
    CHECKS[check](layer_of(**options))


@pytest.mark.parametrize("causal", [False, True])
def test_the_layer_is_the_paper(causal):
    """From x to y through the layer's own projections, and equation 11 in between."""
    layer = layer_of(causal=causal)
    permute = layer.attention.position.encodings[0]
    x = torch.randn(2, 150, 32, dtype=torch.float64)
    q, k, v = (projection(x).view(2, 150, 2, -1).transpose(1, 2) for projection in (layer.query, layer.key, layer.value))
    out = reference.attention(
        q,
        k,
        v,
        permutations=[permute.permutation],
        positions=torch.arange(150).view(1, -1, 1).expand(2, -1, -1),
        visible=torch.ones(150, 150, dtype=torch.bool).tril() if causal else torch.ones(150, 150, dtype=torch.bool),
        feature_map=relu_eps,
        decay=layer.attention.position.encodings[1].log_decay().double().exp() if causal else None,
    )
    expected = layer.output(out.transpose(1, 2).reshape(2, 150, 32))
    actual, state = layer(x)
    assert_close(actual, expected)
    assert (state is None) is not causal


def test_the_readme_example_has_a_state_of_constant_size():
    attention = PermuteFormerAttention(512, num_heads=8, causal=True)
    with torch.no_grad():
        _, state = attention(torch.randn(1, 10, 512))
        _, longer = attention(torch.randn(1, 3000, 512), state=state)
    assert isinstance(longer, LinearState)
    assert [x.numel() for x in longer[:3]] == [x.numel() for x in state[:3]] == [8 * 64 * 64, 8 * 64, 1]
    assert longer.next_position.tolist() == [3010]


def test_default_permutations_are_stored_cycle_by_cycle_and_shared_by_seed():
    first, second, other = layer_of(), layer_of(), layer_of(seed=1)
    permute = first.attention.position.encodings[0]
    assert permute.contiguous
    assert torch.equal(permute.permutation, second.attention.position.encodings[0].permutation)
    assert not torch.equal(permute.permutation, other.attention.position.encodings[0].permutation)


def test_a_checkpoint_brings_its_permutations_along():
    source, target = layer_of(causal=True, seed=1), layer_of(causal=True, seed=2)
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    expected, _ = source(x)
    assert (target(x)[0] - expected).abs().max() > 1e-6
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert torch.equal(target(x)[0], expected)


def test_r_stays_exact_when_the_model_is_cast():
    decay = Decay(8)
    assert torch.equal(copy.deepcopy(decay).bfloat16().log_decay(), decay.log_decay())
    assert torch.equal(copy.deepcopy(decay).half().log_decay(), decay.log_decay())
    assert decay.log_decay().dtype == torch.float64
    assert Decay(8, learnable=True).bfloat16().logit.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:positions on axis")
def test_r_learns():
    torch.manual_seed(0)
    layer = PermuteFormerAttention(16, num_heads=2, causal=True, decay=Decay(2, r=0.9, learnable=True))
    target = PermuteFormerAttention(16, num_heads=2, causal=True, decay=0.5)
    target.load_state_dict(
        {**layer.state_dict(), "attention.position.encodings.1.log_r": torch.tensor([0.5, 0.5]).double().log()}, strict=False
    )
    logit = layer.attention.position.encodings[1].logit
    optimizer = torch.optim.Adam([logit], lr=0.1)
    x = torch.randn(4, 60, 16)
    for _ in range(120):
        loss = (layer(x)[0] - target(x)[0].detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(logit.detach().sigmoid(), torch.tensor([0.5, 0.5]), atol=0.02, rtol=0)


def test_a_sequence_longer_than_the_period_warns_and_names_it():
    permutation = torch.tensor([[1, 2, 0, 3], [1, 0, 2, 3]])
    layer = PermuteFormerAttention(8, num_heads=2, causal=True, permutation=permutation)
    x = torch.randn(2, 7, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, state = layer(x[:, :6])
        layer(x, segments=torch.tensor([[0] * 4 + [1] * 3] * 2))
        layer(x[:, :2], positions=torch.tensor([[[0], [1]], [[100], [101]]]))
    warned = [{"x": x}, {"x": x[:, :1], "state": state}, {"x": x[:, :2], "positions": torch.tensor([[[0], [600]]])}]
    for call in (*warned, {"x": x, "segments": torch.zeros(2, 7, dtype=torch.int64)}):
        with pytest.warns(UserWarning, match="reach further than 6, the period"):
            layer(**call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(dtype):
    layer = PermuteFormerAttention(64, num_heads=4, causal=True)
    x = torch.randn(2, 70, 64)
    expected, _ = layer(x)
    out, state = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert state.kv.dtype == torch.float32
    assert_close(out, expected, dtype)


def test_no_heads_left_over():
    with pytest.raises(ValueError, match=r"hidden_size must be a multiple of num_heads, .* they are 30 and 4"):
        PermuteFormerAttention(30, 4)
    for hidden_size, num_heads in ((8, 0), (0, 1), (8, "4"), (8, None), (8.0, 2), (8, True)):
        with pytest.raises(ValueError, match="must be a whole number, at least 1"):
            PermuteFormerAttention(hidden_size, num_heads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"permutation": torch.zeros(2, 64, dtype=torch.int64)}, "head 0 is not a permutation"),
        ({"permutation": torch.arange(64)[None]}, r"\(heads, features\) = \(2, 64\); it has \(1, 64\)"),
        ({"permutation": "rondom"}, "did you mean 'random'"),
        ({"decay": 0.0, "causal": True}, r"in \(0, 1\]; it is 0.0"),
        ({"decay": 1.5, "causal": True}, "it is 1.5"),
        ({"decay": torch.tensor([0.9, torch.nan]), "causal": True}, "it is .*nan"),
        ({"decay": torch.tensor([0.9, 0.9, 0.9]), "causal": True}, "a tensor of 2"),
        ({"decay": "fast", "causal": True}, "decay must be 'auto'"),
        ({"decay": 0.9}, r"needs r\^\|i-j\|, Decay\(num_heads, r, two_sided=True\)"),
        ({"decay": Decay(2, two_sided=True), "causal": True}, "a causal one two_sided=False"),
        ({"feature_map": "relu_esp"}, "did you mean 'relu_eps'"),
        ({"feature_multiplier": 0}, "feature_multiplier must be a whole number"),
        ({"axes": 100}, "axes must be from 1 to the number of features, 64"),
        ({"axes": 0, "permutation": None}, "axes must be a whole number, at least 1; it is 0"),
        ({"permutation": [[0, 1]]}, "unknown permutation"),
        ({"feature_map": ["relu"]}, "unknown feature_map"),
        ({"seed": None}, "seed must be a whole number, at least 0; it is None"),
        ({"causal": "no"}, "causal must be True or False; it is 'no'"),
        ({"decay": True, "causal": True}, "it is True"),
        ({"decay": nn.Parameter(torch.tensor([0.9, 0.9])), "causal": True}, "learnable=True"),
        ({"decay": Decay(8), "causal": True}, "made for num_heads=8, but attention 'linear' has 2"),
    ],
)
def test_what_is_not_supported_is_refused_when_built(options, message):
    with pytest.raises(ValueError, match=message):
        PermuteFormerAttention(128, **{"num_heads": 2, **options})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"x": torch.zeros(2, 5, 31)}, ValueError, r"\(batch, length, 32\)"),
        ({"x": torch.zeros(5, 32)}, ValueError, r"it has \(5, 32\)"),
        ({"x": torch.zeros(2, 0, 32)}, ValueError, "length of at least 1"),
        ({"positions": torch.zeros(2, 5, dtype=torch.int64)}, ValueError, r"\(2, 5, 1\)"),
        ({"positions": torch.zeros(2, 4, 1, dtype=torch.int64)}, ValueError, r"they have \(2, 4, 1\)"),
        ({"positions": torch.zeros(2, 5, 1)}, TypeError, "positions must be int64, not torch.float32"),
        ({"key_mask": torch.ones(2, 5)}, ValueError, "key_mask must be bool"),
        ({"key_mask": torch.ones(5, 2, dtype=torch.bool)}, ValueError, r"it is torch.bool of shape \(5, 2\)"),
        ({"key_mask": torch.ones(2, 5, dtype=torch.bool, device="meta")}, ValueError, "key_mask is on meta, x on cpu"),
        ({"state": LinearState(torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 16), torch.zeros(2).long())}, ValueError, "state is of shape"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    layer = PermuteFormerAttention(32, num_heads=2, causal=True)
    arguments = {"x": torch.zeros(2, 5, 32), **call}
    with pytest.raises(error, match=message):
        layer(arguments.pop("x"), **arguments)


def test_a_bidirectional_layer_takes_no_state_and_a_2d_one_needs_positions():
    layer = PermuteFormerAttention(32, num_heads=2)
    with pytest.raises(ValueError, match="state is for causal attention"):
        layer(torch.zeros(1, 3, 32), state=object())
    layer = PermuteFormerAttention(32, num_heads=2, axes=2)
    with pytest.raises(ValueError, match="positions must be given where there are several axes"):
        layer(torch.zeros(1, 3, 32))


def test_unknown_names_and_options_list_what_there_is():
    with pytest.raises(ValueError, match=r"unknown attention 'lineer'.*did you mean 'linear'"):
        build("lineer", hidden_size=8, num_heads=2)
    with pytest.raises(ValueError, match=r"unknown position encoding 'permut'.*did you mean 'permute'"):
        build("linear", [("permut", {})], hidden_size=8, num_heads=2)
    with pytest.raises(TypeError, match=r"unknown argument of position encoding 'permute': 'sed'.*did you mean 'seed'"):
        build("linear", [("permute", {"sed": 1})], hidden_size=8, num_heads=2)
    with pytest.raises(TypeError, match=r"unknown argument of attention 'linear': 'chunks'"):
        build("linear", hidden_size=8, num_heads=2, chunks=1)


def test_parts_that_do_not_fit_are_refused_when_built():
    with pytest.raises(ValueError, match="'permute' was made for num_heads=1, but attention 'linear' has 4: make it with num_heads=4"):
        LinearAttention(4, 8, position=Permute(1, 8))
    with pytest.raises(ValueError, match="'permute' was made for feature_size=6, but attention 'linear' has 8"):
        LinearAttention(4, 8, position=Permute(4, 6))
    with pytest.raises(ValueError, match="'permute' was made for axes=1, the layer for axes=2"):
        MultiHeadAttention(32, LinearAttention(4, 8, position=Permute(4, 8)), axes=2)
    with pytest.raises(TypeError, match=r"positions must be a list of names.* it is 'permute'"):
        build("linear", "permute", hidden_size=8, num_heads=2)
    with pytest.raises(TypeError, match=r"unknown argument of attention 'linear': 'head_size'"):
        build("linear", hidden_size=8, num_heads=2, head_size=8)


def test_a_state_of_another_kind_is_refused():
    linear, softmax = (build(name, hidden_size=32, num_heads=2, causal=True) for name in ("linear", "softmax"))
    x = torch.randn(1, 3, 32)
    with pytest.raises(TypeError, match=r"state must be the LinearState .* it is KVState"):
        linear(x, state=softmax(x)[1])
    with pytest.raises(TypeError, match=r"state must be the KVState .* it is LinearState"):
        softmax(x, state=linear(x)[1])
    with pytest.raises(TypeError, match="it is tuple"):
        linear(x, state=linear(x))


def test_redraw_is_explicit():
    layer = PermuteFormerAttention(32, num_heads=2, feature_map="favor")
    x = torch.randn(1, 9, 32)
    first, again = layer(x)[0], layer(x)[0]
    assert torch.equal(first, again)
    layer.attention.redraw()
    assert not torch.equal(layer(x)[0], first)


def test_without_a_normaliser():
    layer = MultiHeadAttention(32, LinearAttention(2, 16, causal=True, normalizer="none")).double()
    with_it = MultiHeadAttention(32, LinearAttention(2, 16, causal=True)).double()
    with_it.load_state_dict(layer.state_dict())
    nn.init.zeros_(layer.value.weight)
    nn.init.ones_(layer.value.bias)
    with_it.load_state_dict(layer.state_dict())
    x = torch.randn(1, 30, 32, dtype=torch.float64)
    normalised, plain = with_it(x)[0], layer(x)[0]
    assert_close(normalised, normalised[:, :1].expand_as(normalised))
    assert (plain[:, -1] - plain[:, 0]).abs().max() > 1, "sums grow where nothing divides them"
    with pytest.raises(ValueError, match="unknown normalizer 'sum'"):
        LinearAttention(2, 16, normalizer="sum")


def test_every_feature_map_makes_a_layer():
    for name in FEATURE_MAPS:
        layer = PermuteFormerAttention(16, num_heads=2, feature_map=name, feature_multiplier=3)
        assert layer.attention.num_features == 24
        assert layer(torch.randn(1, 5, 16))[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:positions on axis")
def test_a_bias_stands_beside_a_transform():
    """With a bias of zero, all pairs formed give what the linear path gives."""
    linear = build("linear", ["permute"], hidden_size=32, num_heads=2, causal=True).double()
    quadratic = build("linear", ["permute", "t5_bias"], hidden_size=32, num_heads=2, causal=True).double()
    quadratic.load_state_dict(linear.state_dict(), strict=False)
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    assert (quadratic(x)[0] - linear(x)[0]).abs().max() > 1e-6
    nn.init.zeros_(quadratic.attention.position.encodings[1].axis_tables[0].weight)
    assert_close(quadratic(x)[0], linear(x)[0])
    for check in ("causal", "padding", "resume", "packed", "relative"):
        CHECKS[check](quadratic)
    with pytest.raises(ValueError, match="normalizer='auto' takes sums of features before"):
        build("linear", ["rope", "t5_bias"], hidden_size=32, num_heads=2)
    with pytest.raises(ValueError, match="a bias and a decay are both"):
        build("linear", ["decay", "t5_bias"], hidden_size=32, num_heads=2, causal=True)


def test_a_bias_sums_in_float32():
    layer = build("linear", ["t5_bias"], hidden_size=64, num_heads=1)
    x = torch.randn(1, 1024, 64) * 6
    expected, _ = layer(x)
    out, _ = layer.half()(x.half())
    assert_close(out, expected, torch.float16)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_a_padded_prefill_can_be_gone_on_from(name):
    layer = build(name, ["rope"], hidden_size=32, num_heads=2, causal=True).double()
    x, more = torch.randn(2, 9, 32, dtype=torch.float64), torch.randn(2, 2, 32, dtype=torch.float64)
    expected, _ = layer(more, state=layer(x)[1])
    padded = torch.cat([x, torch.full((2, 5, 32), torch.nan, dtype=torch.float64)], dim=1)
    _, state = layer(padded, key_mask=(torch.arange(14) < 9).expand(2, -1))
    assert state.next_position.tolist() == [9, 9]
    assert_close(layer(more, state=state)[0], expected)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_without_segments_the_last_one_goes_on(name):
    layer = build(name, hidden_size=32, num_heads=2, causal=True).double()
    x, more = torch.randn(1, 6, 32, dtype=torch.float64), torch.randn(1, 2, 32, dtype=torch.float64)
    _, state = layer(x, segments=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    expected, _ = layer(more, state=state, segments=torch.tensor([[1, 1]]))
    assert_close(layer(more, state=state)[0], expected)
    assert (layer(more, state=layer(x)[1])[0] - expected).abs().max() > 1e-6


def test_layers_are_pickled_and_copied():
    layer = PermuteFormerAttention(32, num_heads=2, causal=True, feature_map="favor", decay=Decay(2, learnable=True))
    x = torch.randn(1, 9, 32)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(other(x)[0], layer(x)[0])


def test_beams_are_reordered():
    layer = build("softmax", ["rope"], hidden_size=32, num_heads=2, causal=True)
    x, more = torch.randn(3, 9, 32), torch.randn(3, 1, 32)
    rows = torch.tensor([2, 0, 0])
    _, state = layer(x)
    expected, _ = layer(more, state=layer(x[rows])[1])
    torch.testing.assert_close(layer(more, state=state.select(rows))[0], expected)


def test_the_same_permutation_on_both_axes():
    same = Permute(2, 16, axes=2, same_axes=True).permutation
    assert torch.equal(same[:, 8:] - 8, same[:, :8])
    own = Permute(2, 16, axes=2).permutation
    assert not torch.equal(own[:, 8:] - 8, own[:, :8])


def test_random_features_stay_exact_when_the_model_is_cast():
    layer = PermuteFormerAttention(32, num_heads=2, feature_map="favor")
    before = layer.attention.projection.clone()
    assert torch.equal(layer.bfloat16().attention.projection, before)


def test_the_ablations_are_shorter_lists():
    for encodings in ([], [Permute(2, 16)], [Decay(2)], [Permute(2, 16), Decay(2)]):
        layer = MultiHeadAttention(32, LinearAttention(2, 16, causal=True, position=Compose(encodings)))
        assert layer(torch.randn(1, 5, 32))[0].shape == (1, 5, 32)


class Doubled(nn.Linear):
    """A projection that somebody put in place of ours."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("attention", ["linear", "softmax", "reformer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_product_for_queries_keys_and_values_is_three(attention, dtype, monkeypatch):
    layer = build(attention, hidden_size=32, num_heads=2).to(dtype)
    x = torch.randn(2, 150, 32, dtype=dtype, requires_grad=True)
    given, weights = [x, *layer.parameters()], torch.randn(2, 150, 32, dtype=dtype)

    def outcome():
        torch.manual_seed(0)  # of the hashes
        parts, (out, _) = layer.project(x), layer(x)
        return parts, out, torch.autograd.grad((out * weights).sum(), given)

    parts, out, gradients = outcome()
    storages = {part.untyped_storage().data_ptr() for part in parts}
    monkeypatch.setattr("permuteformer.attention.layer._is_plain", lambda part: False)
    three = outcome()
    assert len(storages) == 1 < len({part.untyped_storage().data_ptr() for part in three[0]})
    close = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close((parts, out, gradients), three, **close)


@pytest.mark.skipif(not in_use().startswith("native"), reason="no kernel here")
def test_gradients_of_one_product_come_as_one(monkeypatch):
    layer = build("linear", ["permute"], hidden_size=32, num_heads=2, feature_multiplier=4)
    whole = []
    monkeypatch.setattr(torch, "cat", lambda tensors, dim=0, cat=torch.cat: whole.append(dim) or cat(tensors, dim=dim))
    layer(torch.randn(2, 150, 32))[0].sum().backward()
    assert whole == [0, 0]  # biases and weights, and no gradients


@pytest.mark.parametrize("changed", ["replaced", "hooked", "hooked before"])
def test_projections_that_are_not_plain_are_called(changed):
    layer = build("linear", hidden_size=32, num_heads=2)
    x = torch.randn(2, 150, 32)
    with torch.no_grad():
        before = layer.project(x)[1]
        if changed == "replaced":
            doubled = Doubled(32, 32)
            doubled.load_state_dict(layer.key.state_dict())
            layer.key = doubled
        elif changed == "hooked":
            layer.key.register_forward_hook(lambda module, given, out: 2 * out)
        else:
            layer.key.register_forward_pre_hook(lambda module, given: (2 * given[0],))
            before = before - layer.key.bias / 2
        torch.testing.assert_close(layer.project(x)[1], 2 * before)
