"""The CPU kernel beyond the paper's equations, which ``test_linear.py`` tests: any sizes, threads, operators, loading, memory."""

import math
import subprocess
import sys

import pytest
import torch
from attention_cases import MODES, Case
from checks import assert_as_exact, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from permuteformer import PermuteFormerAttention
from permuteformer.ops import native
from permuteformer.ops.feature_map import FEATURE_MAPS, elu, relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.native import load
from permuteformer.ops.native_backend import MAPS, MARKS
from permuteformer.positions.permute import Permute

KERNEL = load()
pytestmark = pytest.mark.skipif(isinstance(KERNEL, str), reason=str(KERNEL))


def compare(case, **changes):
    """Compare the kernel with PyTorch in float64, and with its error in float32."""
    ways = (("native", torch.float32), ("torch", torch.float32), ("torch", torch.float64))
    assert_as_exact(*(case.run(dtype, backend, **changes) for backend, dtype in ways))


def tensors(b, h, length, m, d):
    return [torch.randn(b, length, h, size).transpose(1, 2) for size in (m, m, d)]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(MODES), st.integers(1, 150), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(sorted(MAPS)), st.integers(1, 4), st.integers(1, 70), st.integers(1, 70), st.integers(1, 3), st.integers(0, 10**6),
)  # fmt: skip
def test_any_sizes(mode, length, axes, masked, packed, has_global, normalize, feature_map, heads, features, values, batch, seed):
    axes = min(axes, features, heads)
    case = Case(
        mode, length, axes, masked, packed, has_global and mode == "two_sided", normalize, seed % 3 > 0, seed % 2 == 1,
        heads, features, values, batch, seed,
    )  # fmt: skip
    q, k, v = case.tensors
    # Sums of weights near zero would amplify rounding.
    case.tensors = (*(torch.where(x.abs() < 0.5, 0.5, x) for x in (q, k)), v)
    compare(case, feature_map=FEATURE_MAPS[feature_map])


@pytest.mark.parametrize("mode", MODES)
def test_long_rows(mode):
    """More than one part of a sum, and positions that the kernel counts past masked tokens."""
    for length in (5003, 100_003):
        compare(Case(mode, length, masked=True, heads=1, features=8, batch=1))


@pytest.mark.parametrize("mode", MODES)
def test_threads_change_nothing(mode):
    case = Case(mode, 5000, masked=True, features=16, values=8, batch=1)
    torch.set_num_threads(1)
    expected = case.run(torch.float32, "native")
    for threads in (2, 4):
        torch.set_num_threads(threads)
        for ours, one in zip(case.run(torch.float32, "native"), expected, strict=True):
            assert torch.equal(ours, one)


@pytest.mark.parametrize("mode", MODES)
def test_operators(mode):
    case = Case(mode, 70, masked=True, packed=mode != "bidirectional", has_global=mode == "two_sided", batch=1, features=12)
    q, k, v = (x.nan_to_num().float().requires_grad_() for x in case.tensors)
    state = [torch.rand(1, 3, 12, *tail, requires_grad=True) for tail in ((4,), ())]
    log_decay = None if case.log_decay is None else case.log_decay.clone().requires_grad_()
    rotation = case.encoding.rotation()
    marks = dict.fromkeys(MARKS) | {"mask": case.mask, "segments": case.segments, "global_mask": case.global_mask}
    marks |= {"cycles": rotation.cycles, "of_head": rotation.of_head, "start": torch.zeros(1, dtype=torch.int64)}
    number = {"bidirectional": native.TOTAL, "two_sided": native.TWO_SIDED}.get(mode, native.CAUSAL)
    both = state if mode == "two_sided" else [None, None]
    operator = torch.ops.permuteformer.attention
    torch.library.opcheck(operator, (q, k, v, *state, *both, log_decay, *marks.values(), 0, 1, number, 0))
    torch.library.opcheck(operator, (q, k, v, None, None, None, None, log_decay, *marks.values(), 0, 1, number, 0))
    if mode == "bidirectional":
        apart = marks | {"query_positions": torch.randint(70, (1, 3, 1))}
        torch.library.opcheck(operator, (q[:, :, :3].detach().requires_grad_(), k, v, *(None,) * 5, *apart.values(), 0, 1, number, 0))
    with pytest.raises(TypeError, match=r"float32.*torch.float64"):
        operator(k.double(), k, v, *(None,) * 5, *marks.values(), 0, 1, number, 0)


COMPILED = """
import torch
from permuteformer import linear_attention
from permuteformer.ops import feature_map

class Model(torch.nn.Module):
    def forward(self, x):
        return linear_attention(x, x, x, feature_map=feature_map.relu_eps, causal=True)[0]

x, longer = torch.randn(1, 8, 100, 64), torch.randn(1, 8, 3000, 64)
compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager", dynamic=True)(x)
torch.testing.assert_close(compiled, Model()(x))
program = torch.export.export(Model(), (x,), dynamic_shapes=({2: torch.export.Dim("length", min=2, max=10**6)},))
torch.testing.assert_close(program.module()(longer), Model()(longer))
assert any("permuteformer.attention" in part.code for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule))
"""


