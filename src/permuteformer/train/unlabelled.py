"""What is to be predicted, one item at a time: rows of tables, lines of text, images."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from permuteformer.folders import content_of
from permuteformer.registry import unknown
from permuteformer.tasks.classify import IMAGES, TEXTS
from permuteformer.tasks.images import ENDINGS as IMAGE_ENDINGS
from permuteformer.tasks.images import is_image
from permuteformer.tasks.inputs import Values
from permuteformer.tasks.match import FIRST, SECOND
from permuteformer.tasks.own import choose_column, image_bytes, text_bytes
from permuteformer.tasks.readers import lines as readers
from permuteformer.tasks.readers.archives import MAX_MEMBER_BYTES, members
from permuteformer.tasks.readers.images import gray_image
from permuteformer.tasks.readers.literals import bytes_literal
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import ENDINGS as TABLE_ENDINGS
from permuteformer.tasks.readers.tables import column_names, rows
from permuteformer.tasks.readers.unpacking import PACKINGS, check_file
from permuteformer.texts import printable
from permuteformer.train.saved import Trained

Source = str | os.PathLike[str] | BinaryIO
"""A path, ``"-"`` for standard input, or a stream of bytes."""

TEXT_ENDINGS = (".txt", *(f".txt{packing}" for packing in PACKINGS))
ARCHIVE_ENDINGS = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2")

GUESSES: dict[str, Sequence[str]] = {"text": TEXTS, "first": FIRST, "second": SECOND, "image": IMAGES, "id": ("id",)}
"""What columns are called, by what they are."""

TABLE = "a table (.csv, .tsv, .jsonl, .parquet)"
WANTED = {
    "image": f"images: give a folder or an archive of them, an image, or {TABLE} with a column of paths",
    "first": f"pairs of texts: give {TABLE} with two columns of them",
    "text": f"texts: give {TABLE}, a text file (.txt, a text a line), or - for lines of standard input",
}


@dataclass(frozen=True)
class Unlabelled:
    """One item without its label."""

    path: str
    line: int | None
    """Where it starts, from 1; in Parquet the row's number. ``None`` for a file of its own."""
    id: str | None
    """Of the column of ids; of an image its name."""
    values: tuple[bytes, ...]
    """As the task stores them: one, or the two of a pair. What the model does not read of them is cut off."""
    cut: bool
    """Whether something was cut off."""

    @property
    def place(self) -> str:
        """For messages."""
        return printable(self.path) if self.line is None else f"{printable(self.path)}, line {self.line:,}"


def read(trained: Trained, source: Source, columns: Mapping[str, str], problems: Problems) -> Iterator[Unlabelled]:
    """The items of ``source``, in order. What cannot be used at all raises at once; single items go to ``problems`` in their turn.

    Args:
        trained: says what an item is: a text, a pair of them, or an image.
        source: of texts a table, a text file (a text a line), or standard input; of pairs a table; of images a folder, an archive, one
            image, or a table of paths.
        columns: of a table: ``text``, ``first`` and ``second``, or ``image``, and ``id``, to names. What is not told is as in training if
            there is such a column, else guessed.
        problems: takes items that cannot be used.
    """
    parts = parts_of(trained)
    for option in columns:
        if option not in (*parts, "id"):
            raise ValueError(f"{unknown('column', option, (*parts, 'id'))}; the model reads {WANTED[parts[0]]}")
    if not isinstance(source, (str, os.PathLike)) or os.fspath(source) == "-":
        stream = sys.stdin.buffer if isinstance(source, (str, os.PathLike)) else source
        if parts != ("text",) or columns:
            raise ValueError(f"standard input has lines of texts and no columns; the model reads {WANTED[parts[0]]}")
        return _of_lines(trained, "standard input", _stream_lines(stream, problems), problems)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {printable(str(path))}; check its name and folder")
    name = path.name.lower()
    if path.is_file() and name.endswith(TABLE_ENDINGS):
        return _of_table(trained, path, parts, columns, problems)
    if columns:
        raise ValueError(f"columns are of tables, and {printable(str(path))} is none; the model reads {WANTED[parts[0]]}")
    if parts == ("image",) and (path.is_dir() or name.endswith(ARCHIVE_ENDINGS)):
        return _of_folder(trained, path, problems)
    if parts == ("image",) and name.endswith(IMAGE_ENDINGS):
        return _of_image(trained, path, problems)
    if parts == ("text",) and name.endswith(TEXT_ENDINGS):
        check_file(path)
        return _of_lines(trained, str(path), readers.lines(path, problems), problems)
    raise ValueError(f"{printable(str(path))} cannot be read; the model reads {WANTED[parts[0]]}")


