"""What a person sees of training: a bar that lives, and lines that stay."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from permuteformer.words import short, size_in_words


class Display:
    """Bars of training and evaluation. It shows nothing where ``quiet``, so that other processes can call it as well."""

    def __init__(self, steps: int, metric: str, quiet: bool) -> None:
        self.metric = metric
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=quiet, transient=False)
        self._training = self._progress.add_task("training", total=steps, told="")
        self._last = ""

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def step(self, done: int, loss: float, tokens_per_second: float, memory_bytes: int) -> None:
        """After an update."""
        told = f"loss {loss:.3f} · {self._last}{short(tokens_per_second)} tok/s · {size_in_words(memory_bytes)}"
        self._progress.update(self._training, completed=done, told=told)

    def evaluating(self, split: str, items: int) -> Evaluating:
        """A bar of its own for an evaluation, gone when it ends."""
        return Evaluating(self._progress, split, items)

    def evaluated(self, split: str, epoch: float, metrics: dict[str, float], best: bool) -> None:
        """A line that stays."""
        self._last = f"{self.metric} {metrics[self.metric]:.3g} · "
        told = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say(f"{split} at epoch {epoch:.2f}: {told}" + (" (best)" if best else ""))

    def say(self, text: str) -> None:
        """A line that stays, above the bars."""
        if not self._progress.disable:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Evaluating:
    """A bar for one evaluation; call it with further items."""

    def __init__(self, progress: Progress, split: str, items: int) -> None:
        self._progress, self._split, self._items = progress, split, items

    def __enter__(self) -> Evaluating:
        self._task = self._progress.add_task(f"{self._split}", total=self._items, told="items")
        return self

    def __call__(self, items: int) -> None:
        self._progress.advance(self._task, items)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.remove_task(self._task)
