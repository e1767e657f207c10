"""Linear attention against the paper's equations in O(L^2), on every backend: outputs and gradients, at every awkward length."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_cases import MODES, Case, variants
from checks import assert_close
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from permuteformer.ops import linear, minimal, reference
from permuteformer.ops.call import LinearCall, LinearState, Tokens
from permuteformer.ops.feature_map import FEATURE_MAPS, favor, orthogonal_features, relu_eps
from permuteformer.ops.linear import linear_attention, run
from permuteformer.positions.base import Compose, PositionEncoding
from permuteformer.positions.permute import Permute
from permuteformer.positions.rope import Rope

B, H, M, V, C = 2, 3, 10, 4, 4
DECAY = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)


def tensors(length, dtype=torch.float64, requires_grad=False):
    """q, k, v as projections lay them out: ``b l h d`` seen as ``b h l d``."""
    return [torch.randn(B, length, H, size, dtype=dtype).transpose(1, 2).requires_grad_(requires_grad) for size in (M, M, V)]


def decays(mode):
    return {
        "bidirectional": {},
        "causal": {"causal": True},
        "decay": {"causal": True, "log_decay": DECAY.log()},
        "two_sided": {"two_sided": True, "log_decay": DECAY.log()},
    }[mode]


def assert_same(actual, expected, dtype):
    """Equal to the tolerance of the dtype, where sums are rounded at their own size."""
    for ours, theirs in zip(actual, expected, strict=True):
        size = theirs.abs().max().clamp(min=1)
        assert_close(ours / size, theirs / size, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, C - 1, C, C + 1, 3 * C + 5])
def test_torch_is_the_paper(mode, length):
    for case in variants(mode, length):
        assert_same(case.run(backend="torch", chunk_size=C), case.expected(), torch.float64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 31, 33, 64, 65, 130])
def test_kernel_is_the_paper(mode, length, instruction_set):
    for case in variants(mode, length):
        assert_same(case.run(torch.float32, "native"), case.expected(), torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_three_axes_and_far_positions(mode, backend):
    name, dtype = backend
    for case in (Case(mode, 40, axes=3, masked=True, packed=True), Case(mode, 40, axes=2, far=True), Case(mode, 20, far=True)):
        assert_same(case.run(dtype, name), case.expected(), dtype)


def test_minimal_is_the_paper():
    """The 60 lines to read after the reference compute it too, gradients included."""
    for mode, length in itertools.product(("bidirectional", "decay"), (1, 5, 17)):
        case = Case(mode, length)
        q, k, v = (x.clone().requires_grad_() for x in case.tensors)
        log_decay = None if case.log_decay is None else case.log_decay.clone().requires_grad_()
        permutation = case.encoding.permutation
        if mode == "bidirectional":
            out = minimal.bidirectional(q, k, v, permutation)
        else:
            out = minimal.causal(q, k, v, permutation, log_decay.exp(), chunk=C)
        assert_same(case.results(out, [q, k, v, log_decay]), case.expected(), torch.float64)


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 39), st.booleans())
def test_chunked_is_recurrent_is_split(length, chunk, cut, normalize):
    q, k, v = tensors(length)
    arguments = {"feature_map": relu_eps, "transform": Permute(H, M), "normalize": normalize, **decays("decay")}
    chunked, final = linear_attention(q, k, v, chunk_size=chunk, **arguments)
    state, steps = None, []
    for i in range(length):
        step, state = linear_attention(*(x[:, :, i : i + 1] for x in (q, k, v)), state=state, **arguments)
        steps.append(step)
    assert_close(torch.cat(steps, dim=2), chunked)
    for one, other in zip(final, state, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other)
    if 0 < cut < length:
        head, state = linear_attention(*(x[:, :, :cut] for x in (q, k, v)), chunk_size=chunk, **arguments)
        tail, _ = linear_attention(*(x[:, :, cut:] for x in (q, k, v)), chunk_size=chunk, state=state, **arguments)
        assert_close(torch.cat([head, tail], dim=2), chunked)


@pytest.mark.parametrize("split", [1, 17, 64, 99])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_state_continues_on_either_backend(split, masked, packed):
    q, k, v = tensors(100, torch.float32)
    mask = torch.rand(B, 100) > 0.3 if masked else None
    segments = (torch.rand(B, 100) > 0.95).long().cumsum(1) if packed else None
    arguments = {"feature_map": relu_eps, "transform": Permute(H, M), **decays("decay")}
    whole, end = linear_attention(q, k, v, key_mask=mask, segments=segments, backend="torch", **arguments)
    hidden = torch.zeros(B, 1, 100, 1, dtype=torch.bool) if mask is None else ~mask[:, None, :, None]
    for backends in itertools.product(("native", "torch"), repeat=2):
        out, state = [], None
        for part, name in zip((slice(0, split), slice(split, 100)), backends, strict=True):
            marks = {key: None if x is None else x[:, part] for key, x in (("key_mask", mask), ("segments", segments))}
            y, state = linear_attention(*(x[:, :, part] for x in (q, k, v)), state=state, backend=name, **marks, **arguments)
            out.append(y)
        assert_close(torch.cat(out, dim=2).masked_fill(hidden, 0), whole.masked_fill(hidden, 0))
        assert_close(state.kv, end.kv)
        assert torch.equal(state.next_position, end.next_position)
        assert packed == (state.segment is not None)


@pytest.mark.parametrize("mode", MODES)
def test_states_on_both_sides(mode, backend):
    """Rows cut in three: the middle part continues the state before it and, where it sees later tokens, the state after it."""
    name, dtype = backend
    q, k, v = (x.to(dtype) for x in tensors(90))
    positions = torch.arange(90).view(1, -1, 1) + 7
    options = decays(mode)
    call = LinearCall(q, k, v, relu_eps, M, encoding=Permute(H, M), tokens=Tokens(positions), causal=options.get("causal", False))
    call = replace(call, log_decay=options.get("log_decay"))
    whole, end = run(call, name)

    def part(start, stop, **changes):
        some = slice(start, stop)
        at = Tokens(positions[:, some])
        return run(replace(call, q=q[:, :, some], k=k[:, :, some], v=v[:, :, some], tokens=at, **changes), name)

    none = q[:, :, :0]
    before = run(
        replace(call, q=none, k=k[:, :, :30], v=v[:, :, :30], tokens=Tokens(positions[:, :30]), causal=call.log_decay is not None), name
    )[1]
    after = None
    if mode == "two_sided":
        after = run(replace(call, q=none, k=k[:, :, 60:], v=v[:, :, 60:], tokens=Tokens(positions[:, 60:]), reverse=True), name)[1]
    elif mode == "bidirectional":
        before = run(replace(call, q=none, k=k[:, :, 60:], v=v[:, :, 60:], tokens=Tokens(positions[:, 60:]), state=before), name)[1]
    out, state = part(30, 60, state=before, after=after)
    assert_close(out, whole[:, :, 30:60], dtype)
    if mode in ("causal", "decay"):
        assert_close(part(60, 90, state=state)[1].kv, end.kv, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_states(mode, reverse, backend):
    """gradcheck of everything in and out of a call with states on both sides, and of keys alone."""
    name, dtype = backend
    if name == "native":  # no float64: compare with PyTorch, which gradcheck has checked
        torch.manual_seed(3)
    options = decays(mode)
    log_decay = None if "log_decay" not in options else (DECAY[:2] * 0.9).log().requires_grad_()
    q, k, v = (torch.randn(1, 2, 5, size, dtype=torch.float64, requires_grad=True) for size in (3, 3, 2))
    states = [torch.rand(1, 2, 3, *tail, dtype=torch.float64, requires_grad=True) for tail in ((2,), (), (2,), ())]
    segments = torch.tensor([[0, 0, 0, 1, 1]])
    mask = torch.tensor([[True, True, False, True, True]])

    def compute(q, k, v, kv, z, after_kv, after_z, *r, cast=torch.float64, backend="torch"):
        q, k, v, kv, z, after_kv, after_z = (x.to(cast) for x in (q, k, v, kv, z, after_kv, after_z))
        state = LinearState(kv, z, torch.tensor([7]), torch.tensor([0]))
        after = LinearState(after_kv, after_z, torch.tensor([0]), torch.tensor([1])) if mode == "two_sided" else None
        call = LinearCall(q, k, v, relu_eps, 3, encoding=Permute(2, 3), causal=options.get("causal", False), log_decay=r[0] if r else None)
        results = []
        for tokens in (Tokens(), Tokens(mask=mask), Tokens(segments=segments)):
            here = replace(
                call, tokens=tokens, state=None if reverse and mode == "two_sided" else state, chunk_size=2 if backend == "torch" else None
            )
            if mode == "two_sided" and (tokens.segments is not None or tokens.mask is None):
                here = replace(here, after=after)
            if reverse:
                here = replace(here, q=q[:, :, :0], reverse=mode == "two_sided")
            out, last = run(here, backend)
            results += [out, last.kv, last.z] if out.numel() else [last.kv, last.z]
        return tuple(x.double() for x in results)

    inputs = [q, k, v, *states, *([] if log_decay is None else [log_decay])]
    if name == "torch":
        assert torch.autograd.gradcheck(compute, inputs)
        return
    found = []
    for cast, backend_name in ((torch.float64, "torch"), (dtype, "native")):
        results = compute(*inputs, cast=cast, backend=backend_name)
        torch.manual_seed(4)
        gradients = torch.autograd.grad(results, inputs, [torch.randn(x.shape, dtype=torch.float64) for x in results], allow_unused=True)
        found.append([*results, *(torch.zeros_like(x) if d is None else d for x, d in zip(inputs, gradients, strict=True))])
    assert_same(found[1], found[0], dtype)


@pytest.mark.parametrize("length", [1, 65, 1025])
@pytest.mark.parametrize("queries", [1, 3, 70])
@pytest.mark.parametrize("axes", [0, 2], ids=["plain", "two axes"])
def test_queries_of_other_tokens(length, queries, axes, backend):
    """Outputs and gradients, with masked keys; the same as among all tokens. Without keys, a state is read."""
    name, dtype = backend
    _, k, v = (x.to(dtype) for x in tensors(length))
    q = torch.randn(B, H, queries, M, dtype=dtype)
    at, query_at = (torch.randint(-(10**12), 10**12, (B, n, max(axes, 1))) for n in (length, queries))
    mask = torch.arange(length) % 3 != torch.tensor([[1], [2]])
    call = LinearCall(
        q, k, v, relu_eps, M, encoding=Permute(H, M, axes) if axes else None, tokens=Tokens(at, mask), query_positions=query_at
    )
    found = []
    for cast, backend_name in ((torch.float64, "torch"), (dtype, name)):
        inputs = [x.to(cast).requires_grad_() for x in (q, k, v)]
        out, _ = run(replace(call, q=inputs[0], k=inputs[1], v=inputs[2]), backend_name)
        torch.manual_seed(5)
        d_out = torch.randn(out.shape, dtype=torch.float64) / queries  # gradients of keys are sums over the queries
        found.append([out, *torch.autograd.grad(out, inputs, d_out.to(cast))])
    assert_same(found[1], found[0], dtype)
    _, state = run(replace(call, q=q[:, :, :0]), name)
    read, _ = run(replace(call, k=k[:, :, :0], v=v[:, :, :0], tokens=Tokens(), state=state), name)
    assert_close(read, found[1][0], dtype)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 11), st.sampled_from(MODES))
def test_packed_is_separate(lengths, chunk, mode):
    q, k, v = tensors(sum(lengths))
    arguments = {"feature_map": relu_eps, "transform": Permute(H, M), "chunk_size": chunk, **decays(mode)}
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(B, -1)
    packed, final = linear_attention(q, k, v, segments=segments, **arguments)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone, state = linear_attention(*(x[:, :, part] for x in (q, k, v)), **arguments)
        assert_close(packed[:, :, part], alone)
        start += length
    assert_close(final.kv, state.kv)  # positions count from 0 in every segment
    assert torch.equal(final.next_position, state.next_position)


@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 12), st.integers(1, 11), st.sampled_from(MODES))
def test_padded_is_unpadded(length, before, after, chunk, mode):
    """Padding on either side, with NaN in it: real tokens and the state are the same."""
    q, k, v = tensors(length)
    arguments = {"feature_map": relu_eps, "transform": Permute(H, M), "chunk_size": chunk, **decays(mode)}
    expected, state = linear_attention(q, k, v, **arguments)
    padded = [F.pad(x, (0, 0, before, after), value=torch.nan) for x in (q, k, v)]
    mask = F.pad(torch.ones(B, length, dtype=torch.bool), (before, after))
    out, padded_state = linear_attention(*padded, key_mask=mask, **arguments)
    assert_close(out[:, :, before : before + length], expected)
    assert_close(padded_state.kv, state.kv)
    assert torch.equal(padded_state.next_position, state.next_position)


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("known", [True, False], ids=["state knows its segment", "state does not"])
def test_a_segment_continues_behind_padding(chunk, known):
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    arguments = {"feature_map": relu_eps, "causal": True, "transform": Permute(2, 8)}
    threes = torch.full((1, 40), 3)
    whole, _ = linear_attention(q, k, v, segments=threes, **arguments)
    _, state = linear_attention(*(x[:, :, :30] for x in (q, k, v)), segments=threes[:, :30] if known else None, **arguments)
    padded = [torch.cat([torch.randn(1, 2, 200, 8), x[:, :, 30:]], dim=2) for x in (q, k, v)]
    segments = torch.cat([torch.zeros(1, 200, dtype=torch.int64), threes[:, 30:]], dim=1)
    mask = torch.arange(210).view(1, -1) >= 200
    for options in ({"chunk_size": chunk}, {"backend": "native"}):
        out, after = linear_attention(*padded, segments=segments, key_mask=mask, state=state, **options, **arguments)
        assert_close(out[:, :, 200:], whole[:, :, 30:])
        assert after.segment.tolist() == [3]


def test_a_masked_row_changes_no_state(backend):
    name, dtype = backend
    q, k, v = (x.to(dtype) for x in tensors(9))
    arguments = {"feature_map": relu_eps, "transform": Permute(H, M), "backend": name, **decays("decay")}
    for segments in (None, torch.full((B, 9), 5)):
        _, before = linear_attention(q, k, v, segments=segments, **arguments)
        for length in (1, 5):
            mask, other = torch.zeros(B, length, dtype=torch.bool), None if segments is None else segments[:, :length] + 1
            _, after = linear_attention(*(x[:, :, :length] for x in (q, k, v)), key_mask=mask, segments=other, state=before, **arguments)
            for field in before._fields:
                if getattr(before, field) is not None:
                    torch.testing.assert_close(getattr(after, field), getattr(before, field))


def test_without_real_tokens_output_and_gradients_are_zero(backend):
    name, dtype = backend
    for mode in MODES:
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors(9))
        mask = torch.zeros(B, 9, dtype=torch.bool)
        out, state = linear_attention(q, k, v, feature_map=relu_eps, key_mask=mask, backend=name, **decays(mode))
        assert not out.any()
        assert not state.kv.any()
        assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


def test_no_rows(backend):
    name, dtype = backend
    q, k, v = (x[:0].to(dtype).requires_grad_() for x in tensors(5))
    for mode in MODES:
        out, state = linear_attention(q, k, v, feature_map=relu_eps, transform=Permute(H, M), backend=name, **decays(mode))
        assert out.shape == (0, H, 5, V)
        assert len(state.kv) == 0
        out.sum().backward()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 13, 63, 64, 99])
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(bad, place, backend):
    name, dtype = backend
    segments = (torch.arange(100) >= 50).long().expand(B, -1)
    for mode, spoilt in itertools.product(MODES, range(3)):
        x = [t.to(dtype) for t in tensors(100)]
        arguments = {"feature_map": relu_eps, "transform": Permute(H, M), "segments": segments, "backend": name, **decays(mode)}
        clean, _ = linear_attention(*x, **arguments)
        x[spoilt][0, 0, place] = bad
        out, _ = linear_attention(*x, **arguments)
        sees = segments[0] == segments[0, place]
        if "causal" in arguments:
            sees = sees & (torch.arange(100) >= place)
        if spoilt == 0:
            sees = torch.arange(100) == place
        assert torch.equal(out[1], clean[1])
        assert torch.equal(out[0, 1], clean[0, 1])
        assert torch.equal(out[0, 0, ~sees], clean[0, 0, ~sees])
        assert not out[0, 0, place].isfinite().all()


def test_masked_tokens_may_hold_anything(backend):
    name, dtype = backend
    for mode in MODES:
        x = [t.to(dtype) for t in tensors(90)]
        mask = torch.rand(B, 90) > 0.4
        is_global = torch.rand(B, 90) > 0.9 if mode == "two_sided" else None
        arguments = {"feature_map": relu_eps, "transform": Permute(H, M), "key_mask": mask, "global_mask": is_global, "backend": name}
        clean, _ = linear_attention(*x, **arguments, **decays(mode))
        spoilt = [t.clone().masked_fill(~mask[:, None, :, None], torch.nan).requires_grad_() for t in x]
        out, _ = linear_attention(*spoilt, **arguments, **decays(mode))
        real = mask[:, None, :, None]
        assert torch.equal(out.masked_fill(~real, 0), clean.masked_fill(~real, 0))
        torch.where(real, out, 0).sum().backward()
        for t in spoilt:
            assert t.grad.isfinite().all()
            assert not t.grad.masked_fill(real, 0).any()


def test_a_nan_in_one_channel_stays_in_it():
    for chunk in (1, 2, 6):
        q, k, v = tensors(6)
        v[0, 0, 2, 1] = torch.nan
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True, chunk_size=chunk)
        expected = torch.zeros_like(out, dtype=torch.bool)
        expected[0, 0, 2:, 1] = True
        assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["torch", "native"])
def test_low_precision_sums_in_float32(dtype, name):
    for mode in MODES:
        q, k, v = tensors(300, dtype, requires_grad=True)
        arguments = {"feature_map": relu_eps, "transform": Permute(H, M), **decays(mode)}
        out, state = linear_attention(q, k, v, backend=name, **arguments)
        assert out.dtype == dtype
        assert state.kv.dtype == state.z.dtype == torch.float32
        doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected, wide = linear_attention(*doubles, **arguments)
        assert_close(out, expected)
        torch.testing.assert_close(state.kv, wide.kv.float(), rtol=1e-4, atol=1e-3)
        gradient = torch.randn_like(out)
        pairs = zip(torch.autograd.grad(out, (q, k, v), gradient), torch.autograd.grad(expected, doubles, gradient.double()), strict=True)
        for actual, wanted in pairs:
            assert actual.dtype == dtype
            assert_close(actual, wanted)


@pytest.mark.parametrize("name", ["torch", "native"])
def test_autocast_changes_nothing(name):
    found = []
    for enabled in (False, True):
        torch.manual_seed(1)
        q, k, v = tensors(30, torch.float32, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            outputs = [linear_attention(q, k, v, feature_map=relu_eps, backend=name, **decays(mode))[0] for mode in MODES]
            sum(out.square().sum() for out in outputs).backward()
        found.append([*outputs, *(x.grad for x in (q, k, v))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_feature_map(name):
    function = FEATURE_MAPS[name]
    parameters = [orthogonal_features(H, 6, M).double()] if name == "favor" else []
    q, k, v = tensors(3 * C + 5)
    for causal in (False, True):
        out, _ = linear_attention(q, k, v, feature_map=function, parameters=parameters, causal=causal, chunk_size=C)
        visible = torch.ones(3 * C + 5, 3 * C + 5, dtype=torch.bool)
        features = [function(x, *parameters) for x in (q, k)]
        assert_close(out, reference.kernel_attention(*features, v, visible=visible.tril() if causal else visible))


@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_a_feature_map_have_gradients(mode):
    q, k, v = (torch.randn(1, H, 7, size, dtype=torch.float64) for size in (4, 4, 3))
    projection = orthogonal_features(H, 6, 4).double().requires_grad_()

    def compute(projection):
        return linear_attention(q, k, v, feature_map=favor, parameters=[projection], chunk_size=3, **decays(mode))[0]

    assert torch.autograd.gradcheck(compute, projection)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axes", [1, 2])
def test_plain_normalizer(mode, axes):
    """Numerators with positions, the sum of weights without."""
    case = Case(mode, 15, axes, masked=True, has_global=mode == "two_sided", permuted=False, features=8)
    encoding = Rope(8, axes)
    options = {"backend": "torch", "chunk_size": C, "transform": encoding}
    (out, *_), (raw, *_) = case.run(**options, plain_normalizer=True), case.run(**options, normalize=False)
    ones = replace(case)
    object.__setattr__(ones, "tensors", (*case.tensors[:2], torch.ones_like(case.tensors[2])))
    total = ones.run(backend="torch", normalize=False)[0]
    assert_close(out, raw / total.masked_fill(total == 0, 1))


class Scaled(PositionEncoding):
    """Scales features by a trained weight per head."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64))

    def tables(self, positions):
        return self.weight.view(1, -1, 1, 1)

    def transform(self, x, tables):
        return x * tables


