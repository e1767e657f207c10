"""Files of a user: the splits in their names, and the text files of a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from permuteformer.formatting import printable
from permuteformer.tasks.base import NotReady
from permuteformer.tasks.readers.archives import inside, names
from permuteformer.tasks.readers.errors import Errors

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Usual names of splits."""


def existing(path: str) -> Path:
    """Return the path of a file or folder; raise if it does not exist."""
    found = Path(path).expanduser()
    if not found.exists():
        raise NotReady(f"file not found: {printable(path)}")
    return found


def split_named(name: str) -> str | None:
    """Return the split that a file name contains.

    >>> split_named("wiki.valid.raw.xz"), split_named("reviews.csv")
    ('validation', None)
    """
    return next((SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_NAMES), None)


def files_by_split(path: str, validation: str | None, test: str | None, endings: Sequence[str]) -> list[tuple[str | None, Path]]:
    """Return every file with its split, training files first; the split is ``None`` if nothing says which.

    Args:
        path: a file, or a folder of files, which may have their split in their name.
        validation: a file of validation items.
        test: a file of test items.
        endings: endings of the file names in a folder.
    """
    main = existing(path)
    found: list[tuple[str | None, Path]] = [(None, main)]
    if main.is_dir():
        files = sorted(file for file in main.iterdir() if file.is_file() and file.name.lower().endswith(tuple(endings)))
        if not files:
            raise NotReady(f"{path} has no file that ends in {', '.join(endings)}")
        found = [(split_named(file.name), inside(Path(file.name), main)) for file in files]
        unnamed = [file.name for split, file in found if split is None]
        if unnamed and len(unnamed) < len(found):
            raise ValueError(f"files of {path} have splits in their names, but {', '.join(unnamed)} has none: rename or remove it")
        if not unnamed and "train" not in {split for split, _ in found}:
            raise NotReady(f"{path} has {', '.join(file.name for _, file in found)}, but no training file, such as train{endings[0]}")
    given = [(split, existing(name)) for split, name in (("validation", validation), ("test", test)) if name is not None]
    if given:
        found = [*((split or "train", file) for split, file in found), *given]
    order = {None: 0, "train": 0, "validation": 1, "test": 2}
    return sorted(found, key=lambda entry: order[entry[0]])


def text_files(folder: Path, pattern: str, errors: Errors) -> list[Path]:
    """Return the files of a folder and its subfolders whose names match, sorted; hidden and empty ones are skipped."""

    def wanted(name: str) -> bool:
        parts = name.split("/")
        return fnmatch(parts[-1], pattern) and not any(part.startswith(".") for part in parts)

    return sorted(file for name in names(folder, errors, wanted) if (file := folder / name).stat().st_size)
