"""Text files line by line, plain or compressed (gzip, xz, bzip2), in bounded memory."""

from __future__ import annotations

import ast
import bz2
import io
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from permuteformer.formatting import printable
from permuteformer.tasks.readers.errors import AnyPath, BadItem, CorruptFile, Errors, reason

MAX_LINE_BYTES = 256 << 20
"""Longer lines are errors; they are skipped without being kept in memory."""

MAX_FREE_BYTES = 2 << 30
MAX_RATIO = 200
"""A file that decompresses to more than ``MAX_FREE_BYTES`` may grow by this factor. Text grows by 3 to 10, seldom by 50."""

CHUNK = 1 << 20
"""Bytes read at a time."""


class Compression(NamedTuple):
    """How compressed files of one kind are recognized and read."""

    name: str
    magic: bytes
    """A regular expression of the first bytes."""
    decompressor: Callable[[], Any]


COMPRESSIONS = {
    ".gz": Compression("gzip", rb"\x1f\x8b\x08", lambda: zlib.decompressobj(wbits=31)),
    # A header may request 4 GiB of memory; files of "xz -9" need 65 MiB.
    ".xz": Compression("xz", rb"\xfd7zXZ\x00", lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=1 << 28)),
    # Text may begin with "BZh" too.
    ".bz2": Compression("bzip2", rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", bz2.BZ2Decompressor),
}
"""By the ending of file names."""


def lines(path: AnyPath, errors: Errors) -> Iterator[tuple[int, str]]:
    r"""Yield line numbers, from 1, and the lines of a UTF-8 text file without their ends.

    Only ``\n`` and ``\r\n`` end a line; a byte-order mark at the start is dropped. Lines that are not UTF-8 or too long are errors, and
    so are empty files. Damaged and truncated compressed files are errors after their last good line.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "two.txt")
    >>> _ = path.write_bytes(b"one\r\n\xc3\xa9t\xc3\xa9")
    >>> list(lines(path, Errors()))
    [(1, 'one'), (2, 'été')]
    """
    with open_stream(path) as stream:
        yield from stream_lines(stream, path, errors)


def stream_lines(stream: BinaryIO, name: AnyPath, errors: Errors) -> Iterator[tuple[int, str]]:
    """Yield the same as ``lines`` from an open stream of bytes, such as standard input; ``name`` is shown in errors."""
    for number, line in numbered_lines(stream, name):
        if isinstance(line, BadItem):
            errors.add(line)
        else:
            yield number, line.removesuffix("\r\n").removesuffix("\n")


def numbered_lines(stream: BinaryIO, name: AnyPath) -> Iterator[tuple[int, str | BadItem]]:
    """Yield line numbers and lines with their ends, or the error in place of a line. Errors of the file as a whole come last."""
    number = 0
    try:
        while line := stream.readline(MAX_LINE_BYTES + 2):
            line = line if number else line.removeprefix(b"\xef\xbb\xbf")
            if line:
                number += 1
                yield number, _decode(line, stream, name, number)
    except (CorruptFile, OSError) as error:
        yield number + 1, BadItem(name, None, f"reading stopped after line {number:,}: {reason(error)}")
    else:
        if not number:
            yield 1, BadItem(name, None, "the file is empty; download or copy it again")


def _decode(line: bytes, stream: BinaryIO, name: AnyPath, number: int) -> str | BadItem:
    if len(line.removesuffix(b"\n").removesuffix(b"\r")) > MAX_LINE_BYTES:
        while line and not line.endswith(b"\n"):
            line = stream.readline(CHUNK)
        return BadItem(name, number, f"the line is longer than the limit of {MAX_LINE_BYTES:,} bytes; split it")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        wrong = f"byte {line[error.start]:#04x} at offset {error.start:,} of the line is not UTF-8 ({error.reason})"
        return BadItem(name, number, f"{wrong}; save the file as UTF-8")