@pytest.mark.parametrize("mode", MODES)
def test_a_trained_encoding_has_its_gradient(mode):
    q, k, v = tensors(9)
    encoding = Scaled()
    arguments = {"feature_map": relu_eps, "transform": Compose([encoding]), "normalize": False, **decays(mode)}
    linear_attention(q, k, v, **arguments)[0].square().sum().backward()

    def loss(weight):
        with torch.no_grad():
            encoding.weight.copy_(weight)
            return linear_attention(q, k, v, **arguments)[0].square().sum()

    weight, step = encoding.weight.detach().clone(), torch.tensor([0.0, 1e-5, 0.0], dtype=torch.float64)
    torch.testing.assert_close(encoding.weight.grad[1], (loss(weight + step) - loss(weight - step)) / 2e-5, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("layout", ["b h l d", "sliced", "strided", "expanded", "overlapping"])
@pytest.mark.parametrize("mode", MODES)
def test_any_strides(layout, mode):
    base = torch.randn(2, 90, 3, 40)
    signal = torch.randn(1, 2, 120)
    x = {
        "b h l d": base.permute(0, 2, 1, 3).contiguous()[..., :24],
        "sliced": base[..., 5:29].transpose(1, 2),
        "strided": base[:, ::3, :, ::2].transpose(1, 2),
        "expanded": base[:1].expand(2, -1, -1, -1).transpose(1, 2)[..., :24],
        "overlapping": signal.unfold(2, 16, 1)[:, :, :70],
    }[layout]
    found = []
    for name, cast in (("torch", torch.float64), ("native", torch.float32)):
        leaf = signal.to(cast).requires_grad_() if layout == "overlapping" else x.detach().to(cast).requires_grad_()
        q = leaf.unfold(2, 16, 1)[:, :, :70] if layout == "overlapping" else leaf
        q = (
            q
            if layout in ("overlapping", "b h l d")
            else q.as_strided(x.shape, x.stride())
            if cast == torch.float32 and layout == "expanded"
            else q
        )
        options = {"log_decay": torch.linspace(0.5, 1, q.shape[1]).log()} if "log_decay" in decays(mode) else {}
        out, _ = linear_attention(
            q, q.flip(2), q[..., :7], feature_map=relu_eps, transform=Permute(*q.shape[1:4:2]), backend=name, **{**decays(mode), **options}
        )
        found.append([out.detach().double(), torch.autograd.grad(out.square().sum(), leaf)[0].double()])
    assert_same(found[1], found[0], torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_without_a_graph_break(mode):
    encoding = Permute(H, M)
    q, k, v = tensors(3 * C + 5, torch.float32, requires_grad=True)

    def compute(q, k, v, backend, chunk_size):
        return linear_attention(q, k, v, feature_map=relu_eps, transform=encoding, backend=backend, chunk_size=chunk_size, **decays(mode))[
            0
        ]

    for backend, chunk in (("torch", C), ("native", None)):
        expected = compute(q, k, v, backend, chunk)
        out = torch.compile(compute, fullgraph=True, backend="aot_eager")(q, k, v, backend, chunk)
        assert_close(out, expected)
        gradient = torch.randn_like(out)
        for actual, wanted in zip(*(torch.autograd.grad(y, (q, k, v), gradient) for y in (out, expected)), strict=True):
            assert_close(actual, wanted)


def test_a_second_derivative_is_refused(backend):
    name, dtype = backend
    for mode in MODES:
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors(9))
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, backend=name, **decays(mode))
        (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_a_state_changed_after_use_is_noticed():
    q, k, v = tensors(9, requires_grad=True)
    _, state = linear_attention(*(x.detach() for x in (q, k, v)), feature_map=relu_eps, causal=True)
    out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True, state=state, chunk_size=C)
    state.kv.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_states_are_detached_and_selected_with_all_fields():
    q, k, v = tensors(5, requires_grad=True)
    segments = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 3]])
    _, state = linear_attention(q, k, v, feature_map=relu_eps, causal=True, segments=segments)
    assert state.kv.requires_grad
    assert not state.detach().kv.requires_grad
    for before, after in zip(state, state.select(torch.tensor([1, 0])), strict=True):
        assert torch.equal(after, before.flip(0))


