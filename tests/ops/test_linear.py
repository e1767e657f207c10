"""Linear attention against the paper's equations in O(L^2), on every backend: outputs, gradients and states, at every awkward length."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_cases import MODES, OPTIONS, B, Case, H, M, R, V, attend, draw, every_mode, variants
from checks import assert_all_close, assert_close
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

C = 4
LENGTHS = {"1": (0, 1), "c-1": (1, -1), "c": (1, 0), "c+1": (1, 1), "3c+5": (3, 5)}


@every_mode
@pytest.mark.parametrize(("chunks", "more"), LENGTHS.values(), ids=LENGTHS)
def test_it_is_the_paper(mode, chunks, more, backend):
    name, dtype = backend
    chunk = {"chunk_size": C} if name == "torch" else {}
    for case in variants(mode, chunks * (C if chunk else 64) + more):
        assert_all_close(case.run(dtype, name, **chunk), case.expected(), dtype)


def test_minimal_is_the_paper():
    for mode, length in itertools.product(("bidirectional", "decay"), (1, 5, 17)):
        case = Case(mode, length)
        q, k, v = (x.clone().requires_grad_() for x in case.tensors)
        log_decay = None if case.log_decay is None else case.log_decay.clone().requires_grad_()
        permutation = case.encoding.permutation
        if mode == "bidirectional":
            out = minimal.bidirectional(q, k, v, permutation)
        else:
            out = minimal.causal(q, k, v, permutation, log_decay.exp(), chunk=C)
        assert_all_close(case.results(out, [q, k, v, log_decay]), case.expected(), torch.float64)


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 39), st.booleans())
def test_chunked_is_recurrent_is_split(length, chunk, cut, normalize):
    x = draw(length)
    chunked, final = attend(x, "decay", chunk_size=chunk, normalize=normalize)
    for cuts in (range(length + 1), sorted({0, min(cut, length), length})):
        state, parts = None, []
        for start, stop in itertools.pairwise(cuts):
            part, state = attend(x, "decay", slice(start, stop), state=state, chunk_size=chunk, normalize=normalize)
            parts.append(part)
        assert_close(torch.cat(parts, dim=2), chunked)
        torch.testing.assert_close(state[:3], final[:3])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_state_continues_on_any_backend(masked, packed):
    x = draw(100, torch.float32)
    marks = {"key_mask": torch.rand(B, 100) > 0.3} if masked else {}
    if packed:
        marks["segments"] = (torch.rand(B, 100) > 0.95).long().cumsum(1)
    hidden = ~marks["key_mask"][:, None, :, None] if masked else torch.zeros(1, dtype=torch.bool)
    whole, end = attend(x, "decay", backend="torch", **marks)
    for split, first, second in itertools.product((1, 17, 64, 99), ("native", "torch"), ("native", "torch")):
        head, state = attend(x, "decay", slice(split), backend=first, **marks)
        tail, state = attend(x, "decay", slice(split, None), state=state, backend=second, **marks)
        assert_close(torch.cat([head, tail], dim=2).masked_fill(hidden, 0), whole.masked_fill(hidden, 0))
        assert_close(state.kv, end.kv)
        assert torch.equal(state.next_position, end.next_position)
        assert packed == (state.segment is not None)


@every_mode
def test_states_on_both_sides(mode, backend):
    """The middle third of a row continues the state before it and, if it sees later tokens, the state after it."""
    name, dtype = backend
    x, positions = draw(90, dtype), torch.arange(7, 97).view(1, -1, 1)
    log_decay = OPTIONS[mode].get("log_decay")
    call = LinearCall(*x, relu_eps, M, encoding=Permute(H, M), causal="causal" in OPTIONS[mode], log_decay=log_decay)

    def part(start, stop, has_queries=True, **changes):
        q, k, v = (t[:, :, start:stop] for t in x)
        q = q if has_queries else q[:, :, :0]
        return run(replace(call, q=q, k=k, v=v, tokens=Tokens(positions[:, start:stop]), **changes), name)

    whole, end = part(0, 90)
    before, after = part(0, 30, False, causal=log_decay is not None)[1], None
    if mode == "two_sided":
        after = part(60, 90, False, reverse=True)[1]
    elif mode == "bidirectional":
        before = part(60, 90, False, state=before)[1]
    out, state = part(30, 60, state=before, after=after)
    assert_close(out, whole[:, :, 30:60], dtype)
    if call.causal:
        assert_close(part(60, 90, state=state)[1].kv, end.kv, dtype)


@every_mode
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_states(mode, reverse, backend):
    """Check everything in and out of a call with states on both sides, and of keys alone: PyTorch by gradcheck, the kernel by PyTorch."""
    name, dtype = backend
    q, k, v = (torch.randn(1, 2, 5, size, dtype=torch.float64, requires_grad=True) for size in (3, 3, 2))
    states = [torch.rand(1, 2, 3, *tail, dtype=torch.float64, requires_grad=True) for tail in ((2,), (), (2,), ())]
    decay = [(R[:2] * 0.9).log().requires_grad_()] if "log_decay" in OPTIONS[mode] else []
    mask = torch.tensor([[True, True, False, True, True]])
    segments = torch.tensor([[0, 0, 0, 1, 1]])

    def compute(*given, cast=torch.float64, backend="torch"):
        (q, k, v, kv, z, after_kv, after_z), r = (x.to(cast) for x in given[:7]), given[7:]
        state = LinearState(kv, z, torch.tensor([7]), torch.tensor([0]))
        after = LinearState(after_kv, after_z, torch.tensor([0]), torch.tensor([1]))
        call = LinearCall(q, k, v, relu_eps, 3, encoding=Permute(2, 3), causal="causal" in OPTIONS[mode], log_decay=r[0] if r else None)
        if backend == "torch":
            call = replace(call, chunk_size=2)
        if not (reverse and mode == "two_sided"):
            call = replace(call, state=state)
        if reverse:
            call = replace(call, q=q[:, :, :0], reverse=mode == "two_sided")
        results = []
        for tokens in (Tokens(), Tokens(mask=mask), Tokens(segments=segments)):
            sees_after = mode == "two_sided" and tokens.mask is None
            out, last = run(replace(call, tokens=tokens, after=after if sees_after else None), backend)
            results += [out, last.kv, last.z] if out.numel() else [last.kv, last.z]
        return tuple(x.double() for x in results)

    inputs = [q, k, v, *states, *decay]
    if name == "torch":
        assert torch.autograd.gradcheck(compute, inputs)
        return
    found = []
    for cast, backend_name in ((torch.float64, "torch"), (dtype, "native")):
        results = compute(*inputs, cast=cast, backend=backend_name)
        torch.manual_seed(4)
        gradients = torch.autograd.grad(results, inputs, [torch.randn(x.shape, dtype=x.dtype) for x in results], allow_unused=True)
        found.append([*results, *(torch.zeros_like(x) if d is None else d for x, d in zip(inputs, gradients, strict=True))])
    assert_all_close(found[1], found[0], dtype)


@pytest.mark.parametrize("length", [1, 65, 1025])
@pytest.mark.parametrize("queries", [1, 3, 70])
@pytest.mark.parametrize("axes", [0, 2], ids=["plain", "two axes"])
def test_queries_of_other_tokens(length, queries, axes, backend):
    """Outputs and gradients with masked keys equal PyTorch's in float64. Without keys, a state is read."""
    name, dtype = backend
    _, k, v = draw(length)
    q = torch.randn(B, H, queries, M, dtype=torch.float64)
    at, query_at = (torch.randint(-(10**12), 10**12, (B, n, max(axes, 1))) for n in (length, queries))
    mask = torch.arange(length) % 3 != torch.tensor([[1], [2]])
    encoding = Permute(H, M, axes) if axes else None
    call = LinearCall(q, k, v, relu_eps, M, encoding=encoding, tokens=Tokens(at, mask), query_positions=query_at)
    found, d_out = [], torch.randn(B, H, queries, V, dtype=torch.float64) / queries  # gradients of keys are sums over the queries
    for cast, backend_name in ((torch.float64, "torch"), (dtype, name)):
        q, k, v = inputs = [x.detach().to(cast).requires_grad_() for x in (call.q, call.k, call.v)]
        out, _ = run(replace(call, q=q, k=k, v=v), backend_name)
        found.append([out, *torch.autograd.grad(out, inputs, d_out.to(cast))])
    assert_all_close(found[1], found[0], dtype)
    _, state = run(replace(call, q=q[:, :, :0], k=k, v=v), name)
    read, _ = run(replace(call, q=q, k=k[:, :, :0], v=v[:, :, :0], tokens=Tokens(), state=state), name)
    assert_close(read, found[1][0], dtype)


