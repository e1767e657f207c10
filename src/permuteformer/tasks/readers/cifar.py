"""Batches of CIFAR-10, which are pickles, read without executing them.

A pickle is a program that may call any function. Here Python's disassembler lists its instructions, and those few that build plain data
are followed. Functions are compared by name and never looked up; memory is bounded by the size of the pickle and its instructions.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from permuteformer.tasks.readers.errors import reason

MAX_PICKLE_BYTES = 128 << 20
MAX_INSTRUCTIONS = 2_000_000
"""A batch of CIFAR-10 has 31 MB and 30 thousand instructions."""


def cifar_batch(data: bytes) -> tuple[NDArray[numpy.uint8], list[int]]:
    """Return the images (n, 3072) and labels (0 to 9) of a batch file. An image is 1,024 red values row by row, then green, then blue.

    Raises:
        ValueError: the file is not such a batch.
    """
    batch = _unpickle(data)
    if not isinstance(batch, dict):
        raise ValueError(f"a batch of CIFAR-10 must be a dict; this is a {type(batch).__name__}")
    images, labels = (batch.get(name, batch.get(name.encode())) for name in ("data", "labels"))
    if not isinstance(images, _Array) or not isinstance(labels, list):
        raise ValueError("a batch of CIFAR-10 must have an array 'data' and a list 'labels'")
    pixels = images.values()
    if pixels.ndim != 2 or pixels.shape[1] != 3072 or len(labels) != len(pixels):
        raise ValueError(f"'data' must have the shape (n, 3072) with n labels; it is {pixels.shape} with {len(labels):,} labels")
    if not all(type(label) is int and 0 <= label <= 9 for label in labels):
        raise ValueError("'labels' must be integers from 0 to 9")
    return pixels, labels


@dataclass(frozen=True)
class _Name:
    """A function or class named by the pickle."""

    name: str


class _Array:
    """An array of the pickle; ``state`` is its version, shape, type, order and data."""

    state: Any = None

    def values(self) -> NDArray[numpy.uint8]:
        match self.state:
            case (_, tuple() as shape, _Name("uint8"), bool() as by_columns, str() | bytes() as data):
                raw = data.encode("latin-1", "ignore") if isinstance(data, str) else data
                if all(type(length) is int and length >= 0 for length in shape) and len(shape) <= 8 and math.prod(shape) == len(raw):
                    return numpy.frombuffer(raw, numpy.uint8).reshape(shape, order="F" if by_columns else "C")
        raise ValueError("'data' must be an array of unsigned bytes (uint8) whose shape fits its data")


_NAMES = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct", "numpy ndarray", "numpy dtype", "_codecs encode")
_MARK = object()
_NEW = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE"}
_VALUES |= {"BINBYTES", "SHORT_BINBYTES"}


def _unpickle(data: bytes) -> Any:
    """Return the dicts, lists, tuples, strings, integers and arrays of a pickle. Bytes of Python 2 become ``str`` (Latin-1)."""
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(f"the pickle has {len(data):,} bytes; the limit is {MAX_PICKLE_BYTES:,}")
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_INSTRUCTIONS:
                raise ValueError(f"it has more than the limit of {MAX_INSTRUCTIONS:,} instructions")
            _follow(instruction.name, argument, stack, memo)
        (result,) = stack
    except Exception as error:  # damaged pickles raise several of Python's errors
        problem = "it is damaged" if isinstance(error, LookupError) else reason(error)
        raise ValueError(f"the pickle cannot be read: {problem}; download it again, or do not trust this file") from None
    return result


def _follow(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    match name:
        case "PROTO" | "FRAME" | "STOP":
            pass
        case _ if name in _VALUES:
            stack.append(argument)
        case _ if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        case _ if name in _NEW:
            stack.append(_NEW[name]())
        case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(tuple([stack.pop() for _ in range(int(name[-1]))][::-1]))
        case "TUPLE":
            stack.append(tuple(_pop_to_mark(stack)))
        case "APPEND" | "APPENDS":
            values = [stack.pop()] if name == "APPEND" else _pop_to_mark(stack)
            _top(stack, list).extend(values)
        case "SETITEM" | "SETITEMS":
            values = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else _pop_to_mark(stack)
            if not all(type(key) in (str, bytes, int) for key in values[::2]):  # hashing nested tuples may take forever
                raise ValueError("keys of a dict must be strings or integers")
            _top(stack, dict).update(zip(values[::2], values[1::2], strict=True))
        case "GLOBAL" | "STACK_GLOBAL":
            last, module = (stack.pop(), stack.pop()) if argument is None else ("", argument)
            named = f"{module} {last}".strip() if type(module) is type(last) is str else ""
            if named not in _NAMES:
                raise ValueError(f"it asks for {named[:100]!r}")
            stack.append(_Name(named))
        case "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        case "BUILD":
            state = stack.pop()
            if stack[-1] != _Name("uint8"):
                _top(stack, _Array).state = state
        case _:
            raise ValueError(f"instruction {name} is not for plain data")


def _call(function: Any, arguments: Any) -> Any:
    """Return the result that a known function would have. Nothing is called."""
    match function, arguments:
        case _Name("numpy.core.multiarray _reconstruct" | "numpy._core.multiarray _reconstruct"), (_Name("numpy ndarray"), *_):
            return _Array()
        case _Name("numpy dtype"), ("u1" | "uint8", *_):
            return _Name("uint8")
        case _Name("_codecs encode"), (str() as text, "latin1"):
            return text
    raise ValueError("it makes something else than plain data and arrays of bytes")


def _top(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise ValueError(f"it fills a {type(stack[-1]).__name__} like a {kind.__name__}")
    return stack[-1]


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    values: list[Any] = []
    while (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]
