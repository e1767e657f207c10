"""What all commands share: the console, and errors without a traceback."""

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
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; what was not finished is not kept", style="red")
        raise typer.Exit(130) from None
    except Exception as error:
        if not isinstance(error, (ValueError, TypeError, OSError, *kinds)):
            raise
        cause = error.__cause__ if isinstance(error, kinds) else None  # libraries wrap what was said, and say less
        Console(stderr=True).print(f"{cause or error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def separate(names: list[str] | None) -> list[str]:
    """Names that are given one by one, or with commas between them."""
    return [part for name in names or [] for part in name.split(",") if part]


def say(text: str, style: str = "") -> None:
    """Print a line as it is; a terminal breaks it where it must, so that paths can be copied."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
