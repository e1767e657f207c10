"""The GPU's path computes the paper: on a GPU where there is one, else in Triton's interpreter on the CPU."""

import gc
import importlib.util
import math
import warnings

import pytest
import torch
from checks import assert_close
from interpreted import prepare_fla
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from permuteformer.ops import gpu, reference
from permuteformer.ops.backend import MAPS, VARIABLE, in_use
from permuteformer.ops.feature_map import FEATURE_MAPS, elu, relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.state import LinearState, count_positions
from permuteformer.ops.triton_features import features, turns_of, values
from permuteformer.positions.permute import Permute

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install '.[cuda]'")
has_fla = importlib.util.find_spec("fla") is not None and importlib.util.find_spec("triton") is not None
needs_fla = pytest.mark.skipif(not has_fla, reason="fla is not installed: pip install '.[cuda]'")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, H = 2, 3
DECAY = (0.5, 0.9, 1.0)


@pytest.fixture
def fla():
    """fla's kernels, in the interpreter too. Its overflows in what it masks afterwards are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if DEVICE.type == "cpu":
            prepare_fla()
        yield


def tensors(length, m, d):
    """q, k, v as a projection gives them: ``b l h d`` seen as ``b h l d``."""
    return [torch.randn(B, length, H, size, device=DEVICE).transpose(1, 2) for size in (m, m, d)]


def axis_permutations(encoding):
    identity = torch.arange(encoding.feature_size).expand(H, -1)
    return [torch.where(encoding.axis.cpu() == axis, encoding.permutation.cpu(), identity) for axis in range(encoding.axes)]


@needs_triton
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(
    ("m", "axes", "length", "masked", "tokens_first"),
    [(5, 1, 17, False, True), (48, 2, 7, True, False), (64, 3, 70, False, False), (130, 1, 1, True, True)],
)
def test_features_are_the_papers(name, m, axes, length, masked, tokens_first):
    encoding = Permute(H, m, axes).to(DEVICE)
    rotation = encoding.rotation(DEVICE)
    x = torch.randn(B, length, H, m, device=DEVICE).transpose(1, 2).requires_grad_()
    start = torch.tensor([7, -3], device=DEVICE)
    positions = torch.randint(-9, 99, (B, length, axes), device=DEVICE) if axes > 1 else None
    shown = torch.rand(B, length, device=DEVICE) > 0.3 if masked else None
    ours = features(x, rotation, turns_of(rotation, start, positions), shown, MAPS[name], m + 3, tokens_first)
    assert ours.stride(1 if tokens_first else 2) == m + 3

    exact = x.detach().cpu().double().requires_grad_()
    at = count_positions(start, length, None) if positions is None else positions
    expected = reference.permute(FEATURE_MAPS[name](exact), axis_permutations(encoding), at.cpu())
    if masked:
        expected = expected.masked_fill(~shown.cpu()[:, None, :, None], 0)
    assert_close(ours[..., :m].cpu(), expected)
    assert (ours[..., m:] == 0).all()
    gradient = torch.randn_like(ours)
    (d_x,) = torch.autograd.grad(ours, x, gradient)
    (d_exact,) = torch.autograd.grad(expected, exact, gradient[..., :m].cpu().double())
    assert_close(d_x.cpu(), d_exact)


@needs_triton
@pytest.mark.parametrize("given", [False, True])
def test_any_position_and_any_strides(given):
    encoding = Permute(H, 12).to(DEVICE)
    rotation = encoding.rotation(DEVICE)
    start = torch.tensor([10**12 + 5, -(10**12)], device=DEVICE)
    base = torch.randn(B, 30, H, 40, device=DEVICE)
    ways = [base.permute(0, 2, 1, 3).contiguous(), base[..., 5:17].transpose(1, 2), base[:, ::3, :, ::3].transpose(1, 2)]
    ways.append(base[:1, :, :, :12].expand(2, -1, -1, -1).transpose(1, 2))
    for way in ways:
        x = way[..., :12].requires_grad_()
        positions = count_positions(start, x.shape[2], None)
        turns = turns_of(rotation, start, positions if given else None)
        assert turns.dtype == torch.int32
        ours = features(x, rotation, turns, None, 0, 12, False)
        theirs = encoding.transform(relu_eps(x), encoding.tables(positions))
        assert torch.equal(ours, theirs)
        gradient = torch.randn_like(ours).transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(*(torch.autograd.grad(y, x, gradient)[0] for y in (ours, theirs)))


@needs_triton
def test_one_row_of_positions_is_that_of_all_rows():
    rotation = Permute(H, 12, axes=2).rotation(DEVICE)
    x = torch.randn(B, H, 9, 12, device=DEVICE)
    positions = torch.randint(0, 50, (1, 9, 2), device=DEVICE)
    start = torch.zeros(B, dtype=torch.int64, device=DEVICE)
    one, all_rows = (
        features(x, rotation, turns_of(rotation, start, p), None, 0, 12, False) for p in (positions, positions.expand(B, -1, -1))
    )
    assert torch.equal(one, all_rows)


@needs_triton
@pytest.mark.parametrize("tokens_first", [False, True])
def test_values_have_a_one_beside_them(tokens_first):
    v = torch.randn(B, 9, H, 5, device=DEVICE).transpose(1, 2).clone(memory_format=torch.preserve_format)
    shown = torch.ones(B, 9, dtype=torch.bool, device=DEVICE)
    shown[0, 3:5] = False
    v[0, 1, 4] = math.nan  # hidden
    v[1, 2, 7, 3], v[0, 0, 6, 0] = -math.inf, math.nan
    v.requires_grad_()
    ours, bad = values(v, shown, 8, tokens_first, True)
    there = shown[:, None, :, None]
    expected = torch.where(there & v.isfinite(), v, 0)
    assert torch.equal(ours[..., :5], expected)
    assert torch.equal(ours[..., 5:6], there.float().expand(-1, H, -1, -1))
    assert (ours[..., 6:] == 0).all()
    assert bad.nonzero().tolist() == [[0, 0, 6], [1, 2, 7]]
    as_it_is, none = values(v, None, 8, tokens_first, False)
    assert torch.equal(as_it_is[..., :5].nan_to_num(9), v.nan_to_num(9))
    assert none.numel() == 0
    gradient = torch.randn_like(ours)
    assert torch.equal(torch.autograd.grad(ours, v, gradient)[0], torch.where(there, gradient[..., :5], 0))


def attend(x, backend, dtype, gradients, log_decay=None, state=None, **arguments):
    """Outputs and gradients of everything: a list of tensors in float64 on the CPU."""
    inputs = [t.to(dtype).requires_grad_() for t in x]
    if log_decay is not None:
        log_decay = log_decay.to(dtype).requires_grad_(log_decay.requires_grad)
        inputs += [log_decay] if log_decay.requires_grad else []
    if state is not None:
        state = state._replace(kv=state.kv.to(dtype).requires_grad_(), z=state.z.to(dtype).requires_grad_())
        inputs += [state.kv, state.z]
    out, after = linear_attention(*inputs[:3], backend=backend, log_decay=log_decay, state=state, **arguments)
    mask = arguments.get("key_mask")
    out = out if mask is None else out.masked_fill(~mask[:, None, :, None], 0)  # a hidden token's output means nothing
    found = torch.autograd.grad([out, after.kv, after.z], inputs, [g.to(dtype) for g in gradients])
    return [t.detach().double().cpu() for t in (out, after.kv, after.z, *found)], after


def assert_same(x, **arguments):
    """What the GPU's path gives is what PyTorch gives in float64, which ``test_linear.py`` compares with the paper."""
    (b, h, length, m), d = x[0].shape, x[2].shape[-1]
    arguments = {"feature_map": relu_eps, **arguments}
    gradients = [torch.randn(shape, device=DEVICE) for shape in ((b, h, length, d), (b, h, m, d), (b, h, m))]
    (exact, end), (ours, after) = (attend(x, *way, gradients, **arguments) for way in (("torch", torch.float64), ("cuda", torch.float32)))
    for mine, theirs in zip(ours, exact, strict=True):
        assert_close(mine / theirs.abs().max().clamp(min=1), theirs / theirs.abs().max().clamp(min=1), torch.float32)
    assert torch.equal(after.next_position, end.next_position)
    assert (after.segment is None) == (end.segment is None)
    assert after.segment is None or torch.equal(after.segment, end.segment)


