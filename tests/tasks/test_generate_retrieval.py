"""The generator of text pairs: texts are halves of the named articles, and nothing except both texts gives the label."""

import ast
import csv
import random
import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from small_data import SHARED

from permuteformer.tasks import GenerateOptions
from permuteformer.tasks.generators.retrieval import generate_retrieval, wiki_articles

SPLITS = {"train": "new_aan_pairs.train.tsv", "validation": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
WIKI = SHARED / "wiki_en"
ALPHABETS = ["abcdefghij", "äöüßéèñçøå", "αβγδεζηθικ", "語文書紙筆墨硯本字典", "🙂🙃😀😁😂🤣😃😄😅😆"]
"""Characters of one to four bytes."""


class Row(NamedTuple):
    label: str
    first: str
    second: str
    texts: tuple[bytes, bytes]


def collection(count, seed=0, sizes=(600, 3_000)):
    """Return articles of random words by title. A text occurs in one article only."""
    rng = random.Random(seed)
    articles = {}
    for number in range(count):
        size, words = rng.randint(*sizes), []
        while sum(map(len, words)) + len(words) < size:
            words.append("".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 9))))
        articles[f"Article {seed} {number}"] = rng.choice([" ", "\n", "  "]).join(words)
    return articles


def three_splits(count, **options):
    return {split: list(collection(count, seed, **options).items()) for seed, split in enumerate(SPLITS)}


def generate(folder, documents, half_bytes=100, min_bytes=10, **options):
    """Generate; return statistics and rows of each split."""
    generated = generate_retrieval(folder, documents, GenerateOptions(**options), half_bytes, min_bytes)
    assert generated.folder == folder / "retrieval-halves"
    rows = {split: [] for split in SPLITS}
    for split, name in SPLITS.items():
        for line in (generated.folder / name).read_text(encoding="utf-8").split("\n")[:-1]:
            label, first, second, one, two = line.split("\t")
            rows[split].append(Row(label, first, second, (ast.literal_eval(one), ast.literal_eval(two))))
    return generated.statistics, rows


def test_texts_are_halves_of_the_named_articles(tmp_path):
    articles = collection(121)
    statistics, rows = generate(tmp_path, {"train": articles.items()}, half_bytes=900, min_bytes=40)
    contents = {title.replace(" ", "_"): text.encode() for title, text in articles.items()}
    for split, found in rows.items():
        assert len(found) == statistics[split]["pairs"] == 2 * statistics[split]["articles"]
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
        assert statistics[split]["bytes"] == {"mean": np.mean(sizes), "least": min(sizes), "most": max(sizes)}


