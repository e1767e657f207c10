"""LRA Retrieval: are two documents related?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from permuteformer.tasks import protocol as protocols
from permuteformer.tasks.base import TASKS, Matching, Source
from permuteformer.tasks.inputs import Values
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.literals import bytes_literal
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import rows

COLUMNS = ("label", "id1", "id2", "text1", "text2")
SPLIT_NAMES = {"train": "train", "eval": "validation", "test": "test"}
"""How the files call splits, and how they are called here."""

PLACES = ("lra_release/lra_release/tsv_data", "lra_release/tsv_data", "tsv_data", "lra-retrieval", ".")
ABSTRACTS = "pairs of ACL abstracts, label: they share an author; not LRA's pairs, label: one cites the other"
HALVES = "pairs of halves of articles, label: they are of one article; not LRA's pairs, label: one cites the other"


@TASKS.register("lra-retrieval")
class LraRetrieval(Matching):
    """Pairs of papers of the ACL Anthology: does one cite the other?

    Args:
        protocol: ``"lra"`` or ``"paper"``: whose tokens.
        validate_on: ``"given"``, or ``"test"``, what the paper's authors did and the default of their protocol.
        max_length: tokens of a document with CLS and SEP; what is longer is cut. 4,000 by the paper; LRA has CLS beside 4,000.
        data: the data folder.
        skip_bad: leave out what cannot be read, and count it.

    >>> LraRetrieval(max_length=1024).kind, LraRetrieval().max_length
    ('match', 4001)
    """

    title = "pairs of ACL papers"
    licence = "ACL Anthology: CC BY 4.0 / CC BY-NC-SA 3.0"
    official_items = 182_613
    layouts = (
        *(f"{place}/new_aan_pairs.{{train,eval,test}}.tsv[.gz]" for place in PLACES),
        "acl_pairs/acl_pairs.{train,eval,test}.tsv[.gz], a stand-in",
        "retrieval-halves/new_aan_pairs.{train,eval,test}.tsv, generated",
    )
    advice = "get it: permuteformer data fetch lra-retrieval (8 GB), or make pairs: permuteformer data generate lra-retrieval --from FILE"

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
        self.validate_on = protocols.validation(protocol, validate_on, "given")
        self.input = Values(alphabet, protocols.text_length(protocol) if max_length is None else max_length)
        self.data, self.skip_bad = data, skip_bad

    @property
    def labels(self) -> list[str]:
        return ["unrelated", "related"]

    def notes(self) -> list[str]:
        return super().notes() + protocols.cut(self.protocol, self.max_length)

    def sources(self, folder: Path) -> Iterator[Source]:
        stems = [(place, "new_aan_pairs", "") for place in PLACES]
        stems += [("acl_pairs", "acl_pairs", ABSTRACTS), ("retrieval-halves", "new_aan_pairs", HALVES)]
        for place, stem, note in stems:
            for ending in (".tsv", ".tsv.gz"):
                files = {split: folder / place / f"{stem}.{name}{ending}" for name, split in SPLIT_NAMES.items()}
                if all(path.is_file() for path in files.values()):
                    title = f"{place}/{stem}.*{ending}".removeprefix("./")
                    yield Source(title, tuple(files.values()), partial(_read, files), note)


def _read(files: Mapping[str, Path], problems: Problems) -> Iterator[tuple[str, Row]]:
    for split, path in files.items():
        for line, row in rows(path, problems, columns=COLUMNS):
            try:
                label = {"0.0": 0, "1.0": 1, "0": 0, "1": 1}.get(row["label"])
                if label is None:
                    raise ValueError(f"label must be 0.0 or 1.0; it is {row['label']!r:.50}")
                yield split, {"first": _text(row["text1"]), "second": _text(row["text2"]), "label": label}
            except ValueError as error:
                problems.add(BadItem(path, line, str(error)))


def _text(field: str) -> bytes:
    """The official files hold Python's notation of bytes, others the text itself."""
    return bytes_literal(field) if field.startswith(("b'", 'b"')) else field.encode()
