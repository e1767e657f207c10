"""LRA Retrieval: are two documents related?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from permuteformer.storage import data_folder
from permuteformer.tasks.base import TASKS, Recipe, Source
from permuteformer.tasks.files import split_named, text_files
from permuteformer.tasks.generators.base import Generated, GenerateOptions
from permuteformer.tasks.generators.retrieval import generate_retrieval, wiki_articles
from permuteformer.tasks.inputs import Pair
from permuteformer.tasks.lra import LraTextTask
from permuteformer.tasks.own import find_column
from permuteformer.tasks.readers.errors import BadItem, Errors
from permuteformer.tasks.readers.tables import ENDINGS, column_names, rows
from permuteformer.tasks.readers.text import lines
from permuteformer.tasks.store import Row
from permuteformer.tasks.tokenization import ByteTokens

COLUMNS = ("label", "id1", "id2", "text1", "text2")
FILE_SPLITS = {"train": "train", "eval": "validation", "test": "test"}
"""Splits by their names in the files."""

FOLDERS = ("lra_release/lra_release/tsv_data", "lra_release/tsv_data", "tsv_data", "lra-retrieval", ".")
GENERATED = "retrieval-halves"
ABSTRACTS = "pairs of ACL abstracts that share an author or not; LRA's pairs cite each other or not"
HALVES = "pairs of halves of one article or of two; LRA's pairs cite each other or not"


@TASKS.register("lra-retrieval")
@dataclass(kw_only=True, eq=False)
class LraRetrieval(LraTextTask):
    """Pairs of papers of the ACL Anthology: does one cite the other?

    >>> LraRetrieval(max_length=1024).input.kind, LraRetrieval().input.max_length
    ('match', 4000)
    """

    title = "pairs of ACL papers"
    licence = "ACL Anthology: CC BY 4.0 / CC BY-NC-SA 3.0"
    recipe = Recipe("retrieval", {"batch_size": 32, "epochs": 10, "learning_rate": 2e-4, "warmup_steps": 1000})
    official_items = {"train": 147_086, "validation": 18_090, "test": 17_437}  # noqa: RUF012
    layouts = (
        *(f"{folder}/new_aan_pairs.{{train,eval,test}}.tsv[.gz]" for folder in FOLDERS),
        "acl_pairs/acl_pairs.{train,eval,test}.tsv[.gz], a stand-in",
        f"{GENERATED}/new_aan_pairs.{{train,eval,test}}.tsv, generated",
    )
    advice = "download it: permuteformer data fetch lra-retrieval (8 GB), or generate pairs: data generate lra-retrieval --documents FILE"

    @property
    def input(self) -> Pair:
        tokens = ByteTokens(self.alphabet(), literals=True)
        return Pair(("unrelated", "related"), self.max_length or self.protocol_length, tokens)

    def sources(self, folder: Path) -> Iterator[Source]:
        stems = [(place, "new_aan_pairs", "") for place in FOLDERS]
        stems += [("acl_pairs", "acl_pairs", ABSTRACTS), (GENERATED, "new_aan_pairs", HALVES)]
        for place, stem, note in stems:
            for ending in (".tsv", ".tsv.gz"):
                files = {split: folder / place / f"{stem}.{name}{ending}" for name, split in FILE_SPLITS.items()}
                if all(path.is_file() for path in files.values()):
                    title = f"{place}/{stem}.*{ending}".removeprefix("./")
                    yield Source(title, tuple(files.values()), partial(self._read, files), note=note)

    def _read(self, files: Mapping[str, Path], errors: Errors) -> Iterator[tuple[str, Row]]:
        input = self.input
        for split, path in files.items():
            for line, row in rows(path, errors, columns=COLUMNS):
                with errors.at(path, line):
                    label = {"0.0": 0, "1.0": 1, "0": 0, "1": 1}.get(row["label"])
                    if label is None:
                        raise ValueError(f"label must be 0.0 or 1.0, got {row['label']!r:.50}")
                    yield split, {**input.row([row["text1"], row["text2"]]), "label": label}

    def column_names(self) -> dict[str, str]:
        return {"text": "text1", "second_text": "text2"}

    def generate(self, options: GenerateOptions) -> Generated:
        """Generate pairs of halves of articles: a folder of ``wiki.{train,valid,test}.*``, text files, or a table."""
        if options.documents is None:
            raise ValueError("pairs are generated from articles: give documents (--documents), a folder of wiki.{train,valid,test}.raw")
        return generate_retrieval(data_folder(self.data), _articles(options.documents), options)


def _articles(path: Path) -> Mapping[str, Iterable[tuple[str, str]]]:
    """Return articles by split; all under ``"train"`` if file names have no splits."""
    if not path.exists():
        raise FileNotFoundError(f"documents (--documents) not found: {path}")
    if path.is_file() and path.name.lower().endswith(ENDINGS):
        return {"train": _table_articles(path)}
    wiki = sorted(path.glob("wiki.*")) if path.is_dir() else [path]
    by_split = {split: _wiki_articles(file) for file in wiki if (split := split_named(file.name))}
    return by_split or {"train": _wiki_articles(path) if path.is_file() else _file_articles(path)}


def _wiki_articles(path: Path) -> Iterator[tuple[str, str]]:
    return wiki_articles(line for _, line in lines(path, Errors()))


def _file_articles(path: Path) -> Iterator[tuple[str, str]]:
    for file in text_files(path, "*", Errors()):
        yield str(file.relative_to(path)), "\n".join(line for _, line in lines(file, Errors()))


def _table_articles(path: Path) -> Iterator[tuple[str, str]]:
    column = find_column(path, column_names(path), "text", None, ("text", "document", "body", "content", "article"))
    for line, row in rows(path, Errors()):
        if not isinstance(row.get(column), str):
            raise BadItem(path, line, f"column {column!r} must be text")
        yield f"row {line}", row[column]
