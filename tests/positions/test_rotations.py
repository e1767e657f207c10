"""Rope against Hugging Face's Llama and 60-digit arithmetic, orthogonal against matrix powers and SciPy; both inside attention."""

import math

import checks
import mpmath
import pytest
import scipy.stats
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from permuteformer import build
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.reference import kernel_attention
from permuteformer.positions import POSITIONS
from permuteformer.positions.angles import angles, geometric_turns
from permuteformer.positions.orthogonal import Orthogonal
from permuteformer.positions.rope import Rope


def line(*positions):
    return torch.tensor(positions).view(1, -1, 1)


def test_rope_tables_are_those_of_llama():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    llama = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(100).view(1, -1))
    for actual, expected in zip(Rope(feature_size=16).tables(line(*range(100))), llama, strict=True):
        assert actual.dtype == torch.float64
        checks.assert_close(actual.squeeze(1), expected.double(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rope_is_that_of_llama_bit_for_bit(dtype):
    encoding = Rope(feature_size=16)
    x = torch.randn(2, 3, 50, 16, dtype=dtype)
    cos, sin = tables = encoding.tables(line(*range(50)))
    expected, _ = apply_rotary_pos_emb(x, x, cos.squeeze(1).to(dtype), sin.squeeze(1).to(dtype))
    assert torch.equal(encoding.transform(x, tables), expected)


@pytest.mark.parametrize("position", [1, -3, 4097, 10**6 + 1, 10**12, 10**12 + 1, -(10**12), 2**63 - 1, -(2**63)])
def test_rope_is_exact_at_any_integer(position):
    cos, sin = Rope(feature_size=64).tables(line(position))
    with mpmath.workdps(60):
        exact = [mpmath.mpf(position) * mpmath.mpf(10_000) ** (mpmath.mpf(-2 * t) / 64) for t in range(32)]
        for table, function in ((cos, mpmath.cos), (sin, mpmath.sin)):
            assert max(abs(a - function(e)) for a, e in zip(table[0, 0, 0, :32].tolist(), exact, strict=True)) < 1e-15


def test_turns_of_a_base_below_one_wrap():
    frequency = 0.01 ** (-torch.arange(0, 4, dtype=torch.float64) / 4)
    angle = angles(torch.tensor([[7]]), *geometric_turns(8, 0.01))
    checks.assert_close(torch.cat([angle.cos(), angle.sin()]), torch.stack([(7 * frequency).cos(), (7 * frequency).sin()]))


def test_rope_rejects_bad_options():
    for feature_size, axes in [(7, 1), (6, 2), (10, 4)]:
        with pytest.raises(ValueError, match=rf"feature_size={feature_size} .*axes={axes}.* {2 * axes}$"):
            Rope(feature_size, axes)
    for base in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"base .*{base}"):
            Rope(8, base=base)


def matrices(encoding, *position):
    """Return the matrices ``h m m`` of an orthogonal encoding at a position: their columns are the images of unit vectors."""
    x = torch.eye(encoding.feature_size, dtype=torch.float64)[:, None, None, :].expand(-1, encoding.num_heads, -1, -1)
    return encoding.transform(x, encoding.tables(torch.tensor([[position]]))).squeeze(2).permute(1, 2, 0)


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_orthogonal_is_powers_of_its_matrix(size):
    encoding = Orthogonal(num_heads=8, feature_size=size, seed=size)
    q = matrices(encoding, 1)
    checks.assert_close(q @ q.mT, torch.eye(size, dtype=torch.float64).expand_as(q))
    assert set(torch.linalg.det(q).sign().tolist()) == {-1.0, 1.0}, "no head has a reflection, so (-1)^i is not tested"
    for i in range(-50, 51):
        checks.assert_close(matrices(encoding, i), torch.linalg.matrix_power(q, i))


@pytest.mark.parametrize("size", [1, 7, 8])
def test_orthogonal_at_large_positions(size):
    encoding = Orthogonal(num_heads=3, feature_size=size)
    for i, j in [(10**12, 1), (10**12, -(10**12) + 3), (2**62, 2**62 - 1), (-(2**63), 2**63 - 1), (123456789, 10**15)]:
        checks.assert_close(matrices(encoding, i) @ matrices(encoding, j), matrices(encoding, i + j))
    power = matrices(encoding, 1)
    for n in range(31):  # each squaring doubles the rounding error of ``power``
        checks.assert_close(power, matrices(encoding, 2**n), torch.float32)
        power = power @ power


def test_axes_of_orthogonal_rotate_their_own_parts():
    encoding = Orthogonal(num_heads=3, feature_size=9, axes=2)
    identity = torch.eye(9, dtype=torch.float64).expand(3, -1, -1)
    checks.assert_close(matrices(encoding, 1, 0)[:, 5:], identity[:, 5:])
    checks.assert_close(matrices(encoding, 0, 1)[:, :5], identity[:, :5])


def test_orthogonal_is_drawn_by_haar_measure():
    """Entries, traces, eigenvalue angles and determinants are distributed as in SciPy's orthogonal group."""
    size, heads = 5, 2000
    q = matrices(Orthogonal(heads, size), 1)

    def statistics(q):
        trace, angle = q.diagonal(dim1=-2, dim2=-1).sum(-1), torch.linalg.eigvals(q).angle()[:, 0].abs()
        return q[:, 0, 0], q[:, 2, 1], trace, angle, torch.linalg.det(q)

    expected = torch.from_numpy(scipy.stats.ortho_group(size, seed=0).rvs(heads))
    for ours, theirs in zip(statistics(q), statistics(expected), strict=True):
        assert scipy.stats.ks_2samp(ours.round(decimals=9), theirs.round(decimals=9)).pvalue > 0.01
    biased = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float64))[0]  # LAPACK's signs are not random
    assert scipy.stats.ks_2samp(q[:, 0, 0], biased[:, 0, 0]).pvalue < 1e-6