def test_rows_at_different_positions():
    """A batch whose rows continue from different positions is as its rows alone, and given positions are as counted ones."""
    q, k, v = tensors(11)
    arguments = {"feature_map": relu_eps, "transform": Permute(H, M), "chunk_size": C, **decays("decay")}
    positions = torch.stack([torch.arange(11), torch.arange(11) + 1000]).unsqueeze(-1)
    expected, _ = linear_attention(q, k, v, **arguments)
    assert_close(linear_attention(q, k, v, positions=positions, **arguments)[0], expected)
    _, state = linear_attention(*(x[:, :, :6] for x in (q, k, v)), positions=positions[:, :6], **arguments)
    assert state.next_position.tolist() == [6, 1006]
    tail, state = linear_attention(*(x[:, :, 6:] for x in (q, k, v)), state=state, **arguments)
    assert_close(tail, expected[:, :, 6:])
    assert state.next_position.tolist() == [11, 1011]


@given(st.integers(2, 30), st.integers(-(10**9), 10**9))
def test_scores_are_toeplitz(length, shift):
    encoding = Permute(1, M)
    q, k = torch.rand(2, 1, 1, 1, M, dtype=torch.float64).expand(2, 1, 1, length, M)
    tables = encoding.tables((torch.arange(length) + shift).view(1, -1, 1))
    scores = encoding.transform(q, tables) @ encoding.transform(k, tables).transpose(-1, -2)
    for offset in range(-length + 1, length):
        diagonal = scores[0, 0].diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@given(st.tuples(*[st.integers(-50, 50)] * 6))
