"""Numbers that are not finite: where they began."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SHOWN = 20
"""Items that are named in a sentence; the rest is counted."""


class NotFinite(ArithmeticError):
    """Training met a number that is not finite; nothing of the step is kept."""


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
    """The parameters whose gradients are not finite, as far as this process has them. The last is nearest to the loss, and began it."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and _is_bad(p.grad)]
    return "".join(bad[-1:]) + (f" and {len(bad) - 1} more below it" if len(bad) > 1 else "")


def bad_weights(model: nn.Module) -> str:
    """The parameters that are not finite, as far as this process has them."""
    bad = [name for name, p in model.named_parameters() if _is_bad(p)]
    return _some(bad)


def bad_tensors(groups: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Those of a checkpoint that are not finite."""
    return _some([f"{name} ({group})" for group, tensors in groups.items() for name, value in tensors.items() if _is_bad(value)])


def item_numbers(ids: Sequence[int]) -> str:
    """Items in words, each once.

    >>> item_numbers([4, 7, 4])
    'items 4, 7'
    """
    return f"items {_some(list(dict.fromkeys(ids)))}"


def _some(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:SHOWN])) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _is_bad(x: Tensor) -> bool:
    own: Tensor = x.to_local() if hasattr(x, "to_local") else x  # what this process has of it
    return own.is_floating_point() and not bool(torch.isfinite(own).all())


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, dict):
        for value in out.values():
            yield from _tensors(value)
    elif isinstance(out, (tuple, list)):
        for value in out:
            yield from _tensors(value)
