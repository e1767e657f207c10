"""An extension of griffe, which reads docstrings for the site: examples that begin with ``>>>`` become code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)^(?:>>>.*\n?)(?:(?!\s*$).*\n?)*")


class Doctests(griffe.Extension):
    """Fences examples; else Markdown takes ``>>>`` for a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return the docstring with code fences around examples.

    >>> fenced("Add.")
    'Add.'
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
