"""Rows of JSON lines: one object a line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

from permuteformer.tasks.readers.columns import without_empty_lines
from permuteformer.tasks.readers.lines import text_lines
from permuteformer.tasks.readers.problems import BadItem
from permuteformer.tasks.readers.unpacking import AnyPath
from permuteformer.texts import printable

MAX_DIGITS = 4_300
"""Of a whole number: the time that Python takes for one grows with the square of its length."""


def rows(path: AnyPath) -> Iterator[tuple[int, dict[str, Any] | BadItem]]:
    """Line numbers and objects, or what is wrong in their place. A key that is there twice is wrong: one value would be lost."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole, parse_float=_finite)
    found = ((number, None if isinstance(line, str) and line.isspace() else line) for number, line in text_lines(path))
    checked: Iterator[tuple[int, str | BadItem]] = without_empty_lines(path, found)
    for number, line in checked:
        yield number, line if isinstance(line, BadItem) else _object(path, number, line, decoder)


def keys(path: AnyPath) -> list[str]:
    """The keys of the first object."""
    _, first = next(rows(path), (0, BadItem(path, None, "there are no rows; fetch or copy it again")))
    if isinstance(first, BadItem):
        raise first
    return list(first)


def _object(path: AnyPath, number: int, line: str, decoder: json.JSONDecoder) -> dict[str, Any] | BadItem:
    try:
        row = decoder.decode(line)
    except json.JSONDecodeError as error:
        at = min(error.pos, len(line.rstrip())) + 1  # it may have looked for more after the line's end
        return BadItem(path, number, f"this is no JSON: {error.msg} at character {at:,}; give one object a line")
    except ValueError as error:
        return BadItem(path, number, f"this JSON cannot be used: {error}")
    except RecursionError:
        return BadItem(path, number, "this JSON cannot be used: lists or objects are nested too deeply")
    if not isinstance(row, dict):
        return BadItem(path, number, f'each line must be a JSON object, as {{"text": "…"}}; this is a {type(row).__name__}')
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        name, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {printable(name)!r} is there {times:,} times")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON; leave the value out, or write null")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits; the limit is {MAX_DIGITS:,}")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {printable(digits, 40)} is too large")
    return number
