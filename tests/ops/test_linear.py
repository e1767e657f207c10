"""The one entrance against the paper in O(L^2): outputs and gradients in float64, at every awkward length."""

import itertools

import pytest
import torch
from checks import assert_close
from hypothesis import given
from hypothesis import strategies as st

from permuteformer.ops import reference
from permuteformer.ops.feature_map import FEATURE_MAPS, favor, orthogonal_features, relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.state import LinearState
from permuteformer.positions.permute import Permute

B, H, M, V, C = 2, 3, 10, 4, 4
DECAY = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)


def tensors(length, dtype=torch.float64, requires_grad=True):
    """q, k, v as a projection gives them: ``b l h d`` seen as ``b h l d``."""
    return [torch.randn(B, length, H, size, dtype=dtype).transpose(1, 2).requires_grad_(requires_grad) for size in (M, M, V)]


def visible(length, causal, key_mask=None, segments=None):
    seen = torch.ones(B, 1, length, length, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen if key_mask is None else seen & key_mask[:, None, None, :]
    return seen if segments is None else seen & (segments[:, None, :, None] == segments[:, None, None, :])


def axis_permutations(encoding):
    """The permutation of each axis, of all the features."""
    identity = torch.arange(M).expand(H, M)
    return [torch.where(encoding.axis == axis, encoding.permutation, identity) for axis in range(encoding.axes)]


@pytest.mark.parametrize("length", [1, C - 1, C, C + 1, 3 * C + 5])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("decays", [False, True], ids=["", "decay"])
@pytest.mark.parametrize("axes", [1, 2])
def test_it_is_the_paper(length, causal, decays, axes):
    encoding = Permute(H, M, axes)
    positions = None if axes == 1 else torch.randint(-5, 9, (B, length, axes))
    for masked, packed, normalize in itertools.product((False, True), repeat=3):
        q, k, v = tensors(length)
        log_decay = DECAY.log().requires_grad_() if decays else None
        key_mask = torch.rand(B, length) > 0.3 if masked else None
        segments = (torch.rand(B, length) > 0.7).long().cumsum(1) if packed else None
        out, _ = linear_attention(
            q,
            k,
            v,
            feature_map=relu_eps,
            transform=encoding,
            positions=positions,
            causal=causal,
            log_decay=log_decay,
            two_sided=decays and not causal,
            key_mask=key_mask,
            segments=segments,
            normalize=normalize,
            chunk_size=C,
        )
        # A row with hidden tokens is the row without them.
        rows = []
        for row in range(B):
            shown = torch.arange(length) if key_mask is None else key_mask[row].nonzero().flatten()
            alone = reference.attention(
                *(x[row : row + 1, :, shown] for x in (q, k, v)),
                permutations=axis_permutations(encoding),
                positions=torch.arange(len(shown)).view(1, -1, 1) if positions is None else positions[row : row + 1, shown],
                visible=visible(len(shown), causal, None, None if segments is None else segments[:, shown])[row : row + 1],
                feature_map=relu_eps,
                decay=None if log_decay is None else log_decay.exp(),
                normalize=normalize,
            )
            rows.append(torch.zeros_like(out[:1]).index_copy(2, shown, alone))
        expected = torch.cat(rows)
        # What comes out for a hidden token means nothing.
        shown = torch.ones(B, length, dtype=torch.bool) if key_mask is None else key_mask
        assert_close(out.transpose(1, 2)[shown], expected.transpose(1, 2)[shown])
        gradient = torch.randn_like(out) * shown[:, None, :, None]
        inputs = [x for x in (q, k, v, log_decay) if x is not None]
        for actual, wanted in zip(gradients(out, inputs, gradient), gradients(expected, inputs, gradient), strict=True):
            assert_close(actual, wanted)


def gradients(out, inputs, gradient):
    found = torch.autograd.grad(out, inputs, gradient, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


@given(st.integers(1, 40), st.integers(1, 17), st.booleans(), st.data())
def test_chunked_is_recurrent_is_quadratic(length, chunk, normalize, data):
    encoding = Permute(H, M)
    q, k, v = tensors(length, requires_grad=False)
    arguments = {"feature_map": relu_eps, "transform": encoding, "causal": True, "log_decay": DECAY.log(), "normalize": normalize}
    chunked, final = linear_attention(q, k, v, chunk_size=chunk, **arguments)
    state, steps = None, []
    for i in range(length):
        step, state = linear_attention(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1], state=state, **arguments)
        steps.append(step)
    assert_close(chunked, torch.cat(steps, dim=2))
    positions = torch.arange(length).view(1, -1, 1).expand(B, -1, -1)
    features = [reference.permute(relu_eps(x), [encoding.permutation], positions) for x in (q, k)]
    quadratic = reference.kernel_attention(*features, v, visible=visible(length, True), decay=DECAY, normalize=normalize)
    assert_close(chunked, quadratic)
    for one, other in zip(final, state, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other)

    cut = data.draw(st.integers(0, length - 1))
    if cut:
        head, state = linear_attention(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], chunk_size=chunk, **arguments)
        tail, _ = linear_attention(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], chunk_size=chunk, state=state, **arguments)
        assert_close(torch.cat([head, tail], dim=2), chunked)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 11), st.booleans(), st.booleans())
