"""Linformer, Nyströmformer and Reformer against their formulas, SDPA and Hugging Face. The contract tests cover masks and batches."""

import pytest
import torch
from checks import assert_close, largest_tensor
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from permuteformer.attention import ATTENTIONS, MultiHeadAttention
from permuteformer.attention.reformer import hash_buckets, lsh_attention
from permuteformer.ops.call import Tokens

SMALL = {
    "linformer": {"max_length": 60, "projected_length": 5},
    "nystromformer": {"num_landmarks": 6},
    "reformer": {"num_buckets": 4, "chunk_size": 5},
}
CAUSAL = pytest.mark.parametrize("causal", [False, True])
SHARE = pytest.mark.parametrize("share", [True, False])


def make(name, heads=2, size=4, **options):
    torch.manual_seed(0)
    return ATTENTIONS[name](heads, size, **{**SMALL[name], **options}).double()


def mix(attention, q, k, v, mask=None):
    out, state = attention.mix(q, k, v, Tokens(mask=mask), None)
    assert state is None
    return out


def draw(batch, length):
    """Return q, k and v, whose scores differ by several units."""
    return torch.randn(3, batch, 2, length, 4, dtype=torch.float64) * torch.tensor([3, 1, 1]).view(-1, 1, 1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_other_dtypes_and_strides(name, dtype):
    attention, inputs = make(name, **({"convolution_size": 3} if name == "nystromformer" else {})).to(dtype), draw(2, 23).to(dtype)
    outs = [mix(attention, *inputs), mix(attention, *inputs.transpose(2, 3).contiguous().transpose(2, 3))]
    if name != "linformer":
        with torch.autocast("cpu"):
            outs.append(mix(attention, *inputs))
    expected = mix(attention.double(), *inputs.double())
    for out in outs:
        assert out.dtype == dtype
        assert_close(out, expected)


@pytest.mark.parametrize(
    ("name", "options", "length"),
    [
        *(("linformer", {"max_length": 6, "projected_length": 3, "share_key_value": share}, 5) for share in (True, False)),
        *(("nystromformer", {"num_landmarks": 4, "iterations": 3, "convolution_size": 3}, length) for length in (3, 7)),  # 3: empty ones
        *(("reformer", {"num_buckets": 2, "chunk_size": 3, "causal": causal}, 9) for causal in (False, True)),
    ],
)
def test_gradients(name, options, length):
    attention = make(name, **options)
    mask = torch.arange(length) < torch.tensor([[length], [2]])
    inputs = [x.requires_grad_() for x in (*draw(2, length), *attention.parameters())]
    assert torch.autograd.gradcheck(lambda q, k, v, *_: mix(attention, q, k, v, mask), inputs)


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("linformer", "max_length", (0, 2.5)),
        ("linformer", "projected_length", (0, "8")),
        ("nystromformer", "num_landmarks", (0, 1.5)),
        ("nystromformer", "iterations", (0,)),
        ("nystromformer", "convolution_size", (0, 4, -3, 3.0)),
        ("reformer", "num_hashes", (0,)),
        ("reformer", "chunk_size", (0, 2.5)),
        ("reformer", "num_buckets", (0, 3, -2, 4.0)),
    ],
)
def test_bad_options_are_rejected(name, option, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{option} .*got {value!r}"):
            make(name, **{option: value})


# Linformer


@SHARE
@pytest.mark.parametrize("length", [1, 4, 5, 6, 60])
def test_linformer_is_the_formula_with_the_first_columns(share, length):
    q, k, v = draw(2, length)
    attention = make("linformer", share_key_value=share)
    assert len(list(attention.parameters())) == (1 if share else 2)
    e = attention.key_projection[:, :, :length]
    f = e if share else attention.value_projection[:, :, :length]
    expected = (q @ (e @ k).mT / 4**0.5).softmax(-1) @ (f @ v)
    assert_close(mix(attention, q, k, v), expected)


def test_linformer_projections_keep_the_scale():
    attention = make("linformer", size=16, max_length=400, projected_length=64).float()
    for x in (torch.randn(4, 2, 400, 16), torch.ones(4, 2, 400, 16)):  # independent tokens, and equal ones
        assert (attention.key_projection @ x).square().mean().item() == pytest.approx(1, abs=0.2)


def test_linformer_does_not_copy_the_projection_for_every_row():
    attention, inputs = make("linformer", max_length=512, projected_length=32), draw(8, 512)
    assert largest_tensor(lambda: mix(attention, *inputs)) < 8 * attention.key_projection.numel() * 8


def test_linformer_rejects_longer_inputs():
    with pytest.raises(ValueError, match=r"max_length=60.*got 61"):
        mix(make("linformer"), *draw(1, 61))


# Nyströmformer


@pytest.mark.parametrize("convolution_size", [None, 1, 5, 33])
@pytest.mark.parametrize(("length", "landmarks"), [(24, 6), (24, 1), (60, 12)])
def test_nystromformer_is_that_of_hugging_face(length, landmarks, convolution_size):
    config = NystromformerConfig(hidden_size=16, num_attention_heads=2, num_landmarks=landmarks, segment_means_seq_len=length)
    config.conv_kernel_size = convolution_size or 1
    theirs = NystromformerSelfAttention(config).double().eval()
    theirs.init_option = "exact"  # a scale per head; the config option for it cannot be set in this version
    attention = make("nystromformer", size=8, num_landmarks=landmarks, convolution_size=convolution_size)
    ours = MultiHeadAttention(16, attention).double()
    for name in ("query", "key", "value"):
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    if convolution_size is None:
        theirs.conv_kernel_size = None
    else:
        attention.convolution.load_state_dict(theirs.conv.state_dict())
    ours.output.weight.data.copy_(torch.eye(16))
    ours.output.bias.data.zero_()
    x = 3 * torch.randn(2, length, 16, dtype=torch.float64)
    assert_close(ours(x)[0], theirs(x)[0])


def nystromformer_paper(q, k, v, landmarks):
    """Compute the paper's formula for a row of one head, ``l d``, with LAPACK's pseudo-inverse."""
    groups = [[i for i in range(len(q)) if i * landmarks // len(q) == group] for group in range(landmarks)]
    q_means, k_means = (torch.stack([x[group].mean(0) for group in groups if group]) for x in (q, k))
    left, middle, right = ((x @ y.T / q.shape[-1] ** 0.5).softmax(-1) for x, y in ((q, k_means), (q_means, k_means), (q_means, k)))
    return left @ torch.linalg.pinv(middle) @ right @ v


@pytest.mark.parametrize("length", [1, 5, 6, 7, 13, 40])
def test_nystromformer_is_the_paper_at_any_length_and_mask(length):
    _, k, v = draw(4, length)
    k = 2 * k  # similar landmarks would need more iterations
    mask = torch.rand(4, length) < 0.7
    mask[0], mask[1:, 0] = True, True
    out = mix(make("nystromformer", iterations=30), k, k, v, mask)
    for row, real in enumerate(mask):
        for head in range(2):
            expected = nystromformer_paper(*(x[row, head, real] for x in (k, k, v)), landmarks=6)
            torch.testing.assert_close(out[row, head, real], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 7, 12])
def test_nystromformer_with_a_landmark_per_token_is_softmax_attention(length):
    q, k, v = torch.randn(3, 3, 2, length, 4, dtype=torch.float64)

    def error(**options):
        return (mix(make("nystromformer", **options), q, k, v) - F.scaled_dot_product_attention(q, k, v)).abs().max()

    assert error(num_landmarks=12, iterations=6) < 0.15
    assert error(num_landmarks=12, iterations=30) < 1e-8
    if length > 6:  # with fewer landmarks than tokens it is an approximation
        assert error(iterations=30) > 1e-2
    found = [mix(make("nystromformer", num_landmarks=n), q, k, v) for n in (13, length)]
    assert_close(*found)  # empty landmarks change nothing


# Reformer


def seen_in_a_round(buckets, real, chunk, causal):
    """Return the tokens that each real token sees in one round, itself included."""
    order = sorted((i for i in range(len(buckets)) if real[i]), key=lambda i: (buckets[i], i))
    seen = [set() for _ in buckets]
    for place, i in enumerate(order):
        for other, j in enumerate(order):
            near = 0 <= place - other <= chunk if causal else place // chunk - other // chunk in (0, 1)
            if buckets[i] == buckets[j] and near:
                seen[i].add(j)
    return seen


def reformer_rule(q, v, buckets, chunk, causal=False, mask=None):
    """Compute the softmax over all tokens seen in any round, each counted once, in O(l^2)."""
    out = torch.zeros_like(v)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            real = [True] * q.shape[2] if mask is None else mask[row].tolist()
            rounds = [seen_in_a_round(x.tolist(), real, chunk, causal) for x in buckets[row, head]]
            k = q[row, head] / q[row, head].norm(dim=-1, keepdim=True)
            for i in range(q.shape[2]):
                others = sorted({j for seen in rounds for j in seen[i]} - {i}) or ([i] if real[i] else [])
                if others:
                    out[row, head, i] = (k[others] @ q[row, head, i]).softmax(-1) @ v[row, head, others]
    return out


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.booleans())
def test_reformer_is_the_rule(length, chunk, rounds, buckets, causal, masked):
    torch.manual_seed(length)
    q, _, v = draw(2, length)
    hashed = torch.randint(buckets, (2, 2, rounds, length))
    mask = (torch.rand(2, length) < 0.7) if masked else None
    out = lsh_attention(q, v, hashed, chunk_size=chunk, causal=causal, mask=mask)
    assert_close(out, reformer_rule(q, v, hashed, chunk, causal, mask))


@CAUSAL
def test_reformer_is_the_rule_with_its_own_hash(causal):
    q, _, v = draw(2, 67)
    attention = make("reformer", causal=causal, num_hashes=3)
    mask = torch.arange(67) < torch.tensor([[67], [22]])
    buckets = hash_buckets(q, attention.rotations)
    assert all(len(set(x.tolist())) == 4 for x in buckets.flatten(0, 2)), "some bucket is empty: a weak test"
    assert_close(mix(attention, q, q, v, mask), reformer_rule(q, v, buckets, 5, causal, mask))


@pytest.mark.parametrize("num_hashes", [1, 2, 5])
@pytest.mark.parametrize("chunk_size", [20, 1000])
@CAUSAL
def test_reformer_with_one_chunk_and_one_bucket_is_softmax_attention_to_others(causal, num_hashes, chunk_size):
    q, _, v = draw(3, 20)
    others = ~torch.eye(20, dtype=torch.bool)
    if causal:
        others = others.tril()
        others[0, 0] = True  # the first token sees nothing else
    expected = F.scaled_dot_product_attention(q, F.normalize(q, dim=-1), v, attn_mask=others, scale=1.0)
    attention = make("reformer", causal=causal, num_buckets=1, num_hashes=num_hashes, chunk_size=chunk_size)
    assert_close(mix(attention, q, q, v), expected)


def test_a_query_of_zero_has_a_finite_gradient():
    q, _, v = draw(1, 9)
    q[:, :, 3] = 0
    (gradient,) = torch.autograd.grad(mix(make("reformer"), q.requires_grad_(), q, v).sum(), q)
    assert gradient.isfinite().all()


def test_the_hash_is_the_nearest_direction_or_opposite():
    x, rotations = torch.randn(2, 3, 50, 4, dtype=torch.float64), torch.randn(3, 5, 4, 6)
    buckets = hash_buckets(x, rotations)
    for row, head, hashed, i in ((0, 0, 0, 0), (1, 2, 4, 49), (1, 0, 3, 7)):
        directions = rotations[head, hashed].double().T
        assert buckets[row, head, hashed, i] == (torch.cat([directions, -directions]) @ x[row, head, i]).argmax()
    assert torch.equal(hash_buckets(7 * x, rotations), buckets)
    assert torch.equal(hash_buckets(-x, rotations), (buckets + 6) % 12)


@pytest.mark.parametrize("length", [256, 512, 1024])
def test_memory_of_reformer_is_linear_in_the_length(length):
    attention, (q, _, v) = make("reformer", chunk_size=8).float(), draw(1, length).float()
    expected = 4 * 2 * 2 * length * 16  # bytes × heads × rounds × tokens × the keys of two chunks
    assert largest_tensor(lambda: mix(attention, q, q, v)) == expected
