"""Pairs of halves: as they are written, that they are halves of what they say, and that nothing but the pair tells the label."""

from __future__ import annotations

import ast
import csv
import lzma
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import SHARED

from permuteformer.tasks.generators import retrieval
from permuteformer.tasks.generators.retrieval import generate_retrieval, wiki_articles

NAMES = ["new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv"]
WIKI = SHARED / "wiki_en"
ALPHABETS = ["abcdefghij", "äöüßéèñçøå", "αβγδεζηθικ", "語文書紙筆墨硯本字典", "🙂🙃😀😁😂🤣😃😄😅😆"]
"""Of characters that take one to four bytes."""


class Row(NamedTuple):
    label: str
    first: str
    second: str
    texts: tuple[bytes, bytes]


def article(source: random.Random, size: int) -> str:
    """Words that no other article has, so that a text is found in one place only."""
    words = []
    while sum(map(len, words)) + len(words) < size:
        letters = source.choice(ALPHABETS)
        words.append("".join(source.choices(letters, k=source.randint(1, 9))))
    return source.choice([" ", "\n", "  "]).join(words)


def collection(count: int, seed: int = 0, sizes: tuple[int, int] = (600, 3_000)) -> dict[str, str]:
    source = random.Random(seed)
    return {f"Article {seed} {number}": article(source, source.randint(*sizes)) for number in range(count)}


def rows(file: Path) -> list[Row]:
    found = []
    for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
        label, first, second, one, two = line.split("\t")
        found.append(Row(label, first, second, (ast.literal_eval(one), ast.literal_eval(two))))
    return found


def test_pairs_are_halves_of_what_they_say(tmp_path: Path) -> None:
    articles = collection(121)
    measured = generate_retrieval(tmp_path / "made", {"train": articles.items()}, half_bytes=900, least_bytes=40)
    contents = {title.replace(" ", "_"): text.encode() for title, text in articles.items()}
    for name, split in zip(NAMES, measured.values(), strict=True):
        found = rows(tmp_path / "made" / name)
        assert len(found) == split["pairs"] == 2 * split["articles"]
        for row in found:
            assert row.label == ("1.0" if row.first == row.second else "0.0")
            first, second = contents[row.first], contents[row.second]
            assert first.startswith(row.texts[0])
            begin = second.index(row.texts[1])
            assert 0 <= begin - len(second) // 2 <= 130
            assert second[begin - 1 : begin].isspace() or not second[begin - 130 : begin].split()[1:]
            assert begin + len(row.texts[1]) <= len(second) - 120
            assert len(row.texts[0]) <= len(first) // 2 - 256
            assert all(37 <= len(text) <= 900 and text.decode() for text in row.texts)
            assert abs(len(row.texts[0]) - len(row.texts[1])) < 4
        sizes = [len(text) for row in found for text in row.texts]
        assert split["bytes"] == {"mean": np.mean(sizes), "least": min(sizes), "most": max(sizes)}


