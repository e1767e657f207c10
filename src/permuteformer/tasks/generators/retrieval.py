"""Pairs of texts from any collection of long articles: are the two from one article, or from two?

Stands in for the Retrieval task of Long-Range Arena, and is written as that is. The rest of a pair must not tell the label:

- The title is left out. It would stand before the first half alone, and to look for its words in the other text would do.
- About ``GAP`` bytes between the halves are left out, so that no sentence begins in one text and ends in the other, and as many at the
  end, so that no text ends where its article does.
- Articles go in twos of like length (one last three if need be), and all texts of a two have the same number of bytes (but for
  characters of several bytes, which stay whole). So the halves of a short article are not known by being short.
- Every text is there twice, byte for byte: once with its other half, once with a half of the other article. So one text alone says
  nothing, and labels are balanced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import numpy as np

from permuteformer.folders import new_folder
from permuteformer.registry import unknown
from permuteformer.texts import printable

FILES = {"train": "new_aan_pairs.train.tsv", "validation": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
"""The benchmark's own names."""

GAP = 256
"""Bytes, two sentences or so."""

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
"""Of the articles, where they come without splits."""


def generate_retrieval(
    folder: Path,
    documents: Mapping[str, Iterable[tuple[str, str]]],
    *,
    train: int | None = None,
    validation: int | None = None,
    test: int | None = None,
    half_bytes: int = 4000,
    least_bytes: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Write ``new_aan_pairs.{train,eval,test}.tsv`` into a new ``folder``, and return what was counted on the way.

    A line is the label (``1.0`` for one article, ``0.0`` for two), the two titles, and the two texts as ``b'…'``, with tabs between. The
    first text is always a first half, the second one a second half. Titles tell the label: they are for people, not for models.

    Articles are read once, one at a time; only their titles stay in memory.

    Args:
        folder: is made, whole or not at all; must not be there yet.
        documents: title and text of every article, under ``"train"``, ``"validation"`` and ``"test"``. If there is ``"train"`` alone, its
            articles are split 80 : 10 : 10 by their titles. An article whose title or half was there before is left out.
        train: pairs in the training file, an even number: two for each article that is used. All articles unless told.
        validation: the same for the validation file.
        test: the same for the test file.
        half_bytes: the most that is taken of a half.
        least_bytes: articles that have less to a half are left out. A quarter of ``half_bytes`` unless told.
        seed: which articles go together, and in what order, a whole number from 0 on; without splits also which goes where.
        progress: is called with the number of pairs that were added.

    Returns:
        For each split: ``articles`` used, ``pairs``, ``too_short`` and ``repeated`` articles, which were left out, and ``unused`` ones;
        of the texts' ``bytes`` mean, least and most.
    """
    wanted = {"train": train, "validation": validation, "test": test}
    least_bytes = _check(documents, wanted, half_bytes, least_bytes, seed)
    with new_folder(Path(folder)) as made, TemporaryFile(dir=made) as halves:
        splits = _collect(documents, halves, half_bytes, least_bytes, seed)
        numbers = {name: _articles_wanted(name, wanted[name], split) for name, split in splits.items()}
        measured = {}
        for place, (name, split) in enumerate(splits.items()):
            sizes = []
            with open(made / FILES[name], "w", encoding="utf-8", newline="\n") as file:
                for pair in _pairs(split.articles, numbers[name], np.random.default_rng([seed, place])):
                    sizes.append(_write(file, halves, *pair))
                    if progress is not None:
                        progress(1)
            measured[name] = {
                "articles": numbers[name],
                "pairs": len(sizes),
                "too_short": split.too_short,
                "repeated": split.repeated,
                "unused": len(split.articles) - numbers[name],
                "bytes": {"mean": float(np.mean(sizes)), "least": int(np.min(sizes)), "most": int(np.max(sizes))},
            }
        return measured


def wiki_articles(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Title and text of every article in lines of WikiText's layout.

    A title is a line `` = Title = `` after a blank one, or the first line. Section titles, `` = = Section = = ``, are part of the text.

    >>> list(wiki_articles([" = Abalone = ", " ", " A sea snail . ", " = = Shell = = ", " Convex . "]))
    [('Abalone', 'A sea snail .\\n= = Shell = =\\nConvex .')]
    """
    title: str | None = None
    text: list[str] = []
    after_blank = True
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if after_blank and _is_title(line):
            if title is not None:
                yield title, "\n".join(text)
            title, text = line[2:-2].strip(), []
        elif line and title is None:
            raise ValueError(f"lines must begin with a title, as ' = Title = '; line {number:,} is {raw!r:.80}")
        elif line:
            text.append(line)
        after_blank = not line
    if title is not None:
        yield title, "\n".join(text)


def _is_title(line: str) -> bool:
    return line.startswith("= ") and line.endswith(" =") and len(line) > 4 and not line.startswith("= =") and not line.endswith("= =")


def _check(documents: Mapping[str, Any], wanted: Mapping[str, int | None], half_bytes: int, least_bytes: int | None, seed: int) -> int:
    """Raise where an argument cannot be; return ``least_bytes``."""
    if not isinstance(documents, Mapping):
        raise TypeError(f"documents must be a mapping, as {{'train': articles}}; it is a {type(documents).__name__}")
    for name in documents:
        if name not in FILES:
            raise ValueError(unknown("split in documents:", name, FILES))
    if set(documents) not in ({"train"}, set(FILES)):
        raise ValueError(f"documents must have 'train' alone, to be split, or {', '.join(map(repr, FILES))}; it has {sorted(documents)}")
    for name, pairs in wanted.items():
        if pairs is not None and (not isinstance(pairs, int) or pairs < 4 or pairs % 2):
            raise ValueError(f"{name} must be an even number of pairs from 4 on, or None for as many as there can be; it is {pairs!r}")
    if not isinstance(half_bytes, int) or half_bytes < 16:
        raise ValueError(f"half_bytes must be a whole number from 16 on; it is {half_bytes!r}")
    least_bytes = half_bytes // 4 if least_bytes is None else least_bytes
    if not isinstance(least_bytes, int) or not 4 <= least_bytes <= half_bytes:
        raise ValueError(f"least_bytes must be a whole number from 4 to half_bytes, {half_bytes}; it is {least_bytes!r}")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number from 0 on; it is {seed!r}")
    return least_bytes


class _Article(NamedTuple):
    """An article whose halves stand in the file of halves, one after the other."""

    title: str
    offset: int
    sizes: tuple[int, int]


@dataclass
class _Split:
    articles: list[_Article] = field(default_factory=list)
    too_short: int = 0
    repeated: int = 0


def _collect(
    documents: Mapping[str, Iterable[tuple[str, str]]], halves: IO[bytes], half_bytes: int, least_bytes: int, seed: int
) -> dict[str, _Split]:
    """Cut every article; keep the halves on disk, and in memory where they are."""
    splits = {name: _Split() for name in FILES}
    seen: set[bytes] = set()
    for given in (name for name in FILES if name in documents):
        for title, text in documents[given]:
            split = splits[given if len(documents) > 1 else _split_of(title, seed)]
            cut = _cut(_utf8(title, text), half_bytes, least_bytes)
            if cut is None:
                split.too_short += 1
                continue
            marks = {_digest(b"title " + title.encode()), _digest(b"first " + cut[0]), _digest(b"second " + cut[1])}
            if marks & seen:
                split.repeated += 1
                continue
            seen |= marks
            split.articles.append(_Article(title, halves.tell(), (len(cut[0]), len(cut[1]))))
            halves.write(b"".join(cut))
    return splits


def _utf8(title: str, text: str) -> bytes:
    if not isinstance(title, str) or not isinstance(text, str):
        raise TypeError(f"documents must give a title and a text, both str; there is {title!r:.50}, {text!r:.50}")
    try:
        title.encode()
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"documents must be text that UTF-8 can write; article {title!a:.80} has half a character: read its file with errors='replace'"
        ) from error


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _split_of(title: str, seed: int) -> str:
    """By the title alone: an article stays in its split when others join the collection."""
    place = int.from_bytes(_digest(f"{seed} {title}".encode())[:8], "big") / 2**64
    for name, share in SHARES.items():
        place -= share
        if place < 0:
            return name
    return next(reversed(SHARES))