@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 12), st.integers(1, 11), st.sampled_from(MODES))
def test_padded_is_unpadded(length, before, after, chunk, mode):
    """NaN in padding on either side changes neither real tokens nor the state."""
    x = draw(length)
    expected, state = attend(x, mode, chunk_size=chunk)
    padded = [F.pad(t, (0, 0, before, after), value=torch.nan) for t in x]
    mask = F.pad(torch.ones(B, length, dtype=torch.bool), (before, after))
    out, padded_state = attend(padded, mode, key_mask=mask, chunk_size=chunk)
    assert_close(out[:, :, before : before + length], expected)
    assert_close(padded_state.kv, state.kv)
    assert torch.equal(padded_state.next_position, state.next_position)


@pytest.mark.parametrize("known", [True, False], ids=["state knows its segment", "state does not"])
def test_a_segment_continues_behind_padding(known):
    x = draw(40, torch.float32)
    threes = torch.full((B, 40), 3)
    whole, _ = attend(x, "causal", segments=threes)
    _, state = attend(x, "causal", slice(30), segments=threes if known else None)
    padded = [torch.cat([torch.randn_like(t[:, :, :1]).expand(-1, -1, 200, -1), t[:, :, 30:]], dim=2) for t in x]
    segments, mask = F.pad(threes[:, 30:], (200, 0)), (torch.arange(210) >= 200).expand(B, -1)
    for options in ({"chunk_size": 4}, {"chunk_size": 64}, {"backend": "native"}):
        out, after = attend(padded, "causal", segments=segments, key_mask=mask, state=state, **options)
        assert_close(out[:, :, 200:], whole[:, :, 30:])
        assert after.segment.tolist() == [3] * B


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 5])
def test_a_masked_row_changes_no_state(packed, length, backend):
    name, dtype = backend
    x, segments = draw(9, dtype), torch.full((B, 9), 5) if packed else None
    _, before = attend(x, "decay", segments=segments, backend=name)
    mask, later = torch.zeros(B, 9, dtype=torch.bool), segments + 1 if packed else None
    _, after = attend(x, "decay", slice(length), key_mask=mask, segments=later, state=before, backend=name)
    torch.testing.assert_close([t for t in after if t is not None], [t for t in before if t is not None])


