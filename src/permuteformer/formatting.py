"""Numbers and untrusted text for display: terminal, spreadsheet, Markdown."""

from __future__ import annotations

import re
import unicodedata

MAX_SHOWN = 200
"""Characters of a text shown within a message."""

_JOINERS = "\u200c\u200d"
"""Invisible characters that join letters and emoji; harmless."""

_CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that a terminal may interpret: control codes, writing direction, surrogates, line ends."""

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_FORMULA = re.compile(r"'*[=+\-@\t\r＝＋－＠]")


def printable(text: str, limit: int = MAX_SHOWN) -> str:
    """Return the text on one line for messages and logs: invisible characters escaped, at most ``limit`` characters.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    shown = text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text[: limit + 1])
    return shown if len(text) <= limit else shown[:limit] + "…"


def escape_terminal(text: str) -> str:
    """Escape everything that a terminal would interpret, except line ends and tabs.

    >>> print(escape_terminal("red \\x1b[31m"))
    red \\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(_escape(c) if unicodedata.category(c) in _CONTROL and c not in "\n\t" + _JOINERS else c for c in text)


def escape_cell(text: str) -> str:
    """Escape a CSV cell that a spreadsheet would compute as a formula, by an apostrophe.

    Cells that already start with apostrophes and then ``=``, ``+``, ``-``, ``@``, a tab or a carriage return get one more, so that
    removing one restores the text. Numbers stay as they are.

    >>> [escape_cell(text) for text in ("good", "=1+1", "'=1+1", "-1.5", "-x")]
    ['good', "'=1+1", "''=1+1", '-1.5', "'-x"]
    """
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def escape_markdown(text: str) -> str:
    """Escape text so that Markdown shows it literally.

    >>> escape_markdown("a|b <script> *c*")
    'a\\\\|b &lt;script&gt; \\\\*c\\\\*'
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$#!])", r"\\\1", text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def format_count(number: float) -> str:
    """Format a number to three digits.

    >>> format_count(1234), format_count(267_744), format_count(1.2e9)
    ('1,234', '268 k', '1.2 G')
    """
    for limit, unit in ((1e15, ""), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number:.1e}" if not unit else f"{number / (limit if unit != 'k' else 1e3):.3g} {unit}"
    return f"{number:,.0f}"


def format_bytes(size: int) -> str:
    """Format a number of bytes.

    >>> format_bytes(8_230_000_000), format_bytes(1_500)
    ('8.2 GB', '1.5 kB')
    """
    for unit, bytes_each in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= bytes_each:
            return f"{size / bytes_each:.1f} {unit}"
    return f"{size} bytes"


def format_duration(seconds: float) -> str:
    """Format a duration.

    >>> format_duration(12.34), format_duration(754), format_duration(86_000), format_duration(1e6), format_duration(4e8)
    ('12.3 s', '12 min 34 s', '23 h 53 min', '12 days', '12.7 years')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, days = round(seconds) // 60, seconds / 86_400
    if days >= 3:
        return f"{days:.0f} days" if days < 730 else f"{days / 365.25:.1f} years"
    return f"{minutes} min {round(seconds) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
