"""T5's bias against Hugging Face's T5, alone and inside both attentions."""

import checks
import pytest
import torch
from torch.nn import functional as F
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from permuteformer import build
from permuteformer.ops.feature_map import relu_eps
from permuteformer.positions.t5_bias import T5Bias

CAUSAL = pytest.mark.parametrize("causal", [False, True])


def line(length, start=0):
    return torch.arange(start, start + length).view(1, -1, 1)


def t5(encoding):
    """Return Hugging Face's attention with the table of ``encoding``."""
    weight = encoding.axis_tables[0].weight
    config = T5Config(num_heads=weight.shape[1], is_decoder=encoding.causal)
    config.relative_attention_num_buckets, config.relative_attention_max_distance = len(weight), encoding.max_distance
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    attention.relative_attention_bias.weight = weight
    return attention


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 256), (64, 512), (16, 20), (4, 7), (10, 1000)])
@CAUSAL
def test_buckets(causal, num_buckets, max_distance):
    encoding = T5Bias(32, 4, causal=causal, num_buckets=num_buckets, max_distance=max_distance)
    distance = torch.cat([torch.arange(-3000, 3001), torch.tensor([10**6, -(10**9), 10**12, -(10**12)])])
    expected = T5Attention._relative_position_bucket(-distance, not causal, num_buckets, max_distance)
    assert torch.equal(encoding.bucket(distance), expected)


@CAUSAL
def test_bias_and_gradient(causal):
    encoding = T5Bias(32, 4, causal=causal, num_buckets=16, max_distance=40)
    actual, expected = encoding.bias(line(60), line(90)), t5(encoding).compute_bias(60, 90)
    assert torch.equal(actual, expected)
    assert torch.equal(encoding.bias(line(1, 89), line(90)), t5(encoding).compute_bias(1, 90, past_seen_tokens=89))
    weight = torch.randn_like(actual)
    gradients = [torch.autograd.grad((bias * weight).sum(), encoding.axis_tables[0].weight)[0] for bias in (actual, expected)]
    checks.assert_close(*gradients)


def test_axes_are_summed():
    encoding = T5Bias(32, 4, axes=2)
    query, key = torch.randint(-200, 200, (3, 7, 2)), torch.randint(-200, 200, (3, 9, 2))
    bias = encoding.bias(query, key)
    for b, i, j in [(0, 0, 0), (2, 6, 8), (1, 3, 5)]:
        terms = [table.weight[encoding.bucket(query[b, i, n] - key[b, j, n])] for n, table in enumerate(encoding.axis_tables)]
        checks.assert_close(bias[b, :, i, j], terms[0] + terms[1])


@pytest.mark.parametrize("options", [{"num_buckets": 3}, {"num_buckets": 2}, {"causal": True, "num_buckets": 1}, {"max_distance": 8}])
def test_bad_sizes_are_rejected(options):
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=f"{name} .*got {value}"):
        T5Bias(32, 4, **options)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@CAUSAL
def test_inside_attention(attention, causal):
    layer = build(attention, [("t5_bias", {"max_distance": 20})], hidden_size=24, num_heads=3, causal=causal).double()
    x = torch.randn(2, 33, 24, dtype=torch.float64)
    q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
    encoding = layer.attention.encodings[0]
    assert encoding.causal == causal
    bias = t5(encoding).compute_bias(33, 33)
    if causal:
        bias = bias.masked_fill(~torch.ones(33, 33, dtype=torch.bool).tril(), -torch.inf)
    if attention == "softmax":
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    else:
        weights = relu_eps(q) @ relu_eps(k).mT * bias.exp()
        out = weights @ v / weights.sum(-1, keepdim=True)
    checks.assert_close(layer(x)[0], layer.output(out.transpose(1, 2).flatten(2)))
