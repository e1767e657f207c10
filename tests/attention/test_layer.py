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
from permuteformer.ops.feature_map import FEATURE_MAPS, relu_eps


def layer_of(**options):
    return PermuteFormerAttention(32, num_heads=2, **{"feature_multiplier": 2, **options}).double()


OPTIONS = [
    {"decay": None},
    {"decay": Decay(2, learnable=True)},
    {"permutation": "max_order"},
    {"permutation": torch.stack([torch.randperm(32), torch.randperm(32)])},
    {"axes": 3},
    {"feature_map": "favor"},
    {"feature_map": "elu", "feature_multiplier": 1},
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
@pytest.mark.filterwarnings("ignore:positions on axis")
def test_contracts(options, causal):
    """Of options beyond those that the contract tests run."""
    if not causal and isinstance(options.get("decay"), Decay):
        options = {"decay": Decay(2, learnable=True, two_sided=True)}
    layer = layer_of(causal=causal, **options)
    for check in ("no_poison", "padding", "batch", "packed", "relative", *(("causal", "resume") if causal else ())):
        CHECKS[check](layer)


@pytest.mark.parametrize("kind", ["bidirectional", "causal", "two_sided"])
@pytest.mark.parametrize("axes", [1, 2])
def test_the_layer_is_the_paper(kind, axes):
    """From x to y through the layer's own projections, with equation 11 in between."""
    layer = layer_of(causal=kind == "causal", axes=axes, decay="two_sided" if kind == "two_sided" else "auto")
    permute, *decay = layer.attention.position.encodings
    x, length = torch.randn(2, 60, 32, dtype=torch.float64), 60
    positions = torch.arange(length).view(1, -1, 1)
    if axes == 2:
        positions = torch.stack([torch.arange(length) % 8, torch.arange(length) // 8], dim=-1)[None]
    is_global = torch.zeros(2, length, dtype=torch.bool)
    is_global[:, 0] = kind == "two_sided"
    ranks = torch.stack([reference.ranks(positions, head % axes, ~is_global[:1, None]) for head in range(2)], dim=1)
    if kind == "causal":
        ranks = torch.arange(length).expand(1, 2, -1)
    q, k, v = (projection(x).view(2, length, 2, -1).transpose(1, 2) for projection in (layer.query, layer.key, layer.value))
    identity = torch.arange(32).expand(2, -1)
    visible = torch.ones(length, length, dtype=torch.bool)
    out = reference.attention(
        q,
        k,
        v,
        permutations=[torch.where(permute.axis == axis, permute.permutation, identity) for axis in range(axes)],
        positions=positions.expand(2, -1, -1),
        visible=visible.tril() if kind == "causal" else visible,
        feature_map=relu_eps,
        decay=reference.decay_weights(decay[0].r, ranks, is_global) if decay else None,
    )
    expected = layer.output(out.transpose(1, 2).reshape(2, length, 32))
    given = {"positions": positions if axes == 2 else None, "global_mask": is_global if kind == "two_sided" else None}
    actual, state = layer(x, **given)
    assert_close(actual, expected)
    assert (state is None) is (kind != "causal")
    for queries in (torch.tensor([[0], [0]]), torch.tensor([[0, 5], [7, 7]])):  # global tokens alone take another path
        some, _ = layer(x, queries=queries, **given)
        assert_close(some, expected[torch.arange(2).unsqueeze(1), queries])


def test_half_lives_of_a_two_sided_decay():
    """Geometric from 1 to a quarter of the length, over the heads of each axis."""
    torch.testing.assert_close(Decay(5, two_sided=True, length=64).half_life, torch.tensor([1.0, 2, 4, 8, 16], dtype=torch.float64))
    two = Decay(6, two_sided=True, length=64, axes=2).half_life
    assert_close(two, torch.tensor([1.0, 1, 4, 4, 16, 16], dtype=torch.float64))
    assert_close(Decay(3, two_sided=True, length=64, axes=2).half_life, torch.tensor([1.0, 4, 16], dtype=torch.float64))
    assert Decay(8, two_sided=True).half_life.max() == 256


def test_a_state_of_constant_size():
    attention = PermuteFormerAttention(512, num_heads=8, causal=True)
    with torch.no_grad():
        _, state = attention(torch.randn(1, 10, 512))
        _, longer = attention(torch.randn(1, 3000, 512), state=state)
    assert isinstance(longer, LinearState)
    assert [x.numel() for x in longer[:3]] == [x.numel() for x in state[:3]] == [8 * 64 * 64, 8 * 64, 1]
    assert longer.next_position.tolist() == [3010]


def test_permutations_are_contiguous_shared_by_seed_and_saved():
    first, second, other = layer_of(causal=True), layer_of(causal=True), layer_of(causal=True, seed=1)
    permutations = [layer.attention.position.encodings[0].permutation for layer in (first, second, other)]
    assert first.attention.position.encodings[0].contiguous
    assert torch.equal(*permutations[:2])
    assert not torch.equal(permutations[0], permutations[2])
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    expected, _ = other(x)
    assert (first(x)[0] - expected).abs().max() > 1e-6
    first.load_state_dict(copy.deepcopy(other.state_dict()))
    assert torch.equal(first(x)[0], expected)


def test_exact_buffers_keep_their_dtype_when_a_model_is_cast():
    decay = Decay(8)
    assert torch.equal(copy.deepcopy(decay).bfloat16().log_decay(), decay.log_decay())
    assert decay.log_decay().dtype == torch.float64
    assert Decay(8, learnable=True).bfloat16().logit.dtype == torch.bfloat16
    layer = PermuteFormerAttention(32, num_heads=2, feature_map="favor")
    before = layer.attention.projection.clone()
    assert torch.equal(layer.bfloat16().attention.projection, before)


@pytest.mark.filterwarnings("ignore:positions on axis")
@pytest.mark.parametrize("causal", [False, True])
def test_r_learns(causal):
    layer = PermuteFormerAttention(16, num_heads=2, causal=causal, decay=Decay(2, r=0.9, learnable=True, two_sided=not causal))
    target = PermuteFormerAttention(16, num_heads=2, causal=causal, decay=Decay(2, r=0.5, two_sided=not causal))
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


def test_a_sequence_longer_than_the_period_warns():
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
        with pytest.warns(UserWarning, match="period"):
            layer(**call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    layer = PermuteFormerAttention(64, num_heads=4, causal=True)
    x = torch.randn(2, 70, 64)
    expected, _ = layer(x)
    out, state = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert state.kv.dtype == torch.float32
    assert_close(out, expected, dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size=30.*num_heads=4"),
        *(
            ({"hidden_size": size, "num_heads": heads}, "hidden_size|num_heads")
            for size, heads in ((8, 0), (0, 1), (8, "4"), (8.0, 2), (8, True))
        ),
        ({"permutation": torch.zeros(2, 64, dtype=torch.int64)}, "permutation: head 0"),
        ({"permutation": torch.arange(64)[None]}, r"permutation.*\(2, 64\).*\(1, 64\)"),
        ({"permutation": "rondom"}, "'random'"),
        ({"permutation": [[0, 1]]}, "permutation"),
        ({"decay": 0.0, "causal": True}, r"r must.*0.0"),
        ({"decay": 1.5, "causal": True}, "r must.*1.5"),
        ({"decay": True, "causal": True}, "r must.*True"),
        ({"decay": torch.tensor([0.9, torch.nan]), "causal": True}, "r must.*nan"),
        ({"decay": torch.tensor([0.9, 0.9, 0.9]), "causal": True}, "r must.*2"),
        ({"decay": nn.Parameter(torch.tensor([0.9, 0.9])), "causal": True}, "learnable=True"),
        ({"decay": "fast", "causal": True}, "decay.*'fast'"),
        ({"decay": 0.9}, "two_sided=True"),
        ({"decay": "two_sided", "causal": True}, "two_sided=True.*causal=True"),
        ({"decay": Decay(8), "causal": True}, "num_heads=8.*2"),
        ({"decay": Decay(2, two_sided=True), "axes": 2}, "'decay'.*axes=1.*axes=2"),
        ({"decay": "two_sided", "axes": 3}, "num_heads=2.*axes=3"),
        ({"feature_map": "relu_esp"}, "'relu_eps'"),
        ({"feature_map": ["relu"]}, "feature_map"),
        ({"feature_multiplier": 0}, "feature_multiplier.*0"),
        ({"axes": 100}, "axes.*64.*100"),
        ({"axes": 0, "permutation": None}, "axes.*0"),
        ({"seed": None}, "seed.*None"),
        ({"causal": "no"}, "causal.*'no'"),
    ],
)
def test_what_is_not_supported_is_refused_when_built(options, message):
    with pytest.raises(ValueError, match=message):
        PermuteFormerAttention(**{"hidden_size": 128, "num_heads": 2, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"two_sided": True, "length": 0}, "length.*0"),
        ({"length": 100}, "length.*two_sided"),
        ({"two_sided": True, "length": 100, "r": 0.5}, "length.*r"),
        ({"r": 1.0, "learnable": True}, "learnable"),
        ({"two_sided": 1}, "two_sided.*1"),
    ],
)
def test_decay_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Decay(2, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"x": torch.zeros(2, 5, 31)}, ValueError, r"x .*32.*\(2, 5, 31\)"),
        ({"x": torch.zeros(5, 32)}, ValueError, r"x .*\(5, 32\)"),
        ({"x": torch.zeros(2, 0, 32)}, ValueError, "length >= 1"),
        ({"positions": torch.zeros(2, 5, dtype=torch.int64)}, ValueError, r"positions.*\(2, 5, 1\)"),
        ({"positions": torch.zeros(2, 4, 1, dtype=torch.int64)}, ValueError, r"positions.*\(2, 4, 1\)"),
        ({"positions": torch.zeros(2, 5, 2, dtype=torch.int64)}, ValueError, r"positions.*\(2, 5, 2\)"),
        ({"key_mask": torch.ones(5, 2, dtype=torch.bool)}, ValueError, r"key_mask.*\(5, 2\)"),
        ({"key_mask": torch.ones(2, 5, dtype=torch.bool, device="meta")}, ValueError, "key_mask.*meta.*cpu"),
        ({"queries": torch.tensor([[0], [5]])}, ValueError, "queries.*4.*5"),
        ({"queries": torch.zeros(3, 1, dtype=torch.int64)}, ValueError, r"queries.*\(3, 1\)"),
        ({"global_mask": torch.ones(2, 5, dtype=torch.bool)}, ValueError, "global_mask"),
        ({"state": LinearState(torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 16), torch.zeros(2).long())}, ValueError, "state"),
        ({"state": (1, 2)}, TypeError, "state.*tuple"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    layer = PermuteFormerAttention(32, num_heads=2, causal=True)
    arguments = {"x": torch.zeros(2, 5, 32), **call}
    with pytest.raises(error, match=message):
        layer(arguments.pop("x"), **arguments)


def test_a_bidirectional_layer_takes_no_state_and_a_2d_one_needs_positions():
    with pytest.raises(ValueError, match="state"):
        PermuteFormerAttention(32, num_heads=2)(torch.zeros(1, 3, 32), state=object())
    with pytest.raises(ValueError, match=r"positions.*2 axes.*\(1, 3, 2\)"):
        PermuteFormerAttention(32, num_heads=2, axes=2)(torch.zeros(1, 3, 32))


def test_unknown_names_and_options_suggest_the_nearest():
    sizes = {"hidden_size": 8, "num_heads": 2}
    with pytest.raises(ValueError, match="'lineer'.*'linear'"):
        build("lineer", **sizes)
    with pytest.raises(ValueError, match="'permut'.*'permute'"):
        build("linear", [("permut", {})], **sizes)
    with pytest.raises(TypeError, match="'permute'.*'sed'.*'seed'"):
        build("linear", [("permute", {"sed": 1})], **sizes)
    for argument in ("chunks", "head_size"):
        with pytest.raises(TypeError, match=f"'linear'.*'{argument}'"):
            build("linear", **sizes, **{argument: 1})
    with pytest.raises(TypeError, match="positions.*'permute'"):
        build("linear", "permute", **sizes)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="'permute'.*num_heads=1.*'linear'.*4"):
        LinearAttention(4, 8, position=Permute(1, 8))
    with pytest.raises(ValueError, match="'permute'.*feature_size=6.*8"):
        LinearAttention(4, 8, position=Permute(4, 6))
    with pytest.raises(ValueError, match="'permute'.*axes=1.*axes=2"):
        MultiHeadAttention(32, LinearAttention(4, 8, position=Permute(4, 8)), axes=2)
    with pytest.raises(ValueError, match="'sum'"):
        LinearAttention(2, 16, normalizer="sum")