def open_stream(path: AnyPath) -> BinaryIO:
    """Open a file for reading bytes, decompressed if it has the ending or the first bytes of gzip, xz or bzip2.

    Reading raises ``CorruptFile`` for data that is damaged, truncated or a decompression bomb.
    """
    file = open_file(path)
    start = file.peek(16)
    by_start = (compression for compression in COMPRESSIONS.values() if re.match(compression.magic, start))
    compression = COMPRESSIONS.get(os.path.splitext(os.fspath(path).lower())[1]) or next(by_start, None)
    return io.BufferedReader(_Decompressed(file, compression), CHUNK) if compression else file


def open_file(path: AnyPath) -> io.BufferedReader:
    """Open a regular file; raise ``BadItem`` for others, as reading a pipe could block forever."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return io.BufferedReader(io.FileIO(path), CHUNK)
    except FileNotFoundError:
        raise FileNotFoundError(f"file not found: {printable(os.fspath(path))}") from None
    except (OSError, ValueError) as error:
        raise BadItem(path, None, f"the file cannot be opened: {reason(error)}") from None
    raise BadItem(path, None, f"this is {'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}; give a regular file")


def check_ratio(decompressed: int, compressed: int, free: int) -> None:
    """Raise ``CorruptFile`` if the sizes are those of a decompression bomb; up to ``free`` bytes are no bomb."""
    if decompressed > free and decompressed > MAX_RATIO * compressed:
        wrong = f"it decompresses to more than {free:,} bytes and {MAX_RATIO} times its size, like a decompression bomb"
        raise CorruptFile(wrong, "decompress it yourself if you trust it")


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a file. Unlike ``bz2.open`` and ``lzma.open``, refuse trailing garbage and bound the memory."""

    def __init__(self, file: BinaryIO, compression: Compression) -> None:
        self._file, self._compression = file, compression
        self._decompressor = compression.decompressor()
        self._data = b""
        self._size = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        piece = b""
        while not piece:
            if self._decompressor.eof and not self._next_stream():
                return 0
            try:
                piece = self._decompressor.decompress(self._data, len(buffer))
            except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError) as error:
                raise CorruptFile(f"the data is not {self._compression.name}, or damaged ({reason(error)})") from None
            self._data = getattr(self._decompressor, "unconsumed_tail", b"")  # bz2 and lzma keep it themselves
            if not piece and not self._decompressor.eof:
                more = self._file.read(CHUNK)
                if not more:
                    raise CorruptFile(f"the {self._compression.name} data is truncated")
                self._data += more
        self._size += len(piece)
        check_ratio(self._size, self._file.tell(), MAX_FREE_BYTES)
        buffer[: len(piece)] = piece
        return len(piece)

    def _next_stream(self) -> bool:
        """Start the next compressed stream of the file, after padding with zeros."""
        data = self._decompressor.unused_data.lstrip(b"\0")
        while not data and (more := self._file.read(CHUNK)):
            data = more.lstrip(b"\0")
        if data:
            self._data, self._decompressor = data, self._compression.decompressor()
        return bool(data)


_REFUSED = r"\\\n\r\0\x80-\U0010ffff"
_ESCAPE = r"""\\(?:[\\'"abfnrtv]|x[0-9a-fA-F]{2}|(?![4-7][0-7]{2})[0-7])"""
_LITERAL = re.compile(rf"""b(?:'(?:[^'{_REFUSED}]+|{_ESCAPE})*|"(?:[^"{_REFUSED}]+|{_ESCAPE})*)""")
"""All of a bytes literal except its last quote, without escapes that Python only warns about."""


def bytes_literal(text: str) -> bytes:
    r"""Return the value of a Python bytes literal of one line, as ``repr`` writes it.

    >>> bytes_literal(r"b'caf\xc3\xa9\n'").decode()
    'café\n'
    """
    literal = _LITERAL.match(text)
    end = literal.end() if literal else 0
    if not literal or text[end:] != text[1]:
        raise ValueError(f"not a Python bytes literal at offset {end:,}: {text[end : end + 10]!r}; write b'...' with ASCII and escapes")
    value: bytes = ast.literal_eval(text)
    return value