def test_orthogonal_rounds_only_input_and_output_to_bfloat16():
    encoding, x = Orthogonal(2, 8), torch.randn(1, 2, 3, 8, dtype=torch.bfloat16)
    tables = encoding.tables(line(5, 6, 10**9))
    assert torch.equal(encoding.transform(x, tables), encoding.transform(x.float(), tables).bfloat16())
    checks.assert_close(encoding.transform(x.float(), tables), encoding.transform(x.double(), tables))


# Independent transforms, alone and inside attention


def llama(encoding, x, positions):
    """Rotate the part of each axis by Llama's function, with float64 tables."""
    rotated = []
    for axis, part in enumerate(x.split(encoding.sizes, dim=-1)):
        frequency = encoding.base ** (-torch.arange(0, part.shape[-1], 2, dtype=torch.float64) / part.shape[-1])
        angle = (positions[..., axis, None].double() * frequency).repeat(1, 1, 2)
        rotated.append(apply_rotary_pos_emb(part, part, angle.cos(), angle.sin())[0])
    return torch.cat(rotated, dim=-1)


def matrix_powers(encoding, x, positions):
    """Multiply by powers of the matrix of each axis, for positions of one row."""
    for axis, unit in enumerate(torch.eye(encoding.axes, dtype=torch.int64).tolist()):
        q = matrices(encoding, *unit)
        powers = torch.stack([torch.linalg.matrix_power(q, i) for i in positions[0, :, axis].tolist()], dim=1)  # h l m m
        x = (powers @ x.unsqueeze(-1)).squeeze(-1)
    return x


INDEPENDENT = {"rope": llama, "orthogonal": matrix_powers}


@pytest.mark.parametrize("name", list(INDEPENDENT))
@pytest.mark.parametrize("axes", [1, 2])
def test_transform(name, axes):
    encoding = POSITIONS.build(name, {"base": 500.0} if name == "rope" else {}, {"num_heads": 3, "feature_size": 20, "axes": axes})
    x, positions = torch.randn(2, 3, 20, 20, dtype=torch.float64), torch.randint(-50, 50, (1, 20, axes))
    checks.assert_close(encoding.transform(x, encoding.tables(positions)), INDEPENDENT[name](encoding, x, positions))


def expected_output(layer, name, x):
    """Compute a layer over all pairs of tokens, with the independent transform."""
    attention, length = layer.attention, x.shape[1]
    q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
    feature_map = relu_eps if attention.name == "linear" else nn.Identity()
    plain = feature_map(q), feature_map(k)
    q, k = (INDEPENDENT[name](attention.encodings[0], part, line(*range(length))) for part in plain)
    visible = torch.ones(length, length, dtype=torch.bool).tril(0 if attention.causal else length)
    if attention.name == "linear":
        normalize, plain = attention.normalizer != "none", plain if attention.normalizer == "plain" else None
        out = kernel_attention(q, k, v, visible=visible, normalize=normalize, plain=plain)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return layer.output(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 29])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", list(INDEPENDENT))
@pytest.mark.parametrize("options", [{}, {"chunk_size": 8, "feature_multiplier": 2}, {"chunk_size": 8, "normalizer": "none"}], ids=str)
def test_inside_attention(name, options, causal, length):
    layer = build("linear" if options else "softmax", [name], hidden_size=24, num_heads=3, causal=causal, **options).double()
    x, weight = torch.randn(2, 2, length, 24, dtype=torch.float64)
    x.requires_grad_()
    expected = expected_output(layer, name, x)
    gradients = torch.autograd.grad((expected * weight).sum(), [x, *layer.parameters()])
    for positions in (None, line(*range(length)) + 10**12):
        actual, _ = layer(x, positions=positions)
        checks.assert_close(actual, expected)
        for a, b in zip(torch.autograd.grad((actual * weight).sum(), [x, *layer.parameters()]), gradients, strict=True):
            checks.assert_close(a, b)


def test_the_ablation_divides_by_transformed_weights():
    """A sum of signed weights can be close to zero, which amplifies rounding errors: hence the tolerance."""
    layer = build("linear", ["orthogonal"], hidden_size=24, num_heads=3, causal=True, chunk_size=8, normalizer="transformed").double()
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], expected_output(layer, "orthogonal", x), rtol=1e-6, atol=1e-6)
