"""Options as words of a command line, turned into what a constructor's signature says."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any


def parse_options(build: Callable[..., Any], words: Iterable[str]) -> dict[str, Any]:
    """``NAME=VALUE`` words as arguments of ``build``, each of the type that its signature gives. Names are not checked here.

    >>> def task(path: str, size: int = 8, skip_bad: bool = False, seed: int | None = None): ...
    >>> parse_options(task, ["size=16", "skip-bad=true", "seed=none"])
    {'size': 16, 'skip_bad': True, 'seed': None}
    """
    hints = typing.get_type_hints(build.__init__ if isinstance(build, type) else build)  # type: ignore[misc]
    options: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not name:
            raise ValueError(f"an option must be NAME=VALUE; it is {word!r}")
        if name in options:
            raise ValueError(f"option {name} is given twice")
        options[name] = parse_value(name, value, hints.get(name, str))
    return options


def parse_value(name: str, value: str, hint: Any) -> Any:
    """A word as a ``str``, ``int``, ``float`` or ``bool``, or ``None`` where that is allowed."""
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    if type(None) in choices and value.lower() == "none":
        return None
    for kind in (bool, int, float, str):
        if kind not in choices:
            continue
        try:
            return _flag(value) if kind is bool else kind(value)
        except ValueError:
            continue
    wanted = " or ".join(getattr(choice, "__name__", str(choice)).replace("NoneType", "none") for choice in choices)
    raise ValueError(f"{name} must be of type {wanted}; it is {value!r}")


def _flag(value: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if value.lower() not in words:
        raise ValueError(value)
    return words[value.lower()]


def argument_docs(kind: type) -> dict[str, str]:
    """What the docstring of a class says of its constructor's arguments, under ``Args:``; a class without them has its parent's."""
    told_by = next(parent for parent in kind.__mro__ if "Args:" in (parent.__doc__ or "") or parent is object)
    arguments = (inspect.getdoc(told_by) or "").partition("Args:")[2]
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |^\S|\Z)", arguments, re.MULTILINE | re.DOTALL)
    return {name: _plain(text) for name, text in found}


def attribute_docs(kind: type) -> dict[str, str]:
    """The strings that stand after the fields of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: _plain(str(text.value.value))
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "")
