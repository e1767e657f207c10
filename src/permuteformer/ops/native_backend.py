"""Linear attention by the CPU kernel, as operators of torch: with gradients, and known to torch.compile and torch.export."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from permuteformer.ops import memory
from permuteformer.ops.backend import MAPS, Work
from permuteformer.ops.beside import empty_beside
from permuteformer.ops.native import TENSOR, Kernel, load

SHARED = (
    "Tensor? cycles, Tensor? of_head, Tensor? start, Tensor? positions, Tensor? query_positions, Tensor? shown, int map, bool normalize"
)
OPERATORS = {
    "total": f"(Tensor q, Tensor k, Tensor v, Tensor? kv, Tensor? z, {SHARED}) -> (Tensor, Tensor, Tensor)",
    "total_back": (
        f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor kv, Tensor z, {SHARED}, Tensor d_out, Tensor d_kv, Tensor d_z)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "scan": (
        f"(Tensor q, Tensor k, Tensor v, Tensor kv, Tensor z, {SHARED}, Tensor? log_decay, bool keep) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "scan_back": (
        f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor kv, Tensor z, {SHARED}, Tensor? log_decay, bool learnable, Tensor kept,"
        " Tensor d_out, Tensor d_kv, Tensor d_z) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
}

_library = torch.library.Library("permuteformer", "DEF")
for _name, _schema in OPERATORS.items():
    _library.define(_name + _schema)


def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """What ``Work`` says, of tensors of any strides, in float32."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    turns = (None, None) if work.rotation is None else (work.rotation.cycles, work.rotation.of_head)
    start = None if work.start is None else work.start.contiguous()
    shared = (*turns, start, work.positions, work.query_positions, work.shown, MAPS[work.feature_map], work.normalize)
    ops = torch.ops.permuteformer
    if not work.causal:
        out, kv, z = ops.total(q, k, v, *(None if x is None else x.contiguous() for x in (kv, z)), *shared)
        return out, kv, z
    assert kv is not None
    assert z is not None
    log_decay = None if work.log_decay is None else work.log_decay.contiguous()
    inputs = (q, k, v, kv, z) if log_decay is None else (q, k, v, kv, z, log_decay)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    out, kv, z, _ = ops.scan(q, k, v, kv.contiguous(), z.contiguous(), *shared, log_decay, keep)
    return out, kv, z


class Shared(NamedTuple):
    """What all operators are given besides q, k, v and the carry, in their order."""

    cycles: Tensor | None
    of_head: Tensor | None
    start: Tensor | None
    positions: Tensor | None
    query_positions: Tensor | None
    shown: Tensor | None
    map: int
    normalize: bool


class _Gradients(NamedTuple):
    """Of the outputs, as they are given, and room for those of the inputs."""

    d_out: Tensor
    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    d_kv: Tensor
    d_z: Tensor
    d_log_decay: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> _Gradients:
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        return cls(d_out, *_empty_gradients(q, k, v), *(x.clone(memory_format=torch.contiguous_format) for x in (d_kv, d_z)))


def _call(
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    kv: Tensor,
    z: Tensor,
    shared: Shared,
    log_decay: Tensor | None = None,
    kept: Tensor | None = None,
    gradients: _Gradients | None = None,
) -> None:
    """Write the fields of ``struct Call``, and do what ``name`` says."""
    kernel = load()
    assert isinstance(kernel, Kernel), kernel
    q, k, v = inputs
    for x in (*inputs, kv, z):
        if x.dtype != torch.float32:
            raise TypeError(f"the CPU kernel computes in float32; there is a tensor of {x.dtype}")
    sizes = (*k.shape[:3], q.shape[2], k.shape[3], v.shape[-1])
    d_tensors, carries = ((), ()) if gradients is None else (gradients[:4], gradients[4:])
    fields, kept_alive = fields_of(sizes, (*inputs, out), kv, z, shared, log_decay, kept, d_tensors, carries)
    kernel(name, fields)
    del kept_alive


