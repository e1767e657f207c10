"""The paper's Properties 1 to 3 of every encoding with a kernel, and encodings that the checks must reject."""

import math

import pytest
import torch

from permuteformer.positions import Compose, PositionEncoding
from permuteformer.positions.decay import Decay
from permuteformer.positions.orthogonal import Orthogonal
from permuteformer.positions.permute import Permute
from permuteformer.positions.properties import Verdict, is_bounded, is_positive, is_relative, kernel, sample_positions
from permuteformer.positions.rope import Rope
from permuteformer.positions.sinusoidal import Sinusoidal
from permuteformer.positions.t5_bias import T5Bias

HEADS, SIZE = 3, 8
ALL = {is_relative, is_bounded, is_positive}


@pytest.mark.parametrize(
    ("encoding", "bidirectional", "causal"),
    [
        (Compose([]), ALL, ALL),
        *((Permute(HEADS, SIZE, axes), ALL, ALL) for axes in (1, 2, 3)),
        *((Rope(SIZE, axes), ALL - {is_positive}, ALL - {is_positive}) for axes in (1, 2)),
        *((Orthogonal(HEADS, SIZE, axes), ALL - {is_positive}, ALL - {is_positive}) for axes in (1, 2)),
        (T5Bias(32, HEADS), ALL, ALL),
        (T5Bias(32, HEADS, causal=True), ALL, ALL),
        (Decay(HEADS), ALL - {is_bounded}, ALL),  # why a bidirectional model needs a two-sided decay, or r = 1
        (Decay(HEADS, r=1.0), ALL, ALL),
        (Decay(HEADS, two_sided=True), ALL, ALL),
        (Compose([Permute(HEADS, SIZE), Decay(HEADS)]), ALL - {is_bounded}, ALL),
        (Compose([Permute(HEADS, SIZE), Decay(HEADS, two_sided=True)]), ALL, ALL),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, PositionEncoding) else "",
)
def test_properties(encoding, bidirectional, causal):
    at = sample_positions(encoding.axes or 1)
    for is_causal, expected in ((False, bidirectional), (True, causal)):
        for check in ALL:
            verdict = check(encoding, HEADS, SIZE, positions=at, **({"causal": is_causal} if check is is_bounded else {}))
            assert verdict.holds == bool(verdict) == (check in expected)
            assert len(verdict.positions) == (1 if check is is_positive else 2)
            assert set(verdict.positions) <= set(at)
            assert 0 <= verdict.head < HEADS
    if "transform" in encoding.hooks:  # attention relies on these two
        assert encoding.keeps_sign == (is_positive in causal)
        assert encoding.is_group == (is_relative in causal)


def test_kernel_is_equation_11():
    permute = Permute(HEADS, SIZE)
    p = torch.eye(SIZE, dtype=torch.float64)[permute.permutation]  # (P x)_a = x_pi(a)
    for i, j in [(0, 0), (5, 2), (2, 5), (-3, 4)]:
        expected = torch.linalg.matrix_power(p, i).mT @ torch.linalg.matrix_power(p, j)
        torch.testing.assert_close(kernel(permute, HEADS, SIZE, i, j), expected)
        for two_sided, distance in ((False, i - j), (True, abs(i - j))):
            encoding = Compose([permute, Decay(HEADS, r=0.9, two_sided=two_sided)])
            torch.testing.assert_close(kernel(encoding, HEADS, SIZE, i, j), expected * 0.9**distance)


def test_kernel_is_what_attention_computes():
    encoding = Orthogonal(HEADS, SIZE, axes=2)
    q, k = torch.randn(2, 1, HEADS, 1, SIZE, dtype=torch.float64)
    i, j = (3, -7), (10**9, 4)
    q_i, k_j = (encoding.transform(x, encoding.tables(torch.tensor([[at]]))) for x, at in ((q, i), (k, j)))
    actual = torch.einsum("hm,hmn,hn->h", q[0, :, 0], kernel(encoding, HEADS, SIZE, i, j), k[0, :, 0])
    torch.testing.assert_close(actual, (q_i * k_j).sum(-1)[0, :, 0])
    encoding = T5Bias(32, HEADS)
    factor = encoding.bias(torch.tensor([[[4]]]), torch.tensor([[[9]]])).double().exp()[0]  # h 1 1
    torch.testing.assert_close(kernel(encoding, HEADS, SIZE, 4, 9), factor * torch.eye(SIZE, dtype=torch.float64))


