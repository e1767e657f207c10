"""The ListOps generator: its files against an independent parser, its definition, and the known statistics of Long-Range Arena."""

import random
import statistics
from collections import Counter

import numpy as np
import pytest
from scipy.stats import binomtest, chisquare

from permuteformer.tasks import GenerateOptions
from permuteformer.tasks.generators import listops
from permuteformer.tasks.generators.listops import first_token_answer, generate_listops

NAMES = ["basic_train.tsv", "basic_val.tsv", "basic_test.tsv"]
COUNTS = {"train": 2_000, "validation": 250, "test": 250}
LABELS = [0.168, 0.087, 0.078, 0.082, 0.089, 0.087, 0.077, 0.073, 0.088, 0.169]
"""Shares of the values 0 to 9 in 166,000 trees of the original's rule."""


def parse(source):
    """Return the tree of nested pairs, an int or (operator, arguments). Brackets are ignored: the pairs alone give the structure."""
    stack = [[]]
    for token in source.split(" "):
        if token == "(":
            stack.append([])
        elif token == ")":
            left, right = stack.pop()
            stack[-1].append(left if right == "]" else (left, [right]) if isinstance(left, str) else (left[0], [*left[1], right]))
        else:
            stack[-1].append(int(token) if token.isdigit() else token)
    [[tree]] = stack
    return tree


def value(tree):
    if isinstance(tree, int):
        return tree
    values = sorted(map(value, tree[1]))
    middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
    return {"[MIN": values[0], "[MAX": values[-1], "[MED": middle, "[SM": sum(values) % 10}[tree[0]]


def nodes(tree, depth=1):
    """Yield the symbol, depth and number of arguments of every node."""
    if isinstance(tree, int):
        yield tree, depth, 0
    else:
        yield tree[0], depth, len(tree[1])
        for argument in tree[1]:
            yield from nodes(argument, depth + 1)


def examples(folder):
    """Return the lines of all three files as (source, target)."""
    found = []
    for name in NAMES:
        header, *lines, last = (folder / "listops-1000" / name).read_bytes().decode("ascii").split("\r\n")
        assert (header, last) == ("Source\tTarget", "")
        found += [(source, int(target)) for source, target in (line.split("\t") for line in lines)]
    return found


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listops")
    return generate_listops(folder, GenerateOptions(counts=COUNTS, seed=5, processes=1)).statistics, examples(folder)


def test_statistics_are_those_of_the_files_and_of_long_range_arena(generated):
    measured, found = generated
    lengths = [sum(token not in "()" for token in source.split(" ")) for source, _ in found]
    assert 500 < min(lengths) < 515
    assert 1970 < max(lengths) < 2000
    assert measured["length"]["mean"] == pytest.approx(statistics.mean(lengths))
    assert measured["length"] == pytest.approx({"mean": 1035, "median": 954, "p10": 577, "p90": 1643}, rel=0.04)
    assert measured["accepted"] == pytest.approx(0.083, abs=4 * (0.083 / measured["drawn"]) ** 0.5)
    assert measured["labels"] == {str(label): sum(target == label for _, target in found) / 2_500 for label in range(10)}
    for label, known in zip("0123456789", LABELS, strict=True):
        assert measured["labels"][label] == pytest.approx(known, abs=4 * (known * (1 - known) / 2_500) ** 0.5)
    correct = [first_token_answer(source) == target for source, target in found]
    assert measured["first_token_score"]["train"] == np.mean(correct[:2_000]) == pytest.approx(0.37, abs=0.04)


def test_trees_are_distinct_and_have_their_value(generated):
    _, found = generated
    assert len({source for source, _ in found}) == 2_500
    for source, target in found[::4]:
        assert value(parse(source)) == target


def test_nodes_are_drawn_by_the_definition():
    source = random.Random(0)
    found = [node for _ in range(2_000) for node in nodes(parse(listops._draw_tree(source.random).source))]
    operators = [node for node in found if node[2]]
    assert max(depth for _, depth, _ in found) == 10
    assert max(depth for _, depth, _ in operators) == 9
    assert binomtest(len(operators), sum(depth < 10 for _, depth, _ in found), 0.25).pvalue > 1e-3
    for drawn, possible in (
        ([symbol for symbol, _, _ in operators], {"[MIN", "[MAX", "[MED", "[SM"}),
        ([count for _, _, count in operators], set(range(2, 11))),
        ([symbol for symbol, _, count in found if not count], set(range(10))),
    ):
        assert set(drawn) == possible
        assert chisquare(list(Counter(drawn).values())).pvalue > 1e-3


def test_repeated_trees_are_skipped(tmp_path, monkeypatch):
    draw = listops._draw_block
    monkeypatch.setattr(listops, "_draw_block", lambda seed, number: draw(seed, number // 2))
    options = GenerateOptions(counts={"train": 500, "validation": 50, "test": 50}, processes=1)
    measured = generate_listops(tmp_path, options).statistics
    assert len({source for source, _ in examples(tmp_path)}) == 600
    assert measured["repeated"] > 300
    block = draw(0, 0)
    monkeypatch.setattr(listops, "_draw_block", lambda seed, number: block)
    with pytest.raises(RuntimeError, match="distinct"):
        generate_listops(tmp_path / "few", options)
    assert not (tmp_path / "few" / "listops-1000").exists()


def test_first_token_answer():
    assert [first_token_answer(f"( ( {symbol} 1 ) ] )") for symbol in ("[MIN", "[MAX", "[MED", "[SM", "7")] == [0, 9, 4, 4, 4]