def fields_of(
    sizes: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    kv: Tensor,
    z: Tensor,
    shared: Shared,
    log_decay: Tensor | None = None,
    kept: Tensor | None = None,
    d_tensors: tuple[Tensor, ...] = (),
    carries: tuple[Tensor | None, ...] = (),
) -> tuple[list[int], Any]:
    """The fields of ``struct Call``, and what must be there until it is done.

    ``sizes``: batch, heads, length, queries, features, values. ``tensors``: q, k, v and the output, where they are in memory;
    ``d_tensors``, of the output, q, k and v; ``carries``: gradients of the carry, and of the decay.
    """
    shown = shared.shown
    if shown is not None and shown.stride(-1) != 1:
        shown = shown.contiguous()
    fields = [*sizes, shared.map, int(shared.normalize), torch.get_num_threads()]
    fields += _tensors(tensors)
    fields += map(place, (kv, z, *shared[:3]))
    places = [_rows(x) for x in (shared.positions, shared.query_positions)]
    for at in places:
        fields += (0, 0, 0) if at is None else (at.data_ptr(), at.stride(0) * (at.shape[0] > 1), at.stride(1))
    fields += (0, 0) if shown is None else (shown.data_ptr(), shown.stride(0))
    fields += place(log_decay), place(kept)
    fields += _tensors(d_tensors)
    fields += map(place, (*carries, *(None,) * (3 - len(carries))))
    return fields, (shown, places)


def _tensors(tensors: tuple[Tensor, ...]) -> list[int]:
    """Four of ``struct Tensor4``; where there are no queries, their tensors are nowhere."""
    if not tensors:
        return [0] * (4 * TENSOR)
    return [number for x in tensors for number in (x.data_ptr() if x.shape[2] else 0, *x.stride()[:3])]


def _rows(positions: Tensor | None) -> Tensor | None:
    """Positions whose axes are neighbours in memory."""
    return positions if positions is None or positions.stride(-1) == 1 or positions.shape[-1] == 1 else positions.contiguous()


def place(x: Tensor | None) -> int:
    """Where its numbers are; 0 for none."""
    return 0 if x is None else x.data_ptr()


def _output(q: Tensor, v: Tensor) -> Tensor:
    """``b h l v`` whose heads lie side by side, as the layer will want them."""
    b, h, length, _ = q.shape
    return memory.empty(b, length, h, v.shape[-1], device=v.device, dtype=v.dtype).transpose(1, 2)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Room for those of q, k and v: queries of other tokens come from a projection of their own."""
    made = empty_beside((q, k, v)) if q.shape[2] == k.shape[2] else [memory.empty_like(q), *empty_beside((k, v))]
    # Rows that overlap have no layout of their own to be taken over.
    return [x if x.stride(-1) == 1 else x.new_empty(x.shape) for x in made]


def _carry(q: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None) -> tuple[Tensor, Tensor]:
    """A carry to add to: nothing yet, or one's own of what is given."""
    if kv is None or z is None:
        b, h, _, m = q.shape
        return q.new_zeros(b, h, m, v.shape[-1]), q.new_zeros(b, h, m)
    return kv.clone(), z.clone()