def test_compiled_before_any_call_and_for_any_length():
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"feature_map": elu}, "relu_eps, relu, squared_relu.*elu"),
        ({"plain_normalizer": True}, "plain_normalizer"),
        ({"chunk_size": 4}, "chunk_size"),
        ({"transform": Permute(2, 4, permutation=torch.tensor([[2, 3, 0, 1], [1, 0, 3, 2]]))}, "contiguous cycles"),
    ],
)
def test_unsupported_calls_name_the_reason(arguments, reason):
    q, k, v = tensors(1, 2, 9, 4, 4)
    arguments = {"feature_map": relu_eps, **arguments}
    with pytest.raises(ValueError, match=f"'native'.*{reason}"):
        linear_attention(q, k, v, backend="native", **arguments)
    linear_attention(q, k, v, **arguments)  # PyTorch runs it


def test_a_subclass_of_permute_is_not_taken_for_it():
    class Doubling(Permute):
        def transform(self, x, tables):
            return 2 * super().transform(x, tables)

    q, k, v = tensors(1, 2, 9, 4, 4)
    arguments = {"feature_map": relu_eps, "causal": True, "normalize": False}
    plain, doubled = (linear_attention(q, k, v, transform=kind(2, 4), **arguments)[0] for kind in (Permute, Doubling))
    assert_close(doubled, 4 * plain)


def test_a_permutation_changed_in_place_is_noticed():
    encoding, other = Permute(2, 8), Permute(2, 8, seed=1)
    q, k, v = tensors(1, 2, 40, 8, 4)
    expected, _ = linear_attention(q, k, v, feature_map=relu_eps, transform=other)
    linear_attention(q, k, v, feature_map=relu_eps, transform=encoding)
    encoding.permutation.copy_(other.permutation)
    for backend in ("native", "torch"):
        assert_close(linear_attention(q, k, v, feature_map=relu_eps, transform=encoding, backend=backend)[0], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 9])
def test_a_sum_of_weights_near_zero(causal, length):
    """Its reciprocal is not finite; the mean of values is."""
    q, k, v = tensors(1, 2, length, 8, 8)
    q, k = q.abs() * 1e-20, k.abs() * 1e-20
    ours, _ = linear_attention(q, k, v, feature_map=FEATURE_MAPS["relu"], causal=causal, backend="native")
    exact, _ = linear_attention(q.double(), k.double(), v.double(), feature_map=FEATURE_MAPS["relu"], causal=causal)
    torch.testing.assert_close(ours, exact.float(), rtol=1e-3, atol=1e-3)  # weights have few bits left


def test_a_decay_of_any_strides():
    q, k, v = tensors(1, 4, 70, 8, 8)
    for log_decay in (torch.rand(4, 3)[:, 1].neg(), torch.tensor([-0.1]).expand(4)):
        found = [
            linear_attention(q, k, v, feature_map=relu_eps, causal=True, log_decay=log_decay, backend=b)[0] for b in ("native", "torch")
        ]
        assert_close(*found)


def test_layers_used_in_inference_mode_can_be_trained():
    layer, x = PermuteFormerAttention(32, 4), torch.randn(1, 9, 32)
    with torch.inference_mode():
        layer(x)
        PermuteFormerAttention(32, 4)(x)
    layer(x)[0].sum().backward()
    assert layer.query.weight.grad.isfinite().all()


def test_without_a_kernel_pytorch_runs(tmp_path, monkeypatch):
    broken = tmp_path / "_kernel.so"
    broken.write_bytes(b"no library")
    q, k, v = tensors(1, 2, 9, 4, 4)
    for path, reason in ((broken, "does not load"), (tmp_path / "none.so", "was not built")):
        monkeypatch.setattr(native, "FILE", path)
        with pytest.warns(RuntimeWarning, match=reason):
            linear_attention(q, k, v, feature_map=relu_eps)
        with pytest.raises(ValueError, match=reason), pytest.warns(RuntimeWarning):
            linear_attention(q, k, v, feature_map=relu_eps, backend="native")


def test_a_kernel_of_another_version_is_not_used(monkeypatch):
    """Its struct would be read beyond its end."""

    class Longer(native.Attend):
        _fields_ = [("more", native.ctypes.c_int64)]  # noqa: RUF012

    monkeypatch.setattr(native, "Attend", Longer)
    with pytest.raises(OSError, match="another version"):
        native.Kernel(native.FILE)


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="baseline.*'mmx'"):
        KERNEL.use("mmx")


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
def test_after_memory_ran_out_it_still_works():
    ended = subprocess.run([sys.executable, "-c", MUCH], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "memory" in ended.stdout


def test_half_lives_of_many_heads():
    """r of a two-sided decay at the extremes of float32: weights underflow to zero, and nothing is NaN."""
    q, k, v = tensors(1, 2, 3000, 8, 4)
    log_decay = torch.tensor([math.log(1e-30), 0.0])
    out, _ = linear_attention(q, k, v, feature_map=relu_eps, two_sided=True, log_decay=log_decay, backend="native")
    assert_close(out[:, 0], v[:, 0])  # each token sees itself only
    assert out.isfinite().all()
