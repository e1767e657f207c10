"""Members of folders, tar and zip archives: only regular files, only names that stay inside, nothing executed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from permuteformer.tasks.readers import entries
from permuteformer.tasks.readers.entries import Entry
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.unpacking import AnyPath, Broken, reason
from permuteformer.texts import printable

MAX_MEMBER_BYTES = 512 << 20
"""A larger member is a problem for ``members``, which holds one in memory; ``extract`` takes it."""

MAX_EXTRACTED_BYTES = 64 << 30
"""What one archive may put on the disk. Long-Range Arena's takes 19 GB."""

T = TypeVar("T")


def members(path: AnyPath, problems: Problems, *, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the wanted files, one in memory at a time.

    A folder is walked in sorted order, the files of a folder before its subfolders; a tar (plain, or packed by gzip, xz or bzip2) and a zip
    archive in their own order. Names are relative, with ``/``, and without ``./`` before them.

    To ``problems`` go: a name that leads out (``..``, ``/`` or ``C:`` at the start, backslashes, NUL), wanted or not; and if wanted, what
    is no regular file, is encrypted, too large, or damaged. A link in a folder is followed to a file in that folder only.

    Args:
        path: the folder or archive.
        problems: takes what cannot be used.
        wanted: says by the name whether a file is read.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "b.txt").write_text("second"), (folder / "a.txt").write_text("first")
    >>> list(members(folder, Problems(), wanted=lambda name: name.endswith(".txt")))
    [('a.txt', b'first'), ('b.txt', b'second')]
    """
    return _each(path, problems, wanted, _whole)


def extract(path: AnyPath, folder: AnyPath, wanted: Callable[[str], bool], problems: Problems | None = None) -> int:
    """Write the wanted files below ``folder``, which is made if need be, and return how many there were.

    The same members are problems as in ``members``, but a file may have any size. A file that is there already is never written over: a
    name that is in the archive twice, or is a file and a folder at once, is a problem.

    Args:
        path: the archive, or a folder.
        folder: where files go.
        wanted: says by the name whether a file is written.
        problems: takes what cannot be used; with ``None`` the first problem is raised.
    """
    writer = _Writer(Path(folder))
    return sum(1 for _ in _each(path, Problems() if problems is None else problems, wanted, writer.write))


def _each(path: AnyPath, problems: Problems, wanted: Callable[[str], bool], take: Callable[[str, Entry], T]) -> Iterator[tuple[str, T]]:
    """Each wanted file, taken. The one place where members become problems."""
    where, last = "at", "its start"
    try:
        for entry in entries.entries(path):
            where, last = "in", entry.name
            try:
                name = _checked(entry, wanted)
                taken = take(name, entry) if name else None
            except BadItem as problem:
                problems.add(problem)
            else:
                if name and taken is not None:
                    yield name, taken
            where = "after"
    except Broken as error:
        problems.add(BadItem(path, None, f"ends early {where} {printable(last)}: {error}"))


def _checked(entry: Entry, wanted: Callable[[str], bool]) -> str | None:
    """The name if the file is wanted."""
    name = entry.name
    if not entry.trusted:
        if wrong := _wrong_name(name):
            raise BadItem(entry.place, None, f"{wrong}; do not trust the archive")
        name = "/".join(part for part in name.split("/") if part not in ("", "."))
    if entry.kind == "folder":
        return None
    if not name:
        raise BadItem(entry.place, None, "it has no name; do not trust the archive")
    if entry.kind == "file":
        return name if wanted(name) else None
    if entry.hides or wanted(name):
        raise BadItem(entry.place, None, f"this is {entry.kind}, and only regular files are read; leave it out, or put a file there")
    return None


def _wrong_name(name: str) -> str | None:
    if "\0" in name:
        return "its name holds a NUL byte"
    if "\\" in name:
        return "its name holds a backslash"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "its name is absolute"
    return "its name leads out of the archive" if ".." in name.split("/") else None


def _whole(name: str, entry: Entry) -> bytes:
    pieces, size = [], entry.size
    if size <= MAX_MEMBER_BYTES:
        size = 0
        for piece in entry.data():  # which may be longer than it was said to be
            size += len(piece)
            if size > MAX_MEMBER_BYTES:
                break
            pieces.append(piece)
    if size > MAX_MEMBER_BYTES:
        raise BadItem(entry.place, None, f"it has more than {MAX_MEMBER_BYTES:,} bytes, which is the limit")
    return b"".join(pieces)


class _Writer:
    """Writes files below a folder, and nowhere else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0
        self._parent: Path | None = None

    def write(self, name: str, entry: Entry) -> bool:
        target = self._folder / name
        file = self._created(target, entry)
        try:
            with file:
                for piece in entry.data():
                    self._written += len(piece)
                    if self._written > MAX_EXTRACTED_BYTES:
                        raise Broken(f"more than {MAX_EXTRACTED_BYTES:,} bytes would be written, which is the limit", "do not trust it")
                    file.write(piece)
        except BaseException:
            target.unlink()  # half a file would look like a whole one
            raise
        return True

    def _created(self, target: Path, entry: Entry) -> BinaryIO:
        try:
            if target.parent != self._parent:  # members of a folder come one after another
                self._make_parents(target, entry)
            return open(target, "xb")
        except (OSError, ValueError) as error:
            if isinstance(error, BadItem):
                raise
            twice = isinstance(error, (FileExistsError, NotADirectoryError))
            wrong = "it is there already, from before or by a member of the same name; use an empty folder" if twice else reason(error)
            raise BadItem(entry.place, None, f"{printable(str(target))} cannot be written: {wrong}") from None

    def _make_parents(self, target: Path, entry: Entry) -> None:
        below = target.relative_to(self._folder).parents
        if any((self._folder / parent).is_symlink() for parent in below if parent.parts):
            raise BadItem(
                entry.place, None, f"a link is on the way to {printable(str(target))}, and may lead elsewhere; use an empty folder"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        self._parent = target.parent