def test_packed_is_separate(lengths, chunk, causal, decays):
    encoding = Permute(H, M)
    q, k, v = tensors(sum(lengths), requires_grad=False)
    arguments = {"feature_map": relu_eps, "transform": encoding, "causal": causal, "chunk_size": chunk}
    if decays:
        arguments |= {"log_decay": DECAY.log(), "two_sided": not causal}
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(B, -1)
    packed, final = linear_attention(q, k, v, segments=segments, **arguments)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone, state = linear_attention(q[:, :, part], k[:, :, part], v[:, :, part], **arguments)
        assert_close(packed[:, :, part], alone)
        start += length
    # The last segment's state is the row's. A bidirectional one is kept in its own frame: compare what it answers.
    if causal:
        rotated = encoding.transform(state.kv.transpose(-1, -2), encoding.tables(torch.tensor([[[start - lengths[-1]]]])))
        assert_close(final.kv.transpose(-1, -2), rotated)


@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 12), st.integers(1, 11), st.booleans(), st.booleans())
def test_padded_is_unpadded(length, before, after, chunk, causal, decays):
    """On the left, on the right, with anything in the padding: real tokens come out the same."""
    encoding = Permute(H, M)
    q, k, v = tensors(length, requires_grad=False)
    arguments = {"feature_map": relu_eps, "transform": encoding, "causal": causal, "chunk_size": chunk}
    if decays:
        arguments |= {"log_decay": DECAY.log(), "two_sided": not causal}
    expected, _ = linear_attention(q, k, v, **arguments)
    padded = [torch.nn.functional.pad(x, (0, 0, before, after), value=torch.nan) for x in (q, k, v)]
    mask = torch.nn.functional.pad(torch.ones(B, length, dtype=torch.bool), (before, after))
    out, _ = linear_attention(*padded, key_mask=mask, **arguments)
    assert_close(out[:, :, before : before + length], expected)


@given(st.integers(2, 30), st.integers(-(10**9), 10**9))
def test_scores_depend_on_the_difference_alone(length, shift):
    """One key seen by one query: its weight is a function of i - j (Toeplitz)."""
    encoding = Permute(1, M)
    q, k = torch.rand(2, 1, 1, 1, M, dtype=torch.float64).expand(2, 1, 1, length, M)
    positions = (torch.arange(length) + shift).view(1, -1, 1)
    tables = encoding.tables(positions)
    scores = encoding.transform(q, tables) @ encoding.transform(k, tables).transpose(-1, -2)
    for offset in range(-length + 1, length):
        diagonal = scores[0, 0].diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@given(st.tuples(*[st.integers(-50, 50)] * 6))