@pytest.mark.parametrize("two_sided", [False, True])
def test_encodings_without_a_kernel_are_rejected(two_sided):
    for check in (is_relative, is_positive):
        with pytest.raises(ValueError, match="Sinusoidal"):
            check(Sinusoidal(SIZE), HEADS, SIZE)
    decay = Decay(HEADS, two_sided=two_sided, axes=2)
    with pytest.raises(ValueError, match=r"1 axis .*decay.* got 2"):
        is_relative(Compose([Permute(HEADS, SIZE, 2), decay]), HEADS, SIZE, sample_positions(2))


# Encodings that are wrong in one way


class Squares(Permute):
    """Permutes i^2 times: not a function of i - j."""

    def tables(self, positions):
        return super().tables(positions**2)


class Growing(PositionEncoding):
    """Scales by 1.001^i, which neighbours do not show."""

    def transform(self, x, tables):
        return x * 1.001 ** tables[..., :1].unsqueeze(1).double()


class Logarithmic(PositionEncoding):
    """Depends on i - j, and grows with it as slowly as log(1 + log)."""

    def bias(self, query_positions, key_positions):
        distance = (query_positions - key_positions.mT).abs().double()
        return (1 + distance.log1p()).log().unsqueeze(1).expand(-1, HEADS, -1, -1)


class LateNegation(Permute):
    """Negates one feature of one head at the tenth position only."""

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


class Float32Rope(Rope):
    """Rounds positions to float32: relative near the origin, but not at 10^12."""

    def tables(self, positions):
        return super().tables(positions.float().long())


def test_encodings_that_are_not_relative():
    for broken in (Growing(), AbsoluteBias(32, HEADS), NotANumber(), Float32Rope(SIZE)):
        assert not is_relative(broken, HEADS, SIZE)
    assert is_relative(Float32Rope(SIZE), HEADS, SIZE, positions=range(20))
    assert not is_relative(Squares(HEADS, SIZE, axes=2), HEADS, SIZE, sample_positions(2))
    squares = Squares(HEADS, SIZE)
    verdict = is_relative(squares, HEADS, SIZE)
    assert (verdict.holds, verdict.violation) == (False, 1)
    (i,), (j,) = verdict.positions
    assert not torch.equal(kernel(squares, HEADS, SIZE, i, j), kernel(squares, HEADS, SIZE, i - j, 0))


def test_encodings_that_are_not_bounded():
    for causal in (False, True):
        for broken in (Growing(), Logarithmic(), NotANumber()):
            assert not is_bounded(broken, HEADS, SIZE, causal)
        verdict = is_bounded(Growing(), HEADS, SIZE, causal, positions=[0, 1, 10, 1000])
        assert verdict.positions == ((1000,), (1000,))
        # 1.001^(1000 + 1000), divided by 1.001^(10 + 10) near the origin.
        assert math.isclose(verdict.violation, 1980 * math.log(1.001), rel_tol=1e-9)
    verdict = is_bounded(Decay(HEADS, r=0.5), HEADS, SIZE, causal=False, positions=[0, 1, 100])
    assert verdict.positions == ((0,), (100,))
    assert math.isclose(verdict.violation, 99 * math.log(2), rel_tol=1e-6)


def test_encodings_that_are_not_positive():
    assert is_positive(LateNegation(HEADS, SIZE), HEADS, SIZE) == Verdict(False, 1.0, (sample_positions()[10],), 1)
    assert not is_positive(NotANumber(), HEADS, SIZE)
