"""Language modelling of the English prose that every CPython carries: real text on a machine without a network."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from permuteformer.tasks.base import TASKS, Source
from permuteformer.tasks.language import LanguageModelling
from permuteformer.tasks.readers.problems import Problems

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "pydoc_data"}
SHORT = 30
"""Paragraphs of fewer characters may come again."""

LEAST_BYTES = 1000
"""Docstrings of a module that come to less are left out."""


@TASKS.register("lm-bytes")
class LmBytes(LanguageModelling):
    """The topics of Python's help and the docstrings of its standard library, as bytes.

    A topic or a module is a document; nine of ten are for training, and validation and test have the rest, told by a hash of the name. The
    text is that of the Python that runs, so numbers are for comparison within one version of it.

    Args:
        corpus: ``"topics"`` (about 0.5 MB), ``"docstrings"`` or ``"all"``.
        length: tokens of a window.
        context: tokens at the beginning of a window of evaluation that are read and not scored.

    >>> LmBytes(corpus="topics").vocab_size, LmBytes().max_length
    (259, 512)
    """

    title = "Python's help and docstrings"
    licence = "PSF"
    layouts = ("comes with Python",)

    def __init__(self, corpus: str = "all", length: int = 512, context: int = 256) -> None:
        if corpus not in CORPORA:
            raise ValueError(f"corpus must be one of {', '.join(map(repr, CORPORA))}; it is {corpus!r}")
        self.corpus, self.length, self.context = corpus, length, context
        self.check_options()

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "corpus": self.corpus, "python": platform.python_version()}

    def sources(self, folder: Path) -> Iterator[Source]:
        note = f"text of Python {platform.python_version()}: {self.corpus}"
        yield Source("Python's own text", tuple(FILES[self.corpus]()), partial(self.encode_documents, self._documents), note)

    def _documents(self, problems: Problems) -> Iterator[tuple[str, Iterable[str]]]:
        for name, text in without_repeats(CORPORA[self.corpus]()):
            share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
            yield "train" if share < 0.9 else "validation" if share < 0.95 else "test", text.split("\n")


def without_repeats(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Documents without the paragraphs that an earlier one has: much of Python's help stands in several topics, and would be in several
    splits."""
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
    """The topics of Python's help."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"topic {name}", text.strip()


def docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of each module of the standard library, read from its source: nothing is imported."""
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
        if len(text) >= LEAST_BYTES:
            yield f"module {path.relative_to(library)}", text


def modules() -> list[Path]:
    """The files of the standard library."""
    found = []
    for folder, folders, files in os.walk(_library()):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def both() -> Iterator[tuple[str, str]]:
    """Topics, then docstrings."""
    yield from topics()
    yield from docstrings()


CORPORA = {"topics": topics, "docstrings": docstrings, "all": both}
FILES: dict[str, Callable[[], list[Path]]] = {
    "topics": lambda: [_topics_file()],
    "docstrings": modules,
    "all": lambda: [_topics_file(), *modules()],
}
"""Where each corpus is read."""


def _topics_file() -> Path:
    return _library() / "pydoc_data" / "topics.py"


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])
