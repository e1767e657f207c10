"""The CPU kernel computes what PyTorch computes in float64, which ``test_linear.py`` compares with the paper."""

import itertools
import math
import subprocess
import sys
from unittest import mock

import pytest
import torch
from checks import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from permuteformer.ops import native, reference
from permuteformer.ops.backend import MAPS, VARIABLE
from permuteformer.ops.feature_map import FEATURE_MAPS, elu, relu_eps
from permuteformer.ops.halves import absorb_keys, attend_to_all
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.native import load
from permuteformer.ops.state import LinearState
from permuteformer.positions.permute import Permute

KERNEL = load()
pytestmark = pytest.mark.skipif(isinstance(KERNEL, str), reason=str(KERNEL))


def tensors(b, h, length, m, d):
    """q, k, v as a projection gives them: ``b l h d`` seen as ``b h l d``."""
    return [torch.randn(b, length, h, size).transpose(1, 2) for size in (m, m, d)]


def decay_of(h):
    return torch.tensor([math.log(0.97) * n for n in range(h)])  # the first does not decay


def attend(q, k, v, backend, dtype, gradients=None, log_decay=None, state=None, **arguments):
    """Outputs and gradients of everything: a list of tensors."""
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    if log_decay is not None:
        inputs.append(log_decay.to(dtype).requires_grad_())
        arguments["log_decay"] = inputs[-1]
    if state is not None:
        kv, z = (x.to(dtype).requires_grad_() for x in state[:2])
        inputs += [kv, z]
        state = state._replace(kv=kv, z=z)
    arguments = {"feature_map": relu_eps, **arguments}
    out, after = linear_attention(*inputs[:3], backend=backend, state=state, **arguments)
    outputs = [out, after.kv, after.z]
    if gradients is None:
        return [x.detach() for x in outputs]
    found = torch.autograd.grad(outputs, inputs, [g.to(dtype) for g in gradients])
    return [x.detach() for x in (*outputs, *found)]


def assert_same(q, k, v, **arguments):
    """``assert_as_exact``, but for the output of hidden tokens, which means nothing."""
    b, h, _, m = q.shape
    mask = arguments.get("key_mask")
    gradients = [torch.randn(v.shape), torch.randn(b, h, m, v.shape[-1]), torch.randn(b, h, m)]
    if mask is not None:
        gradients[0] = gradients[0].masked_fill(~mask[:, None, :, None], 0)

    def compute(backend, dtype):
        out, *others = attend(q, k, v, backend, dtype, gradients, **arguments)
        return [out if mask is None else out.masked_fill(~mask[:, None, :, None], 0), *others]

    assert_as_exact(compute)


def assert_as_exact(compute):
    """What the kernel gives is what PyTorch gives in float64, nearly as well as PyTorch's own float32."""
    ways = (("torch", torch.float64), ("torch", torch.float32), ("native", torch.float32))
    for theirs, other, ours in zip(*(compute(backend, dtype) for backend, dtype in ways), strict=True):
        size = theirs.abs().max().clamp(min=1)  # sums of many tokens are rounded at their own size
        error, usual = ((x.double() - theirs).abs().max() for x in (ours, other))
        assert error <= 1e-6 * size + 5 * usual, (float(error), float(usual))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 1025, 2049])
