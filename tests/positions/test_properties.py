"""The paper's Properties 1 to 3 of every encoding that has a kernel, broken twins of them, and Proposition 1."""

import math

import pytest
import torch
from torch import Tensor

from permuteformer.positions import POSITIONS, Compose, PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.orthogonal import Orthogonal
from permuteformer.positions.permute import Permute
from permuteformer.positions.properties import Verdict, is_bounded, is_positive, is_relative, kernel, spread
from permuteformer.positions.rope import Rope
from permuteformer.positions.sinusoidal import Sinusoidal
from permuteformer.positions.t5_bias import T5Bias

HEADS, SIZE = 3, 8


def properties(encoding, causal, axes=1) -> tuple[bool, bool, bool]:
    at = spread(axes)
    verdicts = (
        is_relative(encoding, HEADS, SIZE, at),
        is_bounded(encoding, HEADS, SIZE, causal, at),
        is_positive(encoding, HEADS, SIZE, at),
    )
    for verdict, pair in zip(verdicts, (2, 2, 1), strict=True):
        assert bool(verdict) is verdict.holds
        assert len(verdict.positions) == pair
        assert all(position in at for position in verdict.positions)
        assert 0 <= verdict.head < HEADS
    return tuple(map(bool, verdicts))


# What the paper says


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_permute_has_all_three(axes, causal):
    assert properties(Permute(HEADS, SIZE, axes), causal, axes) == (True, True, True)


def test_permuteformer_has_all_three_where_it_is_causal():
    encoding = Compose([Permute(HEADS, SIZE), Decay(HEADS)])
    assert properties(encoding, causal=True) == (True, True, True)
    assert properties(encoding, causal=False) == (True, False, True)


