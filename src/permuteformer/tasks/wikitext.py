"""WikiText and its like: articles of Wikipedia, tokenised or raw, as words or bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from permuteformer.tasks.base import TASKS, NotReady, Source
from permuteformer.tasks.language import LanguageModelling
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.lines import lines
from permuteformer.tasks.readers.problems import Problems

SPLIT_NAMES = {"train": "train", "valid": "validation", "test": "test"}
"""How WikiText calls splits, and how they are called here."""


class WikiText(LanguageModelling):
    """A corpus in the layout of WikiText: a paragraph a line, words separated by blanks.

    Args:
        unit: ``"words"``, with the end of every line as one, or ``"bytes"``.
        raw: read the text before rare words were made ``<unk>`` (``wiki.*.raw``) in place of ``wiki.*.tokens``.
        length: tokens of a window.
        context: tokens at the beginning of a window of evaluation that are read and not scored.
        min_frequency: words that occur less often in the training text become ``<unk>``.
        data: the data folder.
        skip_bad: leave out lines that cannot be read, and count them.
    """

    folders: ClassVar[tuple[str, ...]]
    """Where it may be in the data folder."""
    note: ClassVar[str] = ""
    licence = "CC BY-SA 3.0"

    def __init__(
        self,
        unit: str = "words",
        raw: bool = False,
        length: int = 512,
        context: int = 256,
        min_frequency: int = 1,
        data: str | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.unit, self.raw, self.length, self.context, self.min_frequency = unit, raw, length, context, min_frequency
        self.data, self.skip_bad = data, skip_bad
        self.check_options()

    def sources(self, folder: Path) -> Iterator[Source]:
        without_train = []
        patterns = ["wiki.{}.raw"] if self.raw else ["wiki.{}.tokens", "{}.txt"]
        for place in self.folders:
            for pattern in patterns:
                found = {split: path for name, split in SPLIT_NAMES.items() if (path := _file(folder / place / pattern.format(name)))}
                # Without the training text there is no vocabulary of words, but bytes can be scored.
                if found and "train" not in found and self.unit == "words":
                    without_train.append(f"{place}/{pattern.format('train')}")
                elif found:
                    title = f"{place}/{pattern.format('*')}"
                    yield Source(title, tuple(found.values()), partial(self._read, found), self.note)
        if without_train:
            raise NotReady(
                f"{folder / without_train[0]} is not there, of which the vocabulary is made; as bytes (unit=bytes) the rest can be used"
            )

    def _read(self, files: Mapping[str, Path], problems: Problems) -> Iterator[tuple[str, Row]]:
        def documents(problems: Problems) -> Iterator[tuple[str, Iterable[str]]]:
            for split, path in files.items():
                yield split, (line for _, line in lines(path, problems))

        return self.encode_documents(documents, problems)


def _file(path: Path) -> Path | None:
    """The file, plain or compressed."""
    return next((packed for ending in ("", ".gz", ".xz", ".bz2") if (packed := Path(f"{path}{ending}")).is_file()), None)


@TASKS.register("wikitext-103")
class WikiText103(WikiText):
    """103 million words of good and featured articles; the paper's language models.

    >>> WikiText103(unit="bytes", raw=True).vocab_size
    259
    """

    title = "WikiText-103"
    folders = ("wikitext-103", "wikitext-103-raw", "wikitext-103-v1", "wikitext-103-raw-v1")
    layouts = (
        "wikitext-103/wiki.{train,valid,test}.tokens",
        "wikitext-103-raw/wiki.{train,valid,test}.raw (with raw)",
        "either compressed (.gz, .xz, .bz2)",
    )
    advice = "get it: permuteformer data fetch wikitext-103 (or wikitext-103-raw)"


@TASKS.register("wikitext-2")
class WikiText2(WikiText):
    """2 million words of the same; validation and test are those of WikiText-103, with more <unk>.

    >>> WikiText2(length=1024).max_length
    1024
    """

    title = "WikiText-2"
    folders = ("wikitext-2", "wikitext-2-raw", "wikitext-2-v1", "wikitext-2-raw-v1")
    layouts = (
        "wikitext-2/wiki.{train,valid,test}.tokens or wikitext-2/{train,valid,test}.txt",
        "wikitext-2-raw/wiki.{train,valid,test}.raw (with raw)",
        "without a training file, as bytes only (unit=bytes)",
    )
    advice = "get it: permuteformer data fetch wikitext-2 (or wikitext-2-raw)"


@TASKS.register("wiki-en")
class WikiEn(WikiText):
    """Long articles of English Wikipedia in the layout of WikiText-103-raw: of your own making, or a stand-in for it.

    Args:
        unit: ``"words"``, with the end of every line as one, or ``"bytes"``.
        length: tokens of a window.
        context: tokens at the beginning of a window of evaluation that are read and not scored.
        min_frequency: words that occur less often in the training text become ``<unk>``; 3 unless told.
        data: the data folder.
        skip_bad: leave out lines that cannot be read, and count them.

    >>> WikiEn(unit="bytes").vocab_size
    259
    """

    title = "long articles of Wikipedia"
    folders = ("wiki_en", "wiki-en")
    layouts = ("wiki_en/wiki.{train,valid,test}.raw, plain or compressed (.gz, .xz, .bz2)",)
    advice = "any text in the layout of WikiText will do; for text files as they are, see the task lm"
    note = "articles of English Wikipedia, not those of WikiText-103"

    def __init__(
        self,
        unit: str = "words",
        length: int = 512,
        context: int = 256,
        min_frequency: int | None = None,
        data: str | None = None,
        skip_bad: bool = False,
    ) -> None:
        default = 3 if unit == "words" else 1
        super().__init__(unit, True, length, context, default if min_frequency is None else min_frequency, data, skip_bad)