@pytest.mark.parametrize(("causal", "decays"), [(False, False), (True, False), (True, True)], ids=["bidirectional", "causal", "decay"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_it_is_what_torch_computes(instruction_set, length, causal, decays, masked):
    q, k, v = tensors(2, 3, length, 13, 5)
    mask = torch.rand(2, length) > 0.3 if masked else None
    assert_same(q, k, v, transform=Permute(3, 13), causal=causal, log_decay=decay_of(3) if decays else None, key_mask=mask)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 150), st.integers(1, 70), st.integers(1, 70),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from(sorted(MAPS)), st.integers(1, 3), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_any_sizes(b, h, length, m, d, causal, decays, masked, name, axes, normalize, seed):
    torch.manual_seed(seed)
    q, k, v = tensors(b, h, length, m, d)
    q, k = (torch.where(x.abs() < 0.1, 0.1, x) for x in (q, k))  # sums of weights so small that rounding is all there is tell nothing
    axes = min(axes, m)
    positions = torch.randint(-(10**12), 10**12, (b, length, axes)) if axes > 1 or seed % 2 else None
    assert_same(
        q,
        k,
        v,
        feature_map=FEATURE_MAPS[name],
        transform=Permute(h, m, axes) if seed % 3 else None,
        positions=positions,
        causal=causal,
        log_decay=decay_of(h) if decays and causal else None,
        key_mask=torch.rand(b, length) > 0.4 if masked else None,
        normalize=normalize,
    )


@pytest.mark.parametrize("length", [1, 65, 1025])
@pytest.mark.parametrize("queries", [1, 3, 70])
@pytest.mark.parametrize("axes", [0, 1, 2], ids=["", "permuted", "two axes"])
def test_queries_of_other_tokens(instruction_set, length, queries, axes):
    """Outputs and gradients, with keys that are hidden."""
    _, k, v = tensors(2, 3, length, 13, 5)
    q = torch.randn(2, 3, queries, 13)
    d_out = torch.randn(2, 3, queries, 5)
    arguments = {
        "feature_map": relu_eps,
        "transform": Permute(3, 13, axes) if axes else None,
        "positions": torch.randint(-(10**12), 10**12, (1, length, max(axes, 1))),
        "query_positions": torch.randint(-(10**12), 10**12, (2, queries, max(axes, 1))),
        "key_mask": torch.arange(length) % 3 != torch.tensor([[1], [2]]),
    }

    def compute(backend, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend_to_all(*inputs, backend=backend, **arguments)
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out.to(dtype))]

    assert_as_exact(compute)


@pytest.mark.parametrize("goes_on", [False, True])
def test_keys_without_queries(instruction_set, goes_on, monkeypatch):
    """The state, and gradients of what is in it; of a state that is gone on from too."""
    _, k, v = tensors(2, 3, 130, 13, 5)
    kv, z, d_kv, d_z = (torch.randn(2, 3, 13, *tail) for tail in ((5,), (), (5,), ()))
    mask = torch.rand(2, 130) > 0.3

    def compute(backend, dtype):
        monkeypatch.setenv(VARIABLE, backend if backend == "torch" else "auto")
        inputs = [x.to(dtype).requires_grad_() for x in ((k, v, kv, z) if goes_on else (k, v))]
        state = LinearState(*inputs[2:], torch.zeros(2, dtype=torch.int64)) if goes_on else None
        positions = torch.arange(130).view(1, -1, 1)
        after = absorb_keys(*inputs[:2], feature_map=relu_eps, transform=Permute(3, 13), positions=positions, key_mask=mask, state=state)
        return [x.detach() for x in (*after[:2], *torch.autograd.grad(after[:2], inputs, [d_kv.to(dtype), d_z.to(dtype)]))]

    assert_as_exact(compute)


