import copy
import pickle
import warnings

import pytest
import torch
from attention_cases import axis_permutations
from checks import CHECKS, assert_close, layer_by_pairs
from torch import nn

from permuteformer import Decay, LinearState, MultiHeadAttention, Permute, PermuteFormerAttention, build
from permuteformer.attention.linear import LinearAttention
from permuteformer.ops import reference


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
    permute = layer.attention.position.encodings[0]
    x, given = torch.randn(2, 60, 32, dtype=torch.float64), {}
    if axes == 2:
        given["positions"] = torch.stack([torch.arange(60) % 8, torch.arange(60) // 8], dim=-1).expand(2, -1, -1)
    if kind == "two_sided":
        given["global_mask"] = (torch.arange(60) == 0).expand(2, -1)
    expected = layer_by_pairs(layer, x, **given, transform=lambda y, at: reference.permute(y, axis_permutations(permute), at))
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


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_of_a_learned_r(causal):
    layer, x = layer_of(causal=causal, decay=Decay(2, r=0.9, learnable=True, two_sided=not causal)), torch.randn(2, 60, 32).double()
    logit = layer.attention.position.encodings[1].logit
    assert_close(logit.sigmoid(), torch.full((2,), 0.9, dtype=torch.float64), torch.float32)

    def loss(step=0.0):
        with torch.no_grad():
            logit[0] += step
        return layer(x)[0].square().sum()

    (gradient,) = torch.autograd.grad(loss(), logit)
    difference = (loss(1e-5) - loss(-2e-5)) / 2e-5
    assert_close(gradient[0], difference, torch.float32)
    assert gradient[0].abs() > 1e-3


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
def test_bad_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        PermuteFormerAttention(**{"hidden_size": 128, "num_heads": 2, **options})


SIZES = {"hidden_size": 32, "num_heads": 2}
X = torch.zeros(1, 3, 32)


def state_of(name):
    return build(name, **SIZES, causal=True)(X)[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Decay(2, two_sided=True, length=0), "length.*0"),
        (lambda: Decay(2, length=100), "length.*two_sided"),
        (lambda: Decay(2, two_sided=True, length=100, r=0.5), "length.*r"),
        (lambda: Decay(2, r=1.0, learnable=True), "learnable"),
        (lambda: Decay(2, two_sided=1), "two_sided.*1"),
        (lambda: build("lineer", **SIZES), "'lineer'.*'linear'"),
        (lambda: build("linear", [("permut", {})], **SIZES), "'permut'.*'permute'"),
        (lambda: build("linear", [("permute", {"sed": 1})], **SIZES), "'permute'.*'sed'.*'seed'"),
        (lambda: build("linear", **SIZES, chunks=1), "'linear'.*'chunks'"),
        (lambda: build("linear", **SIZES, head_size=1), "'linear'.*'head_size'"),
        (lambda: build("linear", "permute", **SIZES), "positions.*'permute'"),
        (lambda: build("linear", ["rope", "t5_bias"], **SIZES), "normalizer='auto'.*bias"),
        (lambda: build("linear", ["decay", "t5_bias"], **SIZES, causal=True), "bias.*decay"),
        (lambda: LinearAttention(4, 8, position=Permute(1, 8)), "'permute'.*num_heads=1.*'linear'.*4"),
        (lambda: LinearAttention(4, 8, position=Permute(4, 6)), "'permute'.*feature_size=6.*8"),
        (lambda: MultiHeadAttention(32, LinearAttention(4, 8, position=Permute(4, 8)), axes=2), "'permute'.*axes=1.*axes=2"),
        (lambda: LinearAttention(2, 16, normalizer="sum"), "'sum'"),
        (lambda: PermuteFormerAttention(**SIZES)(X, state=object()), "state"),
        (lambda: PermuteFormerAttention(**SIZES, axes=2)(X), r"positions.*2 axes.*\(1, 3, 2\)"),
        (lambda: build("linear", **SIZES, causal=True)(X, state=state_of("softmax")), "LinearState.*KVState"),
        (lambda: build("softmax", **SIZES, causal=True)(X, state=state_of("linear")), "KVState|LinearState"),
    ],
)
def test_parts_that_do_not_fit_are_rejected(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"x": torch.zeros(2, 5, 31)}, ValueError, r"x .*32.*\(2, 5, 31\)"),
        ({"x": torch.zeros(5, 32)}, ValueError, r"x .*\(5, 32\)"),
        ({"x": torch.zeros(2, 0, 32)}, ValueError, "length >= 1"),
        ({"positions": torch.zeros(2, 5, dtype=torch.int64)}, ValueError, r"positions.*\(2, 5, 1\)"),
        ({"positions": torch.zeros(2, 5, 2, dtype=torch.int64)}, ValueError, r"positions.*\(2, 5, 2\)"),
        ({"key_mask": torch.ones(5, 2, dtype=torch.bool)}, ValueError, r"key_mask.*\(5, 2\)"),
        ({"queries": torch.tensor([[0], [5]])}, ValueError, "queries.*4.*5"),
        ({"queries": torch.zeros(3, 1, dtype=torch.int64)}, ValueError, r"queries.*\(3, 1\)"),
        ({"global_mask": torch.ones(2, 5, dtype=torch.bool)}, ValueError, "global_mask"),
        ({"state": LinearState(torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 16), torch.zeros(2).long())}, ValueError, "state"),
        ({"state": (1, 2)}, TypeError, "state.*tuple"),
    ],
)
def test_bad_input_is_rejected(call, error, message):
    layer = PermuteFormerAttention(32, num_heads=2, causal=True)
    arguments = {"x": torch.zeros(2, 5, 32), **call}
    with pytest.raises(error, match=message):
        layer(arguments.pop("x"), **arguments)


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


def test_a_bias_sums_in_float32():
    layer = build("linear", ["t5_bias"], hidden_size=64, num_heads=1)
    x = torch.randn(1, 1024, 64) * 6
    expected, _ = layer(x)
    assert_close(layer.half()(x.half())[0], expected, torch.float16)


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


def test_the_same_permutation_on_both_axes():
    for same_axes in (False, True):
        permutation = Permute(2, 16, axes=2, same_axes=same_axes).permutation
        assert torch.equal(permutation[:, 8:] - 8, permutation[:, :8]) == same_axes
