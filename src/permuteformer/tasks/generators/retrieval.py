"""Pairs of texts from long articles: are the two texts halves of one article?

A stand-in for the Retrieval task of Long-Range Arena, in the same format. A model must compare the texts, as nothing else gives the label:

- Titles are not part of the texts. They would be in first halves only, and their words in the other text would be enough.
- ``GAP`` bytes between the halves are dropped, so that no sentence begins in one text and ends in the other. As many are dropped at the
  end, so that no text ends where its article ends.
- Articles of similar length form groups of two (and one of three, if their number is odd). All texts of a group have the same number of
  bytes, except that characters of several bytes are not cut. So a text cannot be matched by its length.
- Every text occurs twice: with its other half, and with a half of another article. So one text alone gives no label, and labels are
  balanced.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import numpy as np

from permuteformer.formatting import printable
from permuteformer.storage import new_folder
from permuteformer.tasks.generators.base import Generated, GenerateOptions

FILES = {"train": "new_aan_pairs.train.tsv", "validation": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
GAP = 256
_TITLE = re.compile("= (?!=)(.+)(?<!=) =", re.DOTALL)
"""A title of WikiText, and not a section title."""


def generate_retrieval(
    folder: Path,
    documents: Mapping[str, Iterable[tuple[str, str]]],
    options: GenerateOptions,
    half_bytes: int = 4000,
    min_bytes: int = 1000,
) -> Generated:
    """Write ``retrieval-halves/new_aan_pairs.{train,eval,test}.tsv`` in the format of Long-Range Arena, into the data folder.

    A line has the label (``1.0`` for one article, ``0.0`` for two), two titles and two texts as ``b'…'``, separated by tabs. The first text
    is always a first half, the second one a second half. The titles reveal the label: they are not for models. Articles are read once, one
    at a time, and kept on disk.

    The statistics of each split are ``articles`` and ``pairs`` written; articles that were ``too_short``, ``repeated`` or ``unused``; mean,
    least and most ``bytes`` of the texts.

    Args:
        folder: the data folder.
        documents: titles and texts of ``"train"``, ``"validation"`` and ``"test"``, or of ``"train"`` alone, which is then split 80:10:10
            by title. Articles with the title or a half of an earlier one are skipped.
        options: its counts are pairs, even numbers: two per article; default: all articles.
        half_bytes: maximum size of a text.
        min_bytes: articles with shorter halves are skipped.
    """
    if set(documents) not in ({"train"}, set(FILES)):
        raise ValueError(f"documents must have the splits {', '.join(FILES)}, or train alone, got {', '.join(documents) or 'none'}")
    counts, seed = options.sizes(dict.fromkeys(FILES, 0)), options.seed
    for name, count in options.counts.items():
        if count < 4 or count % 2:
            raise ValueError(f"{name} must be an even number of pairs, at least 4, got {count}")
    target, statistics = folder / "retrieval-halves", {}
    with new_folder(target) as unfinished, TemporaryFile(dir=unfinished) as halves:
        splits = _cut_articles(documents, halves, half_bytes, min_bytes, seed)
        used = {name: _articles_needed(name, counts[name], split) for name, split in splits.items()}
        for number, (name, split) in enumerate(splits.items()):
            sizes = []
            with open(unfinished / FILES[name], "w", encoding="utf-8", newline="\n") as file:
                for first, second, size in _pairs(split.articles, used[name], np.random.default_rng([seed, number])):
                    one, two = first.half(halves, 0, size), second.half(halves, 1, size)
                    label = "1.0" if first is second else "0.0"
                    file.write(f"{label}\t{_one_word(first.title)}\t{_one_word(second.title)}\t{one!r}\t{two!r}\n")
                    sizes += [len(one), len(two)]
                    options.progress(1)
            statistics[name] = {
                "articles": used[name],
                "pairs": len(sizes) // 2,
                "too_short": split.too_short,
                "repeated": split.repeated,
                "unused": len(split.articles) - used[name],
                "bytes": {"mean": float(np.mean(sizes)), "least": min(sizes), "most": max(sizes)},
            }
    return Generated(target, statistics)


def wiki_articles(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the title and text of every article in the format of WikiText.

    A title is a line `` = Title = `` after a blank line or at the start. Section titles, `` = = Section = = ``, are part of the text.

    >>> list(wiki_articles([" = Abalone = ", " ", " A sea snail . ", " = = Shell = = ", " Convex . "]))
    [('Abalone', 'A sea snail .\\n= = Shell = =\\nConvex .')]
    """
    title: str | None = None
    text: list[str] = []
    after_blank = True
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if after_blank and (heading := _TITLE.fullmatch(line)):
            if title is not None:
                yield title, "\n".join(text)
            title, text = heading[1].strip(), []
        elif line and title is None:
            raise ValueError(f"articles must start with a title such as ' = Title = ', got {printable(raw, 80)!r} in line {number:,}")
        elif line:
            text.append(line)
        after_blank = not line
    if title is not None:
        yield title, "\n".join(text)


