"""What all commands share: the console, numbers that people can read, and errors without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

console = Console()


@contextmanager
def errors_in_words(*kinds: type[Exception]) -> Iterator[None]:
    """Errors that say what to do (``ValueError``, ``TypeError``, ``OSError`` and those given) end the command with their sentence."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (ValueError, TypeError, OSError, *kinds)):
            raise
        Console(stderr=True).print(f"{error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None


def short(number: float) -> str:
    """A number that a person can read."""
    for limit, unit in ((1e15, ""), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number:.1e}" if not unit else f"{number / (limit if unit != 'k' else 1e3):.3g} {unit}"
    return f"{number:,.0f}"


def size(number: int) -> str:
    """Bytes that a person can read."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number / 2**10:.0f} KiB"