@every_mode
def test_without_tokens_or_rows_output_and_gradients_are_zero(mode, backend):
    name, dtype = backend
    x, mask = draw(9, dtype, requires_grad=True), torch.zeros(B, 9, dtype=torch.bool)
    out, state = attend(x, mode, key_mask=mask, backend=name)
    assert not any(t.any() for t in (out, state.kv, *torch.autograd.grad(out.sum(), x)))
    out, state = attend([t[:0] for t in x], mode, backend=name)
    assert (out.shape, len(state.kv)) == ((0, H, 9, V), 0)
    out.sum().backward()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 13, 63, 64, 99])
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(bad, place, backend):
    name, dtype = backend
    segments, tokens = (torch.arange(100) >= 50).long().expand(B, -1), torch.arange(100)
    for mode, spoilt in itertools.product(MODES, range(3)):
        x = draw(100, dtype)
        clean, _ = attend(x, mode, segments=segments, backend=name)
        x[spoilt][0, 0, place, 1] = bad
        out, _ = attend(x, mode, segments=segments, backend=name)
        sees = (segments[0] == segments[0, place]) & (tokens >= place if "causal" in OPTIONS[mode] else True)
        sees = tokens == place if spoilt == 0 else sees
        seen = torch.zeros_like(out, dtype=torch.bool)
        seen[0, 0, sees] = True
        assert torch.equal(out[~seen], clean[~seen])
        assert not out[0, 0, place].isfinite().all()
        if spoilt == 2 and name == "torch":  # the other channels of v are not affected
            seen[..., [0, 2, 3]] = False
            assert torch.equal(out.isfinite(), ~seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["torch", "native"])
@every_mode
def test_low_precision_sums_in_float32(mode, dtype, name):
    x = draw(300, dtype, requires_grad=True)
    out, state = attend(x, mode, backend=name)
    assert (out.dtype, state.kv.dtype, state.z.dtype) == (dtype, torch.float32, torch.float32)
    doubles = [t.detach().double().requires_grad_() for t in x]
    expected, wide = attend(doubles, mode)
    assert_close(out, expected)
    torch.testing.assert_close(state.kv, wide.kv.float(), rtol=1e-4, atol=1e-3)
    d_out = torch.randn_like(out)
    gradients = torch.autograd.grad(out, x, d_out), torch.autograd.grad(expected, doubles, d_out.double())
    for actual, wanted in zip(*gradients, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, wanted)