def test_decay_alone_is_bounded_one_way_only():
    """Which is why the paper has r = 1 in bidirectional models."""
    assert properties(Decay(HEADS), causal=True) == (True, True, True)
    assert properties(Decay(HEADS), causal=False) == (True, False, True)
    assert properties(Decay(HEADS, r=1.0), causal=False) == (True, True, True)
    assert properties(Decay(HEADS, two_sided=True), causal=False) == (True, True, True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("name", ["rope", "orthogonal"])
def test_rotations_are_not_positive(name, axes, causal):
    encoding = POSITIONS.build(name, {}, {"num_heads": HEADS, "feature_size": SIZE, "axes": axes})
    assert properties(encoding, causal, axes) == (True, True, False)


def test_t5_has_all_three():
    """Its trouble is another: its factor is a number a pair, which no product of features is."""
    assert properties(T5Bias(32, HEADS), causal=False) == (True, True, True)
    assert properties(T5Bias(32, HEADS, causal=True), causal=True) == (True, True, True)


def test_no_encoding_at_all_has_all_three():
    assert properties(Compose([]), causal=False) == (True, True, True)


@pytest.mark.parametrize("name", ["permute", "rope", "orthogonal"])
def test_claims_are_the_verdicts(name):
    """What the classes say of themselves, and what attention relies on, is what is found."""
    encoding = POSITIONS.build(name, {}, {"num_heads": HEADS, "feature_size": SIZE})
    assert encoding.keeps_sign == is_positive(encoding, HEADS, SIZE).holds
    assert encoding.is_group == is_relative(encoding, HEADS, SIZE).holds


# The kernel


def test_kernel_is_equation_11():
    permute, decay = Permute(HEADS, SIZE), Decay(HEADS, r=0.9)
    p = torch.eye(SIZE, dtype=torch.float64)[permute.permutation]  # (P x)_a = x_pi(a)
    for i, j in [(0, 0), (5, 2), (2, 5), (-3, 4)]:
        power = torch.linalg.matrix_power(p, i).mT @ torch.linalg.matrix_power(p, j)
        torch.testing.assert_close(kernel(permute, HEADS, SIZE, i, j), power)
        expected = power * 0.9 ** (i - j)
        torch.testing.assert_close(kernel(Compose([permute, decay]), HEADS, SIZE, i, j), expected, rtol=1e-6, atol=1e-6)


def test_kernel_is_what_attention_computes():
    encoding = Orthogonal(HEADS, SIZE, axes=2)
    q, k = torch.randn(2, 1, HEADS, 1, SIZE, dtype=torch.float64)
    i, j = (3, -7), (10**9, 4)
    moved = [encoding.transform(x, encoding.tables(torch.tensor([[at]]))) for x, at in ((q, i), (k, j))]
    expected = (moved[0] * moved[1]).sum(-1)[0, :, 0]
    actual = torch.einsum("hm,hmn,hn->h", q[0, :, 0], kernel(encoding, HEADS, SIZE, i, j), k[0, :, 0])
    torch.testing.assert_close(actual, expected)


def test_kernel_has_the_bias():
    encoding = T5Bias(32, HEADS)
    expected = encoding.bias(torch.tensor([[[4]]]), torch.tensor([[[9]]]))[0, :, 0].exp().double().unsqueeze(-1) * torch.eye(SIZE)
    torch.testing.assert_close(kernel(encoding, HEADS, SIZE, 4, 9), expected.double())


def test_what_has_no_kernel_is_refused():
    for ask in (is_relative, is_positive):
        with pytest.raises(ValueError, match="Sinusoidal adds to embeddings"):
            ask(Sinusoidal(SIZE), HEADS, SIZE)
    with pytest.raises(ValueError, match="a decay counts tokens"):
        is_relative(Compose([Permute(HEADS, SIZE, 2), Decay(HEADS)]), HEADS, SIZE, spread(2))


# Teeth: each question is asked of encodings that are wrong in one way


class Squares(Permute):
    """Permutes i^2 times: not a function of i - j."""

    def tables(self, positions):
        return super().tables(positions**2)


class Growing(PositionEncoding):
    """Scales by 1.001^i: nothing to see between neighbours."""

    def transform(self, x, tables):
        return x * 1.001 ** tables[..., :1].unsqueeze(1).double()


class Logarithmic(PositionEncoding):
    """A kernel that depends on i - j and grows with it, as slowly as can be: by a bias, since no pair of equal maps does."""

    def bias(self, query_positions, key_positions):
        distance = (query_positions - key_positions.mT).abs().double()
        return (1 + distance.log1p()).log().unsqueeze(1).expand(-1, HEADS, -1, -1)


class LateNegation(Permute):
    """Negates one feature of one head, far out only."""

    def transform(self, x, tables):
        x = super().transform(x, tables).clone()
        x[:, 1, 10, 3] *= -1
        return x


class AbsoluteBias(T5Bias):
    def bias(self, query_positions, key_positions):
        return super().bias(query_positions**2, key_positions**2)


class NotANumber(PositionEncoding):
    def transform(self, x, tables):
        return torch.where(tables[..., :1].unsqueeze(1) == 257, torch.nan, x)


class NoisyRope(Rope):
    """Angles by a product in floating point, as is usual: relative up to 10^4 or so, and not at 10^12."""

    def tables(self, positions):
        frequency = 10_000 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
        angle = (positions.float() * frequency.float()).repeat(1, 1, 2).unsqueeze(1).double()
        return angle.cos(), angle.sin()


def test_relative_has_teeth():
    verdict = is_relative(Squares(HEADS, SIZE), HEADS, SIZE)
    assert not verdict
    assert verdict.violation == 1
    (i,), (j,) = verdict.positions
    assert not torch.equal(kernel(Squares(HEADS, SIZE), HEADS, SIZE, i, j), kernel(Squares(HEADS, SIZE), HEADS, SIZE, i - j, 0))
    assert not is_relative(Squares(HEADS, SIZE, axes=2), HEADS, SIZE, spread(2))
    assert not is_relative(Growing(), HEADS, SIZE)
    assert not is_relative(AbsoluteBias(32, HEADS), HEADS, SIZE)
    assert not is_relative(NotANumber(), HEADS, SIZE)
    assert not is_relative(NoisyRope(SIZE), HEADS, SIZE)
    assert is_relative(NoisyRope(SIZE), HEADS, SIZE, positions=range(20), tolerance=1e-5)


def test_bounded_has_teeth():
    for causal in (False, True):
        for broken in (Growing(), Logarithmic(), NotANumber()):
            assert not is_bounded(broken, HEADS, SIZE, causal)
        verdict = is_bounded(Growing(), HEADS, SIZE, causal, positions=[0, 1, 10, 1000])
        assert not verdict
        assert verdict.positions == ((1000,), (1000,))
        # 1.001^(1000 + 1000) there, over 1.001^(10 + 10) near the origin.
        assert math.isclose(verdict.violation, 1980 * math.log(1.001), rel_tol=1e-9)
    verdict = is_bounded(Decay(HEADS, r=0.5), HEADS, SIZE, causal=False, positions=[0, 1, 100])
    assert verdict.positions == ((0,), (100,))
    assert math.isclose(verdict.violation, 99 * math.log(2), rel_tol=1e-6)


def test_positive_has_teeth():
    verdict = is_positive(LateNegation(HEADS, SIZE), HEADS, SIZE)
    assert not verdict
    assert (verdict.positions, verdict.head) == ((spread()[10],), 1)
    assert verdict.violation == 1
    assert not is_positive(NotANumber(), HEADS, SIZE)


def test_verdict_says_what_it_is():
    verdict = is_relative(Permute(HEADS, SIZE), HEADS, SIZE)
    assert verdict == Verdict(True, 0.0, ((0,), (0,)), 0)
    with pytest.raises(AttributeError):
        verdict.holds = False


# Proposition 1: M_i^T N_j depends on i - j only, if and only if it is (P^-iT R)^T (P^j Q) for some P, R, Q


def conditioned(size: int, spread: float = 0.1) -> Tensor:
    """An invertible matrix that neither it nor its inverse grow fast in powers: eigenvalues near the unit circle."""
    rotation = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    return rotation @ torch.linalg.matrix_exp(spread * torch.randn(size, size, dtype=torch.float64) / size**0.5)


def power(matrix: Tensor, i: int) -> Tensor:
    return torch.linalg.matrix_power(matrix, i)


@pytest.mark.parametrize(("size", "m", "n"), [(1, 1, 1), (4, 4, 4), (5, 3, 7), (3, 8, 2)])
def test_proposition_1_if(size, m, n):
    p, r, q = conditioned(size), torch.randn(size, m, dtype=torch.float64), torch.randn(size, n, dtype=torch.float64)

    def product(i, j):
        return (power(p, -i).mT @ r).mT @ (power(p, j) @ q)

    for i, j in [(0, 0), (3, 5), (-4, 2), (7, -1)]:
        for step in (-6, 1, 9):
            torch.testing.assert_close(product(i + step, j + step), product(i, j), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(product(3, 5), product(3, 6))


def disguised(size: int, hidden: int, m: int, n: int):
    """M_i (l x m) and N_j (l x n) with Property 1 by a P of ``size``, but with l larger, and nothing of P to be seen.

    Each has random parts that change with every position, where the other has zeros, and both stand in a random basis.
    """
    p, r, q = conditioned(size), torch.randn(size, m, dtype=torch.float64), torch.randn(size, n, dtype=torch.float64)
    basis = torch.randn(size + 2 * hidden, size + 2 * hidden, dtype=torch.float64)

    def noise(seed, columns):
        return torch.randn(hidden, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def query_map(i):
        return basis @ torch.cat([power(p, -i).mT @ r, noise(1000 + i, m), torch.zeros(hidden, m, dtype=torch.float64)])

    def key_map(j):
        return torch.linalg.inv(basis).mT @ torch.cat([power(p, j) @ q, torch.zeros(hidden, n, dtype=torch.float64), noise(5000 + j, n)])

    return query_map, key_map


def realise(values: dict[int, Tensor], blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """P, R, Q with R^T P^t Q = values[t], from t = 0 … 2 blocks - 1 alone (Ho and Kalman, 1966).

    The matrix of blocks values[a + b] is (R^T P^a) by (P^b Q): its rank is l', its factors give R and Q, and P is what
    takes it to the matrix of blocks values[a + b + 1].
    """

    def hankel(shift):
        return torch.cat([torch.cat([values[a + b + shift] for b in range(blocks)], dim=1) for a in range(blocks)])

    u, s, vh = torch.linalg.svd(hankel(0))
    rank = int((s > 1e-9 * s[0]).sum())
    root = s[:rank].sqrt()
    left, right = u[:, :rank] * root, root[:, None] * vh[:rank]
    m, n = values[0].shape
    p = torch.linalg.pinv(left) @ hankel(1) @ torch.linalg.pinv(right)
    return p, left[:m].mT, right[:, :n]


@pytest.mark.parametrize(("size", "hidden", "m", "n"), [(1, 2, 1, 1), (4, 3, 4, 4), (5, 2, 3, 4), (6, 4, 2, 1), (3, 0, 7, 5)])
def test_proposition_1_only_if(size, hidden, m, n):
    query_map, key_map = disguised(size, hidden, m, n)
    # What is given: products at a few places, each taken somewhere else along the line.
    blocks = 8
    values = {t: query_map(i).mT @ key_map(i + t) for t, i in ((t, (7 * t) % 5 - 2) for t in range(2 * blocks))}
    p, r, q = realise(values, blocks)
    assert p.shape == (size, size)
    assert torch.linalg.cond(p) < 1e3
    # What was not: other distances, before and after, at other places.
    for i, j in [(20, 3), (-9, 11), (4, 4), (0, -15), (-20, -41), (13, 33)]:
        torch.testing.assert_close((power(p, -i).mT @ r).mT @ (power(p, j) @ q), query_map(i).mT @ key_map(j), rtol=1e-7, atol=1e-7)


def test_proposition_1_finds_nothing_where_there_is_nothing():
    """Maps without Property 1: no P of their size explains the products."""
    maps = torch.randn(2, 60, 4, 3, dtype=torch.float64)
    values = {t: maps[0, 2].mT @ maps[1, 2 + t] for t in range(16)}
    p, r, q = realise(values, 8)
    assert p.shape[0] > 4
    assert (r.mT @ power(p, 20) @ q - maps[0, 2].mT @ maps[1, 22]).abs().max() > 0.1


def test_proposition_1_finds_the_permutation():
    """From similarities of PermuteFormer alone, the P that is found is its permutation over r, but for a change of basis."""
    encoding = Compose([Permute(1, 6, seed=2), Decay(1, r=0.5)])
    p, _, _ = realise({t: kernel(encoding, 1, 6, i=3, j=3 + t)[0] for t in range(4)}, 2)
    expected = torch.eye(6, dtype=torch.float64)[encoding.encodings[0].permutation[0]] / 0.5
    characteristic = [torch.stack([torch.trace(power(matrix, n)) for n in range(1, 7)]) for matrix in (p, expected)]
    torch.testing.assert_close(*characteristic, rtol=1e-6, atol=1e-6)
