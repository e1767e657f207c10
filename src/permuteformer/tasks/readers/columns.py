"""What tables have in common: names of columns, and empty lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

from permuteformer.tasks.readers.problems import BadItem
from permuteformer.tasks.readers.unpacking import AnyPath
from permuteformer.texts import printable

T = TypeVar("T")


def wrong_names(names: Sequence[str]) -> str | None:
    """What is wrong with the names of columns, or ``None``.

    >>> wrong_names(["text", "label", "text"])
    "'text' is there 2 times"
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        return f"they must be a list of strings, and are {printable(repr(names))}"
    if not names:
        return "there are none"
    if "" in names:
        return f"name {list(names).index('') + 1:,} is empty"
    name, times = Counter(names).most_common(1)[0]
    return f"{printable(name)!r} is there {times:,} times" if times > 1 else None


def without_empty_lines(path: AnyPath, found: Iterator[tuple[int, T | BadItem | None]]) -> Iterator[tuple[int, T | BadItem]]:
    """What was found, where ``None`` is an empty line: a problem, unless nothing comes after it."""
    first, count = 0, 0
    for number, item in found:
        if item is None:
            first, count = first if count else number, count + 1
            continue
        for line in range(first, first + count):
            yield line, BadItem(path, line, "the line is empty; delete it")
        count = 0
        yield number, item
