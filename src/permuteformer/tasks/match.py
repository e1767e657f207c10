"""Matching of your own pairs of texts, from a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from permuteformer.tasks.base import TASKS, Matching, Source
from permuteformer.tasks.classify import LABELS
from permuteformer.tasks.inputs import Values
from permuteformer.tasks.own import Item, OwnClassification, choose_column, files_of_splits, id_of, label_name, no_column, text_bytes
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import ENDINGS, column_names, rows
from permuteformer.tokens import PAPER

FIRST = ("text1", "first", "texta", "sentence1", "document1", "doc1", "question1", "premise", "query", "left", "a")
SECOND = ("text2", "second", "textb", "sentence2", "document2", "doc2", "question2", "hypothesis", "document", "right", "b")


@TASKS.register("match")
class Match(OwnClassification, Matching):
    """Rows of a table with two texts and a label: CSV, TSV, JSON lines or Parquet.

    Args:
        path: the table, or a folder of tables named after their splits.
        validation: the table of the validation split, if there is one.
        test: that of the test split.
        first: the column of first texts; guessed from its name unless told.
        second: that of second texts.
        label: the column of labels.
        id: a column in which no value may come twice.
        max_length: bytes of the longest text, with CLS and SEP; what is longer is cut.
        seed: of the splits, where they are made.
        skip_bad: leave out what cannot be read, and count it.
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
        id: str | None = None,
        max_length: int = 4096,
        seed: int = 0,
        skip_bad: bool = False,
    ) -> None:
        self.files = files_of_splits(path, validation, test, ENDINGS)
        self.given = frozenset(split for split, _ in self.files if split)
        table = self.files[0][1]
        names = column_names(table)
        chosen = {
            "first": choose_column(table, "first", first, names, FIRST),
            "second": choose_column(table, "second", second, names, SECOND),
            "label": choose_column(table, "label", label, names, LABELS),
        }
        for option, column in chosen.items():
            if column is None:
                raise no_column(table, option, names)
        self.first, self.second, self.label = (str(column) for column in chosen.values())
        self.input = Values(PAPER, max_length)
        self.id = choose_column(table, "id", id, names, ())
        self.seed, self.skip_bad = seed, skip_bad

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "columns": [self.first, self.second, self.label, self.id]}

    def sources(self, folder: Path) -> Iterator[Source]:
        paths = tuple(path for _, path in self.files)
        yield Source(", ".join(path.name for path in paths), paths, lambda problems: self.deal(self._items(problems), problems))

    def _items(self, problems: Problems) -> Iterator[Item | BadItem]:
        for split, path in self.files:
            for line, row in rows(path, problems):
                try:
                    texts = {name: text_bytes(row.get(column), column) for name, column in (("first", self.first), ("second", self.second))}
                    yield Item(path, line, split, label_name(row.get(self.label)), texts, id_of(row, self.id))
                except ValueError as error:
                    yield BadItem(path, line, str(error))