def item_of_texts(trained: Trained, texts: Sequence[str], place: str = "the text") -> Unlabelled:
    """One text, or the two of a pair, as an item."""
    parts = parts_of(trained)
    if parts == ("image",):
        raise ValueError("the model reads images, and this is a text: give an image")
    if len(texts) != len(parts):
        wanted = "two texts, one after the other" if len(parts) == 2 else "one text"
        raise ValueError(f"the model reads {wanted}; {len(texts)} were given")
    value = _text_value(trained)
    return _item(trained, place, None, None, tuple(value(text) for text in texts))


def item_of_image(trained: Trained, data: bytes, place: str = "the image") -> Unlabelled:
    """The content of an image file as an item."""
    if (parts := parts_of(trained)) != ("image",):
        raise ValueError(f"the model reads {'pairs of texts' if len(parts) == 2 else 'texts'}, and this is an image: give a text")
    return _item(trained, place, None, None, (_pixels(trained, data),))


def item_of_split(trained: Trained, split: str, number: int) -> Unlabelled | str:
    """An item of the run's own data, which must be where it was; of a language model the text of a window."""
    items = trained.same_task.dataset(split)
    if not 0 <= number < len(items):
        raise ValueError(f"item must be from 0 to {len(items) - 1:,}, as the {split} split has {len(items):,}; it is {number:,}")
    item = items[number]
    if trained.kind == "lm":
        return trained.task.words(item)[0]
    columns = [name for name, kind in trained.task.columns.items() if kind == "binary"]
    return _item(trained, f"item {number:,} of {split}", None, None, tuple(bytes(item[column]) for column in columns))


def parts_of(trained: Trained) -> tuple[str, ...]:
    """What an item is made of."""
    if trained.kind == "lm":
        raise ValueError(f"{trained.folder} is a language model, which has no labels: go on with a text by permuteformer generate")
    if trained.input.grid is not None:
        return ("image",)
    return ("first", "second") if trained.kind == "match" else ("text",)


def _of_table(trained: Trained, path: Path, parts: Sequence[str], columns: Mapping[str, str], problems: Problems) -> Iterator[Unlabelled]:
    names = column_names(path)
    chosen: dict[str, str | None] = {}
    for part in (*parts, "id"):
        known, asked = trained.columns.get(part), columns.get(part)
        chosen[part] = known if asked is None and known in names else choose_column(path, part, asked, names, GUESSES[part])
        if chosen[part] is None and part != "id":
            there = ", ".join(map(repr, names))
            raise ValueError(
                f"which column of {printable(str(path))} is the {part}? There is {there}; say columns={{{part!r}: NAME}} "
                f"(--{part}-column NAME)"
            )
    cell = partial(_image_cell, trained, path) if trained.input.grid is not None else partial(_text_cell, _text_value(trained))
    return _rows(trained, path, [str(chosen[part]) for part in parts], chosen["id"], cell, problems)


def _rows(
    trained: Trained, path: Path, columns: Sequence[str], ids: str | None, cell: Callable[[object, str], bytes], problems: Problems
) -> Iterator[Unlabelled]:
    for line, row in rows(path, problems):
        try:
            values = tuple(cell(row.get(column), column) for column in columns)
            item = _item(trained, str(path), line, None if ids is None else row.get(ids), values)
        except ValueError as error:
            problems.add(BadItem(path, line, str(error)))
            continue
        yield item


