"""The CPU kernel in C++: loaded by ctypes at its first use, called with one struct. No torch here.

It is built when the package is installed (``hatch_build.py``). Without a compiler, or where it does not load, ``load`` returns the reason
and linear attention runs in PyTorch. The classes below are the structs of ``call.h``, field by field.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("_kernel.so")

TOTAL, CAUSAL, TWO_SIDED = 0, 1, 2
"""``Call.mode``."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


def _integers(names: str) -> list[tuple[str, Any]]:
    return _fields(ctypes.c_int64, names)


def _pointers(names: str) -> list[tuple[str, Any]]:
    return _fields(ctypes.c_void_p, names)


class Tensor4(ctypes.Structure):
    """Data and strides of a tensor ``b h l d``."""

    _fields_ = [*_pointers("data"), *_integers("batch head token")]


class Positions(ctypes.Structure):
    """Data and strides of positions ``b l a``."""

    _fields_ = [*_pointers("data"), *_integers("batch token")]


class Call(ctypes.Structure):
    """One call of linear attention."""

    _fields_ = [
        *_integers("batch heads length queries features values feature_map normalize mode reverse threads"),
        *_fields(Tensor4, "q k v out"),
        *_pointers("kv_in z_in after_kv after_z kv z cycles of_head start"),
        *_fields(Positions, "positions query_positions"),
        *_pointers("mask global_mask segments state_segment after_segment orders"),
        *_integers("axes"),
        *_pointers("log_decay totals"),
        *_fields(Tensor4, "d_out"),
        *_pointers("d_kv d_z"),
        *_fields(Tensor4, "d_q d_k d_v"),
        *_pointers("d_kv_in d_z_in d_after_kv d_after_z d_log_decay"),
    ]


class Chance(ctypes.Structure):
    """Dropout."""

    _fields_ = _integers("seed dropped")


class Drop(ctypes.Structure):
    """Dropout of rows."""

    _fields_ = [*_pointers("x y"), *_integers("rows width"), ("chance", Chance), *_integers("threads")]


class Norm(ctypes.Structure):
    """A layer norm."""

    _fields_ = [*_pointers("weight bias"), ("epsilon", ctypes.c_double)]


class Linear(ctypes.Structure):
    """A linear map."""

    _fields_ = _pointers("weight bias")


class Project(ctypes.Structure):
    """A linear map of a few rows."""

    _fields_ = [*_pointers("x y"), ("linear", Linear), *_integers("rows in out threads")]


class Feed(ctypes.Structure):
    """The feed-forward half of a block."""

    _fields_ = [
        *_integers("rows width hidden activation threads"),
        *_pointers("x y"),
        ("norm", Norm),
        *_fields(Linear, "expand contract"),
        ("chance", Chance),
        *_pointers("d_y d_x d_weights"),
    ]


class Attend(ctypes.Structure):
    """The attention half of a block."""

    _fields_ = [
        ("call", Call),
        *_integers("width"),
        *_pointers("x queries y mixed"),
        ("norm", Norm),
        *_fields(Linear, "query key value output"),
        ("chance", Chance),
        *_pointers("d_y d_x d_queries d_reading d_keys"),
    ]


FUNCTIONS: dict[str, type[ctypes.Structure]] = {
    "attention": Call,
    "attention_back": Call,
    "dropout": Drop,
    "project": Project,
    "feed_forward": Feed,
    "feed_forward_back": Feed,
    "attention_block": Attend,
    "attention_block_back": Attend,
}
"""The functions of the kernel, and the struct that each takes."""


class Kernel:
    """The loaded library. ``functions`` run while other Python threads continue, and raise ``MemoryError``."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        sizes = {"call_size": Call, "drop_size": Drop, "project_size": Project, "feed_size": Feed, "attend_size": Attend}
        is_ours = all(hasattr(library, name) for name in (*FUNCTIONS, *sizes))
        if not is_ours or any(getattr(library, name)() != ctypes.sizeof(struct) for name, struct in sizes.items()):
            raise OSError(f"{path.name} was built from another version of the package: install the package again")
        self.functions: dict[str, Any] = {name: getattr(library, name) for name in FUNCTIONS}
        for name, struct in FUNCTIONS.items():
            self.functions[name].argtypes = [ctypes.POINTER(struct)]
            self.functions[name].errcheck = _check_memory
        library.instruction_set.restype = library.in_use.restype = ctypes.c_char_p
        library.instruction_set.argtypes = [ctypes.c_int64]
        self._library = library

    @property
    def instruction_sets(self) -> list[str]:
        """The compiled instruction sets that this processor has, the best first."""
        names: list[str] = []
        while (name := self._library.instruction_set(len(names))) is not None:
            names.append(name.decode())
        return names

    @property
    def instruction_set(self) -> str:
        """The instruction set in use."""
        return str(self._library.in_use().decode())

    def use(self, name: str) -> None:
        """Use another instruction set from now on: for tests and benchmarks."""
        if not self._library.use(name.encode()):
            raise ValueError(f"instruction set must be one of {', '.join(self.instruction_sets)}, got {name!r}")


def _check_memory(succeeded: int, function: object, arguments: object) -> None:
    if not succeeded:
        raise MemoryError("not enough memory for the buffers of the CPU kernel")


def load() -> Kernel | str:
    """Return the kernel, or why there is none; looked for once. Import torch first: both then share one pool of threads."""
    return _load(FILE)


# torch.compile cannot trace this: it calls it while tracing, as with ``torch.compiler.assume_constant_result``.
load._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _load(file: Path) -> Kernel | str:
    if not file.is_file():
        return "it was not built: install the package again with a C++ compiler"
    try:
        return Kernel(file)
    except OSError as error:
        return f"it does not load: {error}"
