"""Matching of your own pairs of texts, from a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from permuteformer.tasks.base import TASKS, Matching
from permuteformer.tasks.inputs import Values
from permuteformer.tasks.own import OwnTable, choose_column, no_column, text_bytes
from permuteformer.tasks.prepare import Row
from permuteformer.tokens import PAPER

FIRST = ("text1", "first", "texta", "sentence1", "document1", "doc1", "question1", "premise", "query", "left", "a")
SECOND = ("text2", "second", "textb", "sentence2", "document2", "doc2", "question2", "hypothesis", "document", "right", "b")


@TASKS.register("match")
class Match(OwnTable, Matching):
    """Rows of a table with two texts and a label: CSV, TSV, JSON lines or Parquet.

    Args:
        path: the table, or a folder of tables named after their splits.
        validation: the table of the validation split, if there is one.
        test: that of the test split.
        first: the column of first texts; guessed from its name unless told.
        second: that of second texts.
        label: the column of labels.
        split: the column of splits; ``split`` if there is one. Nothing (``split=``) for none.
        id: a column in which no value may come twice.
        max_length: bytes of the longest text, with CLS and SEP; what is longer is cut.
        seed: of the splits, where they are made.
        skip_bad: leave out what cannot be read, and count it.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("first,second,label\\n" + "".join(f"film {n},film {n % 3},{n % 3}\\n" for n in range(50)))
    ...     file.flush()
    ...     Match(file.name).labels
    ['0', '1', '2']
    """

    title = "your pairs of texts, in a table"
    layouts = ("a table: .csv, .tsv, .jsonl or .parquet",)
    advice = "say where it is: path=FILE"

    def __init__(
        self,
        path: str,
        validation: str | None = None,
        test: str | None = None,
        first: str | None = None,
        second: str | None = None,
        label: str | None = None,
        split: str | None = None,
        id: str | None = None,
        max_length: int = 4096,
        seed: int = 0,
        skip_bad: bool = False,
    ) -> None:
        table, names = self.take(path, validation, test, label, split, id)
        chosen = {
            "first": choose_column(table, "first", first, names, FIRST),
            "second": choose_column(table, "second", second, names, SECOND),
        }
        for option, column in chosen.items():
            if column is None:
                raise no_column(table, option, names)
        self.texts = {option: str(column) for option, column in chosen.items()}
        self.needs(*self.texts.values())
        self.input = Values(PAPER, max_length)
        self.seed, self.skip_bad = seed, skip_bad

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "texts": self.texts}

    def choices(self) -> dict[str, str]:
        return {**{option: f"column {column}" for option, column in self.texts.items()}, **super().choices()}

    def row(self, path: Path, row: Mapping[str, Any]) -> Row:
        return {name: text_bytes(row.get(column), column) for name, column in self.texts.items()}