def _cut(article: bytes, half_bytes: int, least_bytes: int) -> tuple[bytes, bytes] | None:
    """The beginnings of both halves, or ``None`` where there is not enough.

    First half, gap, second half, gap: the second half begins at a white space after the middle, if there is one before half the gap is
    over, and the rest of its gap is at the end.
    """
    middle = len(article) // 2
    size = min(middle - GAP, half_bytes)
    if size < least_bytes:
        return None
    words = article[middle : middle + GAP // 2].split(maxsplit=1)
    begin = middle + GAP // 2 - len(words[1]) if len(words) == 2 else _boundary(article, middle)
    return article[: _boundary(article, size)], article[begin : _boundary(article, begin + size)]


def _boundary(text: bytes, place: int) -> int:
    """The last place up to this one where a character begins."""
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place -= 1
    return place


def _articles_wanted(name: str, pairs: int | None, split: _Split) -> int:
    there = len(split.articles)
    if there >= 2 and (pairs or 0) <= 2 * there:
        return there if pairs is None else pairs // 2
    needed = "2 articles or more" if pairs is None else f"{pairs // 2:,} articles for {pairs:,} pairs"
    raise ValueError(
        f"{name} needs {needed}; there are {there:,} ({split.too_short:,} were too short and {split.repeated:,} repeated): "
        "give more documents, or ask for fewer pairs"
    )


def _pairs(articles: list[_Article], number: int, generator: np.random.Generator) -> Iterator[tuple[_Article, _Article, int]]:
    """First and second article of every pair, in random order, and the bytes that each gives."""
    chosen = [articles[place] for place in generator.permutation(len(articles))[:number]]
    chosen.sort(key=lambda article: min(article.sizes))  # stable: those of full length stay in random order
    partner, size = np.empty(number, dtype=np.int64), np.empty(number, dtype=np.int64)
    for begin in range(0, number - 1, 2):
        end = begin + 2 if number - begin != 3 else number
        partner[begin:end] = np.roll(np.arange(begin, end), 1)
        size[begin:end] = min(min(article.sizes) for article in chosen[begin:end])
    for row in generator.permutation(2 * number):
        first = row // 2
        second = partner[first] if row % 2 else first
        yield chosen[first], chosen[second], int(size[first])


def _write(file: IO[str], halves: IO[bytes], first: _Article, second: _Article, size: int) -> tuple[int, int]:
    """Write one line; return how long its texts are."""
    texts = []
    for offset, most in ((first.offset, first.sizes[0]), (second.offset + second.sizes[0], second.sizes[1])):
        halves.seek(offset)
        half = halves.read(most)
        texts.append(half[: _boundary(half, size)])
    file.write(f"{'1.0' if first is second else '0.0'}\t{_plain(first.title)}\t{_plain(second.title)}\t{texts[0]!r}\t{texts[1]!r}\n")
    return len(texts[0]), len(texts[1])


def _plain(title: str) -> str:
    """A title without blanks, quotation marks and control characters, which readers of tables take for more than letters."""
    return "_".join(printable(" ".join(title.replace('"', " ").split())).split()) or "_"
