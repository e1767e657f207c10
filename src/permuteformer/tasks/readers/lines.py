"""Lines of text and of bytes, one at a time, from plain and packed files."""

from __future__ import annotations

from collections.abc import Iterator

from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.unpacking import AnyPath, Broken, chunks
from permuteformer.texts import printable

MAX_LINE_BYTES = 256 << 20
"""A longer line is a problem, and passed over without being kept."""

_BOM = b"\xef\xbb\xbf"


def lines(path: AnyPath, problems: Problems, *, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    r"""Line numbers, from 1, and the lines of a text file, without their ends.

    A line ends with ``\n`` or ``\r\n``, and nothing else ends a line. ``.gz``, ``.xz`` and ``.bz2`` are unpacked, as are files that begin
    like these. A byte-order mark at the start is dropped. A line that is not UTF-8, or is too long, goes to ``problems`` and reading goes
    on; so does a packed file that is damaged or cut off, and there reading ends.

    Args:
        path: the file.
        problems: takes what cannot be used.
        encoding: one in which ``\n`` is a single byte, as in UTF-8 and Latin-1.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "two.txt")
    >>> _ = path.write_bytes(b"one\r\n\xc3\xa9t\xc3\xa9")
    >>> list(lines(path, Problems()))
    [(1, 'one'), (2, 'été')]
    """
    for number, line in text_lines(path, encoding):
        if isinstance(line, BadItem):
            problems.add(line)
        else:
            yield number, line[:-2] if line.endswith("\r\n") else line[:-1] if line.endswith("\n") else line


def raw_lines(path: AnyPath, problems: Problems) -> Iterator[tuple[int, bytes]]:
    """As ``lines``, but the bytes as they are; the byte-order mark is dropped here too."""
    for number, line in byte_lines(path):
        if isinstance(line, BadItem):
            problems.add(line)
        else:
            yield number, line[:-2] if line.endswith(b"\r\n") else line[:-1] if line.endswith(b"\n") else line


def text_lines(path: AnyPath, encoding: str = "utf-8") -> Iterator[tuple[int, str | BadItem]]:
    """Each line with its end, or what is wrong in its place: for formats where a line is not always an item."""
    _check_encoding(encoding)
    for number, line in byte_lines(path):
        if isinstance(line, BadItem):
            yield number, line
            continue
        try:
            text = line.decode(encoding)
        except UnicodeDecodeError as error:
            wrong = f"byte {line[error.start]:#04x} at offset {error.start:,} of the line is not {encoding} ({error.reason})"
            yield number, BadItem(path, number, f"{wrong}; save the file as {encoding}")
        except UnicodeError as error:
            yield number, BadItem(path, number, f"the line is not {encoding} ({printable(str(error))})")
        else:
            yield number, text


def byte_lines(path: AnyPath) -> Iterator[tuple[int, bytes | BadItem]]:
    """As ``text_lines``, in bytes. Problems of the whole file come last, with the number of the last line."""
    number, begun = 0, _Begun()
    try:
        for chunk in chunks(path):
            start = 0
            while end := chunk.find(b"\n", start) + 1:
                line, start, number = chunk[start:end], end, number + 1
                yield number, begun.ended(path, number, line) if begun.size or number == 1 or end > MAX_LINE_BYTES else line
            if start < len(chunk):
                begun.add(chunk[start:])
    except Broken as error:
        yield number, BadItem(path, None, f"ends early after line {number:,}: {error}")
        return
    last = begun.ended(path, number + 1, b"")
    if last:
        yield number + 1, last
    elif not number:
        yield 0, BadItem(path, None, "the file is empty; fetch or copy it again")


class _Begun:
    """The beginning of a line whose end is not there yet. Pieces are joined once: adding them up takes quadratic time."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.size = 0

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self._pieces.append(piece)
        if self.size > MAX_LINE_BYTES + 2:  # the line's end does not count
            self._pieces.clear()

    def ended(self, path: AnyPath, number: int, piece: bytes) -> bytes | BadItem:
        """The line with its last piece, or that it was too long; then nothing is begun."""
        self.add(piece)
        line, size = b"".join(self._pieces), self.size
        self._pieces.clear()
        self.size = 0
        if size > MAX_LINE_BYTES and size - _end(line) > MAX_LINE_BYTES:
            return BadItem(path, number, f"the line has more than {MAX_LINE_BYTES:,} bytes, which is the limit; break it up")
        return line.removeprefix(_BOM) if number == 1 else line


def _end(line: bytes) -> int:
    return 2 if line.endswith(b"\r\n") else 1 if line.endswith(b"\n") else 0


def _check_encoding(encoding: str) -> None:
    try:
        single = "\n".encode(encoding) == b"\n"
    except (LookupError, UnicodeError):
        single = False
    if not single:
        raise ValueError(f"encoding must be one in which a line break is a single byte, as 'utf-8' or 'latin-1'; it is {encoding!r}")
