"""LRA Text: is a film review good or bad, from its bytes?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from permuteformer.tasks import protocol as protocols
from permuteformer.tasks.base import TASKS, Classification, Source
from permuteformer.tasks.inputs import Values
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.archives import members
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import rows

LABELS = ["neg", "pos"]
REVIEW = re.compile(r"(?:^|/)(train|test)/(neg|pos)/\d+_\d+\.txt$")


@TASKS.register("lra-text")
class LraText(Classification):
    """IMDB's 25,000 + 25,000 film reviews, as bytes.

    Args:
        protocol: ``"lra"`` or ``"paper"``: whose tokens.
        validate_on: ``"train"`` holds out a tenth of the training split, ``"test"`` is what the paper's authors did, and the default of
            their protocol.
        max_length: tokens of the longest input with CLS and SEP; what is longer is cut. 4,000 by the paper; LRA has CLS beside 4,000.
        data: the data folder.
        skip_bad: leave out what cannot be read, and count it.

    >>> LraText().max_length, LraText(protocol="paper").max_length, LraText().labels
    (4001, 4000, ['neg', 'pos'])
    """

    title = "IMDB film reviews"
    licence = "none stated; cite Maas et al. 2011"
    official_items = 50_000
    layouts = (
        "aclImdb/{train,test}/{neg,pos}/*.txt",
        "aclImdb_v1.tar.gz",
        'imdb/{train,test}.jsonl[.gz], an object a line: {"text": …, "label": 0 or 1}',
    )
    advice = "get it: permuteformer data fetch lra-text"

    def __init__(
        self,
        protocol: str = "lra",
        validate_on: str | None = None,
        max_length: int | None = None,
        data: str | None = None,
        skip_bad: bool = False,
    ) -> None:
        alphabet = protocols.alphabet(protocol)
        self.protocol = protocol
        self.validate_on = protocols.validation(protocol, validate_on, "train")
        self.input = Values(alphabet, protocols.text_length(protocol) if max_length is None else max_length)
        self.data, self.skip_bad = data, skip_bad

    @property
    def labels(self) -> list[str]:
        return LABELS

    def notes(self) -> list[str]:
        return super().notes() + protocols.cut(self.protocol, self.max_length)

    def sources(self, folder: Path) -> Iterator[Source]:
        places = tuple(folder / "aclImdb" / split / label for split in ("train", "test") for label in LABELS)
        if all(place.is_dir() for place in places):
            yield Source("aclImdb", places, partial(_official, folder / "aclImdb"))
        if (archive := folder / "aclImdb_v1.tar.gz").is_file():
            yield Source("aclImdb_v1.tar.gz", (archive,), partial(_official, archive))
        for ending in (".jsonl", ".jsonl.gz"):
            files = {split: folder / "imdb" / f"{split}{ending}" for split in ("train", "test")}
            if all(path.is_file() for path in files.values()):
                yield Source("imdb, JSON lines", tuple(files.values()), partial(_json_lines, files))


def _official(path: Path, problems: Problems) -> Iterator[tuple[str, Row]]:
    for name, text in members(path, problems, wanted=lambda name: REVIEW.search(name) is not None):
        match = REVIEW.search(name)
        assert match is not None
        yield match[1], {"value": text, "label": LABELS.index(match[2])}


def _json_lines(files: dict[str, Path], problems: Problems) -> Iterator[tuple[str, Row]]:
    for split, path in files.items():
        for line, row in rows(path, problems):
            text, label = row.get("text"), row.get("label")
            if not isinstance(text, str) or label not in (0, 1):
                problems.add(BadItem(path, line, f'there must be a "text" and a "label" of 0 or 1; the label is {label!r:.50}'))
                continue
            yield split, {"value": text.encode("utf-8", "surrogatepass"), "label": int(label)}