def _of_lines(trained: Trained, place: str, found: Iterator[tuple[int, str]], problems: Problems) -> Iterator[Unlabelled]:
    value = _text_value(trained)

    def items() -> Iterator[Unlabelled]:
        for line, text in found:
            try:
                item = _item(trained, place, line, None, (value(text),))
            except ValueError as error:
                problems.add(BadItem(place, line, str(error)))
                continue
            yield item

    return items()


def _of_folder(trained: Trained, path: Path, problems: Problems) -> Iterator[Unlabelled]:
    for name, data in members(path, problems, wanted=is_image):
        try:
            item = _item(trained, str(path / name), None, name, (_pixels(trained, data),))
        except ValueError as error:
            problems.add(BadItem(path / name, None, str(error)))
            continue
        yield item


def _of_image(trained: Trained, path: Path, problems: Problems) -> Iterator[Unlabelled]:
    check_file(path)
    try:
        yield _item(trained, str(path), None, path.name, (_pixels(trained, content_of(path, MAX_MEMBER_BYTES)),))
    except ValueError as error:
        problems.add(BadItem(path, None, str(error)))


def _item(trained: Trained, path: str, line: int | None, id: object, values: tuple[bytes, ...]) -> Unlabelled:
    around, name = trained.input.alphabet.specials, None if id is None else str(id)
    if not around and not all(values):
        raise ValueError("the text is empty, and this model has no tokens around it")
    if not isinstance(trained.input, Values):
        return Unlabelled(path, line, name, values, cut=False)
    room = trained.input.max_length - around
    return Unlabelled(path, line, name, tuple(value[:room] for value in values), any(len(value) > room for value in values))


def _text_value(trained: Trained) -> Callable[[str], bytes]:
    """How a text becomes what the task stores of it."""
    symbols = (trained.about.get("input") or {}).get("symbols")
    if symbols is not None:
        return partial(_symbols, {symbol: n for n, symbol in enumerate(symbols)})
    if trained.input.alphabet.count < 256:
        raise ValueError(f"tokens of task {trained.experiment.task!r} are not bytes: a text cannot be turned into them here")
    return _literal if trained.experiment.task == "lra-retrieval" else _utf8


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # as text_bytes of one's own tables


def _literal(text: str) -> bytes:
    """The official files of Retrieval hold Python's notation of bytes."""
    return bytes_literal(text) if text.startswith(("b'", 'b"')) else _utf8(text)


def _symbols(numbers: Mapping[str, int], text: str) -> bytes:
    """An expression of ListOps; brackets of the binary tree say nothing that the others do not."""
    try:
        value = bytes(numbers[symbol] for symbol in text.split() if symbol not in ("(", ")"))
    except KeyError as error:
        raise ValueError(f"symbols must be of {' '.join(numbers)}; there is {error.args[0]!r:.50}") from None
    if not value:
        raise ValueError(f"there is no expression; symbols are {' '.join(numbers)}")
    return value


def _text_cell(value: Callable[[str], bytes], cell: object, column: str) -> bytes:
    text_bytes(cell, column)  # raises where it is no text
    assert isinstance(cell, str)
    return value(cell)


def _image_cell(trained: Trained, table: Path, cell: object, column: str) -> bytes:
    if not isinstance(cell, str) or not cell:
        raise ValueError(f"column {column!r} must be the path of an image; it is {cell!r:.50}")
    return _pixels(trained, image_bytes(cell, table.parent))


def _pixels(trained: Trained, data: bytes) -> bytes:
    return gray_image(data, trained.input.grid).tobytes()


def _stream_lines(stream: BinaryIO, problems: Problems) -> Iterator[tuple[int, str]]:
    """Line numbers and lines of a stream, which may go on for ever; as ``readers.lines`` of a file."""
    number = 0
    while line := stream.readline(readers.MAX_LINE_BYTES + 1):
        number += 1
        try:
            if len(line) > readers.MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(readers.MAX_LINE_BYTES)
                raise ValueError(f"the line has more than {readers.MAX_LINE_BYTES:,} bytes, which is the limit; break it up")
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except ValueError as error:
            problems.add(BadItem("standard input", number, f"{error}"))
            continue
        yield number, text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")
    if not number:
        problems.add(BadItem("standard input", None, "there are no lines"))
