"""Files of folders, tar and zip archives: only regular files, only names that stay inside, bounded sizes."""

from __future__ import annotations

import errno
import os
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from permuteformer.formatting import printable
from permuteformer.storage import read_bytes
from permuteformer.tasks.readers import text
from permuteformer.tasks.readers.errors import AnyPath, BadItem, CorruptFile, Errors, reason

MAX_MEMBER_BYTES = 512 << 20
"""Larger files are errors in ``members``, which holds one in memory; ``extract`` writes them."""

MAX_EXTRACTED_BYTES = 64 << 30
"""Bytes that one archive may write to the disk. The archive of Long-Range Arena needs 19 GB."""

MAX_HEADER_BYTES = 64 << 10
"""Bytes of the headers of one tar member."""

NOT_A_FILE = "this is a link, a device or another special file; remove it, or replace it by a regular file"

Wanted = Callable[[str], bool]
"""Decides by the name if a file is read."""

T = TypeVar("T")


def members(path: AnyPath, errors: Errors, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the wanted files, one in memory at a time.

    Folders are read in sorted order, the files of a folder before its subfolders; tar archives (plain or compressed) and zip archives in
    their own order. Names are relative, with ``/`` between their parts.

    Errors are names that lead out of the archive (absolute, or with ``..``, a backslash or NUL), wanted or not, and wanted files that are
    not regular, encrypted, too large or damaged. In folders, links are followed to files of the same folder only.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "b.txt").write_text("second"), (folder / "a.txt").write_text("first")
    >>> list(members(folder, Errors(), lambda name: name.endswith(".txt")))
    [('a.txt', b'first'), ('b.txt', b'second')]
    """
    return _each(path, errors, wanted, _content)


def names(path: AnyPath, errors: Errors, wanted: Wanted) -> list[str]:
    """Return the names of the wanted files. The errors are those of ``members``, as far as they do not need the contents."""
    return [name for name, _ in _each(path, errors, wanted, lambda entry: None)]


def extract(path: AnyPath, folder: AnyPath, wanted: Wanted) -> int:
    """Write the wanted files of an archive into a new folder, and return their number.

    The errors are those of ``members``, except that files may have any size, and names that occur twice.
    """
    Path(folder).mkdir(parents=True)
    written = 0

    def write(entry: _Entry) -> None:
        nonlocal written
        written += entry.size
        if written > MAX_EXTRACTED_BYTES:
            raise CorruptFile(f"it has more than the limit of {MAX_EXTRACTED_BYTES:,} bytes", "do not trust it")
        with _create(entry, folder) as file:
            for piece in entry.chunks():
                file.write(piece)

    return sum(1 for _ in _each(path, Errors(), wanted, write))


def inside(path: AnyPath, folder: Path) -> Path:
    """Return a file of a folder; raise if its name or links lead out of the folder."""
    try:
        file, root = (folder / path).resolve(), folder.resolve()
        file.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, NUL
        raise ValueError(f"{printable(str(path))!r} cannot be opened ({reason(error)})") from None
    if not file.is_relative_to(root):
        raise ValueError(f"{printable(str(path))!r} is outside the folder {folder}: move it inside")
    return folder / path


def read_inside(name: str, folder: Path) -> bytes:
    """Return the content of a file of a folder; raise if its name or links lead out of the folder."""
    file = inside(name, folder)
    if not file.is_file():
        raise ValueError(f"file not found: {printable(name, 100)}")
    try:
        return read_bytes(file, MAX_MEMBER_BYTES)
    except OSError as error:
        raise ValueError(f"{printable(name, 100)} cannot be read: {reason(error)}") from None


@dataclass
class _Entry:
    """A file of a folder, or a member of an archive."""

    place: str
    """The path shown in errors."""
    name: str
    size: int
    open: Callable[[], Any]
    """Opens the file for reading; in a tar archive only until the next entry is requested."""
    problem: str = ""
    """Why it cannot be read."""
    is_folder: bool = False

    def chunks(self) -> Iterator[bytes]:
        try:
            with self.open() as file:
                for start in range(0, self.size, text.CHUNK):
                    yield file.read(min(self.size - start, text.CHUNK))
        except CorruptFile:
            raise
        except Exception as error:  # zipfile raises its own errors and several of Python's
            raise BadItem(self.place, None, f"the file cannot be read: {reason(error)}; download or copy it again") from None


def _each(path: AnyPath, errors: Errors, wanted: Wanted, use: Callable[[_Entry], T]) -> Iterator[tuple[str, T]]:
    """Yield the names of wanted files and what ``use`` returns for them."""
    name = "the start"
    try:
        for entry in _folder_entries(Path(path), errors) if os.path.isdir(path) else _archive_entries(path, errors):
            name = entry.name
            if wanted(name):
                with errors.at(entry.place):
                    if entry.problem:
                        raise ValueError(entry.problem)
                    yield name, use(entry)
    except CorruptFile as error:
        errors.add(BadItem(path, None, f"reading stopped at {printable(name)}: {error}"))


def _content(entry: _Entry) -> bytes:
    if entry.size > MAX_MEMBER_BYTES:
        raise BadItem(entry.place, None, f"the file has more than the limit of {MAX_MEMBER_BYTES:,} bytes")
    return b"".join(entry.chunks())


def _create(entry: _Entry, folder: AnyPath) -> BinaryIO:
    try:
        target = Path(folder, entry.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        return open(target, "xb")
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG):  # others are not of this name, such as a full disk
            raise BadItem(entry.place, None, f"the file cannot be written: {reason(error)}; do not trust the archive") from None
        raise


def _folder_entries(folder: Path, errors: Errors) -> Iterator[_Entry]:
    unreadable: list[OSError] = []
    for place, folders, files in os.walk(folder, onerror=unreadable.append):
        folders.sort()
        linked = [name for name in folders if os.path.islink(os.path.join(place, name))]  # they are not followed
        for file in sorted(files + linked):
            path = os.path.join(place, file)
            name, size, problem = Path(path).relative_to(folder).as_posix(), 0, ""
            try:
                if os.path.islink(path):
                    inside(name, folder)
                found = os.stat(path)
                size, problem = found.st_size, "" if stat.S_ISREG(found.st_mode) else NOT_A_FILE
            except OSError as error:
                problem = f"this is a broken link or cannot be accessed ({reason(error)}); remove it, or replace it by a file"
            except ValueError as error:
                problem = str(error)
                if os.path.isdir(path):  # which of its files are wanted is unknown
                    errors.add(BadItem(path, None, problem))
                    continue
            yield _Entry(path, name, size, partial(open, path, "rb"), problem)
    for failure in unreadable:
        errors.add(BadItem(failure.filename, None, f"the folder cannot be read: {reason(failure)}"))


def _archive_entries(path: AnyPath, errors: Errors) -> Iterator[_Entry]:
    """Yield the files of an archive with normalized names; names that lead out are errors."""
    with text.open_file(path) as file:
        start = file.peek(4)
    if not start:
        raise CorruptFile("the file is empty")
    is_zip = os.fspath(path).lower().endswith(".zip") or start.startswith((b"PK\x03\x04", b"PK\x05\x06"))
    for entry in _zip_entries(path) if is_zip else _tar_entries(path):
        name, parts = entry.name, entry.name.split("/")
        entry.place = f"{os.fspath(path)}: {name}"
        entry.name = "/".join(part for part in parts if part not in ("", "."))
        if name.startswith("/") or re.match(r"[A-Za-z]:", name) or ".." in parts or "\\" in name or "\0" in name:
            errors.add(BadItem(entry.place, None, "the name leads out of the archive, or has a backslash or NUL; do not trust the archive"))
        elif not entry.is_folder and not entry.name:
            errors.add(BadItem(entry.place, None, "the name is empty; do not trust the archive"))
        elif not entry.is_folder:
            yield entry


def _zip_entries(path: AnyPath) -> Iterator[_Entry]:
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:
        raise CorruptFile(f"it cannot be read as a zip archive ({reason(error)})") from None
    with archive:
        listed, size = archive.infolist(), os.path.getsize(path)
        if not listed:  # zipfile takes an archive for empty if it does not find its directory
            raise CorruptFile("the archive has no members")
        if sum(info.compress_size for info in listed) > size:
            raise CorruptFile("its members overlap, as in a zip bomb", "do not trust it")
        text.check_ratio(sum(info.file_size for info in listed), size, text.MAX_FREE_BYTES)
        for info in listed:
            problem = ""
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
                problem = NOT_A_FILE
            elif info.flag_bits & 0x1:
                problem = "the file is encrypted; decrypt the archive"
            elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile decompresses others in unbounded memory
                problem = f"compression method {info.compress_type} is not supported; use deflate"
            yield _Entry("", info.orig_filename, info.file_size, partial(archive.open, info), problem, info.orig_filename.endswith("/"))


def _tar_entries(path: AnyPath) -> Iterator[_Entry]:
    with text.open_stream(path) as stream:
        try:
            source = _TarSource(stream)
            tar: Any = tarfile.TarFile(fileobj=source, encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
            empty = True
            while (info := tar.next()) is not None:
                is_file = info.isreg() and not info.issparse()
                if is_file and (info.size < 0 or info.pax_headers.get("size", str(info.size)) != str(info.size)):
                    raise CorruptFile(f"the size of {printable(info.name)} is damaged")
                source.allowed = MAX_HEADER_BYTES + info.size
                yield _Entry("", info.name, info.size, partial(tar.extractfile, info), "" if is_file else NOT_A_FILE, info.isdir())
                empty = False
                tar.members.clear()  # else tarfile keeps all of them
                tar.pax_headers.clear()
            source.check_end()
            if empty:
                raise CorruptFile("the archive has no members")
        except CorruptFile:
            raise
        except Exception as error:
            raise CorruptFile(f"it cannot be read as a tar archive ({reason(error)})") from None


class _TarSource:
    """The bytes of a tar archive for ``tarfile``, which reads headers of any size and takes a truncated archive for a complete one."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._position = 0
        self._last = b""
        self.allowed = MAX_HEADER_BYTES
        """Bytes that may be read, not skipped, until the next member."""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise CorruptFile("the size of a member is damaged")
        while self._position < position:
            self._take(min(position - self._position, text.CHUNK))

    def read(self, size: int) -> bytes:
        self.allowed -= size
        if size < 0 or self.allowed < 0:
            raise CorruptFile(f"a tar header has more than the limit of {MAX_HEADER_BYTES:,} bytes", "do not trust it")
        self._last = self._take(size)
        return self._last

    def check_end(self) -> None:
        """Raise if ``tarfile`` stopped at something else than zeros, or other data follows. This also verifies compressed files."""
        if any(self._last):
            raise CorruptFile("a tar header is damaged")
        while piece := self._stream.read(text.CHUNK):
            if piece.strip(b"\0"):
                raise CorruptFile("data follows the end of the archive", "if the file has several archives, split it")

    def _take(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._position += len(data)
        if len(data) < size:
            raise CorruptFile("the archive is truncated")
        return data
