"""A console that shows texts and obeys none: no markup, no control codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment

from permuteformer.texts import for_terminal


class PlainConsole(Console):
    """Rich's console for texts that may come from strangers.

    Styles are given by arguments and ``Text``, never by brackets in a text; what a terminal would obey in a text is escaped, wherever it is
    printed: in a line, in a table, beside a bar.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed comes through here before its width is counted."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(for_terminal(segment.text), segment.style)


def described() -> TextColumn:
    """The column of a bar that says what it counts."""
    return TextColumn("{task.description}", markup=False)