def test_it_is_the_paper():
    encoding = Permute(2, 10)
    q, k, v = tensors(2, 2, 40, 10, 4)
    out, _ = linear_attention(
        q, k, v, feature_map=relu_eps, transform=encoding, causal=True, log_decay=torch.tensor([0.5, 0.9]).log(), backend="native"
    )
    positions = torch.arange(40).view(1, -1, 1).expand(2, -1, -1)
    expected = reference.attention(
        q.double(),
        k.double(),
        v.double(),
        permutations=[encoding.permutation],
        positions=positions,
        visible=torch.ones(40, 40, dtype=torch.bool).tril(),
        feature_map=relu_eps,
        decay=torch.tensor([0.5, 0.9], dtype=torch.float64),
    )
    assert_close(out, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_any_strides(causal):
    """Whatever way they lie in memory, and whatever is beside them."""
    base = torch.randn(2, 90, 3, 40)
    ways = [
        base.transpose(1, 2),
        base.permute(0, 2, 1, 3).contiguous(),
        base[..., 5:29].transpose(1, 2),
        base[:, ::3, :, ::2].transpose(1, 2),
    ]
    ways.append(base[:1].expand(2, -1, -1, -1).transpose(1, 2))
    for x in ways:
        assert_same(x, x.flip(2), x[..., :7], transform=Permute(3, x.shape[-1]), causal=causal)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_threads_change_nothing(threads, causal):
    q, k, v = tensors(1, 3, 5000, 16, 8)
    gradients = [torch.randn(v.shape), torch.randn(1, 3, 16, 8), torch.randn(1, 3, 16)]
    arguments = {"transform": Permute(3, 16), "causal": causal, "log_decay": decay_of(3) if causal else None}
    torch.set_num_threads(1)
    expected = attend(q, k, v, "native", torch.float32, gradients, **arguments)
    torch.set_num_threads(threads)
    for ours, one in zip(attend(q, k, v, "native", torch.float32, gradients, **arguments), expected, strict=True):
        assert torch.equal(ours, one)


@pytest.mark.parametrize("length", [100_003])
@pytest.mark.parametrize("causal", [False, True])
def test_long(length, causal):
    q, k, v = tensors(1, 1, length, 8, 4)
    mask = torch.rand(1, length) > 0.1
    assert_same(q, k, v, transform=Permute(1, 8), causal=causal, log_decay=torch.tensor([-1e-3]) if causal else None, key_mask=mask)


@pytest.mark.parametrize("split", [1, 17, 64, 99])
@pytest.mark.parametrize("masked", [False, True])
def test_a_state_goes_on_in_either_backend(split, masked):
    q, k, v = tensors(2, 2, 100, 12, 6)
    mask = torch.rand(2, 100) > 0.3 if masked else None
    arguments = {"feature_map": relu_eps, "transform": Permute(2, 12), "causal": True, "log_decay": decay_of(2)}
    whole, end = linear_attention(q, k, v, key_mask=mask, backend="torch", **arguments)
    shown = torch.ones(2, 100, dtype=torch.bool) if mask is None else mask
    for first, second in itertools.product(("native", "torch"), repeat=2):
        out, state = [], None
        for part, backend in ((slice(0, split), first), (slice(split, 100), second)):
            of_part = None if mask is None else mask[:, part]
            y, state = linear_attention(
                q[:, :, part], k[:, :, part], v[:, :, part], key_mask=of_part, state=state, backend=backend, **arguments
            )
            out.append(y)
        hidden = ~shown[:, None, :, None]
        assert_close(torch.cat(out, dim=2).masked_fill(hidden, 0), whole.masked_fill(hidden, 0))
        assert_close(state.kv, end.kv)
        assert torch.equal(state.next_position, end.next_position)


def test_gradients_of_a_state():
    q, k, v = tensors(2, 2, 80, 12, 6)
    _, state = linear_attention(q, k, v, feature_map=relu_eps, transform=Permute(2, 12), causal=True)
    for causal in (False, True):
        assert_same(q, k, v, transform=Permute(2, 12), causal=causal, state=state, log_decay=decay_of(2) if causal else None)


def test_one_token_at_a_time():
    q, k, v = tensors(2, 2, 50, 12, 6)
    arguments = {"feature_map": relu_eps, "transform": Permute(2, 12), "causal": True, "log_decay": decay_of(2), "backend": "native"}
    whole, _ = linear_attention(q, k, v, **arguments)
    state, out = None, []
    for t in range(50):
        y, state = linear_attention(*(x[:, :, t : t + 1] for x in (q, k, v)), state=state, **arguments)
        out.append(y)
    assert_close(torch.cat(out, dim=2), whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 13, 63, 64, 99])
def test_what_is_not_finite_is_seen_by_those_who_see_it(bad, place):
    for spoilt in range(3):
        x = tensors(2, 2, 100, 12, 6)
        arguments = {"feature_map": relu_eps, "transform": Permute(2, 12), "causal": True, "backend": "native"}
        clean, _ = linear_attention(*x, **arguments)
        x[spoilt][0, 0, place] = bad
        out, _ = linear_attention(*x, **arguments)
        assert torch.equal(out[1], clean[1])
        assert torch.equal(out[0, 1], clean[0, 1])
        assert torch.equal(out[0, 0, :place], clean[0, 0, :place])
        assert not out[0, 0, place].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_tokens_may_hold_anything(causal):
    x = tensors(2, 2, 90, 12, 6)
    mask = torch.rand(2, 90) > 0.4
    arguments = {"feature_map": relu_eps, "transform": Permute(2, 12), "causal": causal, "key_mask": mask, "backend": "native"}
    clean, _ = linear_attention(*x, **arguments)
    spoilt = [t.clone().masked_fill(~mask[:, None, :, None], math.nan).requires_grad_() for t in x]
    out, _ = linear_attention(*spoilt, **arguments)
    shown = mask[:, None, :, None]
    assert torch.equal(out.masked_fill(~shown, 0), clean.masked_fill(~shown, 0))
    torch.where(shown, out, 0).sum().backward()
    for t in spoilt:
        assert t.grad.isfinite().all()
        assert (t.grad.masked_fill(shown, 0) == 0).all()


