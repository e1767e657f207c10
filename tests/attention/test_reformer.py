"""Reformer against its rule by brute force, and SDPA. ``contracts/test_attention.py`` tests padding and batches."""

import pytest
import torch
from checks import assert_close, largest_tensor
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from permuteformer.attention import build
from permuteformer.attention.reformer import ReformerAttention, hash_buckets, lsh_attention
from permuteformer.ops.call import Tokens

CAUSAL = pytest.mark.parametrize("causal", [False, True])


def mix(attention, q, v, mask=None):
    out, state = attention.mix(q, q, v, Tokens(mask=mask), None)
    assert state is None
    return out


def draw(batch, length, heads=2, size=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    q, v = torch.randn(2, batch, heads, length, size, generator=generator, dtype=torch.float64).to(dtype)
    return 3 * q, v


def small(**options):
    return ReformerAttention(2, 4, **{"num_buckets": 4, "chunk_size": 5, **options}).double()


def seen_in_a_round(buckets, real, chunk, causal, by_chunk):
    """Return the tokens that each real token sees in one round, itself included; ``by_chunk`` cuts chunks if causal too, as the paper."""
    order = sorted((i for i in range(len(buckets)) if real[i]), key=lambda i: (buckets[i], i))
    seen = [set() for _ in buckets]
    for place, i in enumerate(order):
        for other, j in enumerate(order):
            near = place // chunk - other // chunk in (0, 1) if (by_chunk or not causal) else place - other <= chunk
            if buckets[i] == buckets[j] and near and (j <= i or not causal):
                seen[i].add(j)
    return seen


def brute_force(q, v, buckets, chunk, causal=False, mask=None, by_chunk=False):
    """Compute the softmax over all tokens seen in any round, each counted once, in O(l^2)."""
    out = torch.zeros_like(v)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            real = [True] * q.shape[2] if mask is None else mask[row].tolist()
            rounds = [seen_in_a_round(x.tolist(), real, chunk, causal, by_chunk) for x in buckets[row, head]]
            k = q[row, head] / q[row, head].norm(dim=-1, keepdim=True)
            for i in range(q.shape[2]):
                others = sorted({j for seen in rounds for j in seen[i]} - {i}) or ([i] if real[i] else [])
                if others:
                    out[row, head, i] = (k[others] @ q[row, head, i]).softmax(-1) @ v[row, head, others]
    return out


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.booleans())
def test_is_the_rule(length, chunk, rounds, buckets, causal, masked):
    q, v = draw(2, length)
    generator = torch.Generator().manual_seed(length)
    hashed = torch.randint(buckets, (2, 2, rounds, length), generator=generator)
    mask = (torch.rand(2, length, generator=generator) < 0.7) if masked else None
    out = lsh_attention(q, v, hashed, chunk_size=chunk, causal=causal, mask=mask)
    assert_close(out, brute_force(q, v, hashed, chunk, causal, mask))


@CAUSAL
def test_the_attention_is_the_rule_with_its_own_hash(causal):
    q, v = draw(2, 37)
    attention = small(causal=causal, num_hashes=3)
    mask = torch.arange(37) < torch.tensor([[37], [22]])
    buckets = hash_buckets(q, attention.rotations)
    assert all(len(set(x.tolist())) == 4 for x in buckets.flatten(0, 2)), "some bucket is empty: a weak test"
    assert_close(mix(attention, q, v, mask), brute_force(q, v, buckets, 5, causal, mask))


@pytest.mark.parametrize("num_hashes", [1, 2, 5])
@CAUSAL
@pytest.mark.parametrize("chunk_size", [20, 1000])
def test_one_chunk_and_one_bucket_is_softmax_attention_to_others(causal, num_hashes, chunk_size):
    q, v = draw(3, 20)
    others = ~torch.eye(20, dtype=torch.bool)
    if causal:
        others = others.tril()
        others[0, 0] = True  # the first token sees nothing else
    expected = F.scaled_dot_product_attention(q, F.normalize(q, dim=-1), v, attn_mask=others, scale=1.0)
    attention = small(causal=causal, num_buckets=1, num_hashes=num_hashes, chunk_size=chunk_size)
    assert_close(mix(attention, q, v), expected)


