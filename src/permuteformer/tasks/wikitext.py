"""WikiText and similar corpora: articles of Wikipedia, tokenised or raw, as words or bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from permuteformer.tasks.base import TASKS, NotReady, Recipe, Source
from permuteformer.tasks.language import LanguageTask, file_documents
from permuteformer.tasks.lm import LM_RECIPE

FILE_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
"""Splits by their names in the files."""

PAPER_RECIPE = Recipe(
    "lm",
    {
        "batch_size": 128,  # 65,536 tokens
        "micro_batch_size": 4,  # logits of 512 x 267,744 words are half a GB per item
        "evaluation_batch_size": 4,
        "steps": 50_000,
        "learning_rate": 5e-4,
        "warmup_steps": 4000,
        "warmup_from": 1e-7,
        "adam_beta2": 0.98,
        "weight_decay": 0.01,
    },
)
"""fairseq's recipe, which the paper follows."""


@dataclass(kw_only=True, eq=False)
class WikiText(LanguageTask):
    """A corpus in the layout of WikiText: one paragraph per line, words separated by blanks."""

    licence = "CC BY-SA 3.0"
    recipe = LM_RECIPE
    folders: ClassVar[tuple[str, ...]]
    """Places in the data folder that are searched."""
    patterns: ClassVar[tuple[str, ...]] = ("wiki.{}.tokens", "{}.txt")
    note: ClassVar[str] = ""

    unit: str = "words"
    """Tokens: "words" separated by white space, with the end of every line as one, or "bytes"."""
    raw: bool = False
    """Read wiki.*.raw, the text before rare words became <unk>, in place of wiki.*.tokens."""

    def sources(self, folder: Path) -> Iterator[Source]:
        without_train = []
        for place in self.folders:
            for pattern in ("wiki.{}.raw",) if self.raw else self.patterns:
                found = {split: path for name, split in FILE_SPLITS.items() if (path := _file(folder / place / pattern.format(name)))}
                if found and "train" not in found and self.unit == "words":  # bytes can be scored without a training file
                    without_train.append(f"{place}/{pattern.format('train')}")
                elif found:
                    rows = partial(self.encode, partial(file_documents, list(found.items())))
                    yield Source(f"{place}/{pattern.format('*')}", tuple(found.values()), rows, note=self.note)
        if without_train:
            missing = folder / without_train[0]
            raise NotReady(f"{missing} is missing, which the vocabulary is made of; unit='bytes' (--task.unit bytes) does not need it")


def _file(path: Path) -> Path | None:
    """Return the file, plain or compressed."""
    return next((packed for ending in ("", ".gz", ".xz", ".bz2") if (packed := Path(f"{path}{ending}")).is_file()), None)


@TASKS.register("wikitext-103")
@dataclass(kw_only=True, eq=False)
class WikiText103(WikiText):
    """103 million words of good and featured articles: the paper's language models.

    >>> WikiText103(unit="bytes").input_without_data(0).vocab_size
    259
    """

    title = "WikiText-103"
    recipe = PAPER_RECIPE
    folders = ("wikitext-103", "wikitext-103-raw", "wikitext-103-v1", "wikitext-103-raw-v1")
    layouts = (
        "wikitext-103/wiki.{train,valid,test}.tokens",
        "wikitext-103-raw/wiki.{train,valid,test}.raw (with raw)",
        "either compressed (.gz, .xz, .bz2)",
    )
    advice = "download it: permuteformer data fetch wikitext-103 (or wikitext-103-raw)"


@TASKS.register("wikitext-2")
@dataclass(kw_only=True, eq=False)
class WikiText2(WikiText):
    """2 million words of the same articles; validation and test are those of WikiText-103 with more <unk>.

    >>> WikiText2(unit="bytes", length=256, context=128).input_without_data(0).max_length
    256
    """

    title = "WikiText-2"
    folders = ("wikitext-2", "wikitext-2-raw", "wikitext-2-v1", "wikitext-2-raw-v1")
    layouts = (
        "wikitext-2/wiki.{train,valid,test}.tokens or wikitext-2/{train,valid,test}.txt",
        "wikitext-2-raw/wiki.{train,valid,test}.raw (with raw)",
        "without a training file, as bytes only (unit=bytes)",
    )
    advice = "download it: permuteformer data fetch wikitext-2 (or wikitext-2-raw)"


@TASKS.register("wiki-en")
@dataclass(kw_only=True, eq=False)
class WikiEn(WikiText):
    """Long articles of English Wikipedia in the layout of WikiText-103-raw: your own, or a stand-in for it.

    >>> WikiEn().layouts[0]
    'wiki_en/wiki.{train,valid,test}.raw, plain or compressed (.gz, .xz, .bz2)'
    """

    title = "long articles of Wikipedia"
    folders = ("wiki_en", "wiki-en")
    layouts = ("wiki_en/wiki.{train,valid,test}.raw, plain or compressed (.gz, .xz, .bz2)",)
    advice = "any text in the layout of WikiText will do; for plain text files, use the task lm"
    note = "articles of English Wikipedia, not those of WikiText-103"
    patterns = ("wiki.{}.raw",)
    usual_min_frequency = 3