def test_in_two_dimensions_scores_depend_on_dx_and_dy(numbers):
    x1, y1, x2, y2, dx, dy = numbers
    encoding = Permute(H, M, axes=2)
    q, k = torch.rand(2, 1, H, 1, M, dtype=torch.float64)

    def score(query_at, key_at):
        at = [encoding.tables(torch.tensor(p).view(1, 1, 2)) for p in (query_at, key_at)]
        return (encoding.transform(q, at[0]) * encoding.transform(k, at[1])).sum(-1)

    torch.testing.assert_close(score((x1 + dx, y1 + dy), (x1, y1)), score((x2 + dx, y2 + dy), (x2, y2)))


@pytest.mark.parametrize("name", ["torch", "native"])
def test_long_rows_stay_finite_and_right(name):
    """200,000 tokens at r = 0.88, where r^-j overflows float32 at 700, against the paper's recurrence token by token in float64."""
    length, h, m, size = 200_000, 2, 16, 8
    r = torch.tensor([0.88, 0.99], dtype=torch.float64)
    encoding = Permute(h, m)
    q, k, v = (torch.randn(1, h, length, n) for n in (m, m, size))
    out, state = linear_attention(q, k, v, feature_map=relu_eps, transform=encoding, causal=True, log_decay=r.log(), backend=name)
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in state[:2])
    rows = [0, 1, 127, 128, 699, 700, 701, 5_000, 99_999, 150_001, length - 1]
    fq, fk = relu_eps(q.double()), relu_eps(k.double())
    values = torch.cat([v.double(), torch.ones_like(v[..., :1], dtype=torch.float64)], dim=-1)
    # The state relative to the current token: one step permutes it back once.
    back = encoding.permutation.argsort(-1).unsqueeze(-1).expand(h, m, size + 1)
    carry, expected = torch.zeros(h, m, size + 1, dtype=torch.float64), []
    for i in range(length):
        carry = r[:, None, None] * carry.gather(1, back) + fk[0, :, i, :, None] * values[0, :, i, None, :]
        if i in rows:
            read = (fq[0, :, i, :, None] * carry).sum(1)
            expected.append(read[:, :-1] / read[:, -1:])
    assert_close(out[0][:, rows], torch.stack(expected, dim=1), torch.float32)


