"""T5's bias against Hugging Face's T5, and inside both attentions."""

import checks
import pytest
import torch
from torch.nn import functional as F
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from permuteformer import build
from permuteformer.ops.feature_map import FEATURE_MAPS
from permuteformer.positions import POSITIONS
from permuteformer.positions.t5_bias import T5Bias


def line(length, start=0):
    return torch.arange(start, start + length).view(1, -1, 1)


def huggingface(encoding, causal, num_buckets, max_distance):
    """Their attention with the weights of ours."""
    heads = encoding.axis_tables[0].weight.shape[1]
    config = T5Config(
        d_model=32,
        num_heads=heads,
        d_kv=32 // heads,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=causal,
    )
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    attention.relative_attention_bias.weight = encoding.axis_tables[0].weight
    return attention


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 256), (64, 512), (16, 20), (4, 7), (10, 1000)])
@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_t5s(causal, num_buckets, max_distance):
    encoding = T5Bias(32, 4, causal=causal, num_buckets=num_buckets, max_distance=max_distance)
    distance = torch.cat([torch.arange(-3000, 3001), torch.tensor([10**6, -(10**9), 10**12, -(10**12)])])
    theirs = T5Attention._relative_position_bucket(-distance, not causal, num_buckets, max_distance)
    assert torch.equal(encoding.bucket(distance), theirs)


@pytest.mark.parametrize("causal", [False, True])
def test_bias_is_t5s(causal):
    encoding = T5Bias(32, 4, causal=causal, num_buckets=16, max_distance=40)
    theirs = huggingface(encoding, causal, 16, 40)
    assert torch.equal(encoding.bias(line(60), line(90)), theirs.compute_bias(60, 90))
    # One more token after 89: T5 counts on from what it has seen.
    assert torch.equal(encoding.bias(line(1, 89), line(90)), theirs.compute_bias(1, 90, past_seen_tokens=89))


def test_gradient_is_t5s():
    encoding = T5Bias(32, 4)
    theirs = huggingface(encoding, False, 32, 128)
    weight = torch.randn(1, 4, 20, 30)
    ours = torch.autograd.grad((encoding.bias(line(20), line(30)) * weight).sum(), encoding.axis_tables[0].weight)
    expected = torch.autograd.grad((theirs.compute_bias(20, 30) * weight).sum(), encoding.axis_tables[0].weight)
    checks.assert_close(ours[0], expected[0])


def test_initial_scale_is_t5s():
    weight = T5Bias(hidden_size=400, num_heads=512).axis_tables[0].weight
    assert abs(weight.std().item() - 400**-0.5) < 0.002
    assert abs(weight.mean().item()) < 0.002


def test_axes_are_summed():
    encoding = T5Bias(32, 4, axes=2)
    query, key = torch.randint(-200, 200, (3, 7, 2)), torch.randint(-200, 200, (3, 9, 2))
    bias = encoding.bias(query, key)
    assert bias.shape == (3, 4, 7, 9)
    for b, i, j in [(0, 0, 0), (2, 6, 8), (1, 3, 5)]:
        terms = [table.weight[encoding.bucket(query[b, i, n] - key[b, j, n])] for n, table in enumerate(encoding.axis_tables)]
        checks.assert_close(bias[b, :, i, j], terms[0] + terms[1])


def test_far_positions_are_told_apart_as_near_ones():
    encoding = T5Bias(32, 4)
    assert torch.equal(encoding.bias(line(50, 10**12), line(50, 10**12)), encoding.bias(line(50), line(50)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_buckets": 3}, "even and at least 4.*it is 3"),
        ({"num_buckets": 2}, "even and at least 4.*it is 2"),
        ({"num_buckets": 1, "causal": True}, "at least 2; it is 1"),
        ({"max_distance": 8}, "max_distance must be above 8.*it is 8"),
    ],
)
def test_bad_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        T5Bias(32, 4, **options)


def layer_of(attention, causal, **arguments):
    return build(attention, [("t5_bias", {"max_distance": 20})], hidden_size=24, num_heads=3, causal=causal, **arguments).double()


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_attention_is_sdpa_with_the_bias(causal):
    layer = layer_of("softmax", causal)
    encoding = layer.attention.position.encodings[0]
    assert encoding.causal == causal
    x = torch.randn(2, 33, 24, dtype=torch.float64)
    q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
    bias = huggingface(encoding, causal, 32, 20).compute_bias(33, 33)
    if causal:
        bias = bias.masked_fill(~torch.ones(33, 33, dtype=torch.bool).tril(), -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    checks.assert_close(layer(x)[0], layer.output(out.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_weighs_by_its_exponential(causal):
    layer = layer_of("linear", causal)
    x = torch.randn(2, 33, 24, dtype=torch.float64)
    q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
    phi = FEATURE_MAPS["relu_eps"]
    weights = (phi(q) @ phi(k).mT) * huggingface(layer.attention.position.encodings[0], causal, 32, 20).compute_bias(33, 33).exp()
    weights = weights.tril() if causal else weights
    out = weights @ v / weights.sum(-1, keepdim=True)
    checks.assert_close(layer(x)[0], layer.output(out.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_split_and_resume(attention):
    layer = layer_of(attention, causal=True)
    checks.check_resume(layer)
    checks.check_relative(layer)


def test_registered():
    structure = {"num_heads": 2, "feature_size": 9, "axes": 2, "causal": True, "hidden_size": 16}
    encoding = POSITIONS.build("t5_bias", {"num_buckets": 8}, structure)
    assert encoding.hooks == {"bias"}
    assert [tuple(table.weight.shape) for table in encoding.axis_tables] == [(8, 2), (8, 2)]
    assert set(encoding.state_dict()) == {"axis_tables.0.weight", "axis_tables.1.weight"}
