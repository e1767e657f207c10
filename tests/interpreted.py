"""Patches with which fla's kernels run in Triton's interpreter, on tensors of the CPU."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any


@cache
def prepare_fla() -> None:
    """There is no GPU to try configurations on, so every kernel gets its first; and its loops count in tensors, as compiled ones do."""
    import fla.ops.simple_gla  # noqa: F401
    import triton.language as tl

    def counted(*bounds: Any) -> Iterator[Any]:
        whole = (int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else int(bound) for bound in bounds)
        yield from map(tl.to_tensor, builtins.range(*whole))

    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            for kernel in list(vars(module).values()):
                _keep_first(kernel)
    sys.modules["fla.ops.common.chunk_h"].range = counted  # type: ignore[attr-defined]


def _keep_first(kernel: Any) -> None:
    """Decorators of a kernel lie around each other; the one that tunes has a list of configurations."""
    while kernel is not None and type(kernel).__module__.startswith(("triton", "fla")):
        if isinstance(getattr(kernel, "configs", None), list):
            del kernel.configs[1:]
        kernel = getattr(kernel, "fn", None)