def test_a_million_tokens_lose_little_precision():
    """All keys and values the same: whatever the length, the output is that value, to 3 digits in float32."""
    length = 1_000_003
    q, k = (torch.rand(1, 1, 1, 4).expand(1, 1, length, 4) for _ in range(2))
    v = torch.tensor([1.0, -3.0]).expand(1, 1, length, 2)
    for options in ({}, {"causal": True}, {"two_sided": True, "log_decay": torch.tensor([-1e-6])}):
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, transform=Permute(1, 4), **options)
        torch.testing.assert_close(out, v, rtol=1e-3, atol=0)


def test_a_backend_from_outside(monkeypatch):
    """A backend is an object with two functions; it gets the calls it supports."""
    calls = []

    def unsupported(call):
        return None if call.causal else "it is causal only"

    def compute(call):
        calls.append(call)
        return linear.BACKENDS["torch"].run(call)

    ours = SimpleNamespace(unsupported=unsupported, run=compute)
    monkeypatch.setattr(linear, "BACKENDS", {"ours": ours, **linear.BACKENDS})
    q, k, v = tensors(5)
    causal, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True)
    assert [call.causal for call in calls] == [True]
    assert_close(causal, linear_attention(q, k, v, feature_map=relu_eps, causal=True, backend="torch")[0])
    linear_attention(q, k, v, feature_map=relu_eps)
    assert len(calls) == 1
    with pytest.raises(ValueError, match=r"'ours'.*it is causal only"):
        linear_attention(q, k, v, feature_map=relu_eps, backend="ours")