def test_a_state_of_another_kind_is_refused():
    linear, softmax = (build(name, hidden_size=32, num_heads=2, causal=True) for name in ("linear", "softmax"))
    x = torch.randn(1, 3, 32)
    with pytest.raises(TypeError, match="LinearState.*KVState"):
        linear(x, state=softmax(x)[1])
    with pytest.raises((TypeError, AttributeError), match="KVState|LinearState"):
        softmax(x, state=linear(x)[1])


def test_redraw_is_explicit():
    layer = PermuteFormerAttention(32, num_heads=2, feature_map="favor")
    x = torch.randn(1, 9, 32)
    first, again = layer(x)[0], layer(x)[0]
    assert torch.equal(first, again)
    layer.attention.redraw()
    assert not torch.equal(layer(x)[0], first)


def test_without_a_normalizer_sums_grow():
    layers = [MultiHeadAttention(32, LinearAttention(2, 16, causal=True, normalizer=name)).double() for name in ("none", "auto")]
    nn.init.zeros_(layers[0].value.weight)
    nn.init.ones_(layers[0].value.bias)
    layers[1].load_state_dict(layers[0].state_dict())
    plain, normalized = (layer(torch.ones(1, 30, 32, dtype=torch.float64))[0] for layer in layers)
    assert_close(normalized, normalized[:, :1].expand_as(normalized))
    assert (plain[:, -1] - plain[:, 0]).abs().max() > 1