def test_little_is_lost_to_equal_lengths(tmp_path: Path) -> None:
    documents = {name: collection(60, seed).items() for seed, name in enumerate(("train", "validation", "test"))}
    measured = generate_retrieval(tmp_path / "made", documents, half_bytes=900, least_bytes=10)
    for name, split in measured.items():
        room = [min(900, len(text.encode()) // 2 - 256) for _, text in documents[name]]
        assert split["bytes"]["mean"] > 0.95 * np.mean([size for size in room if size >= 10])


@pytest.mark.parametrize("count", [2, 3, 4, 7, 50])
def test_one_text_alone_tells_nothing(tmp_path: Path, count: int) -> None:
    documents = {name: collection(count, seed).items() for seed, name in enumerate(("train", "validation", "test"))}
    measured = generate_retrieval(tmp_path / "made", documents, half_bytes=900, least_bytes=10)
    for name, split in zip(NAMES, measured.values(), strict=True):
        found = rows(tmp_path / "made" / name)
        assert split["pairs"] == len(found) == 2 * count - 2 * split["too_short"]
        for side in (0, 1):
            uses = {label: Counter(row.texts[side] for row in found if row.label == label) for label in ("0.0", "1.0")}
            assert uses["0.0"] == uses["1.0"]
            assert set(uses["0.0"].values()) == {1}
        lengths = {
            label: Counter((len(row.texts[0]) // 8, len(row.texts[1]) // 8) for row in found if row.label == label)
            for label in ("0.0", "1.0")
        }
        assert (lengths["0.0"] - lengths["1.0"]).total() <= 0.2 * len(found)


def test_order_tells_nothing(tmp_path: Path) -> None:
    generate_retrieval(tmp_path / "made", {"train": collection(400).items()}, half_bytes=100, least_bytes=10)
    labels = [row.label == "1.0" for row in rows(tmp_path / "made" / NAMES[0])]
    assert len(labels) > 400
    runs = sum(before != after for before, after in pairwise(labels))
    assert abs(runs - len(labels) / 2) < 4 * len(labels) ** 0.5 / 2


def test_splits_have_no_article_in_common(tmp_path: Path) -> None:
    articles = collection(300)
    generate_retrieval(tmp_path / "made", {"train": articles.items()}, half_bytes=100, least_bytes=10)
    titles = [{title for row in rows(tmp_path / "made" / name) for title in (row.first, row.second)} for name in NAMES]
    assert len(set.union(*titles)) == sum(map(len, titles))
    assert [len(split) / 300 for split in titles] == pytest.approx([0.8, 0.1, 0.1], abs=4 * (0.16 / 300) ** 0.5)
    # An article stays where it is when there are others, in another order.
    grown = [*collection(50, seed=1).items(), *reversed(articles.items())]
    generate_retrieval(tmp_path / "grown", {"train": grown}, half_bytes=100, least_bytes=10)
    for name, before in zip(NAMES, titles, strict=True):
        assert before <= {row.first for row in rows(tmp_path / "grown" / name)}


def test_repeated_and_short_articles_are_left_out_and_counted(tmp_path: Path) -> None:
    one, two, three = (list(collection(10, seed, (2_000, 3_000)).items()) for seed in range(3))
    title, text = one[0]
    words = text[: len(text) // 2]
    documents = {
        "train": [*one, ("Short", "too little")],
        "validation": [*two, ("Another title", text), (title, "x " * 3_000), ("Same beginning", words + "y " * len(words))],
        "test": [*three, ("Nothing", ""), ("Hardly", "z " * 300)],
    }
    measured = generate_retrieval(tmp_path / "made", documents, half_bytes=100, least_bytes=100)
    assert [(split["articles"], split["too_short"], split["repeated"]) for split in measured.values()] == [
        (10, 1, 0),
        (10, 0, 3),
        (10, 2, 0),
    ]


def test_fewer_pairs_than_there_are(tmp_path: Path) -> None:
    documents = {name: list(collection(20, seed, (2_000, 3_000)).items()) for seed, name in enumerate(("train", "validation", "test"))}
    measured = generate_retrieval(tmp_path / "a", documents, train=4, validation=14, half_bytes=100)
    assert [(split["pairs"], split["articles"], split["unused"]) for split in measured.values()] == [(4, 2, 18), (14, 7, 13), (40, 20, 0)]
    chosen = {row.first for row in rows(tmp_path / "a" / NAMES[0])}
    assert len(chosen) == 2
    for seed in range(1, 5):
        generate_retrieval(tmp_path / str(seed), documents, train=4, half_bytes=100, seed=seed)
        chosen |= {row.first for row in rows(tmp_path / str(seed) / NAMES[0])}
    assert len(chosen) > 4
    with pytest.raises(ValueError, match=r"test needs 21 articles for 42 pairs; there are 20 \(0 were too short and 0 repeated\)"):
        generate_retrieval(tmp_path / "b", documents, test=42, half_bytes=100)
    with pytest.raises(ValueError, match=r"train needs 2 articles or more; there are 0 \(20 were too short"):
        generate_retrieval(tmp_path / "b", documents, half_bytes=9_000, least_bytes=9_000)
    assert not (tmp_path / "b").exists()


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        generate_retrieval(tmp_path / name, {"train": iter(collection(60).items())}, half_bytes=100, least_bytes=10, seed=seed)
    contents = {folder: [(tmp_path / folder / name).read_bytes() for name in NAMES] for folder in "abc"}
    assert contents["a"] == contents["b"] != contents["c"]


def test_lines_are_safe_for_readers_of_tables(tmp_path: Path) -> None:
    odd = ['" Heroes "', "tab\there", "two\nlines", "\x00 and \x1b[31m", "\u2028", "C:\\new", "'", "x" * 1000, "Ünïcödé", ""]
    articles = [(title, f"{number} said \"no\" and 'yes'\t\\ with\nbreaks\r\n\x00 " * 60) for number, title in enumerate(odd)]
    documents = {"train": articles, "validation": collection(2).items(), "test": collection(2, 1).items()}
    generate_retrieval(tmp_path / "made", documents, half_bytes=500, least_bytes=10)
    found = rows(tmp_path / "made" / NAMES[0])
    assert len(found) == 20
    with open(tmp_path / "made" / NAMES[0], newline="", encoding="utf-8") as file:
        assert [tuple(row[:3]) for row in csv.reader(file, delimiter="\t")] == [row[:3] for row in found]
    assert {text.decode().isascii() for row in found for text in row.texts} == {True}


def test_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, str]]:
        yield from collection(30).items()
        raise KeyboardInterrupt

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    for documents, progress in ((broken(), None), (collection(90).items(), stop)):
        with pytest.raises(KeyboardInterrupt):
            generate_retrieval(tmp_path / "made", {"train": documents}, half_bytes=100, least_bytes=10, progress=progress)
        assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_articles_do_not_stay_in_memory(tmp_path: Path) -> None:
    def long() -> Iterator[tuple[str, str]]:
        for number in range(200):
            yield f"Article {number}", f"{number} word " * 20_000  # 200 kB

    reports: list[int] = []
    tracemalloc.start()
    measured = generate_retrieval(tmp_path / "made", {"train": long()}, progress=reports.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(reports) == sum(split["pairs"] for split in measured.values()) == 400
    assert peak < 2_000_000  # all halves are 1.6 MB, all articles 40 MB


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("aé語🙂 \n"), min_size=0, max_size=600), st.integers(16, 400), st.data())
def test_cut_keeps_characters_whole_and_halves_apart(text: str, half_bytes: int, data: st.DataObject) -> None:
    least = data.draw(st.integers(4, half_bytes))
    content = (text * 3).encode()
    cut = retrieval._cut(content, half_bytes, least)
    assert (cut is None) == (len(content) // 2 - 256 < least)
    if cut is not None:
        first, second = cut
        assert first.decode() + second.decode()
        assert all(min(half_bytes, len(content) // 2 - 256) - 3 <= len(half) <= half_bytes for half in cut)
        assert content.startswith(first)
        assert len(first) <= len(content) // 2 - 256
        assert content.find(second, len(content) // 2 - 3, len(content) // 2 + 128 + len(second)) >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"documents": {"train": [], "valid": []}}, r"unknown split in documents: 'valid': .*did you mean 'validation'\?"),
        ({"documents": {"train": [], "test": []}}, r"documents must have 'train' alone.*it has \['test', 'train'\]"),
        ({"train": 7}, "train must be an even number of pairs from 4 on, or None for as many as there can be; it is 7"),
        ({"test": 2}, "test must be an even number"),
        ({"half_bytes": 0}, "half_bytes must be a whole number from 16 on; it is 0"),
        ({"least_bytes": 5000}, "least_bytes must be a whole number from 4 to half_bytes, 4000; it is 5000"),
        ({"seed": -1}, "seed must be a whole number from 0 on; it is -1"),
        ({"documents": {"train": [("Half", "a\ud800b")]}}, "article 'Half' has half a character"),
        ({"documents": {"train": [("Bytes", b"abc")]}}, "a title and a text, both str; there is 'Bytes', b'abc'"),
        ({"documents": [("a", "b")]}, "documents must be a mapping, as {'train': articles}; it is a list"),
    ],
)
def test_refuses(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        generate_retrieval(tmp_path / "made", **{"documents": {"train": []}, **arguments})  # type: ignore[arg-type]
    assert not (tmp_path / "made").exists()


def test_wiki_articles() -> None:
    lines = [" ", " = First = ", "", " Some text . ", " = 5 = ", "", " = = Section = = ", "", " x = y ", ""]
    lines += [" = E = m c2 = ", "", " = = = Deep = = = ", " More .", ""]
    expected = [("First", "Some text .\n= 5 =\n= = Section = =\nx = y"), ("E = m c2", "= = = Deep = = =\nMore .")]
    assert list(wiki_articles(lines)) == expected
    assert list(wiki_articles(f"{line}\n" for line in lines)) == expected
    assert list(wiki_articles(["", " "])) == []
    assert list(wiki_articles([" = Only = "])) == [("Only", "")]
    with pytest.raises(ValueError, match=r"lines must begin with a title, as ' = Title = '; line 2 is 'Some text'"):
        list(wiki_articles(["", "Some text"]))


@pytest.mark.skipif(not WIKI.is_dir(), reason="the Wikipedia articles are not here")
def test_real_articles(tmp_path: Path) -> None:
    def read(name: str) -> Iterable[tuple[str, str]]:
        with lzma.open(WIKI / f"wiki.{name}.raw.xz", "rt", encoding="utf-8", newline="\n") as file:
            yield from wiki_articles(file)

    documents = {"train": read("valid"), "validation": read("test"), "test": collection(4, sizes=(9_000, 9_100)).items()}
    measured = generate_retrieval(tmp_path / "made", documents)
    assert [split["articles"] for split in measured.values()] == [38, 36, 4]
    likeness: dict[str, list[float]] = {"0.0": [], "1.0": []}
    for row in rows(tmp_path / "made" / NAMES[0]):
        one, two = ({word for word in text.split() if len(word) > 3} for text in row.texts)
        likeness[row.label].append(len(one & two) / (len(one) * len(two)) ** 0.5)
    assert np.mean(likeness["1.0"]) > 1.5 * np.mean(likeness["0.0"])
