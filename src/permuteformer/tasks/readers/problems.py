"""What is wrong in a file, and where: raised at once, or skipped and counted."""

from __future__ import annotations

import os
from typing import Any

from permuteformer.texts import printable

SHOWN = 20
"""Problems that are kept word by word; the rest are counted."""


class BadItem(ValueError):
    """One thing in the data that cannot be used.

    Args:
        path: the file, or the archive and its member.
        line: counted from 1; ``None`` where the file is one item.
        message: what is wrong, and what to do.

    >>> print(BadItem("reviews.csv", 7, "there is no label"))
    reviews.csv, line 7: there is no label
    """

    def __init__(self, path: str | os.PathLike[str], line: int | None, message: str) -> None:
        place = printable(os.fspath(path)) if line is None else f"{printable(os.fspath(path))}, line {line:,}"
        super().__init__(f"{place}: {message}")
        self.path, self.line, self.message = os.fspath(path), line, message

    def __reduce__(self) -> Any:  # worker processes send it home
        return type(self), (self.path, self.line, self.message)


class Problems:
    """Takes the bad items of a reading: raises the first one, or with ``skip`` counts them all.

    >>> problems = Problems(skip=True)
    >>> problems.add(BadItem("reviews.csv", 7, "there is no label"))
    >>> problems.count, problems.shown
    (1, ['reviews.csv, line 7: there is no label'])
    """

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.count = 0
        self.shown: list[str] = []

    def add(self, problem: BadItem) -> None:
        if not self.skip:
            raise problem
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(str(problem))
