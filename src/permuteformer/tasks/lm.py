"""Language modelling of your own text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path

from permuteformer.tasks.base import TASKS, NotReady, Recipe, Source
from permuteformer.tasks.files import existing, split_named, text_files
from permuteformer.tasks.language import LanguageTask, file_documents
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.readers.text import lines
from permuteformer.tasks.store import Row

SPLIT_ENDS = {"train": 0.9, "validation": 0.95, "test": 1.0}
"""Ends of the splits as shares of the text; default for files without splits in their names."""

LM_RECIPE = Recipe(
    "lm",
    {"epochs": 10, "batch_size": 16, "learning_rate": 1e-3, "warmup_steps": 200, "adam_beta2": 0.98},
    {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512},
)
"""Of a size for computers without a GPU."""


@TASKS.register("lm")
@dataclass(kw_only=True, eq=False)
class Lm(LanguageTask):
    """Text files, plain or compressed (.gz, .xz, .bz2), one document each.

    Files of a folder with a split in their name (``train.txt``, ``notes.valid.txt``) are that split. Without such names, the text of all
    files in the order of their names is cut: 90 % for training, then 5 % for validation, then 5 % for test.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w", suffix=".txt") as file:
    ...     _ = file.write("all work and no play\\n" * 500)
    ...     file.flush()
    ...     Lm(file.name, length=64, context=32).input.max_length
    64
    """

    title = "your text files"
    layouts = ("a text file, or a folder of text files",)
    recipe = LM_RECIPE

    path: str = field(kw_only=False)
    """Text file, or folder of text files."""
    pattern: str = "*"
    """Which files of the folder, such as *.txt."""

    def __post_init__(self) -> None:
        existing(self.path)
        super().__post_init__()

    def sources(self, folder: Path) -> Iterator[Source]:
        path = existing(self.path)
        yield Source(path.name, (path,), partial(self._read, path))

    def _read(self, path: Path, errors: Errors) -> Iterator[tuple[str, Row]]:
        files = [path] if path.is_file() else text_files(path, self.pattern, errors)
        if not files:
            raise NotReady(f"{path} has no file that matches pattern {self.pattern!r}")
        named = [(split, file) for file in files if len(files) > 1 and (split := split_named(file.name))]
        if named and len(named) < len(files):
            unnamed = [file.name for file in files if not split_named(file.name)]
            raise ValueError(
                f"files of {path} have splits in their names, but {', '.join(unnamed[:5])} has none: rename it, or set pattern"
            )
        return self.encode(partial(file_documents, named) if named else partial(_cut, path, files), errors)


def _cut(path: Path, files: list[Path], errors: Errors) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield documents, cut where a split ends."""
    total = sum(len(line) + 1 for file in files for _, line in lines(file, Errors(skip=True)))
    passed, found = 0, set()

    def split_of(line: str) -> str:
        nonlocal passed
        split = next(split for split, end in SPLIT_ENDS.items() if passed < end * total)
        passed += len(line) + 1
        found.add(split)
        return split

    for file in files:
        yield from groupby((line for _, line in lines(file, errors)), key=split_of)
    if len(found) < len(SPLIT_ENDS):
        raise ValueError(f"{path} has too few lines to be cut into splits: give a folder with train.txt, valid.txt and test.txt")
