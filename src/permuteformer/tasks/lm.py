"""Language modelling of your own text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from permuteformer.tasks.base import TASKS, NotReady, Source
from permuteformer.tasks.language import Documents, LanguageModelling
from permuteformer.tasks.own import split_named, text_files
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.lines import lines
from permuteformer.tasks.readers.problems import Problems

SHARES = {"train": 0.9, "validation": 0.95, "test": 1.0}
"""Where splits end, as shares of the text, if they are not given: later text is kept for testing, as one would with logs."""


@TASKS.register("lm")
class Lm(LanguageModelling):
    """Text files, plain or compressed (.gz, .xz, .bz2), one document each.

    Files of a folder whose names tell of a split (``train.txt``, ``notes.valid.txt``) are that split. Where none does, the text as a whole,
    in the order of names, is cut: 90 hundredths for training, then 5 for validation, then 5 for test.

    Args:
        path: a text file, or a folder of them and of folders.
        pattern: which files of the folder, as ``*.txt``.
        unit: ``"bytes"``, or ``"words"``, split by white space, with the end of every line as one.
        length: tokens of a window.
        context: tokens at the beginning of a window of evaluation that are read and not scored.
        min_frequency: words that occur less often in the training text become ``<unk>``.
        skip_bad: leave out lines that cannot be read, and count them.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w", suffix=".txt") as file:
    ...     _ = file.write("all work and no play\\n" * 500)
    ...     file.flush()
    ...     Lm(file.name, length=64, context=32).max_length
    64
    """

    title = "your text files"
    layouts = ("a text file, or a folder of text files",)
    advice = "say where it is: path=FILE"

    def __init__(
        self,
        path: str,
        pattern: str = "*",
        unit: str = "bytes",
        length: int = 512,
        context: int = 256,
        min_frequency: int = 1,
        skip_bad: bool = False,
    ) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise NotReady(f"path must be a text file or a folder that is there; it is {path!r}")
        self.pattern, self.unit, self.length, self.context, self.min_frequency = pattern, unit, length, context, min_frequency
        self.skip_bad = skip_bad
        self.check_options()

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "pattern": self.pattern}

    def sources(self, folder: Path) -> Iterator[Source]:
        yield Source(self.path.name, (self.path,), self._read)

    def _read(self, problems: Problems) -> Iterator[tuple[str, Row]]:
        files = [self.path] if self.path.is_file() else text_files(self.path, self.pattern, problems)
        if not files:
            raise NotReady(f"{self.path} has no file of the pattern {self.pattern!r}")
        splits = {file: split for file in files if len(files) > 1 and (split := split_named(file.name))}
        unnamed = [file.name for file in files if file not in splits]
        if unnamed and len(unnamed) < len(files):
            raise ValueError(
                f"files of {self.path} have splits in their names, but {', '.join(unnamed[:5])} has none: rename it, or set pattern"
            )
        return self.encode_documents(self._cut(files) if unnamed else partial(_documents, splits), problems)

    def _cut(self, files: list[Path]) -> Documents:
        """Documents that are cut where a split ends; a split must have a line at least."""
        total = sum(len(line) + 1 for file in files for _, line in lines(file, Problems(skip=True)))

        def documents(problems: Problems) -> Iterator[tuple[str, Iterable[str]]]:
            passed = 0
            found = set()

            def split_of(line: str) -> str:
                nonlocal passed
                split = next(split for split, share in SHARES.items() if passed < share * total)
                passed += len(line) + 1
                found.add(split)
                return split

            for file in files:
                yield from groupby((line for _, line in lines(file, problems)), key=split_of)
            if len(found) < len(SHARES):
                raise ValueError(
                    f"{self.path} has too few lines to be cut into splits: give them as files of a folder, train.txt, valid.txt, test.txt"
                )

        return documents


def _documents(splits: Mapping[Path, str], problems: Problems) -> Iterator[tuple[str, Iterable[str]]]:
    for file, split in splits.items():
        yield split, (line for _, line in lines(file, problems))
