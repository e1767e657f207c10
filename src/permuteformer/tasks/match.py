"""Classification of your own pairs of texts, from a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from permuteformer.tasks.base import TASKS
from permuteformer.tasks.inputs import Pair
from permuteformer.tasks.own import TableTask, find_column


@TASKS.register("match")
@dataclass(kw_only=True, eq=False)
class Match(TableTask):
    """Rows of a table with two texts and a label.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("first,second,label\\n" + "".join(f"film {n},film {n % 3},{n % 3}\\n" for n in range(50)))
    ...     file.flush()
    ...     Match(file.name).input.labels
    ('0', '1', '2')
    """

    title = "your pairs of texts, in a table"

    text: str | None = None
    """Column of first texts; default: guessed from its name."""
    second_text: str | None = None
    """Column of second texts; default: guessed from its name."""

    def choose_parts(self, table: Path, names: Sequence[str]) -> None:
        self.text = find_column(table, names, "text", self.text, Pair.parts["text"])
        self.second_text = find_column(table, names, "second_text", self.second_text, Pair.parts["second_text"])

    def input_with(self, labels: tuple[str, ...]) -> Pair:
        return Pair(labels, self.max_length)
