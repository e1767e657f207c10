"""Linformer against SDPA and the paper's formula. ``contracts/test_attention.py`` tests masks and batches."""

import pytest
import torch
from checks import assert_close, largest_tensor
from torch.nn import functional as F

from permuteformer.attention.linformer import LinformerAttention
from permuteformer.ops.call import Tokens


def mix(attention, q, k, v, mask=None):
    out, state = attention.mix(q, k, v, Tokens(mask=mask), None)
    assert state is None
    return out


def small(**options):
    torch.manual_seed(0)
    return LinformerAttention(2, 4, **{"max_length": 60, "projected_length": 5, **options}).double()


def draw(batch, length, dtype=torch.float64):
    return torch.randn(3, batch, 2, length, 4, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("share", [True, False])
def test_identity_projections_are_softmax_attention(share):
    q, k, v = draw(3, 17)
    attention = small(max_length=17, projected_length=17, share_key_value=share)
    for projection in attention.parameters():
        projection.data.copy_(torch.eye(17))
    assert_close(mix(attention, q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 60])
def test_is_the_formula_with_the_first_columns(share, length):
    q, k, v = draw(2, length)
    attention = small(share_key_value=share)
    assert len(list(attention.parameters())) == (1 if share else 2)
    e = attention.key_projection[:, :, :length]
    f = e if share else attention.value_projection[:, :, :length]
    expected = (q @ (e @ k).mT / 4**0.5).softmax(-1) @ (f @ v)
    assert_close(mix(attention, q, k, v), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_and_strides(dtype):
    attention, inputs = small().to(dtype), draw(2, 20, dtype)
    expected = mix(small().to(dtype).double(), *inputs.double())
    for out in (mix(attention, *inputs), mix(attention, *inputs.transpose(2, 3).contiguous().transpose(2, 3))):
        assert out.dtype == dtype
        assert_close(out, expected)


def test_projections_keep_the_scale():
    attention = LinformerAttention(2, 16, max_length=400, projected_length=64)
    for x in (torch.randn(4, 2, 400, 16), torch.ones(4, 2, 400, 16)):  # independent tokens, and equal ones
        assert (attention.key_projection @ x).square().mean().item() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("share", [True, False])
def test_gradients(share):
    attention = small(max_length=6, projected_length=3, share_key_value=share)
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    inputs = [x.requires_grad_() for x in (*draw(2, 5), *attention.parameters())]
    assert torch.autograd.gradcheck(lambda q, k, v, *_: mix(attention, q, k, v, mask), inputs)


def test_the_projection_is_not_copied_for_every_row():
    attention, inputs = LinformerAttention(2, 4, max_length=512, projected_length=32), draw(8, 512, torch.float32).unbind()
    assert largest_tensor(lambda: mix(attention, *inputs)) < 4 * attention.key_projection.numel() * 8


def test_bad_options_and_longer_inputs_are_rejected():
    for name, value in [("max_length", 0), ("max_length", 2.5), ("projected_length", 0), ("projected_length", "8")]:
        with pytest.raises(ValueError, match=f"{name} .*got {value!r}"):
            small(**{name: value})
    with pytest.raises(ValueError, match=r"max_length=60.*got 61"):
        mix(small(), *draw(1, 61))