def _total(q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None, *shared: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, (kv, z) = _output(q, v), _carry(q, v, kv, z)
    _call("total", (q, k, v), out, kv, z, Shared(*shared))
    return out, kv, z


def _total_back(q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *shared, d_out, d_kv, d_z = rest
    gradients = _Gradients.of(q, k, v, d_out, d_kv, d_z)
    _call("total_back", (q, k, v), out, kv, z, Shared(*shared), gradients=gradients)
    return gradients[1:6]


def _scan(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *shared, log_decay, keep = rest
    out, kv, z, kept = _output(q, v), kv.clone(), z.clone(), _kept(q, v, keep)
    _call("scan", (q, k, v), out, kv, z, Shared(*shared), log_decay, kept if keep else None)
    return out, kv, z, kept


def _scan_back(q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *shared, log_decay, learnable, kept, d_out, d_kv, d_z = rest
    if q.numel() and not kept.numel():
        raise RuntimeError("there is no gradient of permuteformer::scan with keep=False: nothing was kept for it")
    d_log = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    gradients = _Gradients.of(q, k, v, d_out, d_kv, d_z)._replace(d_log_decay=d_log if learnable else None)
    _call("scan_back", (q, k, v), out, kv, z, Shared(*shared), log_decay, kept, gradients)
    return *gradients[1:6], d_log.sum(0).float()


def _kept(q: Tensor, v: Tensor, keep: bool) -> Tensor:
    """Room for the carries that the backward pass starts from again."""
    kernel = load()
    tokens = kernel.block * kernel.group if isinstance(kernel, Kernel) else 1
    b, h, length, m = q.shape
    # Not a dimension of them that is 1 for short rows, which a graph would be for then.
    return q.new_empty(b, h, -(-length // tokens) * m * (v.shape[-1] + 1) if keep else 0)


def _fake_total(q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None, *shared: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _output(q, v), *_carry(q, v, kv, z)


def _fake_total_back(q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_empty_gradients(q, k, v), kv.new_empty(kv.shape), z.new_empty(z.shape)


def _fake_scan(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_fake_total(q, k, v, kv, z), _kept(q, v, rest[-1])


def _fake_scan_back(q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_fake_total_back(q, k, v, out, kv, z), q.new_empty(q.shape[1])


def _keep_total(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, kv, _, *shared = inputs
    ctx.has_carry = kv is not None
    ctx.save_for_backward(q, k, v, *output, *(x for x in shared if isinstance(x, Tensor)))
    ctx.shared = [None if isinstance(x, Tensor) else (x,) for x in shared]


@once_differentiable
def _back_total(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, kv, z, *tensors = ctx.saved_tensors
    shared = _again(ctx.shared, tensors)
    *d, d_kv, d_z = torch.ops.permuteformer.total_back(q, k, v, out, kv, z, *shared, d_out, d_kv, d_z)
    return *d, *((d_kv, d_z) if ctx.has_carry else (None, None)), *(None,) * len(shared)


def _keep_scan(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, _, *shared, _ = inputs
    ctx.save_for_backward(q, k, v, *output, *(x for x in shared if isinstance(x, Tensor)))
    ctx.shared = [None if isinstance(x, Tensor) else (x,) for x in shared]
    ctx.mark_non_differentiable(output[3])


@once_differentiable
def _back_scan(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, kv, z, kept, *tensors = ctx.saved_tensors
    *shared, log_decay = _again(ctx.shared, tensors)
    learnable = ctx.needs_input_grad[-2]  # which is not the paper's r
    *d, d_log = torch.ops.permuteformer.scan_back(q, k, v, out, kv, z, *shared, log_decay, learnable, kept, d_out, d_kv, d_z)
    return *d, *(None,) * len(shared), d_log if learnable else None, None


def _again(places: list[Any], tensors: list[Tensor]) -> list[Any]:
    left = iter(tensors)
    return [next(left) if place is None else place[0] for place in places]


for _name, _real, _fake in (
    ("total", _total, _fake_total),
    ("total_back", _total_back, _fake_total_back),
    ("scan", _scan, _fake_scan),
    ("scan_back", _scan_back, _fake_scan_back),
):
    _library.impl(_name, _real, "CPU")
    torch.library.register_fake(f"permuteformer::{_name}", _fake, lib=_library)
torch.library.register_autograd("permuteformer::total", _back_total, setup_context=_keep_total, lib=_library)
torch.library.register_autograd("permuteformer::scan", _back_scan, setup_context=_keep_scan, lib=_library)
