"""Orthogonal against powers of its own matrix, against SciPy's Haar measure, and inside both attentions."""

import checks
import pytest
import scipy.stats
import torch
from torch.nn import functional as F

from permuteformer import build
from permuteformer.ops.feature_map import FEATURE_MAPS
from permuteformer.ops.reference import kernel_attention
from permuteformer.positions import POSITIONS
from permuteformer.positions.orthogonal import Orthogonal


def matrices(encoding, positions):
    """What the encoding does at each position ``l a``, as matrices ``l h m m``: its columns are images of unit vectors."""
    heads, size = encoding.turns.shape[0], sum(encoding.sizes)
    x = torch.eye(size, dtype=torch.float64)[:, None, None, :].expand(-1, heads, len(positions), -1)
    return encoding.transform(x, encoding.tables(positions.unsqueeze(0))).permute(2, 1, 3, 0)


def at(encoding, i):
    return matrices(encoding, torch.tensor([[i]]))[0]


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_powers(size):
    encoding = Orthogonal(num_heads=8, feature_size=size, seed=size)
    i = torch.arange(-50, 51)
    powers = matrices(encoding, i.unsqueeze(-1))
    q = at(encoding, 1)
    checks.assert_close(q @ q.mT, torch.eye(size, dtype=torch.float64).expand_as(q))
    for n, power in zip(i.tolist(), powers, strict=True):
        checks.assert_close(power, torch.linalg.matrix_power(q, n))


def test_both_signs_of_the_determinant_are_at_work():
    """Else the test above would not have met reflections: (-1)^i."""
    for size in (1, 2, 7, 16):
        signs = torch.linalg.det(at(Orthogonal(num_heads=8, feature_size=size, seed=size), 1)).sign()
        assert set(signs.tolist()) == {-1.0, 1.0}


def test_reflections_alternate():
    encoding = Orthogonal(num_heads=16, feature_size=1)
    q = at(encoding, 1)
    for i in (2, 3, 10**12, 10**12 + 1, -(10**12) - 1):
        assert torch.equal(at(encoding, i), q.sign() ** i)


@pytest.mark.parametrize("size", [7, 8])
def test_large_positions_are_consistent(size):
    encoding = Orthogonal(num_heads=3, feature_size=size)
    for i, j in [(10**12, 1), (10**12, -(10**12) + 3), (2**62, 2**62 - 1), (-(2**63), 2**63 - 1), (123456789, 10**15)]:
        checks.assert_close(at(encoding, i) @ at(encoding, j), at(encoding, i + j))
    # By squaring, far from where matrix_power was asked. Each squaring doubles its own rounding, so not further than this.
    power = at(encoding, 1)
    for n in range(31):
        checks.assert_close(power, at(encoding, 2**n), torch.float32)
        power = power @ power


def test_axes_turn_their_own_shares():
    encoding = Orthogonal(num_heads=3, feature_size=9, axes=2)
    x, y = torch.tensor([[1, 0]]), torch.tensor([[0, 1]])
    qx, qy = matrices(encoding, x)[0], matrices(encoding, y)[0]
    identity = torch.eye(9, dtype=torch.float64)
    checks.assert_close(qx[:, 5:], identity[5:].expand(3, -1, -1))
    checks.assert_close(qy[:, :5], identity[:5].expand(3, -1, -1))
    assert (qx[:, :5, :5] - identity[:5, :5]).abs().max() > 0.1
    for i, j in [(3, -2), (11, 40), (-7, 0)]:
        power = torch.linalg.matrix_power(qx, i) @ torch.linalg.matrix_power(qy, j)
        checks.assert_close(matrices(encoding, torch.tensor([[i, j]]))[0], power)


def test_drawn_by_haar_measure():
    """An entry, the trace and the eigenvalue angles are distributed as those of SciPy's orthogonal group."""
    size, heads = 5, 2000
    ours = at(Orthogonal(heads, size), 1)
    theirs = torch.from_numpy(scipy.stats.ortho_group(size, seed=0).rvs(heads))

    def statistics(q):
        return (
            q[:, 0, 0],
            q[:, 2, 1],
            q.diagonal(dim1=-2, dim2=-1).sum(-1),
            torch.linalg.eigvals(q).angle()[:, 0].abs(),
            torch.linalg.det(q),
        )

    for our, their in zip(statistics(ours), statistics(theirs), strict=True):
        assert scipy.stats.ks_2samp(our.round(decimals=9), their.round(decimals=9)).pvalue > 0.01
    # The broken twin: QR as LAPACK gives it, with signs that are not drawn.
    biased = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float64))[0]
    assert scipy.stats.ks_2samp(ours[:, 0, 0], biased[:, 0, 0]).pvalue < 1e-6