@pytest.mark.parametrize("count", [2, 3, 4, 7, 50])
def test_one_text_alone_does_not_give_the_label(tmp_path, count):
    statistics, rows = generate(tmp_path, three_splits(count), half_bytes=900)
    for split, found in rows.items():
        assert statistics[split]["pairs"] == len(found) == 2 * count - 2 * statistics[split]["too_short"]
        apart, joined = ([row.texts for row in found if row.label == label] for label in ("0.0", "1.0"))
        for side in (0, 1):
            assert Counter(texts[side] for texts in apart) == Counter(texts[side] for texts in joined)
            assert len({texts[side] for texts in apart}) == len(apart)
        lengths = [Counter((len(one) // 8, len(two) // 8) for one, two in pairs) for pairs in (apart, joined)]
        assert (lengths[0] - lengths[1]).total() <= 0.2 * len(found)


def test_splits_by_title_and_order(tmp_path):
    articles = collection(400)
    _, rows = generate(tmp_path / "some", {"train": articles.items()})
    titles = {split: {title for row in found for title in (row.first, row.second)} for split, found in rows.items()}
    assert len(set.union(*titles.values())) == sum(map(len, titles.values()))
    assert [len(split) / 400 for split in titles.values()] == pytest.approx([0.8, 0.1, 0.1], abs=4 * (0.16 / 400) ** 0.5)
    labels = [row.label for row in rows["train"]]
    changes = sum(before != after for before, after in pairwise(labels))
    assert abs(changes - len(labels) / 2) < 4 * len(labels) ** 0.5 / 2
    # An article stays in its split when others are added before it.
    more = [*collection(50, seed=1).items(), *reversed(articles.items())]
    _, rows = generate(tmp_path / "more", {"train": more})
    assert all(titles[split] <= {row.first for row in rows[split]} for split in SPLITS)


def test_repeated_and_short_articles_are_skipped_and_counted(tmp_path):
    documents = three_splits(10, sizes=(2_000, 3_000))
    title, text = documents["train"][0]
    half = text[: len(text) // 2]
    documents["train"] += [("Short", "too little")]
    documents["validation"] += [("Another title", text), (title, "x " * 3_000), ("Same beginning", half + "y " * len(half))]
    documents["test"] += [("Nothing", ""), ("Hardly", "z " * 300)]
    statistics, _ = generate(tmp_path, documents, min_bytes=100)
    counts = [(split["articles"], split["too_short"], split["repeated"]) for split in statistics.values()]
    assert counts == [(10, 1, 0), (10, 0, 3), (10, 2, 0)]


def test_numbers_of_pairs(tmp_path):
    documents = three_splits(20, sizes=(2_000, 3_000))
    chosen = set()
    for seed in range(5):
        statistics, rows = generate(tmp_path / str(seed), documents, counts={"train": 4, "validation": 14}, seed=seed)
        counts = [(split["pairs"], split["articles"], split["unused"]) for split in statistics.values()]
        assert counts == [(4, 2, 18), (14, 7, 13), (40, 20, 0)]
        chosen |= {row.first for row in rows["train"]}
    assert len(chosen) > 4
    with pytest.raises(ValueError, match=r"test needs 21 .*20 \(0 too short, 0 repeated\)"):
        generate(tmp_path / "b", documents, counts={"test": 42})
    with pytest.raises(ValueError, match=r"train needs 2 .*0 \(20 too short"):
        generate(tmp_path / "b", documents, half_bytes=9_000, min_bytes=9_000)
    assert not (tmp_path / "b" / "retrieval-halves").exists()


def test_lines_are_safe_for_readers_of_tables(tmp_path):
    odd = ['" Heroes "', "tab\there", "two\nlines", "\x00 and \x1b[31m", "\u2028", "C:\\new", "'", "x" * 1000, "Ünïcödé", ""]
    articles = [(title, f"{number} said \"no\" and 'yes'\t\\ with\nbreaks\r\n\x00 " * 60) for number, title in enumerate(odd)]
    _, rows = generate(tmp_path, {**three_splits(2), "train": articles}, half_bytes=500)
    assert len(rows["train"]) == 20
    with open(tmp_path / "retrieval-halves" / SPLITS["train"], newline="", encoding="utf-8") as file:
        assert [tuple(row[:3]) for row in csv.reader(file, delimiter="\t")] == [row[:3] for row in rows["train"]]
    assert all(text.decode().isascii() for row in rows["train"] for text in row.texts)


def test_articles_do_not_stay_in_memory(tmp_path):
    documents = ((f"Article {number}", f"{number} word " * 20_000) for number in range(200))  # 200 kB each
    tracemalloc.start()
    generate_retrieval(tmp_path, {"train": documents}, GenerateOptions())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000  # all halves are 1.6 MB, all articles 40 MB


@pytest.mark.parametrize(
    ("splits", "counts", "message"),
    [
        (["train", "valid"], {}, "train, valid"),
        ([], {}, "none"),
        (["train"], {"train": 7}, "train .*7"),
        (["train"], {"test": 2}, "test .*4.*2"),
    ],
)
def test_bad_arguments(tmp_path, splits, counts, message):
    with pytest.raises(ValueError, match=message):
        generate(tmp_path, {split: [] for split in splits}, counts=counts)
    assert not (tmp_path / "retrieval-halves").exists()


def test_wiki_articles():
    lines = [" ", " = First = ", "", " Some text . ", " = 5 = ", "", " = = Section = = ", "", " x = y ", ""]
    lines += [" = E = m c2 = ", "", " = = = Deep = = = ", " More .", ""]
    expected = [("First", "Some text .\n= 5 =\n= = Section = =\nx = y"), ("E = m c2", "= = = Deep = = =\nMore .")]
    assert list(wiki_articles(lines)) == expected
    assert list(wiki_articles(f"{line}\n" for line in lines)) == expected
    assert list(wiki_articles(["", " "])) == []
    assert list(wiki_articles([" = Only = "])) == [("Only", "")]
    with pytest.raises(ValueError, match=r"'Some text'.*line 2"):
        list(wiki_articles(["", "Some text"]))
