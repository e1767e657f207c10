"""Texts of strangers where they are shown: one line of a message, a terminal, a spreadsheet, Markdown."""

from __future__ import annotations

import re
import unicodedata

LONGEST = 200
"""Characters of a text within a message."""

_JOINERS = "\u200c\u200d"
"""They do nothing but hold letters and emoji together."""

_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode that a terminal may obey: control codes, what turns the direction of writing, halves of characters, line ends."""

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_FORMULA = re.compile(r"'*[=+\-@\t\r＝＋－＠]")


def printable(text: str, most: int = LONGEST) -> str:
    """The text in one line, with everything escaped that is not seen as it is, and its length bounded: fit for a message and a log.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    shown = text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text[: most + 1])
    return shown if len(text) <= most else shown[:most] + "…"


def for_terminal(text: str) -> str:
    """The text with its lines and tabs, and with everything escaped that a terminal would obey.

    >>> print(for_terminal("red \\x1b[31m"))
    red \\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(_escaped(c) if unicodedata.category(c) in _OBEYED and c not in "\n\t" + _JOINERS else c for c in text)


def for_spreadsheet(text: str) -> str:
    """A text for a cell of CSV: an apostrophe goes before what a spreadsheet would compute, and before those that have one already.

    So nothing is lost: a program takes one apostrophe away from what begins with apostrophes and then ``=``, ``+``, ``-``, ``@``, a tab or
    a carriage return. Numbers stay as they are.

    >>> [for_spreadsheet(text) for text in ("good", "=1+1", "'=1+1", "-1.5", "-x")]
    ['good', "'=1+1", "''=1+1", '-1.5', "'-x"]
    """
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def for_markdown(text: str) -> str:
    """A text that Markdown shows as it is.

    >>> for_markdown("a|b <script> *c*")
    'a\\\\|b &lt;script&gt; \\\\*c\\\\*'
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$#!])", r"\\\1", text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
