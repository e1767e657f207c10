"""A rich console for untrusted text: no markup, no control codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment

from permuteformer.formatting import escape_terminal


class PlainConsole(Console):
    """A console that escapes control codes in everything it prints. Styles are set by arguments and ``Text``, never by markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape every segment before its width is measured."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_terminal(segment.text), segment.style)


def description_column() -> TextColumn:
    """Return the progress-bar column that shows a task's description."""
    return TextColumn("{task.description}", markup=False)