def test_seeds():
    same, other = (at(Orthogonal(2, 6, seed=seed), 1) for seed in (0, 1))
    assert torch.equal(same, at(Orthogonal(2, 6), 1))
    assert not torch.allclose(same, other)
    loaded = Orthogonal(2, 6, seed=1)
    loaded.load_state_dict(Orthogonal(2, 6).state_dict())
    assert torch.equal(at(loaded, 7), at(Orthogonal(2, 6), 7))


def test_casting_a_model_keeps_the_matrices():
    encoding = Orthogonal(2, 8)
    before = at(encoding, 10**9)
    assert torch.equal(at(encoding.to(torch.bfloat16), 10**9), before)
    x = torch.randn(1, 2, 3, 8)
    tables = encoding.tables(torch.tensor([[[5], [6], [10**9]]]))
    for dtype in (torch.float32, torch.bfloat16):
        actual = encoding.transform(x.to(dtype), tables)
        assert actual.dtype == dtype
        checks.assert_close(actual, encoding.transform(x.to(dtype).double(), tables))
    # In bfloat16 nothing is rounded but what goes in and what comes out.
    assert torch.equal(actual, encoding.transform(x.to(dtype).float(), tables).to(dtype))


def test_one_table_moves_a_whole_state():
    encoding = Orthogonal(3, 8)
    state = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    moved = encoding.transform(state, encoding.tables(torch.tensor([[[-4]], [[9]]])))
    for b, i in enumerate((-4, 9)):
        checks.assert_close(moved[b], state[b] @ at(encoding, i).mT)


# Inside attention


def layer_of(attention, causal, **arguments):
    return build(attention, [("orthogonal", {})], hidden_size=24, num_heads=3, causal=causal, **arguments).double()


def moved(layer, x):
    """Features ``b h l m`` of tokens 0, 1, …, moved by powers of the layer's matrix."""
    q = at(layer.attention.position.encodings[0], 1)
    powers = torch.stack([torch.linalg.matrix_power(q, i) for i in range(x.shape[2])], dim=1)  # h l m m
    return (powers @ x.unsqueeze(-1)).squeeze(-1)


def reference(layer, x, normalizer):
    q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
    plain = FEATURE_MAPS["relu_eps"](q), FEATURE_MAPS["relu_eps"](k)
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    visible = visible.tril() if layer.attention.causal else visible
    features = [moved(layer, f) for f in plain]
    out = kernel_attention(
        *features, v, visible=visible, normalize=normalizer != "none", plain=None if normalizer == "transformed" else plain
    )
    return layer.output(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 29])
@pytest.mark.parametrize("normalizer", ["auto", "none"])
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_is_the_quadratic_sum(causal, normalizer, length):
    layer = layer_of("linear", causal, chunk_size=8, feature_multiplier=2, normalizer=normalizer)
    x = torch.randn(2, length, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, length, 24, dtype=torch.float64)
    expected = reference(layer, x, normalizer)
    gradients = torch.autograd.grad((expected * weight).sum(), [x, *layer.parameters()])
    for positions in (None, torch.arange(length).view(1, -1, 1) + 10**12):
        actual, _ = layer(x, positions=positions)
        checks.assert_close(actual, expected)
        for a, b in zip(torch.autograd.grad((actual * weight).sum(), [x, *layer.parameters()]), gradients, strict=True):
            checks.assert_close(a, b)


def test_the_papers_ablation_divides_by_transformed_weights():
    """A sum of signed weights can be next to zero, and what is divided by it anything: so only agreement is asked here."""
    layer = layer_of("linear", True, chunk_size=8, normalizer="transformed")
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    actual, expected = layer(x)[0], reference(layer, x, "transformed")
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_split_and_resume(attention):
    layer = layer_of(attention, causal=True, **({"chunk_size": 8} if attention == "linear" else {}))
    checks.check_resume(layer)
    checks.check_relative(layer)


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_attention_is_sdpa_on_powers(causal):
    layer = layer_of("softmax", causal)
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
    out = F.scaled_dot_product_attention(moved(layer, q), moved(layer, k), v, is_causal=causal)
    checks.assert_close(layer(x)[0], layer.output(out.transpose(1, 2).flatten(2)))


def test_registered():
    encoding = POSITIONS.build("orthogonal", {"seed": 3}, {"num_heads": 2, "feature_size": 9, "axes": 2, "causal": True, "hidden_size": 16})
    assert encoding.hooks == {"transform"}
    assert "heads=2, features=5+4" in repr(encoding)
