"""Shared by all commands: the console, errors in one line, progress bars."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from permuteformer.console import PlainConsole, description_column

console = PlainConsole()

READABLE = (ValueError, TypeError, OSError, MemoryError, ArithmeticError)
"""Errors whose messages say what to do."""
MAX_MESSAGE = 2500
"""Longest error message; longer ones, such as those that repeat a long path, are cut."""


@contextmanager
def readable_errors() -> Iterator[None]:
    """End the command with one line for errors that say what to do."""
    try:
        yield
    except KeyboardInterrupt:
        PlainConsole(stderr=True).print("interrupted", style="red")
        raise SystemExit(130) from None
    except Exception as error:
        if type(error).__name__.startswith("StrictDataclass"):  # of huggingface_hub, which wraps what is wrong with a configuration
            error = error.__cause__ or error  # type: ignore[assignment]
        elif not isinstance(error, READABLE):
            raise
        PlainConsole(stderr=True).print(f"{error}"[:MAX_MESSAGE], style="red", soft_wrap=True)
        raise SystemExit(1) from None


def say(text: str, style: str = "") -> None:
    """Print a line without breaking it, so that paths can be copied."""
    console.print(text, style=style, soft_wrap=True)


def note(text: str, style: str = "") -> None:
    """Print a line to standard error."""
    PlainConsole(stderr=True).print(text, style=style, soft_wrap=True)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print warnings without the line of code that raised them."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(f"note: {message}", style="yellow")
        yield


@contextmanager
def progress_bar(title: str, total: int | None = None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if that is a terminal; call the result with the number of further items."""
    remaining = TimeElapsedColumn() if total is None else TimeRemainingColumn()
    stderr = PlainConsole(stderr=True)
    hidden = not (shown and stderr.is_terminal)  # rich would write an empty line to a file
    columns = (description_column(), BarColumn(), MofNCompleteColumn(), remaining)
    with Progress(*columns, console=stderr, transient=True, redirect_stdout=False, redirect_stderr=False, disable=hidden) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda count: progress.advance(bar, count)
