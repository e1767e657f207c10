"""Pickles of plain data and arrays of bytes, read without running anything.

A pickle is a program for a small machine, which may call any function. Here Python's disassembler lists its instructions, and those few
that build plain data are carried out. Functions are told by their names and never looked up; NumPy sees an array when its size is known to
be that of its data. So nothing runs, and memory is bounded by the pickle's size and by the number of instructions.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from permuteformer.tasks.readers.unpacking import reason

MAX_PICKLE_BYTES = 128 << 20
"""A batch of CIFAR-10 has 31 MB."""

MAX_INSTRUCTIONS = 2_000_000
"""A batch of CIFAR-10 has 30 thousand."""

_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_NAMES = (*_RECONSTRUCT, "numpy ndarray", "numpy dtype", "_codecs encode")


@dataclass(frozen=True)
class _Name:
    """A function or class that the pickle names."""

    name: str


class _Mark:
    """Where on the stack a tuple or list begins."""


class _Bytes:
    """NumPy's type of unsigned bytes, the only one that is read."""


class PickledArray:
    """An array as a pickle describes it."""

    def __init__(self) -> None:
        self.state: Any = None

    def values(self) -> NDArray[numpy.uint8]:
        """The array, if it is one of unsigned bytes and its description fits its data."""
        match self.state:
            case (int(), tuple() as shape, _Bytes(), bool() as by_columns, bytes() as data):
                if all(type(length) is int and length >= 0 for length in shape) and math.prod(shape) == len(data) and len(shape) <= 8:
                    return numpy.frombuffer(data, numpy.uint8).reshape(shape, order="F" if by_columns else "C")
        raise ValueError("an array's description does not fit its data; it must be one of unsigned bytes (uint8)")


def plain_pickle(data: bytes) -> Any:
    """What a pickle holds: dicts, lists, tuples, ``str``, ``bytes``, whole numbers, and arrays of bytes as ``PickledArray``.

    Strings of Python 2 become ``bytes``. Anything else is refused with ``ValueError``.

    >>> import pickle
    >>> plain_pickle(pickle.dumps({"labels": [6, 9]}))
    {'labels': [6, 9]}
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(f"the pickle has {len(data):,} bytes; the limit is {MAX_PICKLE_BYTES:,}")
    machine = _Machine(len(data))
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_INSTRUCTIONS:
                raise ValueError(f"it has more than {MAX_INSTRUCTIONS:,} instructions, which is the limit")
            machine.step(instruction.name, argument)
        (result,) = machine.stack
    except LookupError:  # the stack or the memo does not have it
        raise ValueError("the pickle is damaged; fetch or copy it again") from None
    except Exception as error:  # the disassembler lets through what int and codecs say
        raise ValueError(f"the pickle cannot be read: {reason(error)}") from None
    return result


class _Machine:
    """The stack, the memo, and the instructions that need them."""

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._encodable = size  # one text may be encoded many times over

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(_VALUES[name](argument))
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        else:
            raise ValueError(f"instruction {name} does not belong to plain data; do not trust this file")

    def put(self, place: int | None) -> None:
        self._memo[len(self._memo) if place is None else place] = self.stack[-1]

    def get(self, place: int) -> None:
        self.stack.append(self._memo[place])

    def make_tuple(self, size: int | None) -> None:
        self.stack.append(tuple(self._since_mark() if size is None else [self.stack.pop() for _ in range(size)][::-1]))

    def append(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def append_marked(self, _: Any) -> None:
        self.append(self._since_mark())

    def set_items(self, values: list[Any]) -> None:
        keys = values[::2]
        if not all(type(key) in (bytes, str, int) for key in keys):  # the hash of nested tuples may take for ever
            raise ValueError("keys of a dict must be strings or whole numbers")
        self._top(dict).update(zip(keys, values[1::2], strict=True))

    def set_marked(self, _: Any) -> None:
        self.set_items(self._since_mark())

    def set_last(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def name(self, argument: str | None) -> None:
        if argument is None:
            last, module = self.stack.pop(), self.stack.pop()
            argument = f"{module} {last}" if isinstance(module, str) and isinstance(last, str) else ""
        if argument not in _NAMES:
            raise ValueError(f"it asks for {argument[:100]!r}, which plain data does not need; do not trust this file")
        self.stack.append(_Name(argument))

    def call(self, _: Any) -> None:
        """Not a call: what would come of it, for the few that are known."""
        arguments, function = self.stack.pop(), self.stack.pop()
        match function, arguments:
            case _Name(name), (_Name("numpy ndarray"), *_) if name in _RECONSTRUCT:
                self.stack.append(PickledArray())
            case _Name("numpy dtype"), ("u1" | b"u1" | "uint8" | b"uint8", *_):
                self.stack.append(_Bytes())
            case _Name("_codecs encode"), (str() as text, "latin1") if len(text) <= self._encodable:
                self._encodable -= len(text)
                self.stack.append(text.encode("latin-1"))
            case _:
                raise ValueError("it makes something else than plain data and arrays of bytes; do not trust this file")

    def build(self, _: Any) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, PickledArray):
            made.state = state
        elif not isinstance(made, _Bytes):  # whose state is the order of bytes, of which it has one
            raise ValueError("it sets the inside of something that is no array; do not trust this file")

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"it fills a {type(self.stack[-1]).__name__} as if it were a {kind.__name__}")
        return self.stack[-1]

    def _since_mark(self) -> list[Any]:
        values: list[Any] = []
        while not isinstance(value := self.stack.pop(), _Mark):
            values.append(value)
        return values[::-1]


def _same(argument: Any) -> Any:
    return argument


_VALUES: dict[str, Callable[[Any], Any]] = {
    "MARK": lambda _: _Mark(),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _same),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"), _same),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), lambda argument: argument.encode("latin-1")),
}

_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, argument: None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Machine.name),
    "TUPLE": lambda machine, _: machine.make_tuple(None),
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    "APPENDS": _Machine.append_marked,
    "SETITEM": _Machine.set_last,
    "SETITEMS": _Machine.set_marked,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
}
