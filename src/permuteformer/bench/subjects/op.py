"""One call of attention on random q, k, v, by ours and by others; and a matrix product, for the rate of the machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from permuteformer.bench.steps import work
from permuteformer.bench.subjects import Subject
from permuteformer.bench.subjects.formula import eager_attention
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute
from permuteformer.registry import unknown

METHODS = ("permuteformer", "performer", "permuteformer-torch", "formula", "formula-performer", "sdpa", "matmul")
MATRIX = 2048
"""Rows and columns of the matrices that are multiplied."""


def make(
    device: str,
    method: str,
    length: int = MATRIX,
    batch: int = 1,
    heads: int = 8,
    features: int = 64,
    values: int = 64,
    causal: bool = False,
    two_sided: bool = False,
    gradients: bool = False,
    dtype: str = "float32",
) -> Subject:
    """Attention by ``method``, a name of ``METHODS``.

    ``"permuteformer-torch"`` is ours without the CPU kernel, ``"formula"`` the paper's equation 11 in eager PyTorch (and equation 2, for
    ``"formula-performer"``), ``"sdpa"`` the softmax attention of PyTorch on heads of the size of values.

    Causal linear attention has a decay, as has bidirectional one with ``two_sided``; that of the formula would overflow, so it has no
    causal form here. On a GPU products of float32 may be rounded to TF32.
    """
    if method not in METHODS:
        raise ValueError(unknown("method", method, METHODS))
    precision = getattr(torch, dtype)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    if method == "matmul":
        left, right = torch.randn(2, MATRIX, MATRIX, device=device, dtype=precision)
        return Subject(partial(torch.mm, left, right), flops=2 * MATRIX**3)
    sizes = (values, values, values) if method == "sdpa" else (features, features, values)
    # As projections give them: b l h d, seen as b h l d.
    q, k, v = (
        torch.randn(batch, length, heads, size, device=device, dtype=precision).transpose(1, 2).requires_grad_(gradients) for size in sizes
    )
    call = _call(method, causal, two_sided, q, k, v)
    pairs = length * (length + 1) / 2 if causal else length**2
    forward = 4 * batch * heads * values * (pairs if method == "sdpa" else length * features * (2 if two_sided else 1))
    kind = "training" if gradients else "inference"
    return Subject(partial(_with_gradients, call, (q, k, v)) if gradients else _without_gradients(call), flops=work(kind, forward))


def _call(method: str, causal: bool, two_sided: bool, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    heads, length, features = q.shape[1:]
    if method == "sdpa":
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
    if method.startswith("formula"):
        if causal:
            raise ValueError(f"method {method!r} has no causal form: r^-j overflows. Compare with 'sdpa' or 'permuteformer-torch'")
        index = Permute(heads, features).tables(torch.arange(length).view(1, -1, 1)).to(q.device) if method == "formula" else None
        return partial(eager_attention, q, k, v, index)
    transform = None if method == "performer" else Permute(heads, features).to(q.device)
    log_decay = Decay(heads, two_sided=two_sided).to(q.device).log_decay() if causal or two_sided else None
    options: dict[str, Any] = {"causal": causal, "two_sided": two_sided, "log_decay": log_decay}
    backend = "torch" if method.endswith("torch") else None

    def call() -> Tensor:
        return linear_attention(q, k, v, feature_map=relu_eps, transform=transform, backend=backend, **options)[0]

    return call


def _without_gradients(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return torch.inference_mode()(call)


def _with_gradients(call: Callable[[], Tensor], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = call()
    return torch.autograd.grad(out, given, torch.ones_like(out))
