"""A file as a stream of bytes: gzip, xz and bzip2 are unpacked on the way, in bounded memory."""

from __future__ import annotations

import bz2
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from permuteformer.tasks.readers.problems import BadItem
from permuteformer.texts import printable

AnyPath = str | os.PathLike[str]
"""A path as callers may give it."""

MAX_UNPACKED_BYTES = 1 << 40
"""No file becomes more than this. It ends streams that would never end; memory is bounded by ``CHUNK`` anyway."""

MAX_FREE_BYTES = 2 << 30
MAX_RATIO = 200
"""From so many bytes on, a packed file may become so many times as large: texts become 3 to 10 times, and no more than 50."""

CHUNK = 1 << 20

_XZ_MEMORY = 1 << 28
"""A header may ask for 4 GiB to unpack with; ``xz -9`` asks for 65 MiB."""

PACKINGS = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2"}
"""Endings of packed files."""

_FIRST_BYTES = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),  # "BZh" alone may begin a text
}

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(wbits=31),
    "xz": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
    "bzip2": bz2.BZ2Decompressor,
}


class Broken(Exception):
    """The stream cannot be read further. The message says why, and what to do.

    What came before is good if the stream was cut off. If it is damaged, a little of it may be wrong: packings have their sums at the end.
    """

    def __init__(self, wrong: str, advice: str = "fetch or copy it again") -> None:
        super().__init__(f"{wrong}; {advice}")


def chunks(path: AnyPath) -> Iterator[bytes]:
    """The bytes of a file in pieces of at most ``CHUNK``, unpacked by its ending (``PACKINGS``) or else by its first bytes.

    Raises:
        FileNotFoundError: there is no such file.
        BadItem: it cannot be opened as a file.
        Broken: packed data is damaged or cut off, or the disk fails.
    """
    check_file(path)
    total = 0
    with _opened(path) as file:
        packing = _packing(path, file)
        for piece in _unpacked(file, packing) if packing else _pieces(file):
            total += len(piece)
            if total > MAX_UNPACKED_BYTES:
                raise Broken(f"it unpacks to more than {MAX_UNPACKED_BYTES:,} bytes, which is the limit", "do not trust it")
            if packing:
                check_ratio(total, file.tell())
            yield piece


def check_ratio(unpacked: int, packed: int) -> None:
    """Raise where little becomes much, as in a decompression bomb: what people write never does."""
    if unpacked > MAX_FREE_BYTES and unpacked > MAX_RATIO * packed:
        wrong = f"it unpacks to more than {MAX_FREE_BYTES:,} bytes and {MAX_RATIO} times its size, as a decompression bomb does"
        raise Broken(wrong, "unpack it yourself if you trust it")


def check_file(path: AnyPath) -> None:
    """Raise unless it is a regular file: a folder cannot be read, and a pipe could be waited for in vain."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {printable(os.fspath(path))}; check its name and folder") from None
    except (OSError, ValueError) as error:
        raise BadItem(path, None, f"it cannot be opened: {reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise BadItem(path, None, "this is a folder; give a file")
    if not stat.S_ISREG(mode):
        raise BadItem(path, None, "this is a pipe or a device; give a regular file")


def reason(error: BaseException) -> str:
    """What an exception says, fit for the middle of a sentence."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return printable(said.rstrip("."))


def _opened(path: AnyPath) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise BadItem(path, None, f"it cannot be opened: {reason(error)}") from None


def _packing(path: AnyPath, file: BinaryIO) -> str | None:
    head = _read(file, 16)
    file.seek(0)
    by_ending = PACKINGS.get(os.path.splitext(os.fspath(path).lower())[1])
    by_bytes = next((packing for packing, begins in _FIRST_BYTES.items() if begins.match(head)), None)
    if head and by_ending and by_ending != by_bytes:
        raise Broken(f"it is named as {by_ending} data, but begins as {by_bytes or 'something else'}", "rename it, or fetch it again")
    return by_bytes


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := _read(file, CHUNK):
        yield piece


def _unpacked(file: BinaryIO, packing: str) -> Iterator[bytes]:
    """Not by gzip.open and its like: these lose what they had unpacked before an error, and bz2's and lzma's take rubbish for the end."""
    packed = _read(file, CHUNK)
    while packed:  # one packed stream may follow another
        decompressor = _DECOMPRESSORS[packing]()
        while not decompressor.eof:
            try:
                piece = decompressor.decompress(packed, CHUNK)
            except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError) as error:
                raise Broken(f"the {packing} data is damaged ({reason(error)})") from None
            packed = getattr(decompressor, "unconsumed_tail", b"")
            if piece:
                yield piece
            elif not decompressor.eof:
                more = _read(file, CHUNK)
                if not more:
                    raise Broken(f"the {packing} data is cut off")
                packed += more
        packed = decompressor.unused_data.lstrip(b"\0")
        while not packed and (more := _read(file, CHUNK)):
            packed = more.lstrip(b"\0")  # tapes and xz pad with zeros


def _read(file: BinaryIO, size: int) -> bytes:
    try:
        return file.read(size)
    except OSError as error:
        raise Broken(f"the disk fails: {reason(error)}") from None
