"""What a person sees of training: bars that live, and lines that stay."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from permuteformer.terminal import PlainConsole, described
from permuteformer.words import short, size_in_words


class Display:
    """Bars of training and evaluation, and a line of numbers below them: 80 columns are enough.

    It shows nothing where ``quiet``, so that other processes can call it as well.
    """

    def __init__(self, steps: int, metric: str, quiet: bool, console: Console | None = None) -> None:
        self.metric = metric
        columns = (
            described(),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._progress = _Bars(*columns, console=console or PlainConsole(stderr=True), disable=quiet)
        self._training = self._progress.add_task("training", total=steps)
        self._metric = ""

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def step(self, done: int, loss: float, tokens_per_second: float, memory_bytes: int) -> None:
        """After an update."""
        speed, memory = short(tokens_per_second), size_in_words(memory_bytes)
        self._progress.numbers = f"loss {loss:.4f} · {self._metric}{speed} tokens/s · {memory}"
        self._progress.update(self._training, completed=done)

    def evaluating(self, split: str, items: int) -> Evaluating:
        """A bar of its own for an evaluation, gone when it ends."""
        return Evaluating(self._progress, split, items)

    def evaluated(self, title: str, epoch: float, metrics: dict[str, float], best: bool) -> None:
        """A line that stays."""
        self._metric = f"{self.metric} {metrics[self.metric]:.4g} · "
        told = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say(f"{title}, epoch {epoch:.2f}: {told}" + (" (best)" if best else ""))

    def say(self, text: str) -> None:
        """A line that stays, above the bars."""
        if not self._progress.disable:
            self._progress.console.print(text, soft_wrap=True)


class Evaluating:
    """A bar for one evaluation; call it with further items."""

    def __init__(self, progress: Progress, split: str, items: int) -> None:
        self._progress, self._split, self._items, self._done = progress, split, items, 0

    def __enter__(self) -> Evaluating:
        self._task = self._progress.add_task(self._split, total=self._items)
        return self

    def __call__(self, items: int) -> None:
        self._done = min(self._done + items, self._items)  # the last batches are smaller, and other processes have some of them
        self._progress.update(self._task, completed=self._done)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.remove_task(self._task)


class _Bars(Progress):
    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.numbers)
