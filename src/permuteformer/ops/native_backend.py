"""Linear attention by the CPU kernel, as operators of torch: with gradients, and known to torch.compile and torch.export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from permuteformer.ops.backend import MAPS
from permuteformer.ops.native import Kernel, load

SHARED = "Tensor cycles, Tensor of_head, Tensor start, Tensor? positions, Tensor? shown, int map, bool normalize"
OPERATORS = {
    "total": f"(Tensor q, Tensor k, Tensor v, Tensor kv, Tensor z, {SHARED}) -> (Tensor, Tensor, Tensor)",
    "total_back": (
        f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor kv, Tensor z, {SHARED}, Tensor d_out, Tensor d_kv, Tensor d_z)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "scan": (
        f"(Tensor q, Tensor k, Tensor v, Tensor kv, Tensor z, {SHARED}, Tensor? log_decay, bool keep) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "scan_back": (
        f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor kv, Tensor z, {SHARED}, Tensor? log_decay, Tensor kept,"
        " Tensor d_out, Tensor d_kv, Tensor d_z) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
}

_library = torch.library.Library("permuteformer", "DEF")
for _name, _schema in OPERATORS.items():
    _library.define(_name + _schema)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    z: Tensor,
    *,
    cycles: tuple[Tensor, Tensor] | None,
    start: Tensor,
    positions: Tensor | None,
    shown: Tensor | None,
    feature_map: str,
    normalize: bool,
    causal: bool,
    log_decay: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``b h l v``, and the carry after the last token: ``b h m v`` and ``b h m``. All of them float32.

    Args:
        q: ``b h l m``, as k; v is ``b h l v``. Any strides.
        kv: the carry before the first token, in the absolute frame.
        z: of it the normaliser.
        cycles: of a permutation whose cycles are contiguous: see ``Permute.rotation``.
        start: ``b``: where counted positions begin.
        positions: ``b l a`` or ``1 l a``, where they are given.
        shown: ``b l`` bool.
        feature_map: a name of ``backend.MAPS``.
        normalize: divide by the sum of weights.
        causal: see no key after the query.
        log_decay: ``h``.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if cycles is None:
        none = torch.zeros(q.shape[1] + 1, dtype=torch.int32)
        cycles = none.new_zeros(0, 3), none
    shared = (*cycles, start.contiguous(), positions, shown, MAPS[feature_map], normalize)
    ops = torch.ops.permuteformer
    if not causal:
        out, kv, z = ops.total(q, k, v, kv.contiguous(), z.contiguous(), *shared)
        return out, kv, z
    inputs = (q, k, v, kv, z) if log_decay is None else (q, k, v, kv, z, log_decay)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    out, kv, z, _ = ops.scan(q, k, v, kv.contiguous(), z.contiguous(), *shared, log_decay, keep)
    return out, kv, z


def _call(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kv: Tensor,
    z: Tensor,
    cycles: Tensor,
    of_head: Tensor,
    start: Tensor,
    positions: Tensor | None,
    shown: Tensor | None,
    feature_map: int,
    normalize: bool,
    log_decay: Tensor | None = None,
    kept: Tensor | None = None,
    gradients: tuple[Tensor, ...] = (),
    last: tuple[Tensor | None, ...] = (),
) -> None:
    kernel = load()
    assert isinstance(kernel, Kernel), kernel
    fields = [*q.shape, v.shape[-1], feature_map, int(normalize), torch.get_num_threads()]
    for x in (q, k, v, out):
        fields += x.data_ptr(), *x.stride()[:3]
    fields += kv.data_ptr(), z.data_ptr(), cycles.data_ptr(), of_head.data_ptr(), start.data_ptr()
    if positions is None:
        fields += 0, 0, 0
    else:
        fields += positions.data_ptr(), 0 if len(positions) == 1 else positions.stride(0), positions.stride(1)
    fields += (0, 0) if shown is None else (shown.data_ptr(), shown.stride(0))
    fields += _place(log_decay), _place(kept)
    for x in gradients or (None,) * 4:
        fields += (0, 0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:3])
    fields += map(_place, last or (None,) * 3)
    kernel(name, fields)


def _place(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _plain(shared: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positions and mask as the kernel reads them: numbers of a token side by side, rows of a mask too."""
    cycles, of_head, start, positions, shown, *rest = shared
    if positions is not None and positions.stride(-1) != 1 and positions.shape[-1] > 1:
        positions = positions.contiguous()
    if shown is not None and shown.stride(-1) != 1:
        shown = shown.contiguous()
    return cycles, of_head, start, positions, shown, *rest


