"""Rope against Hugging Face's Llama, against 50-digit arithmetic, and inside both attentions."""

import math
import re

import checks
import mpmath
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from permuteformer import build
from permuteformer.ops.angle import angles, geometric_turns
from permuteformer.ops.feature_map import FEATURE_MAPS
from permuteformer.ops.reference import kernel_attention
from permuteformer.positions import POSITIONS
from permuteformer.positions.rope import Rope


def line(*positions):
    return torch.tensor(positions).view(1, -1, 1)


def llama_rotated(x, positions, base=10_000.0):
    """``x`` rotated by Llama's function, with tables made here: float64, from floating-point frequencies."""
    size = x.shape[-1]
    frequency = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = (positions.double() * frequency).repeat(1, 1, 2)
    return apply_rotary_pos_emb(x, x, angle.cos(), angle.sin())[0]


def test_tables_are_llamas():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    positions = torch.arange(100).view(1, -1)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = Rope(feature_size=16).tables(positions.unsqueeze(-1))
    for our, their in zip(ours, theirs, strict=True):
        assert our.shape == (1, 1, 100, 16)
        assert our.dtype == torch.float64
        checks.assert_close(our.squeeze(1), their.double(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation_is_llamas_to_the_bit(dtype):
    encoding = Rope(feature_size=16)
    x = torch.randn(2, 3, 50, 16, dtype=dtype)
    cos, sin = tables = encoding.tables(torch.arange(50).view(1, -1, 1))
    expected, _ = apply_rotary_pos_emb(x, x, cos.squeeze(1).to(dtype), sin.squeeze(1).to(dtype))
    actual = encoding.transform(x, tables)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


def test_rotation_is_llamas_by_independent_tables():
    x = torch.randn(2, 3, 50, 12, dtype=torch.float64)
    positions = torch.randint(0, 1000, (2, 50, 1))
    encoding = Rope(feature_size=12, base=500.0)
    checks.assert_close(encoding.transform(x, encoding.tables(positions)), llama_rotated(x, positions, base=500.0))


def test_two_axes_rotate_their_own_shares():
    x = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    positions = torch.randint(-50, 50, (2, 20, 2))
    encoding = Rope(feature_size=20, axes=2)
    expected = torch.cat([llama_rotated(share, positions[..., n, None]) for n, share in enumerate(x.split(10, dim=-1))], dim=-1)
    checks.assert_close(encoding.transform(x, encoding.tables(positions)), expected)


@pytest.mark.parametrize("position", [1, -3, 4097, 10**6 + 1, 10**12, 10**12 + 1, -(10**12), 2**63 - 1, -(2**63)])
def test_angles_are_right_to_the_last_digits_anywhere(position):
    cos, sin = Rope(feature_size=64).tables(line(position))
    with mpmath.workdps(60):
        exact = [mpmath.mpf(position) * mpmath.mpf(10_000) ** (mpmath.mpf(-2 * t) / 64) for t in range(32)]
        errors = [
            max(abs(cos[0, 0, 0, t].item() - mpmath.cos(a)), abs(sin[0, 0, 0, t].item() - mpmath.sin(a))) for t, a in enumerate(exact)
        ]
    assert max(errors) < 1e-15


def test_a_floating_point_product_would_not_be():
    """The broken twin of the test above: what the integer product is for."""
    naive = (torch.tensor(10.0**12, dtype=torch.float64) * 10_000 ** (-torch.arange(32, dtype=torch.float64) / 32)).cos()
    assert (Rope(feature_size=64).tables(line(10**12))[0][0, 0, 0, :32] - naive).abs().max() > 1e-6


def test_turns_of_a_base_below_one_wrap():
    frequency = 0.01 ** (-torch.arange(0, 4, dtype=torch.float64) / 4)
    angle = angles(torch.tensor([[7]]), *geometric_turns(8, 0.01))
    checks.assert_close(angle.cos(), (7 * frequency).cos().unsqueeze(0))
    checks.assert_close(angle.sin(), (7 * frequency).sin().unsqueeze(0))


def test_group():
    encoding = Rope(feature_size=16)
    x = torch.randn(1, 2, 1, 16, dtype=torch.float64)

    def at(x, i):
        return encoding.transform(x, encoding.tables(line(i)))

    for i, j in [(3, 4), (10**12, -(10**12) + 1), (2**62, 2**62 - 1), (-5, 10**9)]:
        checks.assert_close(at(at(x, j), i), at(x, i + j))
    checks.assert_close(at(x, 10**12).norm(dim=-1), x.norm(dim=-1))


def test_one_table_moves_a_whole_state():
    encoding = Rope(feature_size=8)
    state = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    by = torch.tensor([[[-4]], [[9]]])
    moved = encoding.transform(state, encoding.tables(by))
    for b in range(2):
        for n in range(5):
            checks.assert_close(
                moved[b : b + 1, :, n : n + 1], encoding.transform(state[b : b + 1, :, n : n + 1], encoding.tables(by[b : b + 1]))
            )


def test_casting_a_model_keeps_the_angles():
    cast, kept = Rope(feature_size=16).to(torch.bfloat16), Rope(feature_size=16)
    for a, b in zip(cast.tables(line(12345)), kept.tables(line(12345)), strict=True):
        assert torch.equal(a, b)
    assert not kept.state_dict()


@pytest.mark.parametrize(("feature_size", "axes"), [(7, 1), (6, 2), (10, 4)])
def test_odd_shares_are_refused(feature_size, axes):
    with pytest.raises(ValueError, match=rf"feature_size={feature_size} with axes={axes}.*multiple of {2 * axes}"):
        Rope(feature_size, axes)


def test_bad_base_is_refused():
    with pytest.raises(ValueError, match="base must be above 0, and a number; it is 0"):
        Rope(8, base=0.0)
    with pytest.raises(TypeError, match=re.escape("There is 'base'")):
        build("linear", [("rope", {"bas": 3})], hidden_size=8, num_heads=2)


# Inside attention


def layer_of(attention, causal, axes=1, **arguments):
    return build(attention, [("rope", {})], hidden_size=24, num_heads=3, causal=causal, axes=axes, **arguments).double()


def reference(layer, x, positions):
    """The layer with rotation by Llama, the quadratic sum, and the normaliser of unrotated features."""
    q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
    plain = FEATURE_MAPS["relu_eps"](q), FEATURE_MAPS["relu_eps"](k)
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    visible = visible.tril() if layer.attention.causal else visible
    out = kernel_attention(*(llama_rotated(f, positions) for f in plain), v, visible=visible, plain=plain)
    return layer.output(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 29])
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_is_the_quadratic_sum(causal, length):
    layer = layer_of("linear", causal, chunk_size=8, feature_multiplier=2)
    assert layer.attention.plain_normalizer
    x = torch.randn(2, length, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, length, 24, dtype=torch.float64)
    expected = reference(layer, x, torch.arange(length).view(1, -1, 1))
    gradients = torch.autograd.grad((expected * weight).sum(), [x, *layer.parameters()])
    for positions in (None, torch.arange(length).view(1, -1, 1), torch.arange(length).view(1, -1, 1) + 10**12):
        actual, _ = layer(x, positions=positions)
        checks.assert_close(actual, expected)
        for a, b in zip(torch.autograd.grad((actual * weight).sum(), [x, *layer.parameters()]), gradients, strict=True):
            checks.assert_close(a, b)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_split_and_resume(attention):
    layer = layer_of(attention, causal=True, **({"chunk_size": 8} if attention == "linear" else {}))
    checks.check_resume(layer)
    checks.check_relative(layer)


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_attention_is_sdpa_on_llamas_rotation(causal):
    layer = layer_of("softmax", causal)
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    positions = torch.arange(17).view(1, -1, 1)
    q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
    out = F.scaled_dot_product_attention(llama_rotated(q, positions), llama_rotated(k, positions), v, is_causal=causal)
    expected = layer.output(out.transpose(1, 2).flatten(2))
    checks.assert_close(layer(x)[0], expected)
    checks.assert_close(layer(x, positions=positions + 10**9)[0], expected)


def test_registered():
    encoding = POSITIONS.build("rope", {"base": 100.0}, {"num_heads": 2, "feature_size": 8, "axes": 2, "causal": True, "hidden_size": 16})
    assert encoding.hooks == {"transform"}
    assert "4+4" in repr(encoding)
    assert math.isclose(encoding.tables(torch.tensor([[[1, 2]]]))[0][0, 0, 0, 4].item(), math.cos(2))
