from types import SimpleNamespace

import pytest
import torch
from checks import TOLERANCE, assert_close
from torch import Tensor
from torch.nn import functional as F
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from permuteformer.attention import ATTENTIONS, MultiHeadAttention, build, nystromformer
from permuteformer.attention.nystromformer import NystromformerAttention
from permuteformer.positions.permute import Permute


def mix(attention: NystromformerAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    out, state = attention.mix(q, k, v, positions=None, key_mask=key_mask, segments=None, state=None)
    assert state is None
    return out


def draw(batch: int, length: int, heads: int = 2, size: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    return tuple(torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))


def small(**options: int | None) -> NystromformerAttention:
    return NystromformerAttention(2, 4, **{"num_landmarks": 6, **options}).double()  # type: ignore[arg-type]


def row_by_row(attention: NystromformerAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> Tensor:
    """The paper on each row's real tokens by themselves, with LAPACK's pseudo-inverse and no convolution; zero elsewhere."""
    out = torch.zeros_like(v)
    landmarks = attention.num_landmarks
    for row, mask in enumerate(key_mask):
        real = mask.nonzero().flatten()
        segments = [[i for i in range(len(real)) if i * landmarks // len(real) == segment] for segment in range(landmarks)]
        for head in range(q.shape[1]):
            queries, keys, values = (x[row, head, real] for x in (q, k, v))
            q_means, k_means = (torch.stack([x[segment].mean(0) for segment in segments if segment]) for x in (queries, keys))
            left, middle, right = (
                (x @ y.T / q.shape[-1] ** 0.5).softmax(-1) for x, y in ((queries, k_means), (q_means, k_means), (q_means, keys))
            )
            out[row, head, real] = left @ torch.linalg.pinv(middle) @ right @ values
    return out


@pytest.mark.parametrize("convolution_size", [None, 1, 5, 33])
@pytest.mark.parametrize(("length", "landmarks"), [(24, 6), (24, 1), (60, 12)])
def test_is_hugging_faces(length, landmarks, convolution_size):
    config = NystromformerConfig(
        hidden_size=16,
        num_attention_heads=2,
        num_landmarks=landmarks,
        segment_means_seq_len=length,
        conv_kernel_size=convolution_size or 1,
        attention_probs_dropout_prob=0.0,
    )
    theirs = NystromformerSelfAttention(config).double()
    theirs.init_option = "exact"  # a scale for each head; its config option for it cannot be set in this version
    if convolution_size is None:
        theirs.conv_kernel_size = None
    ours = MultiHeadAttention(16, NystromformerAttention(2, 8, num_landmarks=landmarks, convolution_size=convolution_size)).double()
    for name in ("query", "key", "value"):
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    if convolution_size is not None:
        ours.attention.convolution.load_state_dict(theirs.conv.state_dict())
    ours.output.weight.data.copy_(torch.eye(16))
    ours.output.bias.data.zero_()
    x = 3 * torch.randn(2, length, 16, dtype=torch.float64)
    assert_close(ours(x)[0], theirs(x)[0])


@pytest.mark.parametrize("length", [1, 5, 6, 7, 13, 40])
def test_is_the_paper_at_any_length_and_mask(length):
    q, k, v = draw(4, length)
    q = k = 2 * k  # landmarks that are alike would leave the iteration far from done
    key_mask = torch.rand(4, length, generator=torch.Generator().manual_seed(length)) < 0.7
    key_mask[0], key_mask[1:, 0] = True, True
    attention = small(iterations=30)
    out = mix(attention, q, k, v, key_mask)
    mask = key_mask[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[mask], row_by_row(attention, q, k, v, key_mask)[mask], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 7, 12])
def test_with_a_landmark_for_every_token_it_is_softmax_attention(length):
    q, k, v = draw(3, length)
    expected = F.scaled_dot_product_attention(q, k, v)
    errors = [(mix(small(num_landmarks=12, iterations=iterations), q, k, v) - expected).abs().max() for iterations in (6, 30)]
    assert errors[0] < 0.15
    assert errors[1] < 1e-8


@pytest.mark.parametrize("length", [1, 4, 6])
def test_empty_landmarks_change_nothing(length):
    q, k, v = draw(3, length)
    assert_close(mix(small(num_landmarks=13), q, k, v), mix(small(num_landmarks=length), q, k, v))


def test_fewer_landmarks_than_tokens_are_an_approximation():
    q, k, v = draw(3, 12)
    assert (mix(small(iterations=30), q, k, v) - F.scaled_dot_product_attention(q, k, v)).abs().max() > 1e-2


@pytest.mark.parametrize("convolution_size", [None, 5])
@pytest.mark.parametrize("pad", [1, 7, 40])
@pytest.mark.parametrize("length", [1, 3, 6, 20])
def test_padding_changes_no_real_token_and_no_gradient(length, pad, convolution_size):
    attention = small(convolution_size=convolution_size)
    plain = [x.requires_grad_() for x in draw(2, length)]
    padded = [F.pad(x.detach(), (0, 0, 0, pad), value=torch.nan).requires_grad_() for x in plain]
    key_mask = (torch.arange(length + pad) < length).expand(2, -1)
    expected, out = mix(attention, *plain), mix(attention, *padded, key_mask)[:, :, :length]
    assert_close(out, expected)
    for got, wanted in zip(torch.autograd.grad(out.sum(), padded), torch.autograd.grad(expected.sum(), plain), strict=True):
        assert_close(got[:, :, :length], wanted)
        assert (got[:, :, length:] == 0).all()


@pytest.mark.parametrize("convolution_size", [None, 5])
def test_the_padding_check_has_teeth(convolution_size):
    q, k, v = (F.pad(x, (0, 0, 0, 7), value=1) for x in draw(2, 20))
    key_mask = (torch.arange(27) < 20).expand(2, -1)
    attention = small(convolution_size=convolution_size)
    assert not torch.allclose(mix(attention, q, k, v)[:, :, :20], mix(attention, q, k, v, key_mask)[:, :, :20], atol=1e-3)


def test_hidden_tokens_anywhere_are_as_if_they_were_not_there():
    q, k, v = draw(1, 30)
    real = torch.rand(30, generator=torch.Generator().manual_seed(1)) < 0.6
    out = mix(small(), *(x.masked_fill(~real[:, None], torch.nan) for x in (q, k, v)), real[None])
    assert_close(out[:, :, real], mix(small(), *(x[:, :, real] for x in (q, k, v))))


def batch_error(attention: NystromformerAttention) -> float:
    """How far rows are from what they are alone; the first row's landmarks are far more peaked than the others'."""
    q, k, v = draw(2, 20)
    q[0], k[0] = 9 * k[0].mean(1, keepdim=True), 9 * k[0]
    key_mask = torch.arange(20) < torch.tensor([[20], [14]])
    together = mix(attention, q, k, v, key_mask)
    alone = [mix(attention, q[row, None], k[row, None], v[row, None], key_mask[row, None]) for row in range(2)]
    return (together - torch.cat(alone)).abs().max().item()


def test_a_row_does_not_depend_on_the_others(monkeypatch):
    limit = TOLERANCE[torch.float64]["atol"]
    assert batch_error(small()) < limit

    def scaled_over_the_batch(matrix: Tensor, iterations: int) -> Tensor:
        original = SimpleNamespace(init_option="original")  # Hugging Face's default
        return NystromformerSelfAttention.iterative_inv(original, matrix, iterations)

    monkeypatch.setattr(nystromformer, "_pseudo_inverse", scaled_over_the_batch)
    assert batch_error(small()) > 1e-3


def test_the_pseudo_inverse_is_lapacks():
    matrix = (3 * torch.randn(2, 3, 8, 8, dtype=torch.float64)).softmax(-1)
    matrix[0, 0, 5:], matrix[0, 0, :, 5:] = 0, 0
    matrix[0, 0, :5] /= matrix[0, 0, :5].sum(-1, keepdim=True)
    matrix[1, 2] = 0
    assert_close(nystromformer._pseudo_inverse(matrix, 30), torch.linalg.pinv(matrix, rtol=1e-10))


def test_a_row_without_a_key_gives_zero():
    q, k, v = (x.fill_(torch.nan) for x in draw(2, 9))
    for convolution_size in (None, 3):
        assert (mix(small(convolution_size=convolution_size), q, k, v, torch.zeros(2, 9, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_and_strides(dtype):
    attention = small(convolution_size=3).to(dtype)
    q, k, v = draw(2, 20, dtype=dtype)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    with torch.autocast("cpu"):
        outs = [mix(attention, q, k, v)]
    outs += [mix(attention, q, k, v), mix(attention, *strided)]
    expected = mix(attention.double(), q.double(), k.double(), v.double())
    for out in outs:
        assert out.dtype == dtype
        assert_close(out, expected)


@pytest.mark.parametrize("length", [3, 7])  # with empty landmarks, and with full ones
def test_gradients(length):
    attention = NystromformerAttention(1, 2, num_landmarks=4, iterations=3, convolution_size=3).double()
    key_mask = torch.arange(length) < torch.tensor([[length], [2]])
    inputs = [x.requires_grad_() for x in (*draw(2, length, heads=1, size=2), *attention.parameters())]
    assert torch.autograd.gradcheck(lambda q, k, v, _: mix(attention, q, k, v, key_mask), inputs)


def test_works_in_a_layer_by_name():
    assert ATTENTIONS["nystromformer"] is NystromformerAttention
    layer = build("nystromformer", hidden_size=8, num_heads=2, num_landmarks=4, convolution_size=3)
    x = torch.randn(2, 20, 8)
    out, state = layer(x)
    assert out.shape == x.shape
    assert state is None
    assert torch.equal(out, layer(x)[0])


@pytest.mark.parametrize("options", [{"num_landmarks": 0}, {"num_landmarks": 1.5}, {"iterations": 0}])
def test_bad_options_are_refused(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name} must be a whole number, at least 1; it is {value}"):
        NystromformerAttention(2, 4, **options)


@pytest.mark.parametrize("size", [0, 4, -3, 3.0])
def test_a_convolution_without_a_middle_is_refused(size):
    with pytest.raises(ValueError, match=f"convolution_size must be an odd number.*None.*it is {size}"):
        NystromformerAttention(2, 4, convolution_size=size)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"'nystromformer'.*'causal'"):
        NystromformerAttention(2, 4, causal=True)
    with pytest.raises(ValueError, match=r"'nystromformer'.*'permute'.*transform"):
        NystromformerAttention(2, 4, position=Permute(2, 4))
    q, k, v = draw(1, 5)
    with pytest.raises(ValueError, match="'segments'"):
        small().mix(q, k, v, positions=None, key_mask=None, segments=torch.zeros(1, 5, dtype=torch.int64), state=None)
    with pytest.raises(ValueError, match="'state'"):
        small().mix(q, k, v, positions=None, key_mask=None, segments=None, state=object())