def some_state(m, d, segment=None):
    start = torch.tensor([5, 900], device=DEVICE)
    return LinearState(torch.rand(B, H, m, d, device=DEVICE), torch.rand(B, H, m, device=DEVICE), start, segment)


@needs_triton
@pytest.mark.parametrize("length", [1, 3, 70])
@pytest.mark.parametrize("masked", [False, True])
def test_bidirectional(length, masked):
    mask = torch.rand(B, length, device=DEVICE) > 0.3 if masked else None
    assert_same(tensors(length, 13, 5), transform=Permute(H, 13).to(DEVICE), key_mask=mask, state=some_state(13, 5) if masked else None)


@needs_triton
@pytest.mark.parametrize("name", MAPS)
def test_bidirectional_on_a_grid(name):
    x = [t.abs() + 0.1 for t in tensors(20, 48, 16)]
    positions = torch.randint(-9, 99, (B, 20, 2), device=DEVICE)
    assert_same(
        x, transform=Permute(H, 48, axes=2).to(DEVICE), positions=positions, feature_map=FEATURE_MAPS[name], normalize=name != "relu"
    )


class Made(TorchDispatchMode):
    """Remembers the memory of features that are made inside."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.permuteformer.features.default:
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result

    def __enter__(self):
        self.made = []
        return super().__enter__()


@needs_triton
def test_features_are_not_kept_where_bidirectional():
    x = [t.requires_grad_() for t in tensors(20, 12, 5)]
    with Made() as forward:
        out, state = linear_attention(*x, feature_map=relu_eps, transform=Permute(H, 12).to(DEVICE), backend="cuda")
    assert len(forward.made) == 2
    gc.collect()  # the interpreter's own cycles
    assert all(memory.expired() for memory in forward.made)
    with Made() as backward:
        torch.autograd.grad([out.sum(), state.kv.sum()], x)
    assert len(backward.made) == 2


@needs_triton
def test_without_a_permutation():
    assert_same(tensors(9, 4, 4))


@needs_fla
@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize(
    ("length", "decay", "learned", "masked", "state"),
    [
        (2, DECAY, False, False, False),
        (70, None, False, True, True),
        (64, DECAY, False, False, True),
        (65, (0.01, 0.1, 0.2), False, False, False),
        (130, DECAY, True, True, True),
    ],
)
def test_causal(length, decay, learned, masked, state):
    log_decay = None if decay is None else torch.tensor(decay, device=DEVICE).log().requires_grad_(learned)
    mask = torch.rand(B, length, device=DEVICE) > 0.3 if masked else None
    before = some_state(12, 5) if state else None
    assert_same(tensors(length, 12, 5), transform=Permute(H, 12).to(DEVICE), causal=True, log_decay=log_decay, key_mask=mask, state=before)


@needs_fla
@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("goes_on", [True, False])
def test_packed(goes_on):
    segments = torch.tensor([[0] * 3 + [1] * 2 + [4] * 66, [2] * 70 + [3]], device=DEVICE)
    first = torch.tensor([0, 2 if goes_on else 1], device=DEVICE)
    mask = torch.ones(B, 71, dtype=torch.bool, device=DEVICE)
    mask[0, 4], mask[0, 68:], mask[1, 60] = False, False, False
    log_decay = torch.tensor(DECAY, device=DEVICE).log().requires_grad_()
    arguments = {"transform": Permute(H, 12).to(DEVICE), "causal": True, "segments": segments, "state": some_state(12, 5, first)}
    assert_same(tensors(71, 12, 5), **arguments, key_mask=mask, log_decay=log_decay)


@needs_fla
@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_paper(causal):
    encoding = Permute(H, 10).to(DEVICE)
    x = tensors(40, 10, 4)
    decay = torch.tensor(DECAY, dtype=torch.float64) if causal else None
    log_decay = None if decay is None else decay.log().to(DEVICE)
    out, _ = linear_attention(*x, feature_map=relu_eps, transform=encoding, causal=causal, log_decay=log_decay, backend="cuda")
    visible = torch.ones(40, 40, dtype=torch.bool)
    expected = reference.attention(
        *(t.double().cpu() for t in x),
        permutations=[encoding.permutation.cpu()],
        positions=torch.arange(40).view(1, -1, 1).expand(B, -1, -1),
        visible=visible.tril() if causal else visible,
        feature_map=relu_eps,
        decay=decay,
    )
    assert_close(out.cpu(), expected)


@needs_fla
@pytest.mark.usefixtures("fla")
def test_a_state_goes_on_in_either_backend_and_a_token_at_a_time():
    x = tensors(40, 12, 5)
    arguments = {"feature_map": relu_eps, "transform": Permute(H, 12).to(DEVICE), "causal": True}
    arguments["log_decay"] = torch.tensor(DECAY, device=DEVICE).log()
    whole, end = linear_attention(*x, backend="torch", **arguments)
    state, parts = None, []
    for part, backend in ((slice(0, 17), "cuda"), (slice(17, 30), "torch"), (slice(30, 39), "cuda"), (slice(39, 40), "cuda")):
        out, state = linear_attention(*(t[:, :, part] for t in x), state=state, backend=backend, **arguments)
        assert state.kv.dtype == state.z.dtype == torch.float32
        parts.append(out)
    assert_close(torch.cat(parts, dim=2), whole)
    assert_close(state.kv, end.kv)
    assert_close(state.z, end.z)


@needs_fla
@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_finite_is_seen_by_those_who_see_it(packed):
    segments = torch.tensor([0] * 5 + [1] * 10, device=DEVICE).expand(B, -1) if packed else None
    arguments = {"feature_map": relu_eps, "transform": Permute(H, 12).to(DEVICE), "causal": True, "segments": segments, "backend": "cuda"}
    for spoilt, bad in ((0, math.nan), (1, math.nan), (2, math.nan)) if not packed else ((2, math.inf),):
        x = tensors(15, 12, 5)
        clean, _ = linear_attention(*x, **arguments)
        x[spoilt][0, 1, 3] = bad
        out, state = linear_attention(*x, **arguments)
        assert torch.equal(out[1], clean[1])
        assert torch.equal(out[0, [0, 2]], clean[0, [0, 2]])
        assert torch.equal(out[0, 1, :3], clean[0, 1, :3])
        assert not out[0, 1, 3].isfinite().any()
        assert bool(out[0, 1, 4].isfinite().any()) == (spoilt == 0)
        assert bool(out[0, 1, 5:].isfinite().all()) == bool(state.kv[0, 1].isfinite().all()) == (packed or spoilt == 0)


@needs_fla
@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("causal", [False, True])
def test_hidden_tokens_may_hold_anything(causal):
    x = tensors(20, 12, 5)
    mask = torch.rand(B, 20, device=DEVICE) > 0.4
    shown = mask[:, None, :, None]
    arguments = {"feature_map": relu_eps, "transform": Permute(H, 12).to(DEVICE), "causal": causal, "key_mask": mask, "backend": "cuda"}
    clean, _ = linear_attention(*x, **arguments)
    spoilt = [t.masked_fill(~shown, math.nan).requires_grad_() for t in x]
    out, _ = linear_attention(*spoilt, **arguments)
    assert torch.equal(out.masked_fill(~shown, 0), clean.masked_fill(~shown, 0))
    torch.where(shown, out, 0).square().sum().backward()
    for t in spoilt:
        assert t.grad.isfinite().all()
        assert (t.grad.masked_fill(shown, 0) == 0).all()


@needs_triton
def test_nobody_is_seen():
    mask = torch.zeros(B, 7, dtype=torch.bool, device=DEVICE)
    out, state = linear_attention(*tensors(7, 12, 5), feature_map=relu_eps, key_mask=mask, backend="cuda")
    assert (out == 0).all()
    assert (state.kv == 0).all()


@needs_fla
@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x = [t.to(dtype).requires_grad_() for t in tensors(9, 12, 5)]
    for causal in (False, True):
        arguments = {"feature_map": relu_eps, "transform": Permute(H, 12).to(DEVICE), "causal": causal}
        ours, theirs = (linear_attention(*x, backend=backend, **arguments)[0] for backend in ("cuda", "torch"))
        assert ours.dtype == dtype
        assert_close(ours, theirs)
        for mine, other in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (ours, theirs)), strict=True):
            assert mine.dtype == dtype
            assert_close(mine, other)


@needs_fla
@pytest.mark.usefixtures("fla")
def test_the_operators_are_what_torch_asks_of_operators():
    ops = torch.ops.permuteformer
    x = torch.randn(1, 2, 5, 12, device=DEVICE, requires_grad=True)
    cycles, of_feature, *_ = Permute(2, 12).rotation(DEVICE)
    turns, shown = torch.zeros(1, len(cycles), dtype=torch.int32, device=DEVICE), torch.rand(1, 5, device=DEVICE) > 0.2
    torch.library.opcheck(ops.features, (x, turns, cycles, of_feature, shown, 0, 16, True))
    torch.library.opcheck(ops.values, (x, shown, 16, True, True))
    q, k, v, state = (torch.rand(*shape, device=DEVICE, requires_grad=True) for shape in ([1, 3, 2, 16],) * 3 + ([1, 2, 16, 16],))
    gates = (-torch.rand(1, 3, 2, device=DEVICE)).requires_grad_()
    torch.library.opcheck(ops.chunked, (q, k, v, state, gates, None))
    torch.library.opcheck(ops.chunked, (q, k, v, state, None, torch.tensor([-0.1, -0.2], device=DEVICE)))


@needs_fla
@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("causal", [False, True])
def test_compiled(causal):
    encoding = Permute(H, 12).to(DEVICE)
    log_decay = torch.tensor(DECAY, device=DEVICE).log().requires_grad_() if causal else None
    mask = torch.rand(B, 9, device=DEVICE) > 0.2
    gpu.look()

    def step(q, k, v):
        arguments = {"feature_map": relu_eps, "transform": encoding, "causal": causal, "log_decay": log_decay, "backend": "cuda"}
        return linear_attention(q, k, v, key_mask=mask, **arguments)[0] * 2

    x = [t.requires_grad_() for t in tensors(9, 12, 5)]
    inputs = x if log_decay is None else [*x, log_decay]
    expected, ours = step(*x), torch.compile(step, fullgraph=True, backend="aot_eager")(*x)
    assert_close(ours, expected)
    gradient = torch.randn_like(ours) * mask[:, None, :, None]
    for mine, theirs in zip(*(torch.autograd.grad(y, inputs, gradient) for y in (ours, expected)), strict=True):
        assert_close(mine, theirs)


@needs_fla
@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("causal", [False, True])
def test_a_second_derivative_is_refused(causal):
    x = [t.requires_grad_() for t in tensors(3, 4, 4)]
    out, _ = linear_attention(*x, feature_map=relu_eps, causal=causal, backend="cuda")
    for t in x:
        (gradient,) = torch.autograd.grad(out.square().sum(), t, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@needs_triton
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"feature_map": elu}, "it has the feature maps relu_eps, relu, squared_relu, and this is elu"),
        ({"segments": torch.zeros(B, 9, dtype=torch.int64)}, "it does not know segments"),
        ({"two_sided": True}, "it does not know two_sided"),
        ({"plain_normalizer": True}, "it does not know plain_normalizer"),
        ({"chunk_size": 4}, "it does not know chunk_size"),
        ({"transform": Permute(H, 4, permutation=torch.tensor([[2, 3, 0, 1]] * H))}, "whose cycles are contiguous"),
    ],
)
def test_what_it_cannot_do_it_says(arguments, words):
    x = tensors(9, 4, 4)
    arguments = {"feature_map": relu_eps} | {key: a.to(DEVICE) if hasattr(a, "to") else a for key, a in arguments.items()}
    with pytest.raises(ValueError, match=f"backend 'cuda' cannot be used here: .*{words}"):
        linear_attention(*x, backend="cuda", **arguments)
    linear_attention(*x, **arguments)  # and PyTorch does it


def test_tensors_of_the_cpu_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = [t.cpu() for t in tensors(9, 4, 4)]
    words = "backend 'cuda' cannot be used here: it is for CUDA, and tensors are on cpu; use 'auto' or 'torch'"
    with pytest.raises(ValueError, match=words):
        linear_attention(*x, feature_map=relu_eps, backend="cuda")
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ValueError, match=words):
        linear_attention(*x, feature_map=relu_eps)


def test_float32_is_not_rounded_unless_torch_may(monkeypatch):
    monkeypatch.setattr(gpu, "_found", gpu.look()._replace(triton=(3, 9, 0), fla=True))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    cpu = torch.device("cpu")
    assert "fla rounds products of float32 to TF32" in gpu.why_not(cpu, torch.float32, causal=True, gated=False)
    assert gpu.why_not(cpu, torch.float32, causal=False, gated=False) == ""
    assert gpu.why_not(cpu, torch.bfloat16, causal=True, gated=False) == ""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert gpu.why_not(cpu, torch.float32, causal=True, gated=False) == ""
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert gpu.why_not(cpu, torch.float32, causal=True, gated=False) == ""


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(gpu, "_found", gpu.look()._replace(triton=None, fla=False))
    assert "triton is not installed; install it with: pip install 'permuteformer[cuda]'" in gpu.why_not(DEVICE, torch.float32, True, False)
    assert in_use("cuda") == "torch"
    monkeypatch.setattr(gpu, "_found", gpu.look()._replace(triton=(3, 9, 0)))
    assert "fla is not installed" in gpu.why_not(DEVICE, torch.float32, True, False)
    assert gpu.why_not(DEVICE, torch.float32, False, False) == ""


def test_tables_of_a_permutation_are_moved_once():
    encoding = Permute(H, 12)
    meta = torch.device("meta")
    first = encoding.rotation(meta)
    assert first.cycles.device.type == first.of_feature.device.type == "meta"
    assert encoding.rotation(meta) is first
    encoding.load_state_dict(Permute(H, 12, seed=1).state_dict())
    assert encoding.rotation(meta) is not first

    another = Permute(H, 12)
    step = torch.compile(lambda x: x + another.rotation(x.device).cycles, fullgraph=True, backend="aot_eager")
    assert step(torch.zeros(1, 3, device=meta)).device == meta
    assert another.rotation(meta) is another.rotation(meta)
