"""Cases at the edge of what may be asked: encodings that are trained, inference mode, padding beside segments, wrong tensors."""

import copy

import pytest
import torch
from checks import assert_close
from torch import nn

from permuteformer.attention import PermuteFormerAttention, build
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.halves import absorb_keys, attend_to_all
from permuteformer.ops.linear import linear_attention
from permuteformer.positions.base import POSITIONS, Compose, PositionEncoding
from permuteformer.positions.orthogonal import Orthogonal
from permuteformer.positions.permute import Permute


class Scaled(PositionEncoding):
    """Features by a weight of each head that is trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 2.0]))

    def tables(self, positions):
        return self.weight.view(1, -1, 1, 1)

    def transform(self, x, tables):
        return x * tables


@pytest.mark.parametrize("way", ["bidirectional", "causal", "of some tokens"])
def test_an_encoding_that_is_trained_has_its_gradient(way):
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    encoding, at = Scaled().double(), torch.arange(9).view(1, 9, 1)
    arguments = {"feature_map": relu_eps, "transform": Compose([encoding]), "positions": at, "normalize": False}

    def loss():
        if way == "of some tokens":
            return attend_to_all(q[:, :, :2], k, v, query_positions=at[:, :2], **arguments).square().sum()
        return linear_attention(q, k, v, causal=way == "causal", **arguments)[0].square().sum()

    loss().backward()
    with torch.no_grad():
        encoding.weight[1] += 1e-5
        above = loss()
        encoding.weight[1] -= 2e-5
        below = loss()
    torch.testing.assert_close(encoding.weight.grad[1], (above - below) / 2e-5, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("chunk_size", [4, 64, 256])
@pytest.mark.parametrize("known", [True, False], ids=["of the state", "of the row"])
def test_a_segment_goes_on_behind_padding(chunk_size, known):
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    arguments = {"feature_map": relu_eps, "causal": True, "transform": Permute(2, 8)}
    threes = torch.full((1, 40), 3)
    whole, _ = linear_attention(q, k, v, segments=threes, **arguments)
    _, state = linear_attention(*(x[:, :, :30] for x in (q, k, v)), segments=threes[:, :30] if known else None, **arguments)
    padded = [torch.cat([torch.randn(1, 2, 200, 8), x[:, :, 30:]], dim=2) for x in (q, k, v)]
    segments = torch.cat([torch.zeros(1, 200, dtype=torch.int64), threes[:, 30:]], dim=1)
    shown = torch.arange(210).view(1, -1) >= 200
    out, after = linear_attention(*padded, segments=segments, key_mask=shown, state=state, chunk_size=chunk_size, **arguments)
    assert_close(out[:, :, 200:], whole[:, :, 30:])
    assert after.segment.tolist() == [3]


def test_layers_that_were_used_in_inference_mode_can_be_trained():
    layer = copy.deepcopy(PermuteFormerAttention(32, 4))
    x = torch.randn(1, 9, 32)
    with torch.inference_mode():
        layer(x)
        PermuteFormerAttention(32, 4)(x)
    layer(x)[0].sum().backward()
    assert layer.query.weight.grad.isfinite().all()


def test_keys_are_checked_before_the_kernel_has_them():
    k, v, at = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.arange(9).view(1, 9, 1)
    with pytest.raises(ValueError, match="v the same but for its size"):
        absorb_keys(k, v[:, :, :4], feature_map=relu_eps, positions=at)
    for mask in (torch.ones(1, 9, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool)):
        with pytest.raises(ValueError, match="key_mask must be bool of shape"):
            absorb_keys(k, v, feature_map=relu_eps, positions=at, key_mask=mask)


def test_the_backend_that_was_asked_for_adds_up_keys(monkeypatch):
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    at = torch.arange(9).view(1, 9, 1)
    monkeypatch.setattr("permuteformer.ops.native_backend.attend", lambda *_: pytest.fail("the kernel was called"))
    attend_to_all(q[:, :, :2], k, v, feature_map=relu_eps, query_positions=at[:, :2], backend="torch")


def test_what_is_after_must_say_its_segment():
    q = k = v = torch.randn(1, 2, 9, 8)
    segments = torch.zeros(1, 9, dtype=torch.int64)
    _, state = linear_attention(q, k, v, feature_map=relu_eps)
    with pytest.raises(ValueError, match="after has no segment"):
        linear_attention(q, k, v, feature_map=relu_eps, segments=segments, after=state)


def test_an_orthogonal_encoding_keeps_lengths_under_autocast():
    encoding, x = Orthogonal(2, 16), torch.randn(1, 2, 50, 16)
    tables = encoding.tables(torch.arange(50).view(1, 50, 1))
    with torch.autocast("cpu", torch.bfloat16):
        turned = encoding.transform(x, tables)
    assert_close(turned, encoding.transform(x, tables))


def test_one_projection_without_a_bias():
    layer = PermuteFormerAttention(64, 4)
    layer.key = nn.Linear(64, layer.key.out_features, bias=False)
    short, long = torch.randn(1, 4, 64), torch.randn(1, 512, 64)
    assert layer(short)[0].shape == short.shape
    assert layer(long)[0].shape == long.shape


def test_no_rows_of_a_reformer():
    layer = build("reformer", hidden_size=32, num_heads=2, causal=False)
    assert layer(torch.randn(0, 5, 32), key_mask=torch.ones(0, 5, dtype=torch.bool))[0].shape == (0, 5, 32)


@pytest.mark.parametrize("name", ["t5_bias", "learned"])
def test_loading_draws_nothing(name):
    options = {"learned": {"max_length": 9}, "t5_bias": {"num_heads": 2}}[name]
    encoding = POSITIONS[name](hidden_size=8, **options)
    drawn = []
    for loads in (False, True):
        torch.manual_seed(0)
        if loads:
            encoding.load_state_dict(encoding.state_dict())
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
