"""What all commands share: the console, and errors without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from permuteformer.terminal import PlainConsole
from permuteformer.texts import printable

LONGEST_COMPLAINT = 1000

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Of click, or of the click that newer versions of typer have in them."""

console = PlainConsole()


@contextmanager
def errors_in_words(*kinds: type[Exception]) -> Iterator[None]:
    """Errors that say what to do (``ValueError``, ``TypeError``, ``OSError`` and those given) end the command with their sentence."""
    try:
        yield
    except KeyboardInterrupt:
        PlainConsole(stderr=True).print("interrupted; what was not finished is not kept", style="red")
        raise typer.Exit(130) from None
    except Exception as error:
        if not isinstance(error, (ValueError, TypeError, OSError, *kinds)):
            raise
        cause = error.__cause__ if isinstance(error, kinds) else None  # libraries wrap what was said, and say less
        PlainConsole(stderr=True).print(f"{cause or error}", style="red", soft_wrap=True)
        raise typer.Exit(1) from None


class Commands(TyperGroup):
    """Commands whose complaints about their words can be printed, whatever stands in these."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _printable_complaints():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _printable_complaints():
            return super().invoke(ctx)


@contextmanager
def _printable_complaints() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        error.message = printable(error.message, LONGEST_COMPLAINT)
        raise


def separate(names: list[str] | None) -> list[str]:
    """Names that are given one by one, or with commas between them."""
    return [part for name in names or [] for part in name.split(",") if part]


def say(text: str, style: str = "") -> None:
    """Print a line as it is; a terminal breaks it where it must, so that paths can be copied."""
    console.print(text, style=style, soft_wrap=True)
