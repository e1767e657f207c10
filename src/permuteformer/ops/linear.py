"""Linear attention, phi(Q) (phi(K)^T V): bidirectional, causal, with a two-sided decay, or one token at a time.

``linear_attention`` is the public function. It builds a ``LinearCall``; ``run`` picks a backend and runs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from permuteformer.ops import cuda_backend, native_backend, torch_backend
from permuteformer.ops.call import LinearCall, LinearState, Tokens, Transform
from permuteformer.ops.checks import can_read_values
from permuteformer.ops.native import load

VARIABLE = "PERMUTEFORMER_BACKEND"
DEFAULT_BACKEND = os.environ.get(VARIABLE) or "auto"


class Backend(Protocol):
    """A module that runs calls: one file, entered into ``BACKENDS``."""

    def unsupported(self, call: LinearCall) -> str | None:
        """Return why this backend cannot run the call, or ``None``."""

    def run(self, call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output ``b h n v``, and the state after the last token, ``b h m v`` and ``b h m``."""


BACKENDS: dict[str, Backend] = {"native": native_backend, "cuda": cuda_backend, "torch": torch_backend}
"""``"auto"`` takes the first one that supports a call."""


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Callable[..., Tensor],
    parameters: Sequence[Tensor] = (),
    transform: Transform | None = None,
    positions: Tensor | None = None,
    causal: bool = False,
    log_decay: Tensor | None = None,
    two_sided: bool = False,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    global_mask: Tensor | None = None,
    normalize: bool = True,
    plain_normalizer: bool = False,
    state: LinearState | None = None,
    after: LinearState | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, LinearState]:
    """Compute attention in time and memory linear in the length.

    Args:
        q: queries ``b h l d``, any strides.
        k: keys ``b h l d``.
        v: values ``b h l v``.
        feature_map: phi, from ``b h l d`` to ``b h l m``; see ``ops.feature_map``.
        parameters: further tensors for ``feature_map``; they get gradients.
        transform: a position encoding of features; see ``positions``.
        positions: ``b l a`` int64; ``None`` counts real tokens, from ``state.next_position`` or 0, and from 0 in each new segment.
        causal: query i sees keys j <= i only.
        log_decay: log r of each head, ``h``: weights r^(i-j), one step per real token.
        two_sided: weights r^|i-j| in a bidirectional call. On several axes, head h orders tokens by axis h mod a.
        key_mask: ``b l`` bool, true for real tokens. A query that sees no key gets zero.
        segments: ``b l`` int64, non-decreasing along a row: tokens see their own segment only.
        global_mask: ``b l`` bool: tokens with weight 1 in both directions of a two-sided decay. Cost grows with their number.
        normalize: divide by the sum of weights (equation 2).
        plain_normalizer: compute that sum from features before ``transform``.
        state: the state that an earlier call returned, to continue from.
        after: the state of later tokens, for a two-sided decay or segments; needs ``segment`` in packed rows.
        chunk_size: tokens per block; changes speed and rounding only.
        backend: ``"native"`` (CPU kernel), ``"cuda"``, ``"torch"``, or ``"auto"``; default: the variable PERMUTEFORMER_BACKEND.

    Masked tokens take no position and no step of the decay, so a padded row gives the same result as the row without padding. The output
    of a masked token is undefined. Keys so far away that their weight underflows (690 tokens at r = 0.88 in float32) are not seen. There
    is no second derivative.

    Returns:
        The output ``b h l v`` in the dtype of v, and the state after the last token.

    >>> q = k = v = torch.randn(1, 2, 6, 4)
    >>> out, state = linear_attention(q, k, v, feature_map=torch.exp, causal=True)
    >>> head, state = linear_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], feature_map=torch.exp, causal=True)
    >>> last, state = linear_attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], feature_map=torch.exp, causal=True, state=state)
    >>> torch.allclose(out, torch.cat([head, last], dim=2), atol=1e-5)
    True
    """
    if q.dim() != 4 or q.shape != k.shape or q.shape[2] == 0:
        raise ValueError(f"q and k must have one shape (batch, heads, length, size), length >= 1, got {tuple(q.shape)}, {tuple(k.shape)}")
    _check_decay(causal, two_sided, log_decay)
    with torch.no_grad():
        num_features = feature_map(q[:, :, :1].to(torch.promote_types(q.dtype, torch.float32)), *parameters).shape[-1]
    _check_transform(transform, q.shape[1], num_features, positions)
    tokens = Tokens.build(
        *(q.shape[0], q.shape[2], q.device),
        positions=positions,
        mask=key_mask,
        segments=segments,
        global_mask=global_mask,
        ordered=log_decay is not None and not causal and positions is not None and positions.shape[-1] > 1,
    )
    call = LinearCall(
        q,
        k,
        v,
        feature_map,
        num_features,
        tuple(parameters),
        transform,
        "none" if not normalize else "plain" if plain_normalizer else "transformed",
        tokens,
        causal=causal,
        log_decay=log_decay,
        state=state,
        after=after,
        chunk_size=chunk_size,
    )
    return run(call, backend)


