"""The CPU kernel in C++: found, loaded at its first use, and called with one array of numbers. No torch here.

It is built when the package is installed (``hatch_build.py``). Where there was no compiler, or it does not load, ``load`` says why and
linear attention goes on in PyTorch.
"""

from __future__ import annotations

import ctypes
from array import array
from pathlib import Path

FILE = Path(__file__).with_name("_kernel.so")

TENSOR = 4
"""Numbers that describe a tensor: where it is, and strides of batch, head and token."""

SIZES = ("batch", "heads", "length", "queries", "features", "values", "map", "normalize", "threads")
TENSORS = ("q", "k", "v", "out")
PLACES = (
    *("kv", "z", "cycles", "of_head", "start", "positions", "positions_batch", "positions_token"),
    *("query_positions", "query_positions_batch", "query_positions_token"),
    *("shown", "shown_batch", "log_decay", "kept"),
)
GRADIENTS = ("d_out", "d_q", "d_k", "d_v")
LAST = ("d_kv", "d_z", "d_log_decay")
WORK = {
    **dict.fromkeys(("total", "total_back", "scan", "scan_back"), "call"),
    "dropout": "drop",
    **dict.fromkeys(("feed", "feed_back"), "feed"),
    **dict.fromkeys(("attend", "attend_back"), "attend"),
}
"""What it can be asked for, and the struct in ``call.h`` that says of what."""
CALL = len(SIZES) + TENSOR * len(TENSORS) + len(PLACES) + TENSOR * len(GRADIENTS) + len(LAST)
FIELDS = {"call": CALL, "drop": 7, "feed": 19, "attend": CALL + 23}
"""Of each struct, 8 bytes a field."""


class Kernel:
    """The library in memory."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        if not all(hasattr(self._library, name) for name in (*WORK, *(f"{struct}_size" for struct in FIELDS))):
            raise OSError(f"{path.name} is of another version of the package: install it again")
        for name in ("block", "group", *(f"{struct}_size" for struct in FIELDS)):
            getattr(self._library, name).restype = ctypes.c_int64
        for name in ("instruction_set", "in_use"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.instruction_set.argtypes = [ctypes.c_int64]
        if any(getattr(self._library, f"{struct}_size")() != 8 * count for struct, count in FIELDS.items()):
            raise OSError(f"{path.name} is of another version of the package: install it again")
        self.block, self.group = self._library.block(), self._library.group()

    def __call__(self, name: str, fields: list[int]) -> None:
        """Do what ``name`` says with a call's fields. Other Python threads go on meanwhile."""
        call = array("q", fields)
        assert len(call) == FIELDS[WORK[name]], name
        if not getattr(self._library, name)(ctypes.c_void_p(call.buffer_info()[0])):
            raise MemoryError("not enough memory for the buffers of linear attention")

    @property
    def instruction_sets(self) -> list[str]:
        """What this processor has of what was compiled, the best first."""
        names: list[str] = []
        while (name := self._library.instruction_set(len(names))) is not None:
            names.append(name.decode())
        return names

    @property
    def instruction_set(self) -> str:
        """What is in use."""
        return str(self._library.in_use().decode())

    def use(self, name: str) -> None:
        """Use another instruction set from now on: for tests and measurements."""
        if not self._library.use(name.encode()):
            raise ValueError(f"instruction set must be one of {', '.join(self.instruction_sets)}; it is {name!r}")


_found: Kernel | str | None = None


def load() -> Kernel | str:
    """The kernel, or why there is none. Torch is to be imported before, so that both have one pool of threads.

    It is looked for once.
    """
    global _found
    if _found is None:
        _found = _look()
    return _found


# torch.compile cannot trace this, and runs it: what ``torch.compiler.assume_constant_result`` does, without importing all of the compiler.
load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget() -> None:
    """Look for the kernel anew at the next call: for tests."""
    global _found
    _found = None


def _look() -> Kernel | str:
    if not FILE.is_file():
        return "it was not built: install the package again where there is a C++ compiler"
    try:
        return Kernel(FILE)
    except OSError as error:
        return f"it does not load: {error}"
