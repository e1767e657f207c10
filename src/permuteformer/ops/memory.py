"""Memory of large tensors on a CPU, kept for the next ones.

What is freed goes back to the system as soon as there is much of it, and comes from there page by page, each an interruption and
cleared before. So the few tensors of a layer that are wider than the model are made here.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections import deque

import torch
from torch import Tensor
from torch.utils import deterministic

SMALLEST_BYTES = 2**20
"""Of a tensor that is made here; malloc keeps what is smaller."""
UNIT = 2**21
"""Bytes of a large page: blocks are of whole ones."""
WASTE = 1.25
"""How much larger than what is asked for a block may be."""


def empty(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """As ``torch.empty``. Its memory is used again for others when nobody holds it any more.

    >>> empty(2, 3, device=torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    size = math.prod(shape) * dtype.itemsize
    is_known = isinstance(size, int) and not torch.compiler.is_compiling()  # else the graph would be for sizes above or below this one
    if device.type == "cpu" and is_known and size >= SMALLEST_BYTES:
        with contextlib.suppress(OSError):  # the system gives no more: torch says so, or has some
            made = torch.frombuffer(_blocks.take(size), dtype=dtype, count=math.prod(shape)).view(shape)
            return made.fill_(torch.nan) if _fills_new_memory() else made
    return torch.empty(shape, device=device, dtype=dtype)


def empty_like(x: Tensor) -> Tensor:
    """As ``torch.empty_like``: ``empty``, laid out as ``x`` is.

    >>> empty_like(torch.zeros(2, 3).t()).stride()
    (1, 3)
    """
    if x.is_contiguous():
        return empty(*x.shape, device=x.device, dtype=x.dtype)
    strides = torch.empty_like(x, device="meta").stride()
    return empty(x.numel(), device=x.device, dtype=x.dtype).as_strided(x.shape, strides)


def release() -> None:
    """Give back to the system what nobody holds: after a training, say, in a process that goes on with something else.

    >>> release()
    """
    _blocks.release()


def _fills_new_memory() -> bool:
    """As torch does where it is asked to be deterministic."""
    return torch.are_deterministic_algorithms_enabled() and bool(deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


class _Blocks:
    """Blocks of memory, in use and free. The free ones are no more bytes than were ever in use at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []  # the longest free first
        self._in_use = self._most = 0
        # Tensors end anywhere, also while the lock is held: then a block is only put here.
        self._ended: deque[mmap.mmap] = deque()

    def take(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """Memory of so many bytes, and a little more; free again when what is returned has ended."""
        with self._lock:
            self._collect()
            whole = -(-size // UNIT) * UNIT
            fitting = [block for block in self._free if whole <= len(block) <= max(WASTE * size, whole)]
            if fitting:
                block = min(fitting, key=len)
                self._free.remove(block)
            else:
                block = _new(whole)
            self._in_use += len(block)
            self._most = max(self._most, self._in_use)
            self._trim(self._most)
        held = (ctypes.c_char * len(block)).from_buffer(block)
        weakref.finalize(held, self._ended.append, block).atexit = False
        return held

    def release(self) -> None:
        """Keep nothing that is free."""
        with self._lock:
            self._collect()
            self._most = self._in_use
            self._trim(0)

    def _collect(self) -> None:
        while self._ended:
            block = self._ended.popleft()
            self._in_use -= len(block)
            self._free.append(block)

    def _trim(self, most: int) -> None:
        while sum(map(len, self._free)) > most:
            with contextlib.suppress(BufferError):  # its tensor is just about to end in another thread, and the block with it
                self._free.pop(0).close()


def _new(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


_blocks = _Blocks()
