"""Tar archives as streams: header by header, with everything bounded that a header could ask for."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from permuteformer.tasks.readers.unpacking import CHUNK, AnyPath, Broken, chunks, reason

MAX_HEADER_BYTES = 1 << 20
"""Of a long name or of extended headers."""

MAX_PADDING_BYTES = 64 << 20
"""Zeros after the end."""

_BLOCK = 512

_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_KINDS = {
    tarfile.DIRTYPE: "folder",
    tarfile.LNKTYPE: "link",
    tarfile.SYMTYPE: "link",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
    tarfile.FIFOTYPE: "pipe",
    tarfile.GNUTYPE_SPARSE: "sparse file",
}


@dataclass
class Member:
    """A member as its headers describe it. ``kind`` is ``"file"``, ``"folder"``, or what else it is, in words."""

    name: str
    kind: str
    size: int


class Tar:
    """The members of a tar archive, packed or not, in their order.

    Not Python's ``tarfile`` but for the header of 512 bytes: that module remembers all members, reads headers of any size into memory, and
    takes an archive that is cut off between two members for a whole one.
    """

    def __init__(self, path: AnyPath) -> None:
        self._chunks = chunks(path)
        self._held, self._at = b"", 0
        self._left = 0

    def members(self) -> Iterator[Member]:
        """Member by member; ``data`` belongs to the one that came last. Raises ``Broken`` where the archive does."""
        common: dict[str, bytes] = {}
        own: dict[str, bytes] = {}
        empty = True
        while True:
            self._skip(self._left)
            block = self._take(_BLOCK)
            if not any(block):
                self._check_end()
                break
            header = _header(block)
            self._left = _padded(header.size)
            if header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                value = self._extension(header.size).split(b"\0")[0]
                own.update({"path": value} if header.type == tarfile.GNUTYPE_LONGNAME else {})
            elif header.type == tarfile.XGLTYPE:
                common.update(_records(self._extension(header.size)))
            elif header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                own.update(_records(self._extension(header.size)))
            else:
                yield self._member(header, {**common, **own})
                own, empty = {}, False
        if empty:
            raise Broken("there are no members in it")

    def data(self, member: Member) -> Iterator[bytes]:
        """The bytes of the member that ``members`` gave last."""
        left = member.size
        while left:
            piece = self._take(min(left, CHUNK))
            self._left -= len(piece)
            left -= len(piece)
            yield piece

    def _member(self, header: tarfile.TarInfo, extended: dict[str, bytes]) -> Member:
        kind = "file" if header.type in _FILES else _KINDS.get(header.type, f"member of type {header.type!r}")
        if "sparse" in extended:
            kind = _KINDS[tarfile.GNUTYPE_SPARSE]
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise Broken("there is a sparse file, whose end cannot be found", "pack it without --sparse")
        if "size" in extended:
            header.size = _number(extended["size"])
            self._left = _padded(header.size)
        if header.type in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            self._left = 0  # for these the size says something else, and no data follows
        name = extended["path"].decode("utf-8", "surrogateescape") if "path" in extended else header.name
        return Member(name, kind, header.size)

    def _extension(self, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise Broken(f"a header has {size:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
        data = self._take(size)
        self._left -= size
        return data

    def _check_end(self) -> None:
        """Only zeros may follow: another archive would be lost in silence. It also has the packing's checksum read."""
        padding, piece = 0, self._held[self._at :]
        while piece:
            padding += len(piece)
            if piece.strip(b"\0") or padding > MAX_PADDING_BYTES:
                raise Broken("something comes after the end mark", "if these are several archives in one file, part them")
            piece = next(self._chunks, b"")

    def _take(self, size: int) -> bytes:
        """Exactly so many bytes."""
        pieces, missing = [self._held[self._at : self._at + size]], size
        missing -= len(pieces[0])
        self._at += len(pieces[0])
        while missing:
            self._held = next(self._chunks, b"")
            if not self._held:
                raise Broken("the archive is cut off")
            pieces.append(self._held[:missing])
            self._at = len(pieces[-1])
            missing -= self._at
        return b"".join(pieces)

    def _skip(self, size: int) -> None:
        while size:
            size -= len(self._take(min(size, CHUNK)))
        self._left = 0


def _header(block: bytes) -> tarfile.TarInfo:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        raise Broken(f"this is no header of a tar archive ({reason(error)})") from None
    if header.size < 0:
        raise Broken("a member has a negative size")
    return header


def _records(data: bytes) -> dict[str, bytes]:
    """``length key=value`` lines of an extended header, where the length counts all of its line."""
    records: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        length = _number(data[at : at + 20].split(b" ")[0])
        line = data[at : at + length]
        key, equals, value = line.partition(b" ")[2].partition(b"=")
        if not equals or len(line) < length or not value.endswith(b"\n"):
            raise Broken("an extended header is damaged")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):  # others are not kept: there may be any number
            records["sparse" if key.startswith(b"GNU") else key.decode()] = value[:-1]
        at += length
    return records


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise Broken("an extended header is damaged")
    return int(digits)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