def test_nobody_is_seen():
    q, k, v = tensors(1, 2, 70, 12, 6)
    mask = torch.zeros(1, 70, dtype=torch.bool)
    for causal in (False, True):
        out, state = linear_attention(q, k, v, feature_map=relu_eps, causal=causal, key_mask=mask, backend="native")
        assert (out == 0).all()
        assert (state.kv == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    q, k, v = (x.to(dtype) for x in tensors(1, 2, 70, 12, 6))
    arguments = {"feature_map": relu_eps, "transform": Permute(2, 12), "causal": True}
    ours, theirs = (linear_attention(q, k, v, backend=backend, **arguments)[0] for backend in ("native", "torch"))
    assert ours.dtype == dtype
    assert_close(ours, theirs)


def test_the_operators_are_what_torch_asks_of_operators():
    x = [t.requires_grad_() for t in tensors(1, 2, 70, 12, 6)]
    carry = torch.zeros(1, 2, 12, 6), torch.zeros(1, 2, 12)
    (cycles, _, of_head, _), start = Permute(2, 12).rotation(torch.device("cpu")), torch.zeros(1, dtype=torch.int64)
    turns = (cycles, of_head)
    shared = (*turns, start, None, None, torch.rand(1, 70) > 0.2, 0, True)
    torch.library.opcheck(torch.ops.permuteformer.total, (*x, *carry, *shared))
    torch.library.opcheck(torch.ops.permuteformer.total, (*x, None, None, *shared))
    for few in (0, 3):
        queries = torch.randn(1, 2, few, 12, requires_grad=True)
        apart = (*turns, start, None, torch.randint(70, (1, few, 1)), None, 0, True)
        torch.library.opcheck(torch.ops.permuteformer.total, (queries, *x[1:], None, None, *apart))
    torch.library.opcheck(torch.ops.permuteformer.scan, (*x, *carry, *shared, decay_of(2).requires_grad_(), True))
    beside = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in torch.randn(1, 70, 60).split([24, 24, 12], dim=-1)]
    torch.library.opcheck(torch.ops.permuteformer.total, (*(part.requires_grad_() for part in beside), *carry, *shared))


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_and_exported(causal):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoding = Permute(2, 12)

        def forward(self, q, k, v):
            return linear_attention(q, k, v, feature_map=relu_eps, transform=self.encoding, causal=causal, backend="native")[0] * 2

    model, x = Model(), tensors(1, 2, 70, 12, 6)
    expected = model(*x)
    assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(*x), expected)
    program = torch.export.export(model, tuple(x))
    assert any("permuteformer" in part.code for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule))
    assert_close(program.module()(*x), expected)


COMPILED = """
import torch
from permuteformer import linear_attention
from permuteformer.ops import feature_map, gpu

class Model(torch.nn.Module):
    def forward(self, x):
        return linear_attention(x, x, x, feature_map=feature_map.relu_eps, causal=True)[0] + (gpu.look().tf32 is None)

x, longer = torch.randn(1, 8, 100, 64), torch.randn(1, 8, 3000, 64)
compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager", dynamic=True)(x)
torch.testing.assert_close(compiled, Model()(x))
program = torch.export.export(Model(), (x,), dynamic_shapes=({2: torch.export.Dim("length", min=2, max=10**6)},))
torch.testing.assert_close(program.module()(longer), Model()(longer))
assert any("permuteformer.scan" in part.code for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule))
"""


def test_compiled_before_anything_was_called_and_for_any_length():
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


