"""Errors of reading data: raised at once, or collected and counted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from permuteformer.formatting import printable

AnyPath = str | os.PathLike[str]

SHOWN = 20
"""Number of errors whose messages are kept; the rest are only counted."""


class BadItem(ValueError):
    """An item of the data that cannot be used.

    Args:
        path: the file, or the archive and its member.
        line: the line number, from 1; ``None`` if the error concerns the file as a whole.
        message: the problem and what to do about it.
    """

    def __init__(self, path: AnyPath, line: int | None, message: str) -> None:
        place = printable(os.fspath(path)) if line is None else f"{printable(os.fspath(path))}, line {line:,}"
        super().__init__(f"{place}: {message}")
        self.path, self.line, self.message = os.fspath(path), line, message

    def __reduce__(self) -> Any:  # it is sent to the other processes of a training run
        return type(self), (self.path, self.line, self.message)


class CorruptFile(Exception):
    """A file that cannot be read any further. The message says why and what to do; the place is added by the caller.

    Data read before a truncation is good. Before damage, the last of it may be wrong: compressed files have their checksums at the end.
    """

    def __init__(self, problem: str, advice: str = "download or copy it again") -> None:
        super().__init__(f"{problem}; {advice}")


class Errors:
    """Raise the first bad item, or with ``skip`` collect all of them.

    >>> errors = Errors(skip=True)
    >>> with errors.at("reviews.csv", 7):
    ...     raise ValueError("the label is missing")
    >>> errors.count, errors.shown
    (1, ['reviews.csv, line 7: the label is missing'])
    """

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.count = 0
        self.shown: list[str] = []

    def add(self, error: BadItem) -> None:
        if not self.skip:
            raise error
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(str(error))

    @contextmanager
    def at(self, path: AnyPath, line: int | None = None) -> Iterator[None]:
        """Add a ``ValueError`` of the block as a bad item of this file and line."""
        try:
            yield
        except BadItem as error:
            self.add(error)
        except ValueError as error:
            self.add(BadItem(path, line, str(error)))


def reason(error: BaseException) -> str:
    """Return the message of an exception, printable and without a full stop."""
    message = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return printable(message.rstrip("."))