@pytest.mark.parametrize("name", ["torch", "native"])
@every_mode
def test_autocast_changes_nothing(mode, name):
    x, found = draw(30, torch.float32, requires_grad=True), []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, _ = attend(x, mode, backend=name)
            found.append([out, *torch.autograd.grad(out.square().sum(), x)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_feature_map(name, causal):
    parameters = [orthogonal_features(H, 6, M).double()] if name == "favor" else []
    q, k, v = draw(3 * C + 5)
    out, _ = linear_attention(q, k, v, feature_map=FEATURE_MAPS[name], parameters=parameters, causal=causal, chunk_size=C)
    visible = torch.ones(3 * C + 5, 3 * C + 5, dtype=torch.bool)
    features = [FEATURE_MAPS[name](x, *parameters) for x in (q, k)]
    assert_close(out, reference.kernel_attention(*features, v, visible=visible.tril() if causal else visible))


@every_mode
def test_parameters_of_a_feature_map_have_gradients(mode):
    x = [torch.randn(1, H, 7, size, dtype=torch.float64) for size in (4, 4, 3)]
    projection = orthogonal_features(H, 6, 4).double().requires_grad_()

    def compute(projection):
        return attend(x, mode, feature_map=favor, parameters=[projection], transform=None, chunk_size=3)[0]

    assert torch.autograd.gradcheck(compute, projection)


@every_mode
@pytest.mark.parametrize("axes", [1, 2])
def test_plain_normalizer(mode, axes):
    """Numerators have positions, sums of weights have none."""
    case = Case(mode, 15, axes, masked=True, has_global=mode == "two_sided", permuted=False, features=8)
    options = {"backend": "torch", "chunk_size": C, "transform": Rope(8, axes)}
    out, raw = case.run(**options, plain_normalizer=True)[0], case.run(**options, normalize=False)[0]
    ones = replace(case)
    ones.tensors = (*case.tensors[:2], torch.ones_like(case.tensors[2]))
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


@every_mode
def test_a_trained_encoding_has_its_gradient(mode):
    x, encoding = draw(9), Scaled()
    arguments = {"transform": Compose([encoding]), "normalize": False}
    attend(x, mode, **arguments)[0].square().sum().backward()

    def loss(weight):
        with torch.no_grad():
            encoding.weight.copy_(weight)
            return attend(x, mode, **arguments)[0].square().sum()

    weight, step = encoding.weight.detach().clone(), torch.tensor([0.0, 1e-5, 0.0], dtype=torch.float64)
    torch.testing.assert_close(encoding.weight.grad[1], (loss(weight + step) - loss(weight - step)) / 2e-5, rtol=1e-5, atol=1e-8)


LAYOUTS = {
    "b h l d": lambda x: x.permute(0, 2, 1, 3).contiguous()[..., :24],
    "sliced": lambda x: x[..., 5:29].transpose(1, 2),
    "strided": lambda x: x[:, ::3, :, ::2].transpose(1, 2),
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1).transpose(1, 2)[..., :24],
    "overlapping": lambda x: x.flatten()[:240].view(1, 2, 120).unfold(2, 16, 1)[:, :, :70],
}


@every_mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, mode):
    base = torch.randn(2, 90, 3, 40, dtype=torch.float64)
    found = []
    for name, cast in (("torch", torch.float64), ("native", torch.float32)):
        leaf = base.to(cast).requires_grad_()
        q = LAYOUTS[layout](leaf)
        options = {"log_decay": R[: q.shape[1]].log()} if "log_decay" in OPTIONS[mode] else {}
        out, _ = attend([q, q.flip(2), q[..., :7]], mode, transform=Permute(*q.shape[1:4:2]), backend=name, **options)
        found.append([out.double(), torch.autograd.grad(out.square().sum(), leaf)[0].double()])
    assert_all_close(found[1], found[0], torch.float32)


@every_mode
@pytest.mark.parametrize(("name", "chunk"), [("torch", C), ("native", None)])
def test_compiled_without_a_graph_break(mode, name, chunk):
    x, encoding = draw(3 * C + 5, torch.float32, requires_grad=True), Permute(H, M)

    def compute(q, k, v):
        arguments = {"transform": encoding, "backend": name, "chunk_size": chunk, **OPTIONS[mode]}
        return linear_attention(q, k, v, feature_map=relu_eps, **arguments)[0]

    expected, out = compute(*x), torch.compile(compute, fullgraph=True, backend="aot_eager")(*x)
    assert_close(out, expected)
    gradient = torch.randn_like(out)
    for actual, wanted in zip(*(torch.autograd.grad(y, x, gradient) for y in (out, expected)), strict=True):
        assert_close(actual, wanted)


