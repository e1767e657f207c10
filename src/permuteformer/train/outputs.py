"""What models answer, as lines and as files: whole, or not at all."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from permuteformer.folders import flush
from permuteformer.texts import for_spreadsheet
from permuteformer.train.predict import Prediction


@contextmanager
def new_file(path: Path) -> Iterator[TextIO]:
    """A text file to write, which takes the place of ``path`` when the block ends without an exception."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: say the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into: make it first")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            yield file
        flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def csv_lines(predictions: Iterable[Prediction], labels: Sequence[str]) -> Iterator[str]:
    """A header, and a row for each prediction: line, id, label, its probability, and ``p_LABEL`` for every label.

    What a spreadsheet would compute has an apostrophe before it, by the rule of ``for_spreadsheet``; JSON lines have texts as they are.

    >>> list(csv_lines([Prediction(2, None, "pos", 0.75, (0.25, 0.75), cut=False)], ["neg", "pos"]))
    ['line,id,label,probability,p_neg,p_pos\\n', '2,,pos,0.75,0.25,0.75\\n']
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")  # either of them within a text is quoted then

    def line(fields: Iterable[object]) -> str:
        writer.writerow(fields)
        text = buffer.getvalue().removesuffix("\r\n") + "\n"
        buffer.seek(0)
        buffer.truncate()
        return text

    yield line(["line", "id", "label", "probability", *(f"p_{label}" for label in labels)])
    for p in predictions:
        numbers = (f"{number:.6g}" for number in (p.probability, *p.probabilities))
        yield line([p.line, p.id and for_spreadsheet(p.id), for_spreadsheet(p.label), *numbers])


def json_lines(predictions: Iterable[Prediction], labels: Sequence[str]) -> Iterator[str]:
    """An object for each prediction.

    >>> list(json_lines([Prediction(2, None, "pos", 0.75, (0.25, 0.75), cut=False)], ["neg", "pos"]))
    ['{"line": 2, "id": null, "label": "pos", "probability": 0.75, "probabilities": {"neg": 0.25, "pos": 0.75}}\\n']
    """
    for p in predictions:
        shares = {label: _digits(number) for label, number in zip(labels, p.probabilities, strict=True)}
        content = {"line": p.line, "id": p.id, "label": p.label, "probability": _digits(p.probability), "probabilities": shares}
        yield json.dumps(content) + "\n"


FORMATS: dict[str, Callable[[Iterable[Prediction], Sequence[str]], Iterator[str]]] = {".csv": csv_lines, ".jsonl": json_lines}
"""How predictions are written, by a file's ending."""


def lines_for(path: Path | None) -> Callable[[Iterable[Prediction], Sequence[str]], Iterator[str]]:
    """How predictions are written to a file of this name; to the screen as CSV."""
    if path is None:
        return csv_lines
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise ValueError(f"output must end in {' or '.join(FORMATS)}; it is {str(path)!r}")
    return FORMATS[ending]


def _digits(number: float) -> float:
    return float(f"{number:.6g}")
