"""A registry of classes by name: each module of a package registers its class, and constructor arguments are the options."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=type)


class Registry(Generic[T]):
    """Maps names to classes. The modules of ``package`` are imported at the first look-up.

    Classes outside the package are registered in the same way:

    >>> from permuteformer.positions import POSITIONS, PositionEncoding
    >>> @POSITIONS.register("nowhere")
    ... class Nowhere(PositionEncoding):
    ...     pass
    >>> "nowhere" in POSITIONS
    True
    >>> POSITIONS.remove("nowhere")
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, T] = {}
        self._discovered = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a class decorator that registers a class under ``name``; raise if another class has that name."""

        def enter(entry: T) -> T:
            if not entry.__module__.startswith(self._package + "."):
                self._discover()  # to know the names of the package's own classes
            if self._entries.get(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is already {self._entries[name].__qualname__}: choose another name")
            self._entries[name] = entry
            return entry

        return enter

    def remove(self, name: str) -> None:
        """Remove a class, so that its name is free again."""
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        if name not in self:
            raise ValueError(unknown(self.kind, name, self))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._entries))

    def name_of(self, entry: type) -> str:
        """Return the name of a class, for messages; its ``__name__`` if it is not registered."""
        return next((name for name, known in self._entries.items() if known is entry), entry.__name__)

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the parameters of the constructor."""
        return dict(inspect.signature(self[name]).parameters)

    def build(self, name: str, arguments: Mapping[str, Any], structure: Mapping[str, Any]) -> Any:
        """Construct ``name`` from the user's ``arguments`` and from those of ``structure`` (heads, sizes) that the constructor has."""
        self.check(name, arguments, structure)
        options = self.options(name)
        return self[name](**{key: value for key, value in structure.items() if key in options}, **arguments)

    def check(self, name: str, arguments: Mapping[str, Any], structure: Iterable[str]) -> None:
        """Raise if an argument is not one of the constructor's, or is set by ``structure``."""
        free = [option for option in self.options(name) if option not in structure]
        for argument in arguments:
            if argument not in free:
                raise TypeError(unknown(f"argument of {self.kind} {name!r}:", argument, free))

    def _discover(self) -> None:
        if not self._discovered:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            self._discovered = True


def unknown(kind: str, name: object, known: Iterable[Any]) -> str:
    """Return the message for an unknown name: the nearest known name, and all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name)[:100], names, n=1)
    hint = f"did you mean {near[0]!r}? Known:" if near else "known:"
    return f"unknown {kind} {name!r:.100}: {hint} {', '.join(map(repr, names)) or 'none'}"