def test_in_two_dimensions_scores_depend_on_dx_and_dy_alone(numbers):
    x1, y1, x2, y2, dx, dy = numbers
    encoding = Permute(H, M, axes=2)
    q, k = torch.rand(2, 1, H, 1, M, dtype=torch.float64)

    def score(query_at, key_at):
        at = [encoding.tables(torch.tensor(p).view(1, 1, 2)) for p in (query_at, key_at)]
        return (encoding.transform(q, at[0]) * encoding.transform(k, at[1])).sum(-1)

    torch.testing.assert_close(score((x1 + dx, y1 + dy), (x1, y1)), score((x2 + dx, y2 + dy), (x2, y2)))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_gradcheck(causal):
    encoding = Permute(2, 3)
    q, k, v = (torch.randn(1, 2, 5, size, dtype=torch.float64, requires_grad=True) for size in (3, 3, 2))
    kv = torch.rand(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    z = torch.rand(1, 2, 3, dtype=torch.float64, requires_grad=True)
    log_decay = torch.tensor([0.6, 0.9], dtype=torch.float64).log().requires_grad_()
    segments = torch.tensor([[0, 0, 0, 1, 1]])

    def run(q, k, v, kv, z, log_decay):
        state = LinearState(kv, z, torch.tensor([7]))
        both = {"causal": causal, "two_sided": not causal, "log_decay": log_decay, "segments": segments, "state": state}
        out, after = linear_attention(q, k, v, feature_map=torch.exp, transform=encoding, chunk_size=2, **both)
        mask = torch.tensor([[True, True, False, True, False]])
        padded, last = linear_attention(q, k, v, feature_map=torch.exp, transform=encoding, chunk_size=2, key_mask=mask, **both)
        plain, total = linear_attention(q, k, v, feature_map=torch.exp, transform=encoding, causal=causal, chunk_size=2, state=state)
        return out, after.kv, after.z, padded, last.kv, last.z, plain, total.kv, total.z

    assert torch.autograd.gradcheck(run, (q, k, v, kv, z, log_decay))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_random_features_are_parameters_with_a_gradient(causal):
    q, k = (torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, 2, 7, 3, dtype=torch.float64)
    projection = orthogonal_features(2, 6, 4).double().requires_grad_()

    def run(projection):
        return linear_attention(q, k, v, feature_map=favor, parameters=[projection], causal=causal, chunk_size=3)[0]

    assert torch.autograd.gradcheck(run, projection)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_feature_map(name, causal):
    function = FEATURE_MAPS[name]
    parameters = [orthogonal_features(H, 6, M).double()] if name == "favor" else []
    q, k, v = tensors(3 * C + 5)
    out, _ = linear_attention(q, k, v, feature_map=function, parameters=parameters, causal=causal, chunk_size=C)
    expected = reference.kernel_attention(function(q, *parameters), function(k, *parameters), v, visible=visible(3 * C + 5, causal))
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_lower_precision_accumulates_in_float32(dtype, causal):
    q, k, v = tensors(500, dtype)
    encoding = Permute(H, M)
    arguments = {"feature_map": relu_eps, "transform": encoding, "causal": causal, "log_decay": DECAY.log() if causal else None}
    out, state = linear_attention(q, k, v, **arguments)
    assert out.dtype == dtype
    assert state.kv.dtype == state.z.dtype == torch.float32
    gradient = torch.randn_like(out)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, wide = linear_attention(*doubles, **arguments)
    assert_close(out, expected)
    torch.testing.assert_close(state.kv, wide.kv.float(), rtol=1e-4, atol=1e-4)  # sums, unlike the output, are not rounded
    for actual, wanted in zip(gradients(out, (q, k, v), gradient), gradients(expected, doubles, gradient.double()), strict=True):
        assert actual.dtype == dtype
        assert_close(actual, wanted)


def test_autocast_does_not_reach_the_sums():
    q, k, v = tensors(50, torch.float32, requires_grad=False)
    expected, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("strides", ["b h l d", "b l h d", "sliced", "expanded"])
def test_any_strides(strides):
    q, k, v = tensors(9, requires_grad=False)
    expected, _ = linear_attention(q.contiguous(), k.contiguous(), v.contiguous(), feature_map=relu_eps, causal=True, chunk_size=C)
    if strides == "b h l d":
        q, k, v = (x.contiguous() for x in (q, k, v))
    elif strides == "sliced":
        q, k, v = (torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v))
    elif strides == "expanded":
        q = q[:, :, :1].expand_as(q)
        expected, _ = linear_attention(q.contiguous(), k, v, feature_map=relu_eps, causal=True, chunk_size=C)
    out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True, chunk_size=C)
    assert_close(out, expected)


def test_without_keys_the_output_is_zero_and_so_is_the_gradient():
    q, k, v = tensors(9)
    for causal in (False, True):
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=causal, key_mask=torch.zeros(B, 9, dtype=torch.bool), chunk_size=C)
        assert not out.any()
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert not gradient.any()


