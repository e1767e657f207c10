"""ListOps of Long-Range Arena: nested lists of MIN, MAX, MED and SM (sum modulo 10) over digits, and their values.

A tree is drawn from its root. A node is an operator with probability 1/4, else a digit; nodes of the tenth level are digits. An operator
has 2 to 10 arguments. Its length is 2 plus the lengths of its arguments. Trees longer than 500 and shorter than 2,000 are kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np

from permuteformer.storage import new_folder
from permuteformer.tasks.generators.base import Generated, GenerateOptions, parallel_map

OFFICIAL_COUNTS = {"train": 96_000, "validation": 2_000, "test": 2_000}
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}

_BLOCK_DRAWS = 5_000
"""Trees drawn per block, of which 8.3 % are kept. Another number would change the data of every seed."""


class Tree(NamedTuple):
    """An expression as nested pairs, its length without the parentheses of the pairs, and its value."""

    source: str
    length: int
    value: int


def generate_listops(folder: Path, options: GenerateOptions) -> Generated:
    """Write ``listops-1000/basic_{train,val,test}.tsv`` in the format of Long-Range Arena, into the data folder.

    A tree is written as nested pairs: ``[MAX 2 9 ]`` is ``( ( ( [MAX 2 ) 9 ) ] )``. All trees are distinct.

    The statistics are trees ``drawn``, the share ``accepted`` for their length and how many were ``repeated``; mean, median, p10 and p90 of
    the ``length``; the share of each of the ``labels``; ``first_token_score``, the accuracy of ``first_token_answer`` per split.
    """
    sizes = options.sizes(OFFICIAL_COUNTS)
    needed = 1 + sum(sizes.values()) // 400  # about 400 trees are kept per block
    blocks = parallel_map(partial(_draw_block, options.seed), range(10 * needed), options.process_count(useful=needed))
    target = folder / "listops-1000"
    totals: Counter[str] = Counter()
    lengths, labels, scores = [], [], {}
    with new_folder(target) as unfinished, closing(blocks):
        trees = _unique(blocks, totals)
        for split, name in FILES.items():
            correct = 0
            with open(unfinished / name, "w", encoding="ascii", newline="\r\n") as file:
                file.write("Source\tTarget\n")
                for tree in islice(trees, sizes[split]):
                    file.write(f"{tree.source}\t{tree.value}\n")
                    lengths.append(tree.length)
                    labels.append(tree.value)
                    correct += first_token_answer(tree.source) == tree.value
                    options.progress(1)
            scores[split] = correct / sizes[split]
        if len(lengths) < sum(sizes.values()):
            raise RuntimeError(f"only {len(lengths):,} distinct trees in {totals['drawn']:,} draws")
    p10, middle, p90 = np.percentile(lengths, [10, 50, 90]).tolist()
    statistics = {
        "drawn": totals["drawn"],
        "accepted": totals["accepted"] / totals["drawn"],
        "repeated": totals["repeated"],
        "length": {"mean": float(np.mean(lengths)), "median": middle, "p10": p10, "p90": p90},
        "labels": {str(digit): labels.count(digit) / len(labels) for digit in range(10)},
        "first_token_score": scores,
    }
    return Generated(target, statistics)


def first_token_answer(source: str) -> int:
    """Return the answer that the first symbol suggests: 0 for ``[MIN``, 9 for ``[MAX``, else 4. More than a third are correct.

    >>> first_token_answer("( ( ( [MAX 2 ) 9 ) ] )"), first_token_answer("[SM")
    (9, 4)
    """
    return {"[MIN": 0, "[MAX": 9}.get(source.lstrip("( ")[:4], 4)


def _unique(blocks: Iterable[list[Tree]], totals: Counter[str]) -> Iterator[Tree]:
    """Yield the trees of all blocks without repetitions; add what was drawn to ``totals``."""
    seen: set[bytes] = set()
    for block in blocks:
        totals.update(drawn=_BLOCK_DRAWS, accepted=len(block))
        for tree in block:
            digest = hashlib.blake2b(tree.source.encode(), digest_size=16).digest()  # 100,000 sources would take 600 MB
            if digest in seen:
                totals["repeated"] += 1
            else:
                seen.add(digest)
                yield tree


def _draw_block(seed: int, number: int) -> list[Tree]:
    random = Random(f"{seed} {number}").random
    trees = (_draw_tree(random) for _ in range(_BLOCK_DRAWS))
    return [tree for tree in trees if 500 < tree.length < 2000]


def _draw_tree(random: Callable[[], float], depth: int = 1) -> Tree:
    """Draw a tree whose root is at ``depth``. Only ``random()`` is used: it gives the same numbers in all versions of Python."""
    if depth == 10 or random() > 0.25:
        return _DIGITS[int(10 * random())]
    operator = _NAMES[int(len(_NAMES) * random())]
    arguments = [_draw_tree(random, depth + 1) for _ in range(2 + int(9 * random()))]
    source = "( " * (len(arguments) + 1) + operator + "".join([f" {tree.source} )" for tree in arguments]) + " ] )"
    return Tree(source, 2 + sum([tree.length for tree in arguments]), OPERATORS[operator]([tree.value for tree in arguments]))


_DIGITS = [Tree(str(digit), 1, digit) for digit in range(10)]
_NAMES = list(OPERATORS)