def test_every_feature_map_makes_a_layer():
    for name in FEATURE_MAPS:
        layer = PermuteFormerAttention(16, num_heads=2, feature_map=name, feature_multiplier=3)
        assert layer.attention.num_features == 24
        assert layer(torch.randn(1, 5, 16))[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:positions on axis")
def test_a_bias_beside_a_transform():
    """With a bias of zero, all pairs give what the linear path gives."""
    linear = build("linear", ["permute"], hidden_size=32, num_heads=2, causal=True).double()
    quadratic = build("linear", ["permute", "t5_bias"], hidden_size=32, num_heads=2, causal=True).double()
    quadratic.load_state_dict(linear.state_dict(), strict=False)
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    assert (quadratic(x)[0] - linear(x)[0]).abs().max() > 1e-6
    nn.init.zeros_(quadratic.attention.position.encodings[1].axis_tables[0].weight)
    assert_close(quadratic(x)[0], linear(x)[0])
    for check in ("causal", "padding", "resume", "packed", "relative"):
        CHECKS[check](quadratic)
    with pytest.raises(ValueError, match="normalizer='auto'.*bias"):
        build("linear", ["rope", "t5_bias"], hidden_size=32, num_heads=2)
    with pytest.raises(ValueError, match="bias.*decay"):
        build("linear", ["decay", "t5_bias"], hidden_size=32, num_heads=2, causal=True)


def test_a_bias_sums_in_float32():
    layer = build("linear", ["t5_bias"], hidden_size=64, num_heads=1)
    x = torch.randn(1, 1024, 64) * 6
    expected, _ = layer(x)
    assert_close(layer.half()(x.half())[0], expected, torch.float16)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_a_padded_prefill_continues(name):
    layer = build(name, ["rope"], hidden_size=32, num_heads=2, causal=True).double()
    x, more = torch.randn(2, 9, 32, dtype=torch.float64), torch.randn(2, 2, 32, dtype=torch.float64)
    expected, _ = layer(more, state=layer(x)[1])
    padded = torch.cat([x, torch.full((2, 5, 32), torch.nan, dtype=torch.float64)], dim=1)
    _, state = layer(padded, key_mask=(torch.arange(14) < 9).expand(2, -1))
    assert state.next_position.tolist() == [9, 9]
    assert_close(layer(more, state=state)[0], expected)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_without_segments_the_last_one_continues(name):
    layer = build(name, hidden_size=32, num_heads=2, causal=True).double()
    x, more = torch.randn(1, 6, 32, dtype=torch.float64), torch.randn(1, 2, 32, dtype=torch.float64)
    _, state = layer(x, segments=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    expected, _ = layer(more, state=state, segments=torch.tensor([[1, 1]]))
    assert_close(layer(more, state=state)[0], expected)
    assert (layer(more, state=layer(x)[1])[0] - expected).abs().max() > 1e-6


def test_layers_are_pickled_copied_and_hooked():
    layer = PermuteFormerAttention(32, num_heads=2, causal=True, feature_map="favor", decay=Decay(2, learnable=True))
    x = torch.randn(1, 9, 32)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(other(x)[0], layer(x)[0])
    calls = []
    layer.register_forward_hook(lambda *_: calls.append("layer"))
    layer(x, queries=torch.tensor([[3]]))
    assert calls == ["layer"]


def test_beams_are_reordered():
    layer = build("softmax", ["rope"], hidden_size=32, num_heads=2, causal=True)
    x, more, rows = torch.randn(3, 9, 32), torch.randn(3, 1, 32), torch.tensor([2, 0, 0])
    _, state = layer(x)
    expected, _ = layer(more, state=layer(x[rows])[1])
    torch.testing.assert_close(layer(more, state=state.select(rows))[0], expected)


def test_the_same_permutation_on_both_axes():
    for same_axes in (False, True):
        permutation = Permute(2, 16, axes=2, same_axes=same_axes).permutation
        assert torch.equal(permutation[:, 8:] - 8, permutation[:, :8]) == same_axes


def test_ablations_are_shorter_lists():
    for encodings in ([], [Permute(2, 16)], [Decay(2)], [Permute(2, 16), Decay(2)]):
        layer = MultiHeadAttention(32, LinearAttention(2, 16, causal=True, position=Compose(encodings)))
        assert layer(torch.randn(1, 5, 32))[0].shape == (1, 5, 32)
