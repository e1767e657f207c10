"""ListOps as Long-Range Arena draws it: nested lists of MIN, MAX, MED and SM over digits, of 501 to 1,999 symbols, with their value."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from permuteformer.folders import new_folder
from permuteformer.tasks.generators.parallel import pieces

FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
"""The benchmark's own names."""

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SHORTER, LONGER = 500, 2000
"""A tree is kept if its length is between the two, neither included."""

_DEPTH, _FEWEST, _MOST = 10, 2, 10
_SHARE = 0.25
"""How often a node above the greatest depth is an operator."""

_DRAWS = 10_000
"""Trees a piece draws. Part of what a seed means: with another number it gives other trees."""

_ACCEPTED = 0.08
"""A little under the share of trees that are kept (0.083). Only tells how many processes are worth their start."""


def generate_listops(
    folder: Path,
    *,
    train: int = 96_000,
    validation: int = 2_000,
    test: int = 2_000,
    seed: int = 0,
    processes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Write ``basic_{train,val,test}.tsv`` into a new ``folder``, and return what was measured on the way.

    The files are as those of the benchmark: a header, lines that end with CRLF, and a list such as ``[MAX 2 9 ]`` as nested pairs,
    ``( ( ( [MAX 2 ) 9 ) ] )``. No tree is there twice, in whatever file. The same seed gives the same bytes with any number of processes.

    Args:
        folder: is made, whole or not at all; must not be there yet.
        train: examples in ``basic_train.tsv``.
        validation: examples in ``basic_val.tsv``.
        test: examples in ``basic_test.tsv``.
        seed: a whole number from 0 on.
        processes: all cores unless told.
        progress: is called with the number of examples that were added.

    Returns:
        ``drawn`` trees, the share of them that was ``accepted`` and how many came ``repeated``; of ``length`` mean, median, p10 and p90;
        ``labels``, the share of each; ``first_token_score``, the share that ``first_token_answer`` has right, by file.
    """
    sizes = {"train": train, "validation": validation, "test": test}
    for name, value in {**sizes, "processes": 1 if processes is None else processes}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on; it is {value!r}")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number from 0 on; it is {seed!r}")

    wanted = sum(sizes.values())
    useful = 1 + int(wanted / (_ACCEPTED * _DRAWS))
    # More than ten times as many are never looked at: draws that give so little are not those of this file.
    drawn = pieces(partial(_draw, seed=seed), 10 * useful + 10, min(processes or os.cpu_count() or 1, useful))
    with new_folder(Path(folder)) as made, ExitStack() as files, closing(drawn):
        writer = _Writer({name: files.enter_context(open(made / file, "wb")) for name, file in FILES.items()}, sizes)
        for piece in drawn:
            added = writer.add(piece)
            if progress is not None and added:
                progress(added)
            if writer.count == wanted:
                return writer.statistics()
        raise RuntimeError(f"only {writer.count:,} of {wanted:,} examples after {writer.drawn:,} draws")


def evaluate(tokens: list[str]) -> int:
    """The value of a list, from its symbols; parentheses may be there or not, as they say nothing that the brackets do not.

    >>> evaluate("( ( ( [MAX 2 ) 9 ) ] )".split()), evaluate("[MED 1 2 [SM 8 9 ] 3 ]".split())
    (9, 2)
    """
    open_lists: list[tuple[str, list[int]]] = []
    value: int | None = None
    nesting = 0
    for place, token in enumerate(_checked(tokens), start=1):
        if token in ("(", ")"):
            nesting += 1 if token == "(" else -1
            if nesting < 0:
                raise ValueError(f"token {place:,} is ')', but no '(' is open")
            continue
        if value is not None:
            raise ValueError(f"token {place:,} is {token!r:.50}, but the list is over before it")
        if token in OPERATORS:
            open_lists.append((token, []))
            continue
        if token == "]":
            if not open_lists:
                raise ValueError(f"token {place:,} is ']', but no list is open")
            operator, arguments = open_lists.pop()
            if not arguments:
                raise ValueError(f"token {place:,} is ']', but {operator} has no arguments")
            result = _apply(operator, arguments)
        elif len(token) == 1 and token in "0123456789":
            result = int(token)
        else:
            raise ValueError(f"token {place:,} is {token!r:.50}; it must be a digit, ']', '(', ')' or one of {', '.join(OPERATORS)}")
        if open_lists:
            open_lists[-1][1].append(result)
        else:
            value = result
    if value is None or nesting:
        missing = f"{len(open_lists):,} ']' missing" if open_lists else f"{nesting:,} ')' missing" if nesting else "no digit and no list"
        raise ValueError(f"the list is not over after token {len(tokens):,}: {missing}")
    return value


def first_token_answer(tokens: list[str]) -> int:
    """What the first symbol alone lets one guess: 0 for ``[MIN``, 9 for ``[MAX``, else 4. More than a third of the answers are right.

    >>> first_token_answer("( ( ( [MAX 2 ) 9 ) ] )".split())
    9
    """
    for token in _checked(tokens):
        if token not in ("(", ")"):
            return _GUESSES.get(token, 4)
    raise ValueError(f"tokens must have a symbol that is no parenthesis; there are {len(tokens)} tokens")


_GUESSES = {"[MIN": 0, "[MAX": 9}


def _checked(tokens: list[str]) -> list[str]:
    if isinstance(tokens, str):
        raise TypeError(f"tokens must be a list of str; it is one str, {tokens!r:.50}: give it .split()")
    return tokens


def _apply(operator: str, arguments: list[int]) -> int:
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MAX":
        return max(arguments)
    if operator == "[SM":
        return sum(arguments) % 10
    ordered = sorted(arguments)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


class _Piece(NamedTuple):
    """The trees of one piece that are kept."""

    sources: list[bytes]
    lengths: NDArray[np.int64]
    values: NDArray[np.int8]
    operators: NDArray[np.int8]
    """Of the roots."""


class _Writer:
    """Takes pieces, leaves out what came before, fills one file after the other, and keeps count."""

    def __init__(self, files: dict[str, Any], sizes: dict[str, int]) -> None:
        for file in files.values():
            file.write(b"Source\tTarget\r\n")
        self._files = files
        self._splits = [name for name, size in sizes.items() for _ in range(size)]
        self._seen: set[bytes] = set()
        self._lengths: list[int] = []
        self._labels: list[int] = []
        self._right: dict[str, list[bool]] = {name: [] for name in sizes}
        self.drawn = self.accepted = self.repeated = self.count = 0

    def add(self, piece: _Piece) -> int:
        """How many of the piece were written."""
        before = self.count
        self.drawn += _DRAWS
        self.accepted += len(piece.sources)
        for source, length, value, operator in zip(piece.sources, piece.lengths, piece.values, piece.operators, strict=True):
            if self.count == len(self._splits):
                break
            digest = hashlib.blake2b(source, digest_size=16).digest()  # 100,000 sources would take 600 MB
            if digest in self._seen:
                self.repeated += 1
                continue
            self._seen.add(digest)
            split = self._splits[self.count]
            self._files[split].write(b"%b\t%d\r\n" % (source, value))
            self._lengths.append(int(length))
            self._labels.append(int(value))
            self._right[split].append(_GUESSES.get(OPERATORS[operator], 4) == value)
            self.count += 1
        return self.count - before

    def statistics(self) -> dict[str, Any]:
        p10, median, p90 = np.percentile(self._lengths, [10, 50, 90]).tolist()
        labels = np.bincount(self._labels, minlength=10) / self.count
        return {
            "drawn": self.drawn,
            "accepted": self.accepted / self.drawn,
            "repeated": self.repeated,
            "length": {"mean": float(np.mean(self._lengths)), "median": median, "p10": p10, "p90": p90},
            "labels": {str(digit): float(share) for digit, share in enumerate(labels)},
            "first_token_score": {split: float(np.mean(right)) for split, right in self._right.items()},
        }


class _Level(NamedTuple):
    """The nodes of one depth, tree by tree, from left to right: the arguments of its lists are the next level, in this order."""

    symbol: NDArray[np.int8]
    """A digit, or 10 + the number of an operator."""
    arguments: NDArray[np.int64]
    """How many, of the operators alone."""

    @property
    def lists(self) -> NDArray[np.bool_]:
        return self.symbol >= 10


def _draw(piece: int, seed: int) -> _Piece:
    """Draw ``_DRAWS`` trees, all at once; keep those of the right length."""
    levels, lengths = _levels(np.random.default_rng([seed, piece]))
    values = _values(levels)
    return _Piece(_sources(levels), lengths, values, levels[0].symbol - np.int8(10))


def _levels(generator: np.random.Generator) -> tuple[list[_Level], NDArray[np.int64]]:
    """The trees that are kept, level by level from the root, and their lengths."""
    tree = np.arange(_DRAWS)
    length = np.ones(_DRAWS, dtype=np.int64)  # every node is counted when its parent is drawn
    drawn = []
    for depth in range(1, _DEPTH + 1):
        symbol = generator.integers(0, 10, len(tree), dtype=np.int8)
        lists = generator.random(len(tree)) <= (_SHARE if depth < _DEPTH else -1)
        owner = tree[lists]
        symbol[lists] = 10 + generator.integers(0, len(OPERATORS), len(owner), dtype=np.int8)
        arguments = generator.integers(_FEWEST, _MOST + 1, len(owner))
        drawn.append((tree, _Level(symbol, arguments), owner))
        length += np.bincount(owner, weights=1 + arguments, minlength=_DRAWS).astype(np.int64)  # 1 for the bracket
        goes_on = length[owner] < LONGER  # of trees that are too long already, no more is drawn
        tree = np.repeat(owner[goes_on], arguments[goes_on])
    kept = (length > SHORTER) & (length < LONGER)
    return [_Level(level.symbol[kept[tree]], level.arguments[kept[owner]]) for tree, level, owner in drawn], length[kept]


_ABSENT = 99
"""Fills up the arguments of a list to ten, and comes last when they are sorted."""


def _values(levels: list[_Level]) -> NDArray[np.int8]:
    """The value of every tree, from the deepest level up."""
    below: NDArray[np.int8] = levels[-1].symbol
    for level in reversed(levels[:-1]):
        count = level.arguments
        table = np.full((len(count), _MOST), _ABSENT, dtype=np.int8)
        table[np.arange(_MOST) < count[:, None]] = below
        table.sort(axis=1)
        row = np.arange(len(count))
        middle = (table[row, (count - 1) // 2] + table[row, count // 2]) // 2
        total = (table.sum(axis=1, dtype=np.int64) - _ABSENT * (_MOST - count)) % 10
        results = np.choose(level.symbol[level.lists] - 10, [table[:, 0], table[row, count - 1], middle, total])
        below = level.symbol.copy()
        below[level.lists] = results
    return below


_NAMES = np.frombuffer("".join(f"{name:4}" for name in OPERATORS).encode(), dtype=np.uint8).reshape(-1, 4)


def _sources(levels: list[_Level]) -> list[bytes]:
    """The trees as text. A list is ``( `` once for each argument and once more, its name, `` x )`` for each argument, and `` ] )``."""
    heads = [2 * (level.arguments + 1) + np.array([len(name) for name in OPERATORS])[level.symbol[level.lists] - 10] for level in levels]
    sizes = _sizes(levels, heads)
    ends = np.cumsum(sizes[0])
    text = np.full(ends[-1] if len(ends) else 0, ord(" "), dtype=np.uint8)
    start = ends - sizes[0]
    for depth, (level, head, size) in enumerate(zip(levels, heads, sizes, strict=True)):
        lists = level.lists
        text[start[~lists]] = ord("0") + level.symbol[~lists]
        own, end = start[lists], (start + size)[lists]
        for number in range(_MOST + 1):
            text[own[level.arguments >= number] + 2 * number] = ord("(")
        for letter in range(4):
            text[own + 2 * (level.arguments + 1) + letter] = _NAMES[level.symbol[lists] - 10, letter]
        text[end - 3], text[end - 1] = ord("]"), ord(")")
        if depth > 0:
            text[start + size + 1] = ord(")")
        if depth + 1 < len(levels):
            # Where an argument begins: its list's beginning, the head, the arguments before it, a blank.
            taken = sizes[depth + 1] + 3
            before = np.cumsum(taken) - taken
            start = before + np.repeat(own + head - before[_firsts(level)], level.arguments) + 1
    whole = text.tobytes()
    return [whole[end - size : end] for end, size in zip(ends.tolist(), sizes[0].tolist(), strict=True)]


def _sizes(levels: list[_Level], heads: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """The characters that each node takes, level by level."""
    sizes = [np.ones(len(levels[-1].symbol), dtype=np.int64)]
    for level, head in zip(reversed(levels[:-1]), reversed(heads[:-1]), strict=True):
        size = np.ones(len(level.symbol), dtype=np.int64)
        size[level.lists] = head + np.add.reduceat(sizes[0] + 3, _firsts(level)) + 4
        sizes.insert(0, size)
    return sizes


def _firsts(level: _Level) -> NDArray[np.int64]:
    """Where in the next level the arguments of each list begin."""
    return np.cumsum(level.arguments) - level.arguments
