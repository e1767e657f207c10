"""A registry of classes by name: one file of a package is one entry, and the constructor's signature is its schema."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=type)


class Registry(Generic[T]):
    """Names to classes. The modules of ``package`` are imported at the first look-up, not before.

    A class from outside the package joins in by the same decorator:

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
        """Class decorator: enter the class under ``name``. A name that is taken is refused."""

        def enter(entry: T) -> T:
            if not entry.__module__.startswith(self._package + "."):
                self._discover()  # so that a name of the package's own is known to be taken
            if self._entries.get(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is already {self._entries[name].__qualname__}; choose another name")
            self._entries[name] = entry
            return entry

        return enter

    def remove(self, name: str) -> None:
        """Forget an entry (tests and notebooks re-register)."""
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        self._discover()
        if name not in self._entries:
            raise ValueError(unknown(self.kind, name, self))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._entries))

    def name_of(self, entry: type) -> str:
        """The name a class stands under, for messages; its own name if it stands under none."""
        return next((name for name, known in self._entries.items() if known is entry), entry.__name__)

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """The constructor's parameters: what may be set."""
        return dict(inspect.signature(self[name]).parameters)

    def build(self, name: str, arguments: Mapping[str, Any], structure: Mapping[str, Any]) -> Any:
        """Construct ``name`` from the user's ``arguments`` and from what the surroundings know.

        Of ``structure`` (head count, sizes) the constructor takes what it names; of ``arguments`` nothing may be left over.
        """
        options = self.options(name)
        self.check(name, arguments, structure)
        known = {key: value for key, value in structure.items() if key in options}
        return self[name](**known, **arguments)

    def check(self, name: str, arguments: Mapping[str, Any], structure: Iterable[str]) -> None:
        """Raise where an argument is none of the constructor's, or one that ``structure`` decides."""
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


def unknown(kind: str, name: object, known: Any) -> str:
    """The sentence for a name that is not known: what there is, and the nearest to what was asked."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name)[:100], names, n=1)
    hint = f"did you mean {near[0]!r}? There is" if near else "there is"
    return f"unknown {kind} {name!r:.100}: {hint} {', '.join(map(repr, names)) or 'none'}"