def test_a_token_alone_in_its_bucket_keeps_its_value():
    q, v = draw(2, 12)
    alone = torch.arange(12).expand(2, 2, 3, -1)
    assert_close(lsh_attention(q, v, alone, chunk_size=4), v)
    met_once = alone.clone()
    met_once[:, :, 1] = 0  # it meets others in the second round: only that counts
    assert_close(lsh_attention(q, v, met_once, chunk_size=4), lsh_attention(q, v, met_once[:, :, 1:2], chunk_size=4))


def test_chunks_as_in_the_paper_would_leak_the_future():
    """Later tokens move the chunks that a token is in, so a causal token sees the ``chunk_size`` tokens before itself."""
    q, v = draw(4, 30)
    attention = small(causal=True, num_hashes=1)
    changed = torch.cat([q[:, :, :15], 3 * torch.randn_like(q[:, :, 15:])], dim=2)
    assert_close(mix(attention, changed, v)[:, :, :15], mix(attention, q, v)[:, :, :15])
    past = [brute_force(x, v, hash_buckets(x, attention.rotations), 3, True, by_chunk=True)[:, :, :15] for x in (q, changed)]
    assert (past[0] - past[1]).abs().max() > 1e-2


@pytest.mark.parametrize(("causal", "expected"), [(True, [5, 6, 7, 8]), (False, [4, 5, 6, 7, 8, 10, 11])])
def test_the_chunk_before_is_seen(causal, expected):
    q, v = draw(1, 12)
    out = mix(small(causal=causal, num_buckets=1, chunk_size=4), q, v.requires_grad_())
    (gradient,) = torch.autograd.grad(out[:, :, 9].sum(), v)
    assert (gradient[0, 0, :, 0] != 0).nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides(dtype):
    q, v = draw(2, 23, dtype=dtype)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, v)]
    expected = mix(small(), q.double(), v.double())
    for out in (mix(small().to(dtype), q, v), mix(small().to(dtype), *strided)):
        assert out.dtype == dtype
        assert_close(out, expected)


@CAUSAL
def test_gradients(causal):
    q, v = (x.requires_grad_() for x in draw(2, 9, size=3))
    buckets = torch.randint(2, (2, 2, 2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    assert torch.autograd.gradcheck(lambda q, v: lsh_attention(q, v, buckets, chunk_size=3, causal=causal, mask=mask), (q, v))


def test_a_query_of_zero_has_a_finite_gradient():
    q, v = draw(1, 9)
    q[:, :, 3] = 0
    (gradient,) = torch.autograd.grad(mix(small(), q.requires_grad_(), v).sum(), q)
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
def test_memory_is_linear_in_the_length(length):
    attention, inputs = ReformerAttention(1, 4, num_buckets=4, chunk_size=8), draw(1, length, heads=1, dtype=torch.float32)
    assert largest_tensor(lambda: mix(attention, *inputs)) == 4 * 2 * length * 16  # bytes × rounds × tokens × the keys of two chunks


def test_rotations_are_fixed_until_redrawn():
    q, v = draw(1, 30)
    attention, other = small(), small(seed=1)
    expected = mix(attention, q, v)
    assert torch.equal(mix(attention, q, v), expected)
    assert torch.equal(small(seed=0).rotations, attention.rotations)
    assert not torch.allclose(mix(other, q, v), expected)
    other.load_state_dict(attention.state_dict())
    assert torch.equal(mix(other, q, v), expected)
    attention.redraw(torch.Generator().manual_seed(1))
    assert torch.equal(attention.rotations, small(seed=1).rotations)


def test_a_layer_has_one_projection_for_queries_and_keys():
    assert build("reformer", hidden_size=8, num_heads=2).key is None


def test_bad_options_are_rejected():
    for name, values in {"num_hashes": (0,), "chunk_size": (0, 2.5), "num_buckets": (0, 3, -2, 4.0)}.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name} .*got {value}"):
                small(**{name: value})
