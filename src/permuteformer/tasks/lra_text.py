"""LRA Text: is a film review positive or negative, from its bytes?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from permuteformer.tasks.base import TASKS, Recipe, Source
from permuteformer.tasks.inputs import Text
from permuteformer.tasks.lra import LraTextTask
from permuteformer.tasks.readers.archives import members
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.readers.tables import rows
from permuteformer.tasks.store import Row
from permuteformer.tasks.tokenization import ByteTokens

LABELS = ("neg", "pos")
REVIEW = re.compile(r"(?:^|/)(train|test)/(neg|pos)/\d+_\d+\.txt$")


@TASKS.register("lra-text")
@dataclass(kw_only=True, eq=False)
class LraText(LraTextTask):
    """IMDB's 25,000 + 25,000 film reviews, as bytes.

    >>> LraText().input.max_length, LraText(protocol="lra").input.max_length, LraText().input.labels
    (4000, 4001, ('neg', 'pos'))
    """

    title = "IMDB film reviews"
    licence = "none stated; cite Maas et al. 2011"
    recipe = Recipe("text", {"batch_size": 16, "epochs": 10, "learning_rate": 1e-5, "warmup_steps": 4000})
    official_items = {"train": 25_000, "test": 25_000}  # noqa: RUF012
    layouts = (
        "aclImdb/{train,test}/{neg,pos}/*.txt",
        "aclImdb_v1.tar.gz",
        'imdb/{train,test}.jsonl[.gz], one object per line: {"text": …, "label": 0 or 1}',
    )
    advice = "download it: permuteformer data fetch lra-text"

    @property
    def input(self) -> Text:
        return Text(LABELS, self.max_length or self.protocol_length, ByteTokens(self.alphabet()))

    def sources(self, folder: Path) -> Iterator[Source]:
        places = tuple(folder / "aclImdb" / split / label for split in ("train", "test") for label in LABELS)
        if all(place.is_dir() for place in places):
            yield Source("aclImdb", places, partial(_read_files, folder / "aclImdb"))
        if (archive := folder / "aclImdb_v1.tar.gz").is_file():
            yield Source("aclImdb_v1.tar.gz", (archive,), partial(_read_files, archive))
        for ending in (".jsonl", ".jsonl.gz"):
            files = {split: folder / "imdb" / f"{split}{ending}" for split in ("train", "test")}
            if all(path.is_file() for path in files.values()):
                yield Source("imdb, JSON lines", tuple(files.values()), partial(_read_json_lines, files))


def _read_files(path: Path, errors: Errors) -> Iterator[tuple[str, Row]]:
    for name, text in members(path, errors, lambda name: REVIEW.search(name) is not None):
        split, label = REVIEW.findall(name)[0]
        yield split, {"value": text, "label": LABELS.index(label)}


def _read_json_lines(files: dict[str, Path], errors: Errors) -> Iterator[tuple[str, Row]]:
    for split, path in files.items():
        for line, row in rows(path, errors):
            text, label = row.get("text"), row.get("label")
            with errors.at(path, line):
                if not isinstance(text, str) or label not in (0, 1):
                    raise ValueError(f'expected "text" and a "label" of 0 or 1, got label {label!r:.50}')
                yield split, {"value": text.encode("utf-8", "surrogatepass"), "label": int(label)}
