import pytest
import torch
from checks import assert_close
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from permuteformer.attention import ATTENTIONS, build
from permuteformer.attention.reformer import ReformerAttention
from permuteformer.ops import lsh
from permuteformer.ops.lsh import hash_buckets, lsh_attention
from permuteformer.positions.permute import Permute


def mix(attention: ReformerAttention, q: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    out, state = attention.mix(q, q, v, positions=None, key_mask=key_mask, segments=None, state=None)
    assert state is None
    return out


def draw(batch: int, length: int, heads: int = 2, size: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    q, v = (torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return 3 * q, v


def small(**options: int | bool) -> ReformerAttention:
    return ReformerAttention(2, 4, **{"num_buckets": 4, "chunk_size": 5, **options}).double()  # type: ignore[arg-type]


def seen_in_a_round(buckets: list[int], real: list[bool], chunk: int, causal: bool, by_chunk: bool | None = None) -> list[set[int]]:
    """Which tokens each real token meets in one round, itself among them, by the rule of ``lsh_attention``.

    ``by_chunk`` cuts into chunks where ``causal`` too, as the paper does.
    """
    order = sorted((i for i in range(len(buckets)) if real[i]), key=lambda i: (buckets[i], i))
    seen: list[set[int]] = [set() for _ in buckets]
    for place, i in enumerate(order):
        for other, j in enumerate(order):
            near = place // chunk - other // chunk in (0, 1) if (by_chunk or not causal) else place - other <= chunk
            if buckets[i] == buckets[j] and near and (j <= i or not causal):
                seen[i].add(j)
    return seen


def brute_force(
    q: Tensor, v: Tensor, buckets: Tensor, chunk: int, causal: bool, key_mask: Tensor, by_chunk: bool = False, multiple: bool = False
) -> Tensor:
    """Softmax over all that a token meets in any round, in O(l^2); ``multiple`` counts what it meets n times n times."""
    out = torch.zeros_like(v)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            real = key_mask[row].tolist()
            rounds = [seen_in_a_round(x.tolist(), real, chunk, causal, by_chunk) for x in buckets[row, head]]
            k = q[row, head] / q[row, head].norm(dim=-1, keepdim=True)
            for i in range(q.shape[2]):
                met = sorted(j for seen in rounds for j in seen[i] if j != i)
                others = (met if multiple else sorted(set(met))) or ([i] if real[i] else [])
                if others:
                    weights = (k[others] @ q[row, head, i]).softmax(-1)
                    out[row, head, i] = weights @ v[row, head, others]
    return out


@given(
    length=st.integers(1, 40),
    chunk=st.integers(1, 12),
    rounds=st.integers(1, 4),
    buckets=st.integers(1, 6),
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_is_the_rule_in_brute_force(length, chunk, rounds, buckets, causal, masked):
    q, v = draw(2, length)
    generator = torch.Generator().manual_seed(length)
    hashed = torch.randint(buckets, (2, 2, rounds, length), generator=generator)
    key_mask = (torch.rand(2, length, generator=generator) < 0.7) if masked else torch.ones(2, length, dtype=torch.bool)
    out = lsh_attention(q, v, hashed, chunk_size=chunk, causal=causal, key_mask=key_mask if masked else None)
    assert_close(out, brute_force(q, v, hashed, chunk, causal, key_mask))


@pytest.mark.parametrize("causal", [False, True])
def test_the_attention_is_the_rule_for_its_own_hash(causal):
    q, v = draw(2, 37)
    attention = small(causal=causal, num_hashes=3)
    key_mask = torch.arange(37) < torch.tensor([[37], [22]])
    buckets = hash_buckets(q, attention.rotations)
    assert all(len(set(x.tolist())) == 4 for x in buckets.flatten(0, 2)), "some bucket is empty: a weak test"
    assert_close(mix(attention, q, v, key_mask), brute_force(q, v, buckets, 5, causal, key_mask))


def test_a_pair_that_meets_in_several_rounds_counts_once():
    q, v = draw(1, 30)
    buckets = torch.randint(2, (1, 2, 3, 30))
    everything = torch.ones(1, 30, dtype=torch.bool)
    out = lsh_attention(q, v, buckets, chunk_size=5)
    assert_close(out, brute_force(q, v, buckets, 5, False, everything))
    assert not torch.allclose(out, brute_force(q, v, buckets, 5, False, everything, multiple=True), atol=1e-3)


@pytest.mark.parametrize("num_hashes", [1, 2, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk_size", [20, 1000])
def test_one_chunk_and_one_bucket_is_softmax_attention_without_itself(causal, num_hashes, chunk_size):
    q, v = draw(3, 20)
    others = ~torch.eye(20, dtype=torch.bool)
    if causal:
        others = others.tril()
        others[0, 0] = True  # the first token has nothing else to see
    expected = F.scaled_dot_product_attention(q, F.normalize(q, dim=-1), v, attn_mask=others, scale=1.0)
    attention = small(causal=causal, num_buckets=1, num_hashes=num_hashes, chunk_size=chunk_size)
    assert_close(mix(attention, q, v), expected)


def test_a_token_alone_in_its_bucket_keeps_its_value():
    q, v = draw(2, 12)
    alone = torch.arange(12).expand(2, 2, 3, -1)
    assert_close(lsh_attention(q, v, alone, chunk_size=4), v)
    met_once = alone.clone()
    met_once[:, :, 1] = 0  # in the second round it meets others: that alone counts
    assert_close(lsh_attention(q, v, met_once, chunk_size=4), lsh_attention(q, v, met_once[:, :, 1:2], chunk_size=4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pad", [1, 7, 40])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 20])
def test_padding_changes_no_real_token_and_no_gradient(length, pad, causal):
    attention = small(causal=causal)
    plain = [x.requires_grad_() for x in draw(2, length)]
    padded = [F.pad(x.detach(), (0, 0, 0, pad), value=torch.nan).requires_grad_() for x in plain]
    key_mask = (torch.arange(length + pad) < length).expand(2, -1)
    expected, out = mix(attention, *plain), mix(attention, *padded, key_mask)[:, :, :length]
    assert_close(out, expected)
    for got, wanted in zip(torch.autograd.grad(out.sum(), padded), torch.autograd.grad(expected.sum(), plain), strict=True):
        assert_close(got[:, :, :length], wanted)
        assert (got[:, :, length:] == 0).all()


def test_the_padding_check_has_teeth():
    q, v = (F.pad(x, (0, 0, 0, 7), value=1) for x in draw(2, 20))
    key_mask = (torch.arange(27) < 20).expand(2, -1)
    attention = small()
    assert not torch.allclose(mix(attention, q, v)[:, :, :20], mix(attention, q, v, key_mask)[:, :, :20], atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_tokens_anywhere_are_as_if_they_were_not_there(causal):
    q, v = draw(1, 30)
    real = torch.rand(30, generator=torch.Generator().manual_seed(1)) < 0.6
    attention = small(causal=causal)
    out = mix(attention, *(x.masked_fill(~real[:, None], torch.nan) for x in (q, v)), real[None])
    assert_close(out[:, :, real], mix(attention, *(x[:, :, real] for x in (q, v))))
    assert (out[:, :, ~real] == 0).all()


def futures(q: Tensor, start: int) -> list[Tensor]:
    """The same sequence with other tokens from ``start`` on."""
    return [torch.cat([q[:, :, :start], 3 * torch.randn_like(q[:, :, start:])], dim=2) for _ in range(4)]


@pytest.mark.parametrize("start", [1, 7, 20, 29])
def test_the_future_changes_nothing(start):
    q, v = draw(2, 30)
    attention = small(causal=True, num_hashes=3)
    for q_other, v_other in zip(futures(q, start), futures(v, start), strict=True):
        assert_close(mix(attention, q_other, v_other)[:, :, :start], mix(attention, q, v)[:, :, :start])


def test_the_papers_chunks_would_tell_of_the_future():
    """Tokens to come that are sorted before it move where a token's chunk begins: why a causal token looks back from itself."""
    q, v = draw(1, 30)
    rotations = small(num_hashes=1).rotations
    everything = torch.ones(1, 30, dtype=torch.bool)
    past = [brute_force(x, v, hash_buckets(x, rotations), 3, True, everything, by_chunk=True)[:, :, :15] for x in (q, *futures(q, 15))]
    assert max((x - past[0]).abs().max() for x in past[1:]) > 1e-2


def test_the_past_and_the_chunk_before_are_seen():
    q, v = draw(1, 12)
    attention = small(causal=True, num_buckets=1, chunk_size=4)
    v.requires_grad_()
    (gradient,) = torch.autograd.grad(mix(attention, q, v)[:, :, 9].sum(), v)
    assert (gradient[0, 0, :, 0] != 0).nonzero().flatten().tolist() == [5, 6, 7, 8]
    (gradient,) = torch.autograd.grad(mix(small(num_buckets=1, chunk_size=4), q, v)[:, :, 9].sum(), v)
    assert (gradient[0, 0, :, 0] != 0).nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 10, 11]


def test_a_row_does_not_depend_on_the_others():
    q, v = draw(3, 20)
    key_mask = torch.arange(20) < torch.tensor([[20], [3], [0]])
    attention = small()
    together = mix(attention, q, v, key_mask)
    for row in range(3):
        one = slice(row, row + 1)
        assert_close(together[one], mix(attention, q[one], v[one], key_mask[one]))


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_without_a_key_gives_zero(causal):
    q, v = (x.fill_(torch.nan) for x in draw(2, 13))
    assert (mix(small(causal=causal), q, v, torch.zeros(2, 13, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides(dtype):
    attention = small().to(dtype)
    q, v = draw(2, 23, dtype=dtype)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, v)]
    outs = [mix(attention, q, v), mix(attention, *strided)]
    expected = mix(attention.double(), q.double(), v.double())
    for out in outs:
        assert out.dtype == dtype
        assert_close(out, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal):
    q, v = (x.requires_grad_() for x in draw(2, 9, size=3))
    buckets = torch.randint(2, (2, 2, 2, 9), generator=torch.Generator().manual_seed(0))
    key_mask = torch.arange(9) < torch.tensor([[9], [4]])
    assert torch.autograd.gradcheck(lambda q, v: lsh_attention(q, v, buckets, chunk_size=3, causal=causal, key_mask=key_mask), (q, v))


def test_a_query_of_zero_has_a_gradient():
    q, v = draw(1, 9)
    q[:, :, 3] = 0
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(mix(small(), q, v).sum(), q)
    assert gradient.isfinite().all()


def test_the_hash_is_the_nearest_of_the_directions_and_their_opposites():
    x = torch.randn(2, 3, 50, 4, dtype=torch.float64)
    rotations = torch.randn(3, 5, 4, 6)
    buckets = hash_buckets(x, rotations)
    assert buckets.shape == (2, 3, 5, 50)
    for row, head, hashed, i in ((0, 0, 0, 0), (1, 2, 4, 49), (1, 0, 3, 7)):
        directions = rotations[head, hashed].double().T
        products = torch.cat([directions, -directions]) @ x[row, head, i]
        assert buckets[row, head, hashed, i] == products.argmax()
    assert torch.equal(hash_buckets(7 * x, rotations), buckets)
    assert torch.equal(hash_buckets(-x, rotations), (buckets + 6) % 12)


def test_time_and_memory_are_linear_in_the_length():
    attention = ReformerAttention(1, 4, num_buckets=4, chunk_size=8)

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple) else (result,):
                self.largest = max(self.largest, x.numel() if isinstance(x, Tensor) else 0)
            return result

    sizes = []
    for length in (256, 512, 1024):
        q, v = draw(1, length, heads=1, dtype=torch.float32)
        with Watch() as watch, torch.no_grad():
            mix(attention, q, v)
        sizes.append(watch.largest)
    assert sizes == [2 * length * 16 for length in (256, 512, 1024)]  # rounds, tokens, and the keys of two chunks for each


def test_nothing_is_random_but_by_asking():
    q, v = draw(1, 30)
    attention = small()
    expected = mix(attention, q, v)
    assert torch.equal(mix(attention, q, v), expected)
    assert torch.equal(small(seed=0).rotations, attention.rotations)
    other = small(seed=1)
    assert not torch.allclose(mix(other, q, v), expected)
    other.load_state_dict(attention.state_dict())
    assert torch.equal(mix(other, q, v), expected)
    attention.redraw(torch.Generator().manual_seed(1))
    assert torch.equal(attention.rotations, small(seed=1).rotations)


def test_works_in_a_layer_by_name():
    assert ATTENTIONS["reformer"] is ReformerAttention
    layer = build("reformer", hidden_size=8, num_heads=2, causal=True, chunk_size=4, num_buckets=4)
    assert layer.key is None
    x = torch.randn(2, 20, 8)
    out, state = layer(x)
    assert out.shape == x.shape
    assert state is None
    assert torch.equal(out, layer(x)[0])


@pytest.mark.parametrize("options", [{"num_hashes": 0}, {"chunk_size": 0}, {"chunk_size": 2.5}])
def test_bad_options_are_refused(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name} must be a whole number, at least 1; it is {value}"):
        ReformerAttention(2, 4, **options)


@pytest.mark.parametrize("buckets", [0, 3, -2, 4.0])
def test_an_odd_number_of_buckets_is_refused(buckets):
    with pytest.raises(ValueError, match=f"num_buckets must be an even number.*or 1 for no hashing; it is {buckets}"):
        ReformerAttention(2, 4, num_buckets=buckets)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"'reformer'.*'permute'.*transform"):
        ReformerAttention(2, 4, position=Permute(2, 4))
    q, v = draw(1, 5)
    with pytest.raises(ValueError, match="'segments'"):
        small().mix(q, q, v, positions=None, key_mask=None, segments=torch.zeros(1, 5, dtype=torch.int64), state=None)
    with pytest.raises(ValueError, match="'state'"):
        small(causal=True).mix(q, q, v, positions=None, key_mask=None, segments=None, state=object())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(1, 2, 4, 4)}, r"q and v .*\(1, 2, 5, 4\) and \(1, 2, 4, 4\)"),
        ({"buckets": torch.zeros(1, 2, 3, 4, dtype=torch.int64)}, r"buckets .*\(1, 2, rounds, 5\).*\(1, 2, 3, 4\)"),
        ({"buckets": torch.zeros(1, 2, 3, 5)}, r"buckets must be int64.*torch.float32"),
        ({"chunk_size": 0}, "chunk_size .*at least 1; it is 0"),
        ({"key_mask": torch.ones(1, 4, dtype=torch.bool)}, r"key_mask .*\(1, 5\).*\(1, 4\)"),
        ({"key_mask": torch.ones(1, 5)}, r"key_mask must be bool.*torch.float32"),
    ],
)
def test_the_op_refuses_what_does_not_fit(change, message):
    good = {
        "q": torch.zeros(1, 2, 5, 4),
        "v": torch.zeros(1, 2, 5, 4),
        "buckets": torch.zeros(1, 2, 3, 5, dtype=torch.int64),
        "chunk_size": 3,
    }
    assert lsh.lsh_attention(**good).shape == (1, 2, 5, 4)
    with pytest.raises(ValueError, match=message):
        lsh.lsh_attention(**{**good, **change})
