"""PermuteFormer in plain PyTorch, to read after ``reference.py``: linear time, no fused code, no options."""

from __future__ import annotations

import torch
from torch import Tensor


def features(x: Tensor, permutation: Tensor) -> Tensor:
    """Return phi(x), the features of token i permuted i times: ``b h l m``; ``permutation`` is ``h m``."""
    powers = [torch.arange(x.shape[-1]).expand_as(permutation)]
    for _ in range(x.shape[2] - 1):
        powers.append(permutation.gather(-1, powers[-1]))  # pi^(i+1)(a) = pi(pi^i(a))
    index = torch.stack(powers, dim=1).expand_as(x)
    return (x.relu() + 1e-3).gather(-1, index)  # (P^i phi)_a = phi_{pi^i(a)}


def bidirectional(q: Tensor, k: Tensor, v: Tensor, permutation: Tensor) -> Tensor:
    """Attend from every token to every token: phi(Q) (phi(K)^T V), equations 6 and 11.

    >>> q, k, v = torch.rand(3, 1, 2, 10, 4).unbind()
    >>> bidirectional(q, k, v, torch.tensor([[1, 2, 3, 0], [1, 0, 3, 2]])).shape
    torch.Size([1, 2, 10, 4])
    """
    q, k = features(q, permutation), features(k, permutation)
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # the column of ones sums the weights
    out = q @ (k.transpose(-1, -2) @ v)
    return out[..., :-1] / out[..., -1:]


def causal(q: Tensor, k: Tensor, v: Tensor, permutation: Tensor, r: Tensor, chunk: int = 64) -> Tensor:
    """Attend from every token to itself and the tokens before it, weighted by r^(i-j); ``r`` is ``h``.

    A state of m x (v + 1) numbers per head holds all earlier chunks. Exponents are never negative, so no length overflows.

    >>> q, k, v = torch.rand(3, 1, 2, 10, 4).unbind()
    >>> causal(q, k, v, torch.tensor([[1, 2, 3, 0], [1, 0, 3, 2]]), torch.tensor([0.9, 0.99])).shape
    torch.Size([1, 2, 10, 4])
    """
    q, k = features(q, permutation), features(k, permutation)
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    r = r[:, None, None]
    state = torch.zeros_like(k.transpose(-1, -2)[..., :1] @ v[:, :, :1])  # b h m v+1
    out = []
    for q_c, k_c, v_c in zip(*(x.split(chunk, dim=2) for x in (q, k, v)), strict=True):
        size = q_c.shape[2]
        t = torch.arange(size)
        within = (q_c @ k_c.transpose(-1, -2) * r ** (t[:, None] - t).clamp(min=0)).tril()
        out.append(within @ v_c + r ** (t[:, None] + 1) * (q_c @ state))
        state = r**size * state + (k_c * r ** (size - 1 - t[:, None])).transpose(-1, -2) @ v_c
    total = torch.cat(out, dim=2)
    return total[..., :-1] / total[..., -1:]
