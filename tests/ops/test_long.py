"""200,000 tokens with r = 0.88, where r^-j would have overflowed float32 at 700: finite, and right."""

import pytest
import torch
from checks import assert_close

from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.positions.permute import Permute

LENGTH, H, M, V = 200_000, 2, 16, 8
DECAY = torch.tensor([0.88, 0.99], dtype=torch.float64)


@pytest.fixture(scope="module")
def encoding():
    return Permute(H, M)


def recurrence(encoding, q, k, v, rows):
    """The paper's state, one token after another in float64: S <- r S + phi(k) v^T, read at ``rows``."""
    q, k = relu_eps(q.double()), relu_eps(k.double())
    v = torch.cat([v.double(), torch.ones_like(v[..., :1], dtype=torch.float64)], dim=-1)
    step = encoding.permutation
    state = torch.zeros(H, M, V + 1, dtype=torch.float64)
    # The state is kept relative to the current token: moving on by one permutes it once, back.
    back = step.argsort(-1).unsqueeze(-1).expand_as(state)
    decay = DECAY[:, None, None]
    out = {}
    for i in range(LENGTH):
        state = decay * state.gather(1, back) + k[0, :, i, :, None] * v[0, :, i, None, :]
        if i in rows:
            read = (q[0, :, i, :, None] * state).sum(1)
            out[i] = read[:, :-1] / read[:, -1:]
    return torch.stack([out[i] for i in sorted(rows)], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_and_finite(encoding, dtype):
    q, k, v = (torch.randn(1, H, LENGTH, size).to(dtype) for size in (M, M, V))
    out, state = linear_attention(q, k, v, feature_map=relu_eps, transform=encoding, causal=True, log_decay=DECAY.log())
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in state[:2])
    rows = {0, 1, 127, 128, 699, 700, 701, 5_000, 99_999, 150_001, LENGTH - 1}
    expected = recurrence(encoding, q, k, v, rows)
    assert_close(out[0][:, sorted(rows)], expected, dtype)


def test_a_million_tokens_do_not_lose_precision():
    """All keys and values the same: whatever the length, the output is that value."""
    encoding = Permute(1, 4)
    length = 1_000_003
    q, k = (torch.rand(1, 1, 1, 4).expand(1, 1, length, 4) for _ in range(2))
    v = torch.tensor([1.0, -3.0]).expand(1, 1, length, 2)
    for causal in (False, True):
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, transform=encoding, causal=causal, chunk_size=512)
        torch.testing.assert_close(out, v, rtol=1e-4, atol=0)
