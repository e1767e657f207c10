"""Bytes as Python writes them, ``b'…'``, read without running anything."""

from __future__ import annotations

import codecs
import re

_ESCAPE = re.compile(rb"""\\(?:[\\'"abfnrtv]|x[0-9a-fA-F]{2}|(?![4-7][0-7]{2})[0-7])""")
"""Of an octal escape the first digit is enough: the others may stand for themselves. Beyond ``\\377`` is no byte."""


def bytes_literal(text: str) -> bytes:
    r"""The bytes that a literal stands for, as ``repr`` writes them: ``b'…'`` or ``b"…"`` in one line.

    What Python takes with a warning is refused: unknown escapes such as ``\q``, and octal ones beyond ``\377``.

    >>> bytes_literal(r"b'caf\xc3\xa9\n'").decode()
    'café\n'
    """
    quote = text[1:2]
    if text[:1] != "b" or quote not in ("'", '"'):
        raise ValueError(f"at offset 0: a bytes literal must begin with b' or b\", not with {text[:2]!r}")
    if len(text) < 3 or text[-1] != quote:
        raise ValueError(f"at offset {max(len(text) - 1, 2)}: a bytes literal that begins with b{quote} must end with {quote}")
    try:
        body = text[2:-1].encode("ascii")
    except UnicodeEncodeError as error:
        at = error.start + 2
        raise ValueError(f"at offset {at}: a bytes literal must be ASCII, and {text[at]!r} is not; write it as \\x escapes") from None
    rest = _ESCAPE.sub(b"", body)
    if any(wrong in rest for wrong in (b"\\", quote.encode(), b"\n", b"\r", b"\0")):
        raise ValueError(_what_is_wrong(body, quote.encode()))
    return bytes(codecs.escape_decode(body)[0])


def _what_is_wrong(body: bytes, quote: bytes) -> str:
    kept = _ESCAPE.sub(lambda escape: b" " * len(escape[0]), body)  # offsets stay as they are
    wrong = re.search(rb"[\\\n\r\0" + quote + rb"]", kept)
    assert wrong is not None
    at = wrong.start() + 2
    found = wrong[0]
    if found == b"\\":
        return f"at offset {at}: {body[wrong.start() : wrong.start() + 4].decode()!r} is no escape of a bytes literal"
    if found == quote:
        return f"at offset {at}: the literal ends here, and more follows; there must be one literal and nothing else"
    return f"at offset {at}: a bytes literal must be one line without NUL; write {found.decode()!r} as an escape"
