"""Nyströmformer against Hugging Face's, LAPACK's pseudo-inverse and SDPA. ``contracts/test_attention.py`` tests masks and batches."""

from types import SimpleNamespace

import checks
import pytest
import torch
from checks import assert_close
from torch.nn import functional as F
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from permuteformer.attention import MultiHeadAttention, nystromformer
from permuteformer.attention.nystromformer import NystromformerAttention
from permuteformer.ops.call import Tokens


def mix(attention, q, k, v, mask=None):
    out, state = attention.mix(q, k, v, Tokens(mask=mask), None)
    assert state is None
    return out


def small(**options):
    return NystromformerAttention(2, 4, **{"num_landmarks": 6, **options}).double()


def draw(batch, length, heads=2, size=4):
    return torch.randn(3, batch, heads, length, size, dtype=torch.float64)


@pytest.mark.parametrize("convolution_size", [None, 1, 5, 33])
@pytest.mark.parametrize(("length", "landmarks"), [(24, 6), (24, 1), (60, 12)])
def test_is_hugging_face(length, landmarks, convolution_size):
    config = NystromformerConfig(hidden_size=16, num_attention_heads=2, num_landmarks=landmarks, segment_means_seq_len=length)
    config.conv_kernel_size = convolution_size or 1
    theirs = NystromformerSelfAttention(config).double().eval()
    theirs.init_option = "exact"  # a scale per head; the config option for it cannot be set in this version
    ours = MultiHeadAttention(16, NystromformerAttention(2, 8, num_landmarks=landmarks, convolution_size=convolution_size)).double()
    for name in ("query", "key", "value"):
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    if convolution_size is None:
        theirs.conv_kernel_size = None
    else:
        ours.attention.convolution.load_state_dict(theirs.conv.state_dict())
    ours.output.weight.data.copy_(torch.eye(16))
    ours.output.bias.data.zero_()
    x = 3 * torch.randn(2, length, 16, dtype=torch.float64)
    assert_close(ours(x)[0], theirs(x)[0])


def paper(q, k, v, landmarks):
    """Compute the paper's formula for a row of one head, ``l d``, with LAPACK's pseudo-inverse."""
    groups = [[i for i in range(len(q)) if i * landmarks // len(q) == group] for group in range(landmarks)]
    q_means, k_means = (torch.stack([x[group].mean(0) for group in groups if group]) for x in (q, k))
    left, middle, right = ((x @ y.T / q.shape[-1] ** 0.5).softmax(-1) for x, y in ((q, k_means), (q_means, k_means), (q_means, k)))
    return left @ torch.linalg.pinv(middle) @ right @ v


@pytest.mark.parametrize("length", [1, 5, 6, 7, 13, 40])
def test_is_the_paper_at_any_length_and_mask(length):
    _, k, v = draw(4, length)
    k = 2 * k  # similar landmarks would need more iterations
    mask = torch.rand(4, length) < 0.7
    mask[0], mask[1:, 0] = True, True
    out = mix(small(iterations=30), k, k, v, mask)
    for row, real in enumerate(mask):
        for head in range(2):
            expected = paper(*(x[row, head, real] for x in (k, k, v)), landmarks=6)
            torch.testing.assert_close(out[row, head, real], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 7, 12])
def test_with_a_landmark_per_token_it_is_softmax_attention(length):
    q, k, v = draw(3, length)
    expected = F.scaled_dot_product_attention(q, k, v)
    errors = [(mix(small(num_landmarks=12, iterations=iterations), q, k, v) - expected).abs().max() for iterations in (6, 30)]
    assert errors[0] < 0.15
    assert errors[1] < 1e-8
    assert_close(mix(small(num_landmarks=13), q, k, v), mix(small(num_landmarks=length), q, k, v))  # empty landmarks change nothing
    if length > 6:  # with fewer landmarks than tokens it is an approximation
        assert (mix(small(iterations=30), q, k, v) - expected).abs().max() > 1e-2


def test_a_norm_of_the_whole_batch_would_mix_its_rows(monkeypatch):
    layer = MultiHeadAttention(8, small()).double()
    checks.check_batch(layer)

    def hugging_face(matrix, iterations):
        return NystromformerSelfAttention.iterative_inv(SimpleNamespace(init_option="original"), matrix, iterations)

    monkeypatch.setattr(nystromformer, "_pseudo_inverse", hugging_face)
    with pytest.raises(AssertionError):
        checks.check_batch(layer)


def test_the_pseudo_inverse_is_that_of_lapack():
    matrix = (3 * torch.randn(2, 3, 8, 8, dtype=torch.float64)).softmax(-1)
    matrix[0, 0, 5:], matrix[0, 0, :, 5:] = 0, 0
    matrix[0, 0, :5] /= matrix[0, 0, :5].sum(-1, keepdim=True)
    matrix[1, 2] = 0
    assert_close(nystromformer._pseudo_inverse(matrix, 30), torch.linalg.pinv(matrix, rtol=1e-10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_and_strides(dtype):
    attention, inputs = small(convolution_size=3).to(dtype), draw(2, 20).to(dtype)
    with torch.autocast("cpu"):
        outs = [mix(attention, *inputs)]
    outs += [mix(attention, *inputs), mix(attention, *inputs.transpose(2, 3).contiguous().transpose(2, 3))]
    expected = mix(attention.double(), *inputs.double())
    for out in outs:
        assert out.dtype == dtype
        assert_close(out, expected)


@pytest.mark.parametrize("length", [3, 7])  # with empty landmarks, and without
def test_gradients(length):
    attention = NystromformerAttention(1, 2, num_landmarks=4, iterations=3, convolution_size=3).double()
    mask = torch.arange(length) < torch.tensor([[length], [2]])
    inputs = [x.requires_grad_() for x in (*draw(2, length, heads=1, size=2), *attention.parameters())]
    assert torch.autograd.gradcheck(lambda q, k, v, _: mix(attention, q, k, v, mask), inputs)


def test_bad_options_are_rejected():
    for name, values in {"num_landmarks": (0, 1.5), "iterations": (0,), "convolution_size": (0, 4, -3, 3.0)}.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name} .*got {value}"):
                small(**{name: value})
