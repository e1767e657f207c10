"""ListOps by rule, against a second generator that is written as the definition reads, and against known statistics."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, ks_2samp

from permuteformer.tasks.generators import listops
from permuteformer.tasks.generators.listops import evaluate, first_token_answer, generate_listops

NAMES = ["basic_train.tsv", "basic_val.tsv", "basic_test.tsv"]
LABELS = [0.168, 0.087, 0.078, 0.082, 0.089, 0.087, 0.077, 0.073, 0.088, 0.169]
"""Published to three digits, of some 166,000 trees."""

Tree = int | tuple[str, list[Any]]


def grow(source: random.Random, depth: int = 1, budget: list[int] | None = None) -> Tree:
    """One tree, from the definition. Raises OverflowError as soon as it is too long."""
    budget = budget if budget is not None else [1999]
    budget[0] -= 1
    if depth < 10 and source.random() <= 0.25:
        budget[0] -= 1
        if budget[0] < 0:
            raise OverflowError
        count = source.randint(2, 10)
        return source.choice(["[MIN", "[MAX", "[MED", "[SM"]), [grow(source, depth + 1, budget) for _ in range(count)]
    if budget[0] < 0:
        raise OverflowError
    return source.randrange(10)


def value(tree: Tree) -> int:
    if isinstance(tree, int):
        return tree
    values = [value(child) for child in tree[1]]
    return {"[MIN": min(values), "[MAX": max(values), "[MED": int(statistics.median(values)), "[SM": sum(values) % 10}[tree[0]]


def length(tree: Tree) -> int:
    return 1 if isinstance(tree, int) else 2 + sum(map(length, tree[1]))


def pairs(tree: Tree) -> str:
    """As the files have it: pairs of what came so far and the next argument, and at the end of that and the bracket."""
    if isinstance(tree, int):
        return str(tree)
    so_far = tree[0]
    for child in tree[1]:
        so_far = f"( {so_far} {pairs(child)} )"
    return f"( {so_far} ] )"


def parse(source: str) -> Tree:
    """A tree from the nested pairs, by the pairs alone: brackets are not looked for."""
    stack: list[list[Any]] = [[]]
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


def shape(tree: Tree) -> tuple[int, set[int]]:
    """Depth, and the numbers of arguments there are."""
    if isinstance(tree, int):
        return 1, set()
    below = [shape(child) for child in tree[1]]
    return 1 + max(depth for depth, _ in below), {len(tree[1])}.union(*(counts for _, counts in below))


def examples(folder: Path) -> list[tuple[str, int]]:
    found = []
    for name in NAMES:
        header, *lines, last = (folder / name).read_bytes().decode("ascii").split("\r\n")
        assert (header, last) == ("Source\tTarget", "")
        found += [(source, int(target)) for source, target in (line.split("\t") for line in lines)]
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("listops") / "made"
    return folder, generate_listops(folder, train=4_000, validation=250, test=250, seed=5, processes=1)


@pytest.fixture(scope="module")
def sample(made: tuple[Path, dict[str, Any]]) -> list[tuple[str, int]]:
    return examples(made[0])


def test_lengths_and_share_are_the_known_ones(made: tuple[Path, dict[str, Any]]) -> None:
    measured = made[1]
    assert measured["accepted"] == pytest.approx(0.083, abs=4 * (0.083 / measured["drawn"]) ** 0.5 + 0.0005)
    assert measured["length"] == pytest.approx({"mean": 1035, "median": 954, "p10": 577, "p90": 1643}, rel=0.03)


def test_labels_are_the_known_ones(made: tuple[Path, dict[str, Any]], sample: list[tuple[str, int]]) -> None:
    measured = made[1]["labels"]
    assert list(measured) == list("0123456789")
    for label, known in enumerate(LABELS):
        assert measured[str(label)] == pytest.approx(known, abs=4 * (known * (1 - known) * (1 / 4_500 + 1 / 166_000)) ** 0.5 + 0.0005)
        assert measured[str(label)] == sum(target == label for _, target in sample) / 4_500


def test_lengths_are_of_the_files(made: tuple[Path, dict[str, Any]], sample: list[tuple[str, int]]) -> None:
    lengths = [sum(token not in "()" for token in source.split(" ")) for source, _ in sample]
    assert 500 < min(lengths) < 510
    assert 1980 < max(lengths) < 2000
    assert made[1]["length"]["mean"] == pytest.approx(statistics.mean(lengths))
    assert made[1]["length"]["median"] == statistics.median(lengths)


def test_first_token_scores_more_than_a_third(made: tuple[Path, dict[str, Any]], sample: list[tuple[str, int]]) -> None:
    right = [first_token_answer(source.split(" ")) == target for source, target in sample]
    assert np.mean(right) == pytest.approx(0.37, abs=0.025)
    scores = made[1]["first_token_score"]
    assert scores == {"train": np.mean(right[:4_000]), "validation": np.mean(right[4_000:4_250]), "test": np.mean(right[4_250:])}


def test_distribution_is_that_of_the_definition(sample: list[tuple[str, int]]) -> None:
    source, draws, kept = random.Random(3), 20_000, []
    for _ in range(draws):
        try:
            tree = grow(source)
        except OverflowError:
            continue
        if length(tree) > 500:
            kept.append(tree)
    assert len(kept) / draws == pytest.approx(0.083, abs=4 * (0.083 / draws) ** 0.5)
    parsed = [parse(text) for text, _ in sample[: len(kept)]]
    labels = [np.bincount([value(tree) for tree in trees], minlength=10) for trees in (kept, parsed)]
    assert chi2_contingency(labels).pvalue > 1e-4
    assert ks_2samp([length(tree) for tree in kept], [length(tree) for tree in parsed]).pvalue > 1e-4
    symbols = [Counter(token for tree in trees for token in pairs(tree).split(" ") if token not in "()") for trees in (kept, parsed)]
    for symbol, count in symbols[0].items():
        assert symbols[1][symbol] / symbols[1].total() == pytest.approx(count / symbols[0].total(), rel=0.02)


def test_files_are_nested_pairs_with_their_value(sample: list[tuple[str, int]]) -> None:
    depths, counts = set(), Counter()
    for source, target in sample:
        assert evaluate(source.split(" ")) == target
    for source, target in sample[::10]:
        tree = parse(source)
        assert pairs(tree) == source
        assert value(tree) == target
        assert evaluate([token for token in source.split(" ") if token not in "()"]) == target
        depth, found = shape(tree)
        depths.add(depth)
        counts.update(found)
    assert max(depths) == 10
    assert set(counts) == set(range(2, 11))


def test_nothing_is_there_twice(sample: list[tuple[str, int]]) -> None:
    assert len({source for source, _ in sample}) == len(sample) == 4_500


def test_repeated_trees_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = listops._draw
    monkeypatch.setattr(listops, "_draw", lambda piece, seed: draw(piece // 2, seed))
    measured = generate_listops(tmp_path / "made", train=1_000, validation=100, test=100, processes=1)
    found = examples(tmp_path / "made")
    assert len({source for source, _ in found}) == len(found) == 1_200
    assert measured["repeated"] > 500


def test_bytes_do_not_depend_on_processes(tmp_path: Path) -> None:
    sizes = {"train": 1_800, "validation": 30, "test": 20}
    alone, reports = [], []
    alone.append(generate_listops(tmp_path / "1", **sizes, processes=1, progress=reports.append))
    alone.append(generate_listops(tmp_path / "2", **sizes, processes=2))
    generate_listops(tmp_path / "other", **sizes, seed=1, processes=1)
    assert alone[0] == alone[1]
    assert sum(reports) == 1_850
    for name in NAMES:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
        assert (tmp_path / "1" / name).read_bytes() != (tmp_path / "other" / name).read_bytes()
    assert [(tmp_path / "1" / name).read_bytes().count(b"\r\n") - 1 for name in NAMES] == [1_800, 30, 20]


def test_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_listops(tmp_path / "made", train=2_000, validation=1, test=1, processes=1, progress=stop)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train must be a whole number from 1 on; it is 0"):
        generate_listops(tmp_path / "made", train=0)
    with pytest.raises(ValueError, match=r"processes must be .* it is 1\.5"):
        generate_listops(tmp_path / "made", processes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seed must be .* it is -1"):
        generate_listops(tmp_path / "made", seed=-1)
    with pytest.raises(FileExistsError, match="is there already"):
        generate_listops(tmp_path)


TREES = st.recursive(
    st.integers(0, 9), lambda inner: st.tuples(st.sampled_from(["[MIN", "[MAX", "[MED", "[SM"]), st.lists(inner, min_size=1, max_size=10))
)


@given(TREES)
def test_evaluate_is_the_recursive_value(tree: Tree) -> None:
    assert evaluate(pairs(tree).split(" ")) == value(tree)


@given(TREES, st.data())
def test_evaluate_refuses_what_lacks_a_symbol(tree: Tree, data: st.DataObject) -> None:
    tokens = [token for token in pairs(tree).split(" ") if token not in "()"]
    gone = data.draw(st.sampled_from([place for place, token in enumerate(tokens) if not token.isdigit() or len(tokens) == 1]))
    with pytest.raises(ValueError, match="token"):
        evaluate(tokens[:gone] + tokens[gone + 1 :])


def test_evaluate_goes_deep() -> None:
    assert evaluate(["[SM"] * 100_000 + ["7"] + ["1", "]"] * 100_000) == (7 + 100_000) % 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not over after token 0: no digit and no list"),
        ("[MIN 1 2", "not over after token 3: 1 ']' missing"),
        ("( 3", r"not over after token 2: 1 '\)' missing"),
        ("[MIN ]", r"token 2 is '\]', but \[MIN has no arguments"),
        ("]", r"token 1 is '\]', but no list is open"),
        ("3 4", "token 2 is '4', but the list is over"),
        ("[MAX 1 ) ]", r"token 3 is '\)', but no '\(' is open"),
        ("[MAX 1 10 ]", "token 3 is '10'; it must be a digit"),
        ("[MAX 1 ² ]", "token 3 is '²'"),
        ("[FIRST 1 ]", r"token 1 is '\[FIRST'"),
    ],
)
def test_evaluate_names_the_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(text.split())


def test_first_token_answer() -> None:
    assert [first_token_answer(["(", "(", name]) for name in ("[MIN", "[MAX", "[MED", "[SM", "7")] == [0, 9, 4, 4, 4]
    with pytest.raises(ValueError, match="no parenthesis; there are 2 tokens"):
        first_token_answer(["(", ")"])
    for function in (evaluate, first_token_answer):
        with pytest.raises(TypeError, match=r"give it \.split\(\)"):
            function("[MIN 1 2 ]")  # type: ignore[arg-type]
