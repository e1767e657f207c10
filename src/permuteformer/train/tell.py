"""Telling how training goes: the record of the run folder, trackers, the log, and the person who looks on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import Accelerator

from permuteformer.train.environment import peak_memory
from permuteformer.train.progress import Display
from permuteformer.train.run import Run
from permuteformer.train.state import Cursor
from permuteformer.train.together import on_main
from permuteformer.train.update import Updated

T = TypeVar("T")


class Teller:
    """Tells of a run what its processes find out together; all of them call it, one writes."""

    def __init__(self, run: Run, accelerator: Accelerator, display: Display, steps_per_epoch: int) -> None:
        self.run_folder, self.accelerator, self.display, self.steps_per_epoch = run, accelerator, display, steps_per_epoch

    def update(self, cursor: Cursor, updated: Updated, tokens_per_second: float) -> None:
        """On the screen, about one update."""
        loss = updated.loss / max(updated.counted, 1)
        self.display.step(cursor.step, loss, tokens_per_second, peak_memory(self.accelerator.device))

    def line(self, cursor: Cursor, updated: Updated) -> None:
        """A line about training since the last one."""
        values = {
            "loss": cursor.loss / max(cursor.counted, 1),
            "learning_rate": updated.learning_rate,
            "gradient_norm": updated.gradient_norm,
            "tokens_per_second": (cursor.tokens - cursor.lines_tokens) / max(cursor.seconds - cursor.lines_seconds, 1e-9),
            "seconds": cursor.seconds,
            "memory_bytes": peak_memory(self.accelerator.device),
        }
        cursor.loss = cursor.counted = 0.0
        cursor.lines_seconds, cursor.lines_tokens = cursor.seconds, cursor.tokens
        self._write("train", cursor, values, "train", values)

    def metrics(self, event: str, cursor: Cursor, split: str, metrics: dict[str, float], best: bool = False, **more: Any) -> None:
        """What an evaluation came to."""
        title = f"{split} at {more['length']} tokens" if "length" in more else split
        self._write(event, cursor, {"split": split, "metrics": metrics, "seconds": cursor.seconds, **more}, title, metrics)
        self.display.evaluated(title, cursor.step / self.steps_per_epoch, metrics, best)

    def say(self, text: str) -> None:
        """A sentence."""
        self.on_main(lambda: self.run_folder.log(text))
        self.display.say(text)

    def on_main(self, action: Callable[[], T]) -> T:
        """Have the main process do something; all processes know what came of it."""
        return on_main(self.accelerator, action)

    def _write(self, event: str, cursor: Cursor, values: dict[str, Any], title: str, numbers: dict[str, float]) -> None:
        def write() -> None:
            self.run_folder.record(event, step=cursor.step, epoch=cursor.step / self.steps_per_epoch, **values)
            self.accelerator.log({f"{title}/{name}": number for name, number in numbers.items()}, step=cursor.step)

        self.on_main(write)