@every_mode
def test_a_second_derivative_is_refused(mode, backend):
    name, dtype = backend
    x = draw(9, dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(attend(x, mode, backend=name)[0].square().sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_state_is_detached_selected_and_not_changed_before_backward():
    x, segments = draw(5, requires_grad=True), torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 3]])
    _, state = attend(x, "causal", segments=segments)
    assert state.kv.requires_grad
    assert not state.detach().kv.requires_grad
    for before, after in zip(state, state.select(torch.tensor([1, 0])), strict=True):
        assert torch.equal(after, before.flip(0))
    _, state = attend([part.detach() for part in x], "causal", transform=None)
    out, _ = attend(x, "causal", transform=None, state=state, chunk_size=C)
    state.kv.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_rows_at_different_positions():
    """Rows that continue from different positions are the same as alone, and given positions are the same as counted ones."""
    x, positions = draw(11), torch.stack([torch.arange(11), torch.arange(11) + 1000]).unsqueeze(-1)
    expected, _ = attend(x, "decay", chunk_size=C)
    assert_close(attend(x, "decay", positions=positions, chunk_size=C)[0], expected)
    _, state = attend(x, "decay", slice(6), positions=positions)
    assert state.next_position.tolist() == [6, 1006]
    tail, state = attend(x, "decay", slice(6, None), state=state, chunk_size=C)
    assert_close(tail, expected[:, :, 6:])
    assert state.next_position.tolist() == [11, 1011]


def test_long_rows_stay_finite_and_right():
    """200,000 tokens at r = 0.88, where r^-j overflows float32 at 700, against the paper's recurrence token by token in float64."""
    length, h, m, size = 200_000, 2, 16, 8
    r = torch.tensor([0.88, 0.99], dtype=torch.float64)
    encoding = Permute(h, m)
    q, k, v = (torch.randn(1, h, length, n) for n in (m, m, size))
    rows = [0, 1, 127, 128, 699, 700, 701, 5_000, 99_999, 150_001, length - 1]
    fq, fk = relu_eps(q.double()), relu_eps(k.double())
    values = torch.cat([v.double(), torch.ones_like(v[..., :1], dtype=torch.float64)], dim=-1)
    # Further back than this, keys have no weight: 0.99^5000 is 1e-22.
    back = encoding.permutation.argsort(-1).unsqueeze(-1).expand(h, m, size + 1)
    expected = []
    for row in rows:
        carry = torch.zeros(h, m, size + 1, dtype=torch.float64)  # relative to the current token: each step permutes it back once
        for i in range(max(0, row - 5_000), row + 1):
            carry = r[:, None, None] * carry.gather(1, back) + fk[0, :, i, :, None] * values[0, :, i, None, :]
        read = (fq[0, :, row, :, None] * carry).sum(1)
        expected.append(read[:, :-1] / read[:, -1:])
    for name in ("torch", "native"):
        out, state = linear_attention(q, k, v, feature_map=relu_eps, transform=encoding, causal=True, log_decay=r.log(), backend=name)
        assert all(x.isfinite().all() for x in (out, *state[:2]))
        assert_close(out[0][:, rows], torch.stack(expected, dim=1), torch.float32)


def test_a_million_tokens_lose_little_precision():
    """All keys and values are equal: whatever the length, the output is that value, to 3 digits in float32."""
    length = 1_000_003
    q, k = (torch.rand(1, 1, 1, 4).expand(1, 1, length, 4) for _ in range(2))
    v = torch.tensor([1.0, -3.0]).expand(1, 1, length, 2)
    for options in ({}, {"causal": True}, {"two_sided": True, "log_decay": torch.tensor([-1e-6])}):
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, transform=Permute(1, 4), **options)
        torch.testing.assert_close(out, v, rtol=1e-3, atol=0)


