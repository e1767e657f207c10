import pytest
import torch
from checks import assert_close
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from permuteformer.attention import ATTENTIONS, build
from permuteformer.attention.linformer import LinformerAttention
from permuteformer.positions.permute import Permute


def mix(attention: LinformerAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    out, state = attention.mix(q, k, v, positions=None, key_mask=key_mask, segments=None, state=None)
    assert state is None
    return out


def draw(batch: int, length: int, heads: int = 2, size: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    return tuple(torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))


def small(**options: int | bool) -> LinformerAttention:
    torch.manual_seed(0)
    return LinformerAttention(2, 4, **{"max_length": 60, "projected_length": 5, **options}).double()  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [True, False])
def test_identity_projections_are_softmax_attention(share):
    q, k, v = draw(3, 17)
    attention = small(max_length=17, projected_length=17, share_key_value=share)
    for projection in attention.parameters():
        projection.data.copy_(torch.eye(17))
    assert_close(mix(attention, q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 60])
def test_is_the_papers_formula_with_the_first_columns(share, length):
    q, k, v = draw(2, length)
    attention = small(share_key_value=share)
    expected = torch.empty_like(v)
    for row in range(2):
        for head in range(2):
            values = attention.key_projection if share else attention.value_projection
            e, f = attention.key_projection[head, :, :length], values[head, :, :length]
            scores = q[row, head] @ (e @ k[row, head]).T / 4**0.5
            expected[row, head] = scores.softmax(-1) @ (f @ v[row, head])
    assert_close(mix(attention, q, k, v), expected)


def test_sharing_is_one_parameter():
    assert len(list(small(share_key_value=True).parameters())) == 1
    apart = small(share_key_value=False)
    assert len(list(apart.parameters())) == 2
    assert not torch.equal(apart.key_projection, apart.value_projection)


@pytest.mark.parametrize("pad", [1, 7, 40])
@pytest.mark.parametrize("length", [1, 5, 20])
def test_padding_changes_no_real_token_and_no_gradient(pad, length):
    attention = small()
    plain = [x.requires_grad_() for x in draw(2, length)]
    padded = [F.pad(x.detach(), (0, 0, 0, pad), value=torch.nan).requires_grad_() for x in plain]
    key_mask = (torch.arange(length + pad) < length).expand(2, -1)
    expected, out = mix(attention, *plain), mix(attention, *padded, key_mask)[:, :, :length]
    assert_close(out, expected)
    for got, wanted in zip(torch.autograd.grad(out.sum(), padded), torch.autograd.grad(expected.sum(), plain), strict=True):
        assert_close(got[:, :, :length], wanted)
        assert (got[:, :, length:] == 0).all()


def test_the_padding_check_has_teeth():
    q, k, v = (F.pad(x, (0, 0, 0, 7), value=1) for x in draw(2, 20))
    key_mask = (torch.arange(27) < 20).expand(2, -1)
    attention = small()
    assert not torch.allclose(mix(attention, q, k, v)[:, :, :20], mix(attention, q, k, v, key_mask)[:, :, :20], atol=1e-3)


def test_a_row_does_not_depend_on_the_others():
    q, k, v = draw(3, 20)
    key_mask = torch.arange(20) < torch.tensor([[20], [3], [0]])
    attention = small()
    together = mix(attention, q, k, v, key_mask)
    for row in range(3):
        one = slice(row, row + 1)
        assert_close(together[one], mix(attention, q[one], k[one], v[one], key_mask[one]))


def test_a_row_without_a_key_gives_zero():
    q, k, v = (x.fill_(torch.nan) for x in draw(2, 6))
    assert (mix(small(), q, k, v, torch.zeros(2, 6, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_and_strides(dtype):
    attention = small().to(dtype)
    q, k, v = draw(2, 20, dtype=dtype)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    outs = [mix(attention, q, k, v), mix(attention, *strided)]
    expected = mix(attention.double(), q.double(), k.double(), v.double())
    for out in outs:
        assert out.dtype == dtype
        assert_close(out, expected)


def test_projected_entries_keep_their_scale():
    torch.manual_seed(0)
    attention = LinformerAttention(2, 16, max_length=400, projected_length=64)
    for x in (torch.randn(4, 2, 400, 16), torch.ones(4, 2, 400, 16)):  # independent tokens, and equal ones
        projected = attention.key_projection @ x
        assert projected.square().mean().item() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("share", [True, False])
def test_gradients(share):
    attention = small(max_length=6, projected_length=3, share_key_value=share)
    key_mask = torch.arange(5) < torch.tensor([[5], [3]])
    inputs = [x.requires_grad_() for x in (*draw(2, 5), *attention.parameters())]
    assert torch.autograd.gradcheck(lambda q, k, v, *_: mix(attention, q, k, v, key_mask), inputs)


def test_no_tensor_is_larger_than_the_scores():
    """A projection copied for every row of the batch would be 4 x 2 x 32 x 512 numbers."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            sizes.extend(
                x.untyped_storage().nbytes() for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)
            )
            return result

    attention = LinformerAttention(2, 4, max_length=512, projected_length=32)
    inputs = draw(8, 512, dtype=torch.float32)
    with Watch(), torch.no_grad():
        mix(attention, *inputs)
    assert max(sizes) <= 4 * max(2 * 32 * 512, 8 * 2 * 512 * 4)


def test_works_in_a_layer_by_name():
    assert ATTENTIONS["linformer"] is LinformerAttention
    layer = build("linformer", hidden_size=8, num_heads=2, max_length=30, projected_length=4)
    x = torch.randn(2, 20, 8)
    out, state = layer(x)
    assert out.shape == x.shape
    assert state is None
    assert torch.equal(out, layer(x)[0])


def test_a_longer_input_is_refused_naming_both_lengths():
    with pytest.raises(ValueError, match=r"length 61.*max_length=60.*larger max_length"):
        mix(small(), *draw(1, 61))


@pytest.mark.parametrize("options", [{"max_length": 0}, {"max_length": 2.5}, {"projected_length": 0}, {"projected_length": "8"}])
def test_bad_options_are_refused(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name} must be a whole number.*at least 1; it is {value!r}"):
        LinformerAttention(2, 4, **{"max_length": 10, **options})


def test_max_length_must_be_given():
    with pytest.raises(TypeError, match="max_length"):
        LinformerAttention(2, 4)  # type: ignore[call-arg]


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"'linformer'.*'causal'"):
        LinformerAttention(2, 4, causal=True, max_length=10)
    with pytest.raises(ValueError, match=r"'linformer'.*'permute'.*transform"):
        LinformerAttention(2, 4, position=Permute(2, 4), max_length=10)
    q, k, v = draw(1, 5)
    with pytest.raises(ValueError, match="'segments'"):
        small().mix(q, k, v, positions=None, key_mask=None, segments=torch.zeros(1, 5, dtype=torch.int64), state=None)
    with pytest.raises(ValueError, match="'state'"):
        small().mix(q, k, v, positions=None, key_mask=None, segments=None, state=object())