def _output(v: Tensor) -> Tensor:
    """``b h l v`` whose heads lie side by side, as the layer will want them."""
    b, h, length, size = v.shape
    return v.new_empty(b, length, h, size).transpose(1, 2)


def _total(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *shared: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, kv, z = _output(v), kv.clone(), z.clone()
    _call("total", q, k, v, out, kv, z, *_plain(shared))
    return out, kv, z


def _total_back(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv: Tensor, z: Tensor, *shared_and_gradients: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *shared, d_out, d_kv, d_z = shared_and_gradients
    d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
    d_kv, d_z = d_kv.clone(memory_format=torch.contiguous_format), d_z.clone(memory_format=torch.contiguous_format)
    _call("total_back", q, k, v, out, kv, z, *_plain(tuple(shared)), gradients=(_rows(d_out), d_q, d_k, d_v), last=(d_kv, d_z, None))
    return d_q, d_k, d_v, d_kv, d_z


def _scan(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *shared, log_decay, keep = rest
    out, kv, z, kept = _output(v), kv.clone(), z.clone(), _kept(q, v, keep)
    _call("scan", q, k, v, out, kv, z, *_plain(tuple(shared)), log_decay, kept if keep else None)
    return out, kv, z, kept


def _scan_back(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv: Tensor, z: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *shared, log_decay, kept, d_out, d_kv, d_z = rest
    d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
    d_kv, d_z = d_kv.clone(memory_format=torch.contiguous_format), d_z.clone(memory_format=torch.contiguous_format)
    d_log = torch.zeros(q.shape[:2], dtype=torch.float64)
    _call(
        "scan_back",
        *(q, k, v, out, kv, z, *_plain(tuple(shared)), log_decay, kept),
        gradients=(_rows(d_out), d_q, d_k, d_v),
        last=(d_kv, d_z, None if log_decay is None else d_log),
    )
    return d_q, d_k, d_v, d_kv, d_z, d_log.sum(0).float()


def _rows(d_out: Tensor) -> Tensor:
    return d_out if d_out.stride(-1) == 1 else d_out.contiguous()


def _kept(q: Tensor, v: Tensor, keep: bool) -> Tensor:
    """Room for the carries that the backward pass starts from again."""
    kernel = load()
    tokens = kernel.block * kernel.group if isinstance(kernel, Kernel) else 1
    b, h, length, m = q.shape
    return q.new_empty(b, h, -(-length // tokens) if keep else 0, m * (v.shape[-1] + 1))


def _fake_total(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *shared: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _output(v), torch.empty_like(kv), torch.empty_like(z)


def _fake_total_back(q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *(torch.empty_like(x) for x in (q, k, v)), kv.new_empty(kv.shape), z.new_empty(z.shape)


def _fake_scan(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_fake_total(q, k, v, kv, z), _kept(q, v, rest[-1])


def _fake_scan_back(q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_fake_total_back(q, k, v, out, kv, z), q.new_empty(q.shape[1])


def _keep_total(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, _, *shared = inputs
    ctx.save_for_backward(q, k, v, *output, *(x for x in shared if isinstance(x, Tensor)))
    ctx.shared = [None if isinstance(x, Tensor) else (x,) for x in shared]


def _back_total(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, kv, z, *tensors = ctx.saved_tensors
    shared = _again(ctx.shared, tensors)
    d = torch.ops.permuteformer.total_back(q, k, v, out, kv, z, *shared, d_out, d_kv, d_z)
    return *d, *(None,) * len(shared)


def _keep_scan(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, _, *shared, _ = inputs
    ctx.save_for_backward(q, k, v, *output, *(x for x in shared if isinstance(x, Tensor)))
    ctx.shared = [None if isinstance(x, Tensor) else (x,) for x in shared]
    ctx.mark_non_differentiable(output[3])


def _back_scan(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, kv, z, kept, *tensors = ctx.saved_tensors
    *shared, log_decay = _again(ctx.shared, tensors)
    *d, d_log = torch.ops.permuteformer.scan_back(q, k, v, out, kv, z, *shared, log_decay, kept, d_out, d_kv, d_z)
    return *d, *(None,) * len(shared), None if log_decay is None else d_log, None


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
