"""Which task's data can be made by rule, of how many items, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permuteformer.registry import unknown
from permuteformer.tasks.generators.listops import generate_listops
from permuteformer.tasks.generators.pathfinder import LEVELS, generate_pathfinder
from permuteformer.tasks.generators.retrieval import generate_retrieval, wiki_articles
from permuteformer.tasks.own import choose_column, no_column, split_named, text_files
from permuteformer.tasks.readers.lines import lines
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import ENDINGS, column_names, rows

Progress = Callable[[int], None] | None

OFFICIAL = {
    "lra-listops": {"train": 96_000, "validation": 2_000, "test": 2_000},
    "lra-pathfinder": {"train": 160_000, "validation": 20_000, "test": 20_000},
    "lra-retrieval": {},
}
"""Tasks whose data can be made, and the numbers of items that the official data has; pairs are as many as the articles allow."""


@dataclass(frozen=True)
class Made:
    """What was generated."""

    folder: Path
    statistics: dict[str, Any]


def generate(
    name: str,
    data: Path,
    counts: Mapping[str, int],
    *,
    seed: int = 0,
    processes: int | None = None,
    progress: Progress = None,
    resolution: int | None = None,
    level: str | None = None,
    documents: Path | None = None,
) -> Made:
    """Make the data of a task where the task looks for it in the folder ``data``.

    Args:
        name: ``"lra-listops"``, ``"lra-pathfinder"`` or ``"lra-retrieval"``.
        data: the data folder.
        counts: items of ``"train"``, ``"validation"`` and ``"test"``, where they are not the official numbers.
        seed: the same one gives the same data, whatever the number of processes.
        processes: all cores unless told.
        progress: gets the number of further items.
        resolution: of Pathfinder; 32 unless told.
        level: of Pathfinder; ``"hard"`` unless told.
        documents: for pairs, where articles are: a folder of ``wiki.{train,valid,test}.*`` or one such file, a folder of text files, or a
            table with a column of texts.
    """
    if name not in OFFICIAL:
        raise ValueError(unknown("task to generate", name, OFFICIAL))
    for option, value, of in (
        ("resolution", resolution, "lra-pathfinder"),
        ("level", level, "lra-pathfinder"),
        ("documents (--from)", documents, "lra-retrieval"),
    ):
        if value is not None and of != name:
            raise ValueError(f"{option} is for {of} alone; it is {value!r}, and the task is {name}")
    sizes = {**OFFICIAL[name], **counts}
    if name == "lra-listops":
        folder = data / "listops-1000"
        return Made(folder, generate_listops(folder, **sizes, seed=seed, processes=processes, progress=progress))
    if name == "lra-pathfinder":
        return _pathfinder(data, resolution or 32, level or "hard", sizes, seed, processes, progress)
    if documents is None:
        raise ValueError("pairs are made of articles: say where they are with documents (--from): a folder of wiki.{train,valid,test}.raw")
    folder = data / "retrieval-halves"
    made = generate_retrieval(folder, _articles(documents), **sizes, seed=seed, progress=progress)
    return Made(folder, made)


def _pathfinder(
    data: Path, resolution: int, level: str, sizes: Mapping[str, int], seed: int, processes: int | None, progress: Progress
) -> Made:
    statistics = generate_pathfinder(
        data,
        resolution=resolution,
        level=level,
        count=sum(sizes.values()),
        splits=sizes,
        seed=seed,
        processes=processes,
        progress=progress,
    )
    return Made(data / f"pathfinder{resolution}" / LEVELS[level], statistics)


def _articles(path: Path) -> Mapping[str, Iterable[tuple[str, str]]]:
    """Articles by split, or all under ``"train"`` where nothing tells of splits."""
    if not path.exists():
        raise FileNotFoundError(f"documents (--from) must be a file or folder that is there; it is {str(path)!r}")
    if path.is_file() and path.name.lower().endswith(ENDINGS):
        return {"train": _of_table(path)}
    wiki = sorted(path.glob("wiki.*")) if path.is_dir() else [path]
    by_split = {split: _of_wiki(file) for file in wiki if (split := split_named(file.name))}
    if by_split:
        return by_split
    return {"train": _of_wiki(path) if path.is_file() else _of_folder(path)}


def _of_wiki(path: Path) -> Iterator[tuple[str, str]]:
    return wiki_articles(line for _, line in lines(path, Problems()))


def _of_folder(path: Path) -> Iterator[tuple[str, str]]:
    for file in text_files(path, "*", Problems()):
        yield str(file.relative_to(path)), "\n".join(line for _, line in lines(file, Problems()))


def _of_table(path: Path) -> Iterator[tuple[str, str]]:
    names = column_names(path)
    text = choose_column(path, "text", None, names, ("text", "document", "body", "content", "article"))
    if text is None:
        raise no_column(path, "text", names)
    for line, row in rows(path, Problems()):
        if not isinstance(row.get(text), str):
            raise BadItem(path, line, f"column {text!r} must be text")
        yield f"row {line}", row[text]
