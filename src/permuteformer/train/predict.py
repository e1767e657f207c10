"""Predictions of a trained classifier for new items: reading them, batch by batch, and writing the answers."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, TextIO

import torch
from torch import Tensor

from permuteformer.formatting import escape_cell, printable
from permuteformer.ops.checks import check_integer
from permuteformer.registry import unknown
from permuteformer.storage import fsync, read_bytes
from permuteformer.tasks.images import ENDINGS as IMAGE_ENDINGS
from permuteformer.tasks.images import is_image
from permuteformer.tasks.inputs import Classification
from permuteformer.tasks.own import find_column, guess_column, read_part
from permuteformer.tasks.readers.archives import MAX_MEMBER_BYTES, members
from permuteformer.tasks.readers.errors import BadItem, Errors
from permuteformer.tasks.readers.tables import ENDINGS as TABLE_ENDINGS
from permuteformer.tasks.readers.tables import column_names, rows
from permuteformer.tasks.readers.text import lines, stream_lines
from permuteformer.tasks.store import Row
from permuteformer.train.build import model_inputs
from permuteformer.train.trained_model import TrainedModel

Source = str | os.PathLike[str] | BinaryIO
"""A path, ``"-"`` for standard input, or a binary stream."""

TEXT_ENDINGS = (".txt", ".txt.gz", ".txt.xz", ".txt.bz2")
ARCHIVE_ENDINGS = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2")

TABLE = "a table (.csv, .tsv, .jsonl, .parquet)"
EXPECTED = {
    "image": f"images: a folder or archive of them, an image, or {TABLE} with a column of paths",
    "second_text": f"pairs of texts: {TABLE} with two columns of them",
    "text": f"texts: {TABLE}, a text file (.txt) with one text per line, or - for lines of standard input",
}


@dataclass(frozen=True)
class NewItem:
    """An item without a label."""

    path: str
    line: int | None
    """Line of its start, from 1; ``None`` for a file."""
    id: str | None
    """Value of the id column; of an image its name."""
    row: Row
    """As the task stores it."""
    cut: bool
    """Whether it is longer than the model reads."""

    @property
    def place(self) -> str:
        """Its file and line, for messages."""
        return printable(self.path) if self.line is None else f"{printable(self.path)}, line {self.line:,}"


@dataclass(frozen=True)
class Prediction:
    """The answer for one item."""

    line: int | None
    """Line where the item starts, from 1; ``None`` for an image file."""
    id: str | None
    """Value of the id column, if there is one; of an image its name."""
    label: str
    probability: float
    """Of the label."""
    probabilities: tuple[float, ...]
    """Of all labels, in the order of ``TrainedModel.labels``."""
    cut: bool
    """Whether the text was longer than the model reads, so that its end was not read."""


def predict(
    trained: TrainedModel,
    source: Source,
    *,
    columns: Mapping[str, str] | None = None,
    batch_size: int = 32,
    errors: Errors | None = None,
) -> Iterator[Prediction]:
    """Yield predictions for the items of ``source``, in their order. One batch at a time is in memory.

    Args:
        trained: a classifier, from ``permuteformer.train.trained_model.load``.
        source: for texts a table (CSV, TSV, JSON lines, Parquet), a text file with one text per line, ``"-"`` for standard input, or a
            binary stream; for pairs a table; for images a folder, an archive, an image, or a table of paths relative to it.
        columns: columns of a table: ``{"text": NAME}``, ``second_text``, ``image``, ``id``; default: as in training, else guessed.
        batch_size: items at a time.
        errors: collects items that cannot be read; default: the first one raises.
    """
    check_integer(batch_size=batch_size)
    errors = Errors() if errors is None else errors
    return _predict(trained, read_items(trained, source, columns or {}, errors), batch_size, errors)


def _predict(trained: TrainedModel, items: Iterator[NewItem], batch_size: int, errors: Errors) -> Iterator[Prediction]:
    is_empty = True
    while batch := list(islice(items, batch_size)):
        is_empty = False
        for item, row in zip(batch, probabilities(trained, batch).tolist(), strict=True):
            best = max(range(len(row)), key=row.__getitem__)
            yield Prediction(item.line, item.id, trained.labels[best], row[best], tuple(row), item.cut)
    if is_empty:
        skipped = f": all {errors.count:,} items are bad; the first is {errors.shown[0]}" if errors.count else ""
        raise ValueError(f"there is nothing to predict{skipped}")


@torch.inference_mode()
def probabilities(trained: TrainedModel, items: list[NewItem]) -> Tensor:
    """Return the probabilities of all labels for each item, ``b n`` float64."""
    batch = trained.input.collate([{"id": n, **item.row} for n, item in enumerate(items)]).to(trained.model.device)
    logits: Tensor = trained.model(**model_inputs(batch, trained.model.config)).logits.cpu().double()
    for item, row in zip(items, logits, strict=True):
        if not row.isfinite().all():
            raise ValueError(
                f"{item.place}: the model's output is not finite ({row.tolist()}): check how its training ended ({trained.folder}), and "
                "train again, for example with a lower learning rate"
            )
    return logits.softmax(-1)


def new_item(trained: TrainedModel, parts: Sequence[Any], path: str = "the item", line: int | None = None, id: object = None) -> NewItem:
    """Return an item of its parts: one text, two texts, or the content of an image file."""
    input = classifier_input(trained)
    if len(parts) != len(input.parts):
        raise ValueError(f"the model reads {len(input.parts)} texts per item, got {len(parts)}")
    is_image = "image" in input.parts
    if any(isinstance(part, bytes) != is_image for part in parts):
        raise ValueError(f"the model reads {'an image' if is_image else 'text'}, got {'text' if is_image else 'an image'}")
    row = input.row(parts)
    return NewItem(path, line, None if id is None else str(id), row, input.is_cut(row))


def classifier_input(trained: TrainedModel) -> Classification:
    """Return the input of a classifier; raise for a language model."""
    if not isinstance(trained.input, Classification):
        raise ValueError(f"{trained.folder} is a language model, without labels: use permuteformer generate")
    return trained.input


def read_items(trained: TrainedModel, source: Source, columns: Mapping[str, str], errors: Errors) -> Iterator[NewItem]:
    """Return the items of ``source``, in order. A source that cannot be read raises at once; single items go to ``errors``."""
    input = classifier_input(trained)
    parts = list(input.parts)
    expected = f"the model reads {EXPECTED[parts[-1]]}"
    for option in columns:
        if option not in (*parts, "id"):
            raise ValueError(f"{unknown('column option', option, (*parts, 'id'))}; {expected}")
    if not isinstance(source, (str, os.PathLike)) or os.fspath(source) == "-":
        if parts != ["text"] or columns:
            raise ValueError(f"standard input has lines of text and no columns; {expected}")
        stream = sys.stdin.buffer if isinstance(source, (str, os.PathLike)) else source
        found = ((line, None, [text]) for line, text in stream_lines(stream, "standard input", errors))
        return _items(trained, "standard input", found, errors)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"file not found: {printable(str(path))}")
    name = path.name.lower()
    if path.is_file() and name.endswith(TABLE_ENDINGS):
        return _items(trained, str(path), _table_parts(trained, path, columns, errors), errors)
    if columns:
        raise ValueError(f"only tables have columns, {printable(str(path))} is not one; {expected}")
    if parts == ["image"] and (path.is_dir() or name.endswith(ARCHIVE_ENDINGS)):
        images = ((None, name, [data]) for name, data in members(path, errors, wanted=is_image))
        return _items(trained, str(path), images, errors)
    if parts == ["image"] and name.endswith(IMAGE_ENDINGS):
        return _items(trained, str(path), iter([(None, path.name, [read_bytes(path, MAX_MEMBER_BYTES)])]), errors)
    if parts == ["text"] and name.endswith(TEXT_ENDINGS):
        return _items(trained, str(path), ((line, None, [text]) for line, text in lines(path, errors)), errors)
    raise ValueError(f"{printable(str(path))} cannot be read; {expected}")


def _items(trained: TrainedModel, path: str, found: Iterator[tuple[int | None, object, list[Any]]], errors: Errors) -> Iterator[NewItem]:
    for line, id, parts in found:
        try:
            yield new_item(trained, parts, path, line, id)
        except ValueError as error:
            errors.add(BadItem(path if line is not None or id is None else f"{path}: {id}", line, str(error)))


def _table_parts(trained: TrainedModel, path: Path, columns: Mapping[str, str], errors: Errors) -> Iterator[tuple[int, object, list[Any]]]:
    """Return the lines of a table, each with its id and the parts of its item. Raises at once if a column is missing."""
    names = column_names(path)
    asked = {**{part: column for part, column in trained.columns.items() if column in names}, **columns}
    guesses = classifier_input(trained).parts
    chosen = {part: find_column(path, names, part, asked.get(part), guesses[part]) for part in guesses}
    id_column = guess_column(path, names, "id", asked.get("id"), ("id",))

    def read() -> Iterator[tuple[int, object, list[Any]]]:
        for line, row in rows(path, errors):
            try:
                parts = [read_part(part, row.get(column), column, path.parent) for part, column in chosen.items()]
            except ValueError as error:
                errors.add(BadItem(path, line, str(error)))
                continue
            yield line, None if id_column is None else row.get(id_column), parts

    return read()


def csv_lines(predictions: Iterable[Prediction], labels: Sequence[str]) -> Iterator[str]:
    """Yield a header and a row per prediction: line, id, label, its probability, and ``p_LABEL`` for every label.

    Cells that a spreadsheet would compute get an apostrophe (``escape_cell``); JSON lines have texts as they are.

    >>> list(csv_lines([Prediction(2, None, "pos", 0.75, (0.25, 0.75), cut=False)], ["neg", "pos"]))
    ['line,id,label,probability,p_neg,p_pos\\n', '2,,pos,0.75,0.25,0.75\\n']
    """
    writer = csv.writer(SimpleNamespace(write=str), lineterminator="\r\n")  # so that either of them within a text is quoted

    def line(*cells: object) -> str:
        return str(writer.writerow(cells)).removesuffix("\r\n") + "\n"

    yield line("line", "id", "label", "probability", *(f"p_{label}" for label in labels))
    for p in predictions:
        numbers = (f"{number:.6g}" for number in (p.probability, *p.probabilities))
        yield line(p.line, p.id and escape_cell(p.id), escape_cell(p.label), *numbers)


def json_lines(predictions: Iterable[Prediction], labels: Sequence[str]) -> Iterator[str]:
    """Yield a JSON object per prediction.

    >>> list(json_lines([Prediction(2, None, "pos", 0.75, (0.25, 0.75), cut=False)], ["neg", "pos"]))
    ['{"line": 2, "id": null, "label": "pos", "probability": 0.75, "probabilities": {"neg": 0.25, "pos": 0.75}}\\n']
    """
    for p in predictions:
        by_label = {label: float(f"{number:.6g}") for label, number in zip(labels, p.probabilities, strict=True)}
        content = {"line": p.line, "id": p.id, "label": p.label, "probability": float(f"{p.probability:.6g}"), "probabilities": by_label}
        yield json.dumps(content) + "\n"


def lines_for(path: Path | None) -> Callable[[Iterable[Prediction], Sequence[str]], Iterator[str]]:
    """Return the format for a file by its ending; CSV for the terminal."""
    formats = {".csv": csv_lines, ".jsonl": json_lines}
    ending = ".csv" if path is None else path.suffix.lower()
    if ending not in formats:
        raise ValueError(f"output must end in {' or '.join(formats)}, got {str(path)!r}")
    return formats[ending]


@contextmanager
def new_file(path: Path) -> Iterator[TextIO]:
    """Open a text file that replaces ``path`` when the block ends without an exception."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"folder not found: {path.parent}")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            yield file
        fsync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
