"""Linear attention by the CPU kernel, as a pair of torch operators: with gradients, for torch.compile and torch.export too."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from permuteformer.ops.call import LinearCall
from permuteformer.ops.checks import is_transformed
from permuteformer.ops.feature_map import FEATURE_MAPS
from permuteformer.ops.native import CAUSAL, TOTAL, TWO_SIDED, Call, Kernel, load

MAPS = {"relu_eps": 0, "relu": 1, "squared_relu": 2}
"""The kernel's feature maps, and their numbers in ``native/rows.h``."""

TENSORS = ("q", "k", "v")
STATES = ("kv", "z", "after_kv", "after_z", "log_decay")
MARKS = (
    *("cycles", "of_head", "start", "positions", "query_positions", "mask", "global_mask"),
    *("segments", "state_segment", "after_segment", "orders"),
)
"""Arguments of the operators: tensors and optional tensors with gradients, and optional ones without."""
SETTINGS = ("feature_map", "normalize", "mode", "reverse")
GIVEN = ", ".join(
    [*(f"Tensor {name}" for name in TENSORS), *(f"Tensor? {name}" for name in (*STATES, *MARKS)), *(f"int {name}" for name in SETTINGS)]
)

_library = torch.library.Library("permuteformer", "DEF")
_library.define(f"attention({GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"attention_back({GIVEN}, Tensor out, Tensor new_kv, Tensor new_z, Tensor totals, Tensor d_out, Tensor d_kv, Tensor d_z,"
    " bool learnable) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def unsupported(call: LinearCall) -> str | None:
    """Return why the kernel cannot run a call, or ``None``."""
    device, dtype = call.v.device.type, call.v.dtype
    if device != "cpu":
        return f"it runs on the CPU, and the tensors are on {device}"
    if is_transformed():
        return "torch.func and forward-mode differentiation do not see what it computes"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes in float32, and the values are {dtype}"
    if not has_map(call.feature_map):
        return f"it has the feature maps {', '.join(MAPS)}, not {getattr(call.feature_map, '__name__', repr(call.feature_map))}"
    if call.encoding is not None and call.encoding.rotation() is None:
        return "its only encodings are permutations with contiguous cycles"
    uses = {
        "plain_normalizer": call.normalizer == "plain",
        "chunk_size": call.chunk_size is not None,
        "query_mask": call.query_mask is not None,
    }
    for field, is_used in uses.items():
        if is_used:
            return f"it has no {field}"
    return kernel if isinstance(kernel := _load(), str) else None


def has_map(feature_map: Any) -> bool:
    """Return whether the kernel has this feature map."""
    name = getattr(feature_map, "__name__", "")
    return name in MAPS and FEATURE_MAPS.get(name) is feature_map


def _load() -> Kernel | str:
    kernel = load()
    if isinstance(kernel, str) and not torch.compiler.is_compiling():
        # One text and one place, so that Python shows it once.
        warnings.warn(f"the CPU kernel is not in use: {kernel}. PyTorch runs instead, several times slower", RuntimeWarning, stacklevel=1)
    return kernel


def run(call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``b h n v``, and the state after the last token, ``b h m v`` and ``b h m``."""
    tokens, state, after = call.tokens, call.state, call.after
    rotation = None if call.encoding is None else call.encoding.rotation()
    given = (
        *map(_rows, (call.q, call.k, call.v)),
        *((None, None) if state is None else (state.kv.float(), state.z.float())),
        *((None, None) if after is None else (after.kv.float(), after.z.float())),
        None if call.log_decay is None else call.log_decay.double(),
        *((None, None) if rotation is None else rotation),
        None if state is None else state.next_position,
        tokens.positions,
        call.query_positions,
        tokens.mask,
        tokens.global_mask,
        tokens.segments,
        call.first_segment,
        None if after is None else after.segment,
        tokens.orders,
        MAPS[call.feature_map.__name__],
        int(call.normalizer != "none"),
        CAUSAL if call.causal else TWO_SIDED if call.scans else TOTAL,
        int(call.reverse),
    )
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given[: len(TENSORS) + len(STATES)])
    is_watched = torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack()
    out, kv, z, _ = torch.ops.permuteformer.attention(*given) if needs_grad or is_watched else _attention(*given, keep=False)
    return out if out.dtype == call.v.dtype else out.to(call.v.dtype), kv, z


def _rows(x: Tensor) -> Tensor:
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def struct(
    sizes: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    given: tuple[Any, ...],
    kv: Tensor,
    z: Tensor,
    totals: Tensor | None = None,
    d_out: Tensor | None = None,
    d_state: tuple[Tensor, ...] = (),
    gradients: tuple[Tensor, ...] = (),
    d_states: tuple[Tensor | None, ...] = (),
) -> tuple[Call, list[Any]]:
    """Return the kernel's struct, and the tensors that must outlive the call.

    Args:
        sizes: batch, heads, length, queries, features, values.
        tensors: q, k, v and the output; none where they exist inside the kernel only.
        given: optional tensors and settings of the operator, in order.
        kv: the state after.
        z: likewise.
        totals: sums of weights, for the backward pass.
        d_out: the gradient of the output.
        d_state: gradients of the state after.
        gradients: results: of q, k and v.
        d_states: results: of ``STATES``.
    """
    count = len(STATES) + len(MARKS)
    kept = [x if x is None or x.is_contiguous() else x.contiguous() for x in given[:count]]
    pointers = [None if x is None else x.data_ptr() for x in kept]
    kv_in, z_in, after_kv, after_z, log_decay, cycles, of_head, start, _, _, mask, global_mask, *segments, orders = pointers
    q, k, v, out = map(_strides, tensors) if tensors else (_NONE,) * 4
    at, query_at = (_positions(x) for x in kept[count - len(MARKS) + 3 : count - len(MARKS) + 5])
    axes = 0 if kept[-1] is None else len(kept[-1])
    call = Call(
        *(*sizes, *given[count:], torch.get_num_threads(), q, k, v, out, kv_in, z_in, after_kv, after_z, kv.data_ptr(), z.data_ptr()),
        *(cycles, of_head, start, at, query_at, mask, global_mask, *segments, orders, axes, log_decay),
        *(None if totals is None else totals.data_ptr(),),
    )
    if d_state:
        call.d_kv, call.d_z = (x.data_ptr() for x in d_state)
    if d_out is not None:
        call.d_out = _strides(d_out)
        call.d_q, call.d_k, call.d_v = map(_strides, gradients)
    for name, x in zip(("d_kv_in", "d_z_in", "d_after_kv", "d_after_z", "d_log_decay"), d_states, strict=False):
        setattr(call, name, None if x is None else x.data_ptr())
    return call, [*kept, at]


_NONE = (None, 0, 0, 0)


def _strides(x: Tensor) -> tuple[int | None, ...]:
    return (x.data_ptr(), *x.stride()[:3]) if x.shape[2] else _NONE


def _positions(x: Tensor | None) -> tuple[int | None, ...]:
    return (None, 0, 0) if x is None else (x.data_ptr(), x.stride(0) if len(x) > 1 else 0, x.stride(1))


def _attention(q: Tensor, k: Tensor, v: Tensor, *given: Any, keep: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the kernel. Without ``keep``, one causal token takes a shorter path that saves nothing for a backward pass."""
    for x in (q, k, v, *given[:2]):
        if x is not None and x.dtype != torch.float32:
            raise TypeError(f"the CPU kernel computes in float32, got a tensor of {x.dtype}")
    out, kv, z, totals = _fake_attention(q, k, v, *given)
    is_step = not keep and given[-2] == CAUSAL and k.shape[2] == q.shape[2] == 1
    sizes = (*k.shape[:3], q.shape[2], k.shape[3], v.shape[3])
    call, kept = struct(sizes, (q, k, v, out), given, kv, z, None if is_step else totals)
    functions()["attention"](call)
    del kept
    return out, kv, z, totals


def _attention_back(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *given, out, kv, z, totals, d_out, d_kv, d_z, learnable = rest
    results = _fake_attention_back(q, k, v, *rest)
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    d_state = tuple(x.contiguous() for x in (d_kv, d_z))
    d_log = torch.zeros(k.shape[:2], dtype=torch.float64) if learnable else None
    sizes = (*k.shape[:3], q.shape[2], k.shape[3], v.shape[3])
    d_states = (*(x if x.numel() else None for x in results[3:7]), d_log)
    call, kept = struct(sizes, (q, k, v, out), tuple(given), kv, z, totals, d_out, d_state, results[:3], d_states)
    for x in results[3:7]:
        x.zero_()  # rows whose segment does not continue get no gradient
    functions()["attention_back"](call)
    del kept
    return *results[:7], results[7] if d_log is None else d_log.sum(0)


def functions() -> dict[str, Any]:
    """Return the functions of the kernel."""
    kernel = load()
    assert isinstance(kernel, Kernel), kernel
    return kernel.functions


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results. Heads of the output are neighbours, so that merging them copies nothing."""
    (b, h, n, m), d, mode = q.shape, v.shape[3], given[-2]
    totals = q.new_empty(0) if mode == TOTAL else q.new_empty(b, h, n)
    return q.new_empty(b, n, h, d).transpose(1, 2), q.new_empty(b, h, m, d), q.new_empty(b, h, m), totals


def _fake_attention_back(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None, after_kv: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    (b, h, _, m), d, mode = k.shape, v.shape[3], rest[-10]
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    gradients = [x if x.stride(-1) == 1 else x.new_empty(x.shape) for x in gradients]

    def state(is_there: bool) -> list[Tensor]:
        return [q.new_empty(b, h, m, d), q.new_empty(b, h, m)] if is_there else [q.new_empty(0), q.new_empty(0)]

    return *gradients, *state(kv is not None or mode == TOTAL), *state(after_kv is not None), q.new_empty(h, dtype=torch.float64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    count = len(TENSORS) + len(STATES) + len(MARKS)
    ctx.save_for_backward(*inputs[:count], *output)
    ctx.settings = inputs[count:]
    ctx.mark_non_differentiable(output[3])


@once_differentiable
def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *inputs, out, kv, z, totals = ctx.saved_tensors
    learnable = ctx.needs_input_grad[len(TENSORS) + len(STATES) - 1]
    found = torch.ops.permuteformer.attention_back(*inputs, *ctx.settings, out, kv, z, totals, d_out, d_kv, d_z, learnable)
    wanted = [d if need else None for d, need in zip(found, ctx.needs_input_grad, strict=False)]
    return *wanted, *(None,) * (len(MARKS) + len(SETTINGS))


_library.impl("attention", _attention, "CPU")
_library.impl("attention_back", _attention_back, "CPU")
torch.library.register_fake("permuteformer::attention", _fake_attention, lib=_library)
torch.library.register_fake("permuteformer::attention_back", _fake_attention_back, lib=_library)
torch.library.register_autograd("permuteformer::attention", _backward, setup_context=_save, lib=_library)
