"""Numbers that are not finite: where they began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class NotFinite(ArithmeticError):
    """Training met a number that is not finite; nothing of it is kept."""


def first_bad_layer(model: nn.Module, forward: Callable[[], Any]) -> str:
    """Run ``forward`` once more and say in which module the first number that is not finite came up, and whether by its weights."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, given: Any, out: Any) -> None:
            if not found and any(_is_bad(x) for x in _tensors(out)):
                bad = [own for own, p in module.named_parameters(recurse=False) if _is_bad(p)]
                bad += [own for own, b in module.named_buffers(recurse=False) if _is_bad(b)]
                found.append(f"{name or 'the loss'}" + (f", whose {' and '.join(bad)} is not finite" if bad else ""))

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "none when it was computed once more"


def bad_gradients(model: nn.Module) -> str:
    """The parameters whose gradients are not finite; those nearest to the loss come last in a model, and began it."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and _is_bad(_local(p.grad))]
    if not bad:
        return "none on this process"
    return bad[-1] + (f" and {len(bad) - 1} more below it" if len(bad) > 1 else "")


def _is_bad(x: Tensor) -> bool:
    return x.is_floating_point() and not bool(torch.isfinite(_local(x)).all())


def _local(x: Tensor) -> Tensor:
    """What this process has of a tensor that is shared out."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, dict):
        for value in out.values():
            yield from _tensors(value)
    elif isinstance(out, (tuple, list)):
        for value in out:
            yield from _tensors(value)