@given(st.integers(1, 20), st.integers(0, 15), st.integers(1, 6), st.booleans(), st.booleans(), st.booleans())
def test_padding_at_the_end_leaves_no_trace_in_the_state(length, pads, chunk, decays, packed, given_positions):
    """A batch that was padded on the right can be gone on from, as if it had not been."""
    encoding = Permute(H, M)
    arguments = {"feature_map": relu_eps, "transform": encoding, "causal": True, "chunk_size": chunk}
    arguments |= {"log_decay": DECAY.log()} if decays else {}
    q, k, v = tensors(length + 3, requires_grad=False)
    facts = {}
    if packed:
        facts["segments"] = (torch.arange(length + 3) // 4).expand(B, -1)
    if given_positions:
        facts["positions"] = torch.arange(length + 3).view(1, -1, 1).expand(B, -1, -1) + 100

    def run(chosen, state=None, padding=0):
        x = [torch.nn.functional.pad(t[:, :, chosen], (0, 0, 0, padding), value=torch.nan) for t in (q, k, v)]
        mask = torch.nn.functional.pad(torch.ones(B, chosen.stop - chosen.start, dtype=torch.bool), (0, padding))
        here = {name: torch.cat([t[:, chosen], t[:, -1:].expand(-1, padding, *t.shape[2:]) + 7], dim=1) for name, t in facts.items()}
        return linear_attention(*x, state=state, key_mask=mask if padding else None, **here, **arguments)

    first, rest = slice(0, length), slice(length, length + 3)
    expected, _ = run(rest, run(first)[1])
    actual, _ = run(rest, run(first, padding=pads)[1])
    assert_close(actual, expected)


def test_a_row_of_padding_changes_no_state():
    encoding = Permute(H, M)
    arguments = {"feature_map": relu_eps, "transform": encoding, "causal": True, "log_decay": DECAY.log()}
    q, k, v = tensors(9, requires_grad=False)
    _, before = linear_attention(q, k, v, **arguments)
    for length in (1, 5):
        hidden = torch.zeros(B, length, dtype=torch.bool)
        _, after = linear_attention(q[:, :, :length], k[:, :, :length], v[:, :, :length], key_mask=hidden, state=before, **arguments)
        for name in ("kv", "z", "next_position"):
            torch.testing.assert_close(getattr(after, name), getattr(before, name))


def test_nan_in_the_padding_reaches_no_gradient():
    for causal in (False, True):
        q, k, v = tensors(9)
        with torch.no_grad():
            for x in (q, k, v):
                x[:, :, 6:] = torch.nan
        mask = (torch.arange(9) < 6).expand(B, -1)
        out, _ = linear_attention(q, k, v, feature_map=torch.exp, causal=causal, key_mask=mask, chunk_size=C)
        for gradient in torch.autograd.grad(out[:, :, :6].sum(), (q, k, v)):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("chunk", [1, 2, 6])
def test_a_nan_in_one_channel_stays_in_it(chunk):
    q, k, v = tensors(6, requires_grad=False)
    v[0, 0, 2, 1] = torch.nan
    out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True, chunk_size=chunk)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[0, 0, 2:, 1] = True
    assert torch.equal(out.isnan(), expected)


def test_the_gradient_in_autocast_is_that_without():
    found = []
    for enabled in (False, True):
        torch.manual_seed(1)
        q, k, v = tensors(30, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            for causal in (False, True):
                out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=causal, chunk_size=C)
                out.square().sum().backward()
        found.append([x.grad for x in (q, k, v)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_changing_a_state_after_use_is_noticed():
    q, k, v = tensors(9)
    _, state = linear_attention(q.detach(), k.detach(), v.detach(), feature_map=relu_eps, causal=True)
    out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True, state=state, chunk_size=C)
    state.kv.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_rows():
    q, k, v = (x[:0] for x in tensors(5, requires_grad=False))
    for causal in (False, True):
        out, state = linear_attention(q, k, v, feature_map=relu_eps, transform=Permute(H, M), causal=causal)
        assert out.shape == (0, H, 5, V)
        assert len(state.kv) == 0


def test_states_are_detached_and_selected_with_all_they_hold():
    q, k, v = tensors(5)
    segments = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 3]])
    _, state = linear_attention(q, k, v, feature_map=relu_eps, causal=True, segments=segments)
    assert state.kv.requires_grad
    assert not state.detach().kv.requires_grad
    assert state.select(torch.tensor([1, 0])).segment.tolist() == [3, 1]
    again, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True, segments=segments + 3, state=state)
    fresh, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=True, segments=segments + 3)
    assert_close(again[0], fresh[0])  # another segment
    assert (again[1] - fresh[1]).abs().max() > 1e-3, "the same segment does not go on"


def test_a_state_without_segments_goes_on_into_the_first():
    q, k, v = tensors(10, requires_grad=False)
    arguments = {"feature_map": relu_eps, "causal": True, "chunk_size": C}
    segments = torch.tensor([[0] * 7 + [1] * 3] * B)
    expected, _ = linear_attention(q, k, v, segments=segments, **arguments)
    _, state = linear_attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], **arguments)
    out, _ = linear_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], segments=segments[:, 4:], state=state, **arguments)
    assert_close(out, expected[:, :, 4:])


