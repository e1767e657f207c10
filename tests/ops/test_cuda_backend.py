"""The GPU backend: on a GPU where there is one, else in Triton's interpreter on the CPU. Needs triton and fla: make gpu."""

import functools
import importlib.util
import warnings

import pytest
import torch
from attention_cases import Case
from checks import assert_close
from interpreted import prepare_fla

from permuteformer.ops import cuda_backend, linear
from permuteformer.ops.call import LinearState
from permuteformer.ops.feature_map import elu, relu_eps
from permuteformer.ops.linear import backend_in_use, linear_attention
from permuteformer.positions.permute import Permute
from permuteformer.positions.rope import Rope

has_fla = importlib.util.find_spec("fla") is not None and importlib.util.find_spec("triton") is not None
needs_fla = pytest.mark.skipif(not has_fla, reason="fla is not installed: pip install '.[cuda]'")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, H = 2, 3
DECAY = (0.5, 0.9, 1.0)


@pytest.fixture
def fla():
    """fla's kernels, in the interpreter too. Warnings about overflows in what it masks later are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if DEVICE.type == "cpu":
            prepare_fla()
        yield


def on_fla(test):
    return needs_fla(pytest.mark.usefixtures("fla")(test))


def tensors(length, m, d):
    return [torch.randn(B, length, H, size, device=DEVICE).transpose(1, 2) for size in (m, m, d)]


@on_fla
@pytest.mark.parametrize("mode", ["causal", "decay", "two_sided"])
@pytest.mark.parametrize(
    ("length", "axes", "masked", "packed"), [(2, 1, False, False), (64, 2, False, False), (70, 1, True, True), (66, 2, True, True)]
)
def test_it_is_the_paper(mode, length, axes, masked, packed):
    if DEVICE.type == "cuda":
        pytest.skip("the reference is on the CPU: test_states and others run on a GPU")
    case = Case(mode, length, axes, masked, packed, has_global=mode == "two_sided" and packed)
    for ours, theirs in zip(case.run(torch.float32, "cuda"), case.expected(), strict=True):
        size = theirs.abs().max().clamp(min=1)
        assert_close(ours / size, theirs / size, torch.float32)


@on_fla
@pytest.mark.parametrize("mode", ["decay", "two_sided"])
@pytest.mark.parametrize("continues", [True, False])
def test_states_and_their_gradients(mode, continues):
    """A packed row that continues a state before it, and for a two-sided decay one after it."""
    segments = torch.tensor([[0] * 3 + [1] * 2 + [4] * 66, [2] * 70 + [3]], device=DEVICE)
    mask = torch.ones(B, 71, dtype=torch.bool, device=DEVICE)
    mask[0, 4], mask[0, 68:], mask[1, 60] = False, False, False
    x = tensors(71, 12, 5)
    states = [torch.rand(B, H, 12, *tail, device=DEVICE) for tail in ((5,), (), (5,), ())]
    gradients = [torch.randn(shape, device=DEVICE) for shape in ((B, H, 71, 5), (B, H, 12, 5), (B, H, 12))]
    found = []
    for backend, dtype in (("torch", torch.float64), ("cuda", torch.float32)):
        inputs = [t.to(dtype).requires_grad_() for t in (*x, *states)]
        log_decay = torch.tensor(DECAY, device=DEVICE, dtype=dtype).log().requires_grad_()
        start = torch.tensor([5, 900], device=DEVICE)
        state = LinearState(*inputs[3:5], start, torch.tensor([0, 2 if continues else 1], device=DEVICE))
        after = LinearState(*inputs[5:], start, torch.tensor([4 if continues else 5, 3], device=DEVICE)) if mode == "two_sided" else None
        options = {"causal": mode == "decay", "two_sided": mode == "two_sided", "transform": Permute(H, 12).to(DEVICE)}
        out, end = linear_attention(
            *inputs[:3], feature_map=relu_eps, log_decay=log_decay, key_mask=mask, segments=segments, state=state, after=after,
            backend=backend, **options,
        )  # fmt: skip
        results = [out.masked_fill(~mask[:, None, :, None], 0), end.kv, end.z]
        d = torch.autograd.grad(results, [*inputs, log_decay], [g.to(dtype) for g in gradients], allow_unused=True)
        found.append([*results, *(torch.zeros(1, device=DEVICE, dtype=dtype) if each is None else each for each in d)])
        found[-1].append(end.next_position)
    for theirs, ours in zip(*found, strict=True):
        size = theirs.abs().max().clamp(min=1)
        assert_close(ours / size, theirs / size, torch.float32)


@on_fla
def test_any_encoding_and_feature_map():
    x = tensors(70, 12, 5)
    for options in ({"transform": Rope(12).to(DEVICE)}, {"feature_map": elu}):
        found = [linear_attention(*x, **{"feature_map": relu_eps, **options}, causal=True, backend=name)[0] for name in ("cuda", "torch")]
        assert_close(*found)


@on_fla
@pytest.mark.parametrize("causal", [False, True])
def test_values_that_are_not_finite(causal):
    segments = torch.tensor([0] * 5 + [1] * 10, device=DEVICE).expand(B, -1)
    log_decay = torch.tensor(DECAY, device=DEVICE).log()
    arguments = {"feature_map": relu_eps, "causal": causal, "two_sided": not causal, "log_decay": log_decay, "segments": segments}
    x = tensors(15, 12, 5)
    clean, _ = linear_attention(*x, backend="cuda", **arguments)
    x[2][0, 1, 3] = torch.inf
    out, state = linear_attention(*x, backend="cuda", **arguments)
    assert torch.equal(out[1], clean[1])
    assert torch.equal(out[0, [0, 2]], clean[0, [0, 2]])
    assert torch.equal(out[0, 1, 5:], clean[0, 1, 5:])
    assert not out[0, 1, 3:5].isfinite().any()
    assert bool(out[0, 1, :3].isfinite().all()) == causal
    assert state.kv[0, 1].isfinite().all()


@on_fla
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x = [t.to(dtype).requires_grad_() for t in tensors(9, 12, 5)]
    ours, theirs = (linear_attention(*x, feature_map=relu_eps, causal=True, backend=name)[0] for name in ("cuda", "torch"))
    assert ours.dtype == dtype
    assert_close(ours, theirs)
    for mine, other in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (ours, theirs)), strict=True):
        assert_close(mine, other)


@on_fla
def test_a_second_derivative_is_refused():
    x = [t.requires_grad_() for t in tensors(3, 4, 4)]
    out, _ = linear_attention(*x, feature_map=relu_eps, causal=True, backend="cuda")
    for t in x:
        (gradient,) = torch.autograd.grad(out.square().sum(), t, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@needs_fla
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "one matrix product"),
        ({"causal": True, "plain_normalizer": True}, "plain_normalizer"),
        ({"causal": True, "chunk_size": 4}, "chunk_size"),
    ],
)
def test_unsupported_calls_name_the_reason(arguments, reason):
    with pytest.raises(ValueError, match=f"'cuda'.*{reason}"):
        linear_attention(*tensors(9, 4, 4), feature_map=relu_eps, backend="cuda", **arguments)


def test_cpu_tensors_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = [t.cpu() for t in tensors(9, 4, 4)]
    with pytest.raises(ValueError, match="'cuda'.*cpu"):
        linear_attention(*x, feature_map=relu_eps, causal=True, backend="cuda")
    monkeypatch.setattr(linear, "DEFAULT_BACKEND", "cuda")
    with pytest.raises(ValueError, match="'cuda'.*cpu"):
        linear_attention(*x, feature_map=relu_eps, causal=True)


def test_what_fla_lacks_is_named(monkeypatch):
    missing = functools.partial(cuda_backend.missing, torch.device("cpu"))
    monkeypatch.setattr(cuda_backend, "_triton_version", lambda: None)
    assert "triton" in missing(torch.float32)
    assert backend_in_use("cuda") == "torch"
    monkeypatch.setattr(cuda_backend, "_triton_version", lambda: (3, 9, 0))
    monkeypatch.setattr(cuda_backend, "_has_fla", lambda: False)
    assert "fla" in missing(torch.float32)
    monkeypatch.setattr(cuda_backend, "_has_fla", lambda: True)
    for name in ("TRITON_INTERPRET", "TRITON_F32_DEFAULT"):
        monkeypatch.delenv(name, raising=False)
    assert "TF32" in missing(torch.float32)
    assert missing(torch.bfloat16) is None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert missing(torch.float32) is None
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert missing(torch.float32) is None
