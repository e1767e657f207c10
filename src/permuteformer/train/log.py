"""Metrics and messages of a run: progress bars, metrics file, trackers and log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from permuteformer.console import PlainConsole, description_column
from permuteformer.formatting import format_bytes, format_count
from permuteformer.machine import peak_memory
from permuteformer.train.distributed import Distributed
from permuteformer.train.run_folder import RunFolder

if TYPE_CHECKING:
    from permuteformer.train.loop import Progress
    from permuteformer.train.step import Updated


class Display:
    """Progress bars of training and evaluation, with the latest numbers below, in 80 columns; nothing if ``quiet``."""

    def __init__(self, steps: int, metric: str, quiet: bool, console: Console | None = None) -> None:
        self.metric = metric
        columns = (description_column(), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"))
        self._bars = _BarsWithNumbers(*columns, console=console or PlainConsole(stderr=True), disable=quiet)
        self._training = self._bars.add_task("training", total=steps)
        self._metric = ""

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def step(self, done: int, loss: float, tokens_per_second: float, memory_bytes: int) -> None:
        """Show an update."""
        speed, memory = format_count(tokens_per_second), format_bytes(memory_bytes)
        self._bars.numbers = f"loss {loss:.4f} · {self._metric}{speed} tokens/s · {memory}"
        self._bars.update(self._training, completed=done)

    @contextmanager
    def evaluating(self, split: str, items: int) -> Iterator[Callable[[int], None]]:
        """Show a bar for an evaluation; call the result with the number of further items."""
        bar, done = self._bars.add_task(split, total=items), 0

        def advance(count: int) -> None:
            nonlocal done
            done = min(done + count, items)  # other processes have some of the last batches
            self._bars.update(bar, completed=done)

        try:
            yield advance
        finally:
            self._bars.remove_task(bar)

    def evaluated(self, title: str, epoch: float, metrics: dict[str, float], best: bool) -> None:
        """Print the metrics of an evaluation."""
        self._metric = f"{self.metric} {metrics[self.metric]:.4g} · "
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say(f"{title}, epoch {epoch:.2f}: {shown}" + (" (best)" if best else ""))

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        if not self._bars.disable:
            self._bars.console.print(text, soft_wrap=True)


class _BarsWithNumbers(Bars):
    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.numbers)


class MetricsLog:
    """Writes the metrics of a run to its folder, to trackers and to the display. All processes call it; the main one writes."""

    def __init__(self, run: RunFolder, distributed: Distributed, display: Display, steps_per_epoch: int) -> None:
        self.run, self.distributed, self.display, self.steps_per_epoch = run, distributed, display, steps_per_epoch

    def update(self, progress: Progress, updated: Updated, tokens_per_second: float) -> None:
        """Show an update."""
        loss = updated.loss / max(updated.labels, 1)
        self.display.step(progress.step, loss, tokens_per_second, peak_memory(self.distributed.device))

    def training(self, progress: Progress, updated: Updated) -> None:
        """Record training since the last such line."""
        values = {
            "loss": progress.loss / max(progress.labels, 1),
            "learning_rate": updated.learning_rate,
            "gradient_norm": updated.gradient_norm,
            "tokens_per_second": (progress.tokens - progress.logged_tokens) / max(progress.seconds - progress.logged_seconds, 1e-9),
            "seconds": progress.seconds,
            "memory_bytes": peak_memory(self.distributed.device),
        }
        progress.loss = progress.labels = 0.0
        progress.logged_seconds, progress.logged_tokens = progress.seconds, progress.tokens
        self._write("train", progress, values, "train", values)

    def metrics(self, event: str, progress: Progress, split: str, metrics: dict[str, float], best: bool = False, **more: Any) -> None:
        """Record the metrics of an evaluation."""
        title = f"{split} at {more['length']} tokens" if "length" in more else split
        self._write(event, progress, {"split": split, "metrics": metrics, "seconds": progress.seconds, **more}, title, metrics)
        self.display.evaluated(title, progress.step / self.steps_per_epoch, metrics, best)

    def say(self, text: str) -> None:
        """Print a message and write it to the log."""
        self.distributed.on_main(lambda: self.run.log(text))
        self.display.say(text)

    def _write(self, event: str, progress: Progress, values: dict[str, Any], title: str, numbers: dict[str, float]) -> None:
        def write() -> None:
            self.run.record(event, step=progress.step, epoch=progress.step / self.steps_per_epoch, **values)
            named = {f"{title}/{name}": number for name, number in numbers.items()}
            self.distributed.accelerator.log(named, step=progress.step)

        self.distributed.on_main(write)