def run(call: LinearCall, backend: str | None = None) -> tuple[Tensor, LinearState]:
    """Check a call, run it on the backend of this name or the first that supports it, and return the output and the state after it.

    >>> q = k = v = torch.randn(1, 2, 10, 4)
    >>> out, state = run(LinearCall(q, k, v, torch.exp, num_features=4), backend="torch")
    >>> out.shape
    torch.Size([1, 2, 10, 4])
    """
    call.check()
    out, kv, z = choose(call, backend).run(call)
    return out, call.next_state(kv, z)


def choose(call: LinearCall, backend: str | None = None) -> Backend:
    """Return the backend for a call; raise where the one asked for by name does not support it."""
    name = requested_backend(backend)
    if name == "auto":
        return next(found for found in BACKENDS.values() if found.unsupported(call) is None)
    if reason := BACKENDS[name].unsupported(call):
        raise ValueError(f"backend {name!r} does not support this call: {reason}; use 'auto' or 'torch'")
    return BACKENDS[name]


def requested_backend(backend: str | None = None) -> str:
    """Return the backend asked for: the argument, or the default."""
    name, source = (DEFAULT_BACKEND, VARIABLE) if backend is None else (backend, "backend")
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"{source} must be one of auto, {', '.join(BACKENDS)}, got {name!r}")
    return name


def backend_in_use(device: str = "cpu") -> str:
    """Return the fastest backend on a device, the CPU kernel with its instruction set: ``"native avx2"``, ``"cuda"`` or ``"torch"``."""
    name, kernel = requested_backend(), load()
    if device == "cuda" and name in ("auto", "cuda"):
        return "torch" if cuda_backend.missing(torch.device(device), torch.bfloat16) else "cuda"
    if device != "cpu" or name not in ("auto", "native") or isinstance(kernel, str):
        return "torch"
    return f"native {kernel.instruction_set}"


def _check_decay(causal: bool, two_sided: bool, log_decay: Tensor | None) -> None:
    if two_sided and causal:
        raise ValueError("two_sided=True is for bidirectional attention: leave it out with causal=True")
    if log_decay is None:
        return
    if not causal and not two_sided:
        raise ValueError(
            "log_decay with causal=False needs two_sided=True, for r^|i-j|: r^(i-j) grows without bound for keys after the query"
        )
    if can_read_values(log_decay) and not ((log_decay <= 0) & log_decay.isfinite()).all():
        raise ValueError(f"log_decay must be log r for r in (0, 1], so 0 or less, got {log_decay.tolist()}")


def _check_transform(transform: Transform | None, heads: int, features: int, positions: Tensor | None) -> None:
    """Raise where an encoding was built for other sizes; layers check this when they are built."""
    for name, size in {"num_heads": heads, "feature_size": features}.items():
        if (built_for := getattr(transform, name, None)) not in (None, size):
            raise ValueError(f"transform was built for {name}={built_for}, but this call has {size}: build it with {name}={size}")
    axes = getattr(transform, "axes", None) or 1
    if axes > (1 if positions is None else positions.shape[-1]):
        shape = None if positions is None else tuple(positions.shape)
        raise ValueError(f"positions must have shape (batch, length, axes) with the {axes} axes of transform, got {shape}")