def test_autocast():
    q, k, v = tensors(1, 2, 70, 12, 6)
    expected, _ = linear_attention(q, k, v, feature_map=relu_eps, backend="native")
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, backend="native")
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"feature_map": elu}, "it has the feature maps relu_eps, relu, squared_relu, and this is elu"),
        ({"segments": torch.zeros(1, 9, dtype=torch.int64)}, "it does not know segments"),
        ({"plain_normalizer": True}, "it does not know plain_normalizer"),
        ({"chunk_size": 4}, "it does not know chunk_size"),
        ({"transform": Permute(2, 4, permutation=torch.tensor([[2, 3, 0, 1], [1, 0, 3, 2]]))}, "whose cycles are contiguous"),
    ],
)
def test_what_it_cannot_do_it_says(arguments, words):
    q, k, v = tensors(1, 2, 9, 4, 4)
    arguments = {"feature_map": relu_eps, **arguments}
    with pytest.raises(ValueError, match=f"backend 'native' cannot be used here: .*{words}"):
        linear_attention(q, k, v, backend="native", **arguments)
    linear_attention(q, k, v, **arguments)  # and PyTorch does it


def test_a_permutation_of_ones_own_is_not_taken_for_ours():
    class Doubling(Permute):
        def transform(self, x, tables):
            return 2 * super().transform(x, tables)

    q, k, v = tensors(1, 2, 9, 4, 4)
    arguments = {"feature_map": relu_eps, "causal": True, "normalize": False}
    plain, own = (linear_attention(q, k, v, transform=kind(2, 4), **arguments)[0] for kind in (Permute, Doubling))
    assert_close(own, 4 * plain)


@pytest.mark.parametrize("causal", [False, True])
def test_a_second_derivative_is_refused(causal):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 9, 4, 4))
    out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=causal, backend="native")
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_environment_chooses(monkeypatch):
    q, k, v = tensors(1, 2, 9, 4, 4)
    monkeypatch.setenv(VARIABLE, "native")
    with pytest.raises(ValueError, match="cannot be used here"):
        linear_attention(q, k, v, feature_map=elu)
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ValueError, match="PERMUTEFORMER_BACKEND must be one of auto, native, cuda, torch; it is 'fast'"):
        linear_attention(q, k, v, feature_map=relu_eps)


def test_a_kernel_that_does_not_load_is_no_end(tmp_path, monkeypatch):
    broken = tmp_path / "_kernel.so"
    broken.write_bytes(b"no library")
    for path, words in ((broken, "it does not load"), (tmp_path / "none.so", "it was not built")):
        monkeypatch.setattr(native, "FILE", path)
        native.forget()
        try:
            assert words in load()
            q, k, v = tensors(1, 2, 9, 4, 4)
            with pytest.warns(RuntimeWarning, match=f"the CPU kernel is not in use: {words}.* Linear attention goes on in PyTorch"):
                linear_attention(q, k, v, feature_map=relu_eps)
            with pytest.raises(ValueError, match=words):
                linear_attention(q, k, v, feature_map=relu_eps, backend="native")
        finally:
            native.forget()


def test_a_kernel_of_another_version_is_not_used(tmp_path):
    """Its fields are others, and would be read from beyond the end of ours."""
    with mock.patch.dict(native.FIELDS, attend=native.FIELDS["attend"] + 1), pytest.raises(OSError, match="is of another version"):
        native.Kernel(native.FILE)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("permutation", [Permute(1, 8), Permute(8, 8), Permute(2, 4), Permute(2, 16)], ids=str)
def test_a_permutation_of_other_sizes_is_refused(permutation, backend):
    q, k, v = tensors(1, 2, 9, 8, 8)
    at = torch.arange(9).view(1, 9, 1)
    arguments = {"feature_map": relu_eps, "transform": permutation}
    for way in (
        lambda: linear_attention(q, k, v, backend=backend, **arguments),
        lambda: linear_attention(q, k, v, backend=backend, causal=True, **arguments),
        lambda: attend_to_all(q, k, v, backend=backend, **arguments),
        lambda: attend_to_all(q[:, :, :2], k, v, backend=backend, query_positions=at[:, :2], **arguments),
        lambda: absorb_keys(k, v, positions=at, **arguments),
    ):
        with pytest.raises(ValueError, match=r"transform permutes \d heads and \d+ features; there are 2 and 8"):
            way()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_positions_of_too_few_axes_are_refused(backend):
    q, k, v = tensors(1, 2, 9, 8, 8)
    one, two = torch.zeros(1, 9, 1, dtype=torch.int64), torch.zeros(1, 9, 2, dtype=torch.int64)
    arguments = {"feature_map": relu_eps, "transform": Permute(2, 8, axes=2), "backend": backend}
    for positions, words in ((None, "there are none"), (one, r"they have shape \(1, 9, 1\)")):
        with pytest.raises(ValueError, match=f"with 2 axes, as transform has; {words}"):
            linear_attention(q, k, v, positions=positions, **arguments)
        with pytest.raises(ValueError, match=f"with 2 axes, as transform has; {words}"):
            attend_to_all(q, k, v, positions=positions, **arguments)
    with pytest.raises(ValueError, match=r"they have shape \(1, 2, 1\)"):
        attend_to_all(q[:, :, :2], k, v, positions=two, query_positions=one[:, :2], **arguments)


