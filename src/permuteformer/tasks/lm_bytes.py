"""Language modelling of the English text in every CPython: real data without a download."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from permuteformer.tasks.base import TASKS, Source
from permuteformer.tasks.language import LanguageTask
from permuteformer.tasks.lm import LM_RECIPE
from permuteformer.tasks.lra import check_choice
from permuteformer.tasks.readers.errors import Errors

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "pydoc_data"}
SHORT = 30
"""Paragraphs of fewer characters may be repeated."""

MIN_BYTES = 1000
"""Modules with fewer bytes of docstrings are skipped."""


@TASKS.register("lm-bytes")
@dataclass(kw_only=True, eq=False)
class LmBytes(LanguageTask):
    """The topics of Python's help and the docstrings of its standard library.

    A topic or a module is a document. A hash of its name puts nine of ten into the train split and divides the rest. The text is that of
    the running Python, so numbers are comparable within one version of it.

    >>> LmBytes(corpus="topics").input.vocab_size, LmBytes(corpus="topics").input.max_length
    (259, 512)
    """

    title = "Python's help and docstrings"
    licence = "PSF"
    layouts = ("part of Python",)
    recipe = LM_RECIPE

    corpus: str = "all"
    """"topics" (about 0.5 MB), "docstrings" or "all"."""

    def __post_init__(self) -> None:
        check_choice("corpus", self.corpus, tuple(CORPORA))
        super().__post_init__()

    def cache_key(self) -> dict[str, Any]:
        return {**super().cache_key(), "python": platform.python_version()}

    def sources(self, folder: Path) -> Iterator[Source]:
        note = f"text of Python {platform.python_version()}: {self.corpus}"
        paths = (_library() / "pydoc_data" / "topics.py", *modules())
        yield Source("Python's own text", paths, partial(self.encode, self._documents), note=note)

    def _documents(self, errors: Errors) -> Iterator[tuple[str, Iterable[str]]]:
        found = chain.from_iterable(corpus() for corpus in CORPORA[self.corpus])
        for name, text in without_repeats(found):
            share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
            yield "train" if share < 0.9 else "validation" if share < 0.95 else "test", text.split("\n")


def without_repeats(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Drop paragraphs that an earlier document has: much of Python's help is in several topics, and would be in several splits."""
    seen: set[str] = set()
    for name, text in documents:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) < SHORT or words not in seen:
                paragraphs.append(paragraph)
            seen.add(words)
        if len(kept := "\n\n".join(paragraphs).strip()) >= SHORT:
            yield name, kept


def topics() -> Iterator[tuple[str, str]]:
    """Yield the topics of Python's help."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"topic {name}", text.strip()


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of each module of the standard library, read from its source: nothing is imported."""
    library = _library()
    for path in modules():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]
        text = "\n\n".join(found).encode("utf-8", "ignore").decode()
        if len(text) >= MIN_BYTES:
            yield f"module {path.relative_to(library)}", text


def modules() -> list[Path]:
    """Return the files of the standard library."""
    found = []
    for folder, folders, files in os.walk(_library()):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


CORPORA = {"topics": (topics,), "docstrings": (docstrings,), "all": (topics, docstrings)}


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])