def test_the_default_backend(monkeypatch):
    q, k, v = tensors(5, torch.float32)
    monkeypatch.setattr(linear, "DEFAULT_BACKEND", "native")
    with pytest.raises(ValueError, match="'native'.*elu"):
        linear_attention(q, k, v, feature_map=FEATURE_MAPS["elu"])
    monkeypatch.setattr(linear, "DEFAULT_BACKEND", "fast")
    with pytest.raises(ValueError, match="PERMUTEFORMER_BACKEND.*auto, native, cuda, torch.*'fast'"):
        linear_attention(q, k, v, feature_map=relu_eps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(B, H, 5)}, r"q and k.*\(2, 3, 5\)"),
        ({"k": torch.zeros(B, H, 4, M)}, r"q and k.*\(2, 3, 4, 10\)"),
        ({"v": torch.zeros(B, H, 4, V)}, r"v.*\(2, 3, 4, 4\)"),
        ({"q": torch.zeros(B, H, 0, M), "k": torch.zeros(B, H, 0, M), "v": torch.zeros(B, H, 0, V)}, "length >= 1"),
        ({"log_decay": torch.zeros(H)}, "two_sided=True"),
        ({"log_decay": torch.zeros(H + 1), "causal": True}, r"log_decay.*\(3,\).*\(4,\)"),
        ({"log_decay": torch.tensor([0.1] * H), "causal": True}, "log_decay.*0.1"),
        ({"log_decay": torch.tensor([torch.nan] * H), "two_sided": True}, "log_decay.*nan"),
        ({"two_sided": True, "causal": True}, "two_sided.*causal"),
        ({"key_mask": torch.ones(B, 5)}, "key_mask.*torch.bool.*torch.float32"),
        ({"key_mask": torch.ones(B, 4, dtype=torch.bool)}, r"key_mask.*\(2, 5\).*\(2, 4\)"),
        ({"global_mask": torch.ones(B, 5, dtype=torch.bool)}, "global_mask.*two-sided"),
        ({"global_mask": torch.ones(B, 5), "two_sided": True, "log_decay": torch.zeros(H)}, "global_mask.*torch.bool"),
        ({"segments": torch.ones(B, 5)}, "segments.*int64"),
        ({"segments": torch.tensor([[0, 1, 0, 0, 0]] * B)}, "segments.*decrease"),
        ({"chunk_size": 0}, "chunk_size.*1.*0"),
        ({"positions": torch.zeros(B, 9, 1, dtype=torch.int64)}, r"positions.*\(2, 9, 1\)"),
        ({"positions": torch.zeros(B, 5, 1)}, "positions.*int64.*float32"),
        ({"v": torch.zeros(B, H, 5, V, device="meta")}, "v is on meta.*cpu"),
        ({"state": LinearState(torch.zeros(B, H, M, V + 1), torch.zeros(B, H, M), torch.zeros(B).long())}, r"state.*\(2, 3, 10, 5\)"),
        ({"state": LinearState(torch.zeros(1, H, M, V), torch.zeros(1, H, M), torch.zeros(1).long())}, r"state.*\(1, 3, 10, 4\)"),
        ({"after": LinearState(torch.zeros(B, H, M, V), torch.zeros(B, H, M), torch.zeros(B).long()), "causal": True}, "after"),
        (
            {
                "after": LinearState(torch.zeros(B, H, M, V), torch.zeros(B, H, M), torch.zeros(B).long()),
                "segments": torch.zeros(B, 5, dtype=torch.int64),
            },
            "after.*segment",
        ),
        ({"transform": Permute(H, 8)}, "feature_size=8.*10"),
        ({"transform": Permute(1, M)}, "num_heads=1.*3"),
        ({"transform": Permute(H, M, axes=2)}, "positions.*2 axes.*None"),
        ({"transform": Permute(H, M, axes=2), "positions": torch.zeros(B, 5, 1, dtype=torch.int64)}, r"positions.*2 axes.*\(2, 5, 1\)"),
        ({"backend": "fast"}, "backend.*'fast'"),
    ],
)
@pytest.mark.parametrize("backend_name", ["torch", "native"])
def test_bad_input_is_refused(change, message, backend_name):
    arguments = {"q": torch.zeros(B, H, 5, M), "k": torch.zeros(B, H, 5, M), "v": torch.zeros(B, H, 5, V)}
    arguments |= {"feature_map": relu_eps, "backend": backend_name, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        linear_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
