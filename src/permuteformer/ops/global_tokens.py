"""Global tokens of a two-sided decay, computed by calls without them: for backends that have no code of their own for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from permuteformer.ops.call import LinearCall, Transform


def with_global_tokens(call: LinearCall, run: Callable[[LinearCall], tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Run a call with ``tokens.global_mask`` by three calls without.

    Local tokens see local keys with the decay and global keys without; global tokens see all keys without. Numerators and, as a column of
    ones beside the values, sums of weights are added up and divided at the end.

    Args:
        call: a bidirectional call with a decay and global tokens.
        run: runs a call without global tokens; returns its output and state.

    Returns:
        The output, and the state of the local tokens.
    """
    tokens, is_global, positions = call.tokens, call.tokens.global_mask, call.positions()
    assert is_global is not None
    real = torch.ones_like(is_global) if tokens.mask is None else tokens.mask

    def sums(encoding: Transform | None, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums of weighted values over the keys that each query sees, and the state of the local keys."""

        def part(keys: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            orders = None if log_decay is None else tokens.orders
            seen = replace(tokens, positions=positions, mask=keys, global_mask=None, orders=orders)
            changed = replace(call, v=v, tokens=seen, normalizer="none", encoding=encoding, log_decay=log_decay, query_mask=real)
            return run(changed)

        local, kv, z = part(real & ~is_global, call.log_decay)
        of_global, of_all = part(is_global & real, None)[0], part(real, None)[0]
        return torch.where(is_global[:, None, :, None], of_all, local + of_global), kv, z

    v = call.v.to(call.dtype)
    ones = torch.ones_like(v[..., :1])
    out, kv, z = sums(call.encoding, torch.cat([v, ones], dim=-1))
    out, total, kv = out[..., :-1], out[..., -1:], kv[..., :-1]
    if call.normalizer == "plain":
        total, z, _ = sums(None, ones)
        z = z.squeeze(-1)
    if call.normalizer != "none":
        out = out / total.masked_fill(total == 0, 1)
    return out.to(call.v.dtype), kv, z