def test_initial_state_of_a_bidirectional_call_is_more_keys():
    q, k, v = tensors(12, requires_grad=False)
    encoding = Permute(H, M)
    expected, whole = linear_attention(q, k, v, feature_map=relu_eps, transform=encoding, chunk_size=C)
    _, state = linear_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], feature_map=relu_eps, transform=encoding, chunk_size=C)
    out, after = linear_attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], feature_map=relu_eps, transform=encoding, state=state)
    assert_close(out, expected[:, :, 5:])
    assert_close(after.kv, whole.kv)
    assert_close(after.z, whole.z)


def test_rows_may_stand_at_different_positions():
    """A batch whose rows go on from different positions is as its rows alone, and given positions are as counted ones."""
    encoding = Permute(H, M)
    q, k, v = tensors(11, requires_grad=False)
    arguments = {"feature_map": relu_eps, "transform": encoding, "causal": True, "log_decay": DECAY.log(), "chunk_size": C}
    positions = torch.stack([torch.arange(11), torch.arange(11) + 1000]).unsqueeze(-1)
    expected, _ = linear_attention(q, k, v, **arguments)
    given_, _ = linear_attention(q, k, v, positions=positions, **arguments)
    assert_close(given_, expected)
    _, state = linear_attention(q[:, :, :6], k[:, :, :6], v[:, :, :6], positions=positions[:, :6], **arguments)
    assert state.next_position.tolist() == [6, 1006]
    tail, state = linear_attention(q[:, :, 6:], k[:, :, 6:], v[:, :, 6:], state=state, **arguments)
    assert_close(tail, expected[:, :, 6:])
    assert state.next_position.tolist() == [11, 1011]
    reordered = state.select(torch.tensor([1, 0]))
    assert torch.equal(reordered.kv, state.kv.flip(0))
    assert reordered.next_position.tolist() == [1011, 11]


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_compiled_without_a_graph_break(causal):
    encoding = Permute(H, M)
    q, k, v = tensors(3 * C + 5, torch.float32)

    def run(q, k, v):
        return linear_attention(q, k, v, feature_map=relu_eps, transform=encoding, causal=causal, chunk_size=C)[0]

    expected = run(q, k, v)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_close(out, expected)
    gradient = torch.randn_like(out)
    for actual, wanted in zip(gradients(out, (q, k, v), gradient), gradients(expected, (q, k, v), gradient), strict=True):
        assert_close(actual, wanted)


GOOD = {"feature_map": relu_eps}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(B, H, 5)}, "q and k must have one shape"),
        ({"k": torch.zeros(B, H, 4, M)}, "q and k must have one shape"),
        ({"v": torch.zeros(B, H, 4, V)}, "v the same but for its size"),
        ({"q": torch.zeros(B, H, 0, M), "k": torch.zeros(B, H, 0, M), "v": torch.zeros(B, H, 0, V)}, "length of at least 1"),
        ({"log_decay": torch.zeros(H)}, "pass two_sided=True"),
        ({"log_decay": torch.zeros(H + 1), "causal": True}, r"log_decay must have shape \(3,\)"),
        ({"two_sided": True, "causal": True}, "two_sided=True is for bidirectional"),
        ({"key_mask": torch.ones(B, 5)}, "key_mask must be bool"),
        ({"key_mask": torch.ones(B, 4, dtype=torch.bool)}, r"\(2, 5\)"),
        ({"segments": torch.ones(B, 5)}, "segments must be int64"),
        ({"segments": torch.tensor([[0, 1, 0, 0, 0]] * B)}, "must not decrease"),
        ({"chunk_size": 0}, "chunk_size must be a whole number, at least 1"),
        ({"log_decay": torch.tensor([0.1] * H), "causal": True}, "0 or below"),
        ({"log_decay": torch.tensor([torch.nan] * H), "causal": True}, "0 or below"),
        ({"positions": torch.zeros(B, 9, 1, dtype=torch.int64)}, r"they have \(2, 9, 1\)"),
        ({"v": torch.zeros(B, H, 5, V, device="meta")}, "v is on meta, q on cpu"),
        ({"state": LinearState(torch.zeros(B, H, M, V + 1), torch.zeros(B, H, M), torch.zeros(B).long())}, "state is of shape"),
        ({"state": LinearState(torch.zeros(1, H, M, V), torch.zeros(1, H, M), torch.zeros(1).long())}, "state is of shape"),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {"q": torch.zeros(B, H, 5, M), "k": torch.zeros(B, H, 5, M), "v": torch.zeros(B, H, 5, V), **GOOD, **change}
    with pytest.raises(ValueError, match=message):
        linear_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