def test_a_backend_from_outside_and_the_default_one(monkeypatch):
    """A backend is an object with two functions; it gets the calls it supports."""
    calls = []

    def compute(call):
        calls.append(call)
        return linear.BACKENDS["torch"].run(call)

    ours = SimpleNamespace(unsupported=lambda call: None if call.causal else "it is causal only", run=compute)
    monkeypatch.setattr(linear, "BACKENDS", {"ours": ours, **linear.BACKENDS})
    x = draw(5, torch.float32)
    assert_close(attend(x, "causal")[0], attend(x, "causal", backend="torch")[0])
    attend(x, "bidirectional")
    assert [call.causal for call in calls] == [True]
    with pytest.raises(ValueError, match="'ours'.*it is causal only"):
        attend(x, "bidirectional", backend="ours")
    for default, message in (("native", "'native'.*elu"), ("fast", "PERMUTEFORMER_BACKEND.*native.*cuda.*torch.*'fast'")):
        monkeypatch.setattr(linear, "DEFAULT_BACKEND", default)
        with pytest.raises(ValueError, match=message):
            attend(x, "bidirectional", feature_map=FEATURE_MAPS["elu"])


def state_of(*shape):
    return LinearState(torch.zeros(shape), torch.zeros(shape[:3]), torch.zeros(shape[0]).long())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(B, H, 5)}, r"q and k.*\(2, 3, 5\)"),
        ({"k": torch.zeros(B, H, 4, M)}, r"q and k.*\(2, 3, 4, 10\)"),
        ({"v": torch.zeros(B, H, 4, V)}, r"v.*\(2, 3, 4, 4\)"),
        (dict.fromkeys("qkv", torch.zeros(B, H, 0, M)), "length >= 1"),
        ({"v": torch.zeros(B, H, 5, V, device="meta")}, "v is on meta.*cpu"),
        ({"log_decay": torch.zeros(H)}, "two_sided=True"),
        ({"log_decay": torch.zeros(H + 1), "causal": True}, r"log_decay.*\(3,\).*\(4,\)"),
        ({"log_decay": torch.full((H,), 0.1), "causal": True}, "log_decay.*0.1"),
        ({"log_decay": torch.full((H,), torch.nan), "two_sided": True}, "log_decay.*nan"),
        ({"two_sided": True, "causal": True}, "two_sided.*causal"),
        ({"key_mask": torch.ones(B, 5)}, "key_mask.*torch.bool.*torch.float32"),
        ({"key_mask": torch.ones(B, 4, dtype=torch.bool)}, r"key_mask.*\(2, 5\).*\(2, 4\)"),
        ({"global_mask": torch.ones(B, 5, dtype=torch.bool)}, "global_mask.*two-sided"),
        ({"global_mask": torch.ones(B, 5), "two_sided": True, "log_decay": torch.zeros(H)}, "global_mask.*torch.bool"),
        ({"segments": torch.ones(B, 5)}, "segments.*int64"),
        ({"segments": torch.tensor([[0, 1, 0, 0, 0]] * B)}, "segments"),
        ({"chunk_size": 0}, "chunk_size.*1.*0"),
        ({"positions": torch.zeros(B, 9, 1, dtype=torch.int64)}, r"positions.*\(2, 9, 1\)"),
        ({"positions": torch.zeros(B, 5, 1)}, "positions.*int64.*float32"),
        ({"state": state_of(B, H, M, V + 1)}, r"state.*\(2, 3, 10, 5\)"),
        ({"state": state_of(1, H, M, V)}, r"state.*\(1, 3, 10, 4\)"),
        ({"after": state_of(B, H, M, V), "causal": True}, "after"),
        ({"after": state_of(B, H, M, V), "segments": torch.zeros(B, 5, dtype=torch.int64)}, "after.*segment"),
        ({"transform": Permute(H, 8)}, "feature_size=8.*10"),
        ({"transform": Permute(1, M)}, "num_heads=1.*3"),
        ({"transform": Permute(H, M, axes=2)}, "positions.*2 axes.*None"),
        ({"transform": Permute(H, M, axes=2), "positions": torch.zeros(B, 5, 1, dtype=torch.int64)}, r"positions.*2 axes.*\(2, 5, 1\)"),
        ({"backend": "fast"}, "backend.*'fast'"),
    ],
)
def test_bad_input_is_refused(change, message):
    x = {"q": torch.zeros(B, H, 5, M), "k": torch.zeros(B, H, 5, M), "v": torch.zeros(B, H, 5, V)}
    x, options = {name: change.get(name, t) for name, t in x.items()}, {name: value for name, value in change.items() if name not in x}
    with pytest.raises((ValueError, TypeError), match=message):
        linear_attention(*x.values(), feature_map=relu_eps, **options)