class _Article(NamedTuple):
    """An article whose halves are at ``offset`` in the file of halves, one after the other."""

    title: str
    offset: int
    sizes: tuple[int, int]

    def half(self, halves: IO[bytes], which: int, size: int) -> bytes:
        """Return the first ``size`` bytes of a half, without a part of a character."""
        halves.seek(self.offset + which * self.sizes[0])
        content = halves.read(self.sizes[which])
        return content[: _boundary(content, size)]


@dataclass
class _Split:
    articles: list[_Article] = field(default_factory=list)
    too_short: int = 0
    repeated: int = 0


def _cut_articles(
    documents: Mapping[str, Iterable[tuple[str, str]]], halves: IO[bytes], half_bytes: int, min_bytes: int, seed: int
) -> dict[str, _Split]:
    """Write the halves of all articles to ``halves``; return the articles of each split."""
    splits = {name: _Split() for name in FILES}
    seen: set[bytes] = set()
    for given in (name for name in FILES if name in documents):
        for title, text in documents[given]:
            split = splits[given if len(documents) > 1 else _split_of(title, seed)]
            cut = _cut(_encode(text), half_bytes, min_bytes)
            if cut is None:
                split.too_short += 1
                continue
            digests = {_digest(b"title " + _encode(title)), _digest(b"first " + cut[0]), _digest(b"second " + cut[1])}
            if digests & seen:
                split.repeated += 1
                continue
            seen |= digests
            split.articles.append(_Article(title, halves.tell(), (len(cut[0]), len(cut[1]))))
            halves.write(b"".join(cut))
    return splits


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a lone surrogate, which is not valid Unicode, becomes a question mark


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _split_of(title: str, seed: int) -> str:
    """Choose a split by the title alone: an article stays in its split when others are added."""
    share = int.from_bytes(_digest(_encode(f"{seed} {title}"))[:8], "big") / 2**64
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"


def _cut(article: bytes, half_bytes: int, min_bytes: int) -> tuple[bytes, bytes] | None:
    """Return the beginnings of both halves, or ``None`` if the article is too short.

    The layout is first half, gap, second half, gap. The second half begins after the first white space behind the middle, if there is one
    within half a gap. This takes from the gap at the end.
    """
    middle = len(article) // 2
    size = min(middle - GAP, half_bytes)
    if size < min_bytes:
        return None
    words = article[middle : middle + GAP // 2].split(maxsplit=1)
    begin = middle + GAP // 2 - len(words[1]) if len(words) == 2 else _boundary(article, middle)
    return article[: _boundary(article, size)], article[begin : _boundary(article, begin + size)]


def _boundary(text: bytes, position: int) -> int:
    """Return the last position up to ``position`` where a UTF-8 character begins."""
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position -= 1
    return position


def _articles_needed(name: str, pairs: int, split: _Split) -> int:
    available = len(split.articles)
    needed = pairs // 2 or max(available, 2)
    if needed > available:
        raise ValueError(
            f"{name} needs {needed:,} articles or more, got {available:,} ({split.too_short:,} too short, {split.repeated:,} repeated): "
            "add documents or ask for fewer pairs"
        )
    return needed


def _pairs(articles: list[_Article], count: int, rng: np.random.Generator) -> Iterator[tuple[_Article, _Article, int]]:
    """Yield the first and second article of every pair and the size of both texts, in random order."""
    chosen = [articles[number] for number in rng.permutation(len(articles))[:count]]
    chosen.sort(key=lambda article: min(article.sizes))  # stable: articles of full length stay in random order
    partner, size = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for begin in range(0, count - 1, 2):
        end = begin + 2 if count - begin != 3 else count
        partner[begin:end] = np.roll(np.arange(begin, end), 1)
        size[begin:end] = min(min(article.sizes) for article in chosen[begin:end])
    for row in rng.permutation(2 * count):
        first = row // 2
        second = partner[first] if row % 2 else first
        yield chosen[first], chosen[second], int(size[first])


def _one_word(title: str) -> str:
    """Return a title without blanks, quotation marks and control characters, which readers of tables interpret."""
    return "_".join(printable(" ".join(title.replace('"', " ").split())).split()) or "_"