def test_a_decay_of_any_strides():
    q, k, v = tensors(1, 4, 70, 8, 8)
    wide, alike = torch.rand(4, 3)[:, 1].neg(), torch.tensor([-0.1]).expand(4)
    for log_decay in (wide, alike):
        arguments = {"feature_map": relu_eps, "causal": True}
        ours, _ = linear_attention(q, k, v, log_decay=log_decay, backend="native", **arguments)
        theirs, _ = linear_attention(q, k, v, log_decay=log_decay, backend="torch", **arguments)
        assert_close(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 9])
def test_a_total_that_is_all_but_zero(causal, length):
    """One over it is not finite; the mean of values is."""
    q, k, v = tensors(1, 2, length, 8, 8)
    q, k = q.abs() * 1e-20, k.abs() * 1e-20
    ours, _ = linear_attention(q, k, v, feature_map=FEATURE_MAPS["relu"], causal=causal, backend="native")
    exact, _ = linear_attention(q.double(), k.double(), v.double(), feature_map=FEATURE_MAPS["relu"], causal=causal)
    torch.testing.assert_close(ours, exact.float(), rtol=1e-3, atol=1e-3)  # weights have few bits left


def test_keys_and_values_of_two_types():
    _, k, v = tensors(1, 2, 9, 8, 8)
    at = torch.arange(9).view(1, 9, 1)
    expected = absorb_keys(k, v, feature_map=relu_eps, positions=at)
    assert_close(absorb_keys(k.double(), v, feature_map=relu_eps, positions=at).kv.float(), expected.kv)
    none = (None,) * 6
    with pytest.raises(TypeError, match=r"computes in float32; there is a tensor of torch.float64"):
        torch.ops.permuteformer.total(k.double(), k, v, None, None, *none, 0, True)


def test_a_gradient_that_nothing_was_kept_for_is_refused():
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 9, 8, 8))
    kv, z = torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8)
    out, *_ = torch.ops.permuteformer.scan(q, k, v, kv, z, *(None,) * 6, 0, True, None, False)
    with pytest.raises(RuntimeError, match="no gradient of permuteformer::scan with keep=False"):
        out.sum().backward()


def test_rows_that_overlap():
    """Windows of one signal."""
    signal = torch.randn(1, 2, 40, requires_grad=True)
    windows = signal.unfold(2, 16, 1)[:, :, :5]
    gradients = []
    for backend in ("native", "torch"):
        out, _ = linear_attention(windows, windows, windows, feature_map=relu_eps, backend=backend)
        gradients.append(torch.autograd.grad(out.square().sum(), signal)[0])
    assert_close(*gradients)


MUCH = """
import resource
import torch
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention

def attend(m, backend="native"):
    torch.manual_seed(0)
    q, v = torch.randn(1, 1, 8, m), torch.randn(1, 1, 8, 1)
    return linear_attention(q, q, v, feature_map=relu_eps, backend=backend)[0]

torch.set_num_threads(1)
attend(64)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400_000_000, resource.RLIM_INFINITY))
try:
    attend(2_000_000)
except MemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for m in (100_000, 64, 3000):
    torch.testing.assert_close(attend(m), attend(m, "torch"), rtol=1e-3, atol=1e-3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_after_memory_ran_out_it_goes_on():
    ended = subprocess.run([sys.executable, "-c", MUCH], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "not enough memory for the buffers of linear attention" in ended.stdout


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match=r"instruction set must be one of .*baseline; it is 'mmx'"):
        KERNEL.use("mmx")
