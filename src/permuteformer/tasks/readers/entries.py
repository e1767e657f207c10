"""What is in a folder, a tar or a zip archive, before anybody looks at it closely."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from permuteformer.tasks.readers.problems import BadItem
from permuteformer.tasks.readers.tars import Tar
from permuteformer.tasks.readers.unpacking import CHUNK, AnyPath, Broken, check_file, check_ratio, reason


@dataclass
class Entry:
    """One thing in an archive.

    Args:
        place: for messages.
        name: as the archive has it, which may be anything.
        kind: ``"file"``, ``"folder"``, or what else it is, in words.
        size: as the archive says.
        data: gives the bytes; once, and before the next entry is asked for.
        trusted: the name comes from the file system.
        hides: files may be behind it whose names are not known.
    """

    place: str
    name: str
    kind: str
    size: int
    data: Callable[[], Iterator[bytes]]
    trusted: bool = False
    hides: bool = False


def entries(path: AnyPath) -> Iterator[Entry]:
    """The entries of a folder or archive. A zip is known by its ending or first bytes; another file is taken for a tar.

    Raises:
        FileNotFoundError: there is nothing of this name.
        BadItem: it cannot be opened.
        Broken: it cannot be read further.
    """
    if os.path.isdir(path):
        return _of_folder(os.fspath(path))
    check_file(path)
    if not os.path.getsize(path):
        raise Broken("the file is empty")
    return _of_zip(path) if os.fspath(path).lower().endswith(".zip") or _begins_as_zip(path) else _of_tar(path)


def _of_folder(folder: str) -> Iterator[Entry]:
    root = os.path.realpath(folder)
    waiting = [""]
    while waiting:
        below = waiting.pop()
        try:
            with os.scandir(os.path.join(folder, below)) as listing:
                found = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            yield _on_disk(folder, below or ".", f"a folder that cannot be read ({reason(error)})", hides=True)
            continue
        folders = [below + entry.name + "/" for entry in found if entry.is_dir(follow_symlinks=False)]
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                yield _in_folder(folder, root, below + entry.name)
        waiting.extend(reversed(folders))


def _in_folder(folder: str, root: str, name: str) -> Entry:
    path = os.path.join(folder, name)
    try:
        inside = os.path.join(os.path.realpath(path), "").startswith(os.path.join(root, ""))
        found = os.stat(path)
    except (OSError, RuntimeError) as error:
        return _on_disk(folder, name, f"a link to nothing, or a file that cannot be looked at ({reason(error)})")
    if os.path.islink(path) and not inside:
        return _on_disk(folder, name, "a link that leads out of the folder", hides=stat.S_ISDIR(found.st_mode))
    if not stat.S_ISREG(found.st_mode):
        return _on_disk(folder, name, "a link to a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device")
    return _on_disk(folder, name, "file", found.st_size)


def _on_disk(folder: str, name: str, kind: str, size: int = 0, hides: bool = False) -> Entry:
    path = os.path.join(folder, name)

    def data() -> Iterator[bytes]:
        try:
            with open(path, "rb") as file:
                while piece := file.read(CHUNK):
                    yield piece
        except OSError as error:
            raise BadItem(path, None, f"it cannot be read: {reason(error)}") from None

    return Entry(path, name, kind, size, data, trusted=True, hides=hides)


def _of_tar(path: AnyPath) -> Iterator[Entry]:
    tar = Tar(path)
    for member in tar.members():
        kind = member.kind if member.kind in ("file", "folder") else f"a {member.kind}"
        yield Entry(f"{os.fspath(path)}: {member.name}", member.name, kind, member.size, partial(tar.data, member))


def _of_zip(path: AnyPath) -> Iterator[Entry]:
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # besides its own errors it lets through those of struct and of text
        raise Broken(f"this cannot be read as a zip archive ({reason(error)})") from None
    with archive:
        listed = archive.infolist()
        if not listed:  # zipfile takes an archive for empty whose directory cannot be found
            raise Broken("there are no members in it")
        if sum(info.compress_size for info in listed) > os.path.getsize(path):
            raise Broken("its members overlap, as in a zip bomb", "do not trust it")
        check_ratio(sum(info.file_size for info in listed), os.path.getsize(path))
        for info in listed:
            place = f"{os.fspath(path)}: {info.orig_filename}"
            yield Entry(place, info.orig_filename, _kind(info), info.file_size, partial(_unzipped, archive, info, place))


def _kind(info: zipfile.ZipInfo) -> str:
    mode = stat.S_IFMT(info.external_attr >> 16)
    if info.filename.endswith("/"):  # not is_dir(), which falls over an empty name
        return "folder"
    if mode not in (0, stat.S_IFREG):
        return "a link" if mode == stat.S_IFLNK else "a pipe or a device"
    if info.flag_bits & 0x1:
        return "an encrypted member"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile unpacks others without a bound on memory
        return f"packed by zip's method {info.compress_type}"
    return "file"


def _unzipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, place: str) -> Iterator[bytes]:
    try:
        with archive.open(info) as file:
            while piece := file.read(CHUNK):
                yield piece
    except Exception as error:
        raise BadItem(place, None, f"it cannot be unpacked: {reason(error)}; fetch or copy the archive again") from None


def _begins_as_zip(path: AnyPath) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")
    except OSError as error:
        raise BadItem(path, None, f"it cannot be opened: {reason(error)}") from None
