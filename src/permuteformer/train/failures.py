"""Failures of training: signals, full disks, lost processes, lack of memory, and numbers that are not finite."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import DistError

from permuteformer.experiments.layout import CHECKPOINTS
from permuteformer.machine import is_out_of_memory
from permuteformer.storage import NO_SPACE, READ_ONLY, WriteError, concerns
from permuteformer.train import checkpoint

LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed? ?out", re.IGNORECASE)
"""Messages of torch, in a plain ``RuntimeError``, for a process that does not answer."""

MAX_SHOWN = 20
"""Names or numbers in a message; the rest is counted."""


class Interrupted(Exception):
    """A signal came, to this process or another one of the run; all of them raise this together."""


class NotFinite(ArithmeticError):
    """Training produced a number that is not finite; nothing of the step is kept."""


class LostProcess(ConnectionError):
    """Another process of the run does not answer any more."""


class StopSignal:
    """Records SIGINT and SIGTERM within its block; a Ctrl-C after the first signal interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


def ignore_signals(worker: int) -> None:
    """Ignore SIGINT and SIGTERM in a worker that loads data: its parent handles them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def readable_failures(folder: Path) -> Iterator[None]:
    """Explain failures of a run in ``folder``: what was kept, and how to continue.

    Raises:
        WriteError: the disk is full, or the folder is not writable.
        LostProcess: another process of the run has ended.
        MemoryError: there is not enough memory.
    """
    processes = int(os.environ.get("WORLD_SIZE", 1))
    resume, checkpoints = f"permuteformer resume {folder}", folder / CHECKPOINTS
    thread_failed = threading.excepthook
    if thread_failed is threading.__excepthook__:
        threading.excepthook = _tracker_failed
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, WriteError) and not concerns(error, folder):
            raise  # of the cache of prepared data; its message says what to do
        number = _error_number(error)
        if number in NO_SPACE:
            message = f"{NO_SPACE[number]}, training stopped; {kept(checkpoints)}. Free some space, then: {resume}"
            raise WriteError(number, message) from error
        if number in READ_ONLY and isinstance(error, OSError) and concerns(_cause(error), folder):
            message = f"{folder} cannot be written, {READ_ONLY[number]}, training stopped; {kept(checkpoints)}. "
            raise WriteError(number, f"{message}Make it writable and repeat the command, or use another folder with --output") from error
        raise
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(f"{type(error).__name__}: {error}"):
            first = (str(error).strip().splitlines() or ["not enough memory"])[0]
            message = f"{first} (a smaller --micro-batch-size needs less memory: repeat the command with it; {kept(checkpoints)})"
            raise MemoryError(message) from error
        if processes > 1 and (isinstance(error, DistError) or LOST.search(str(error))):
            raise LostProcess(
                f"one of the {processes} processes of this run was lost, training stopped; {kept(checkpoints)}. See the last message of "
                f"that process, then resume with the same number: torchrun --nproc-per-node {processes} -m {resume}"
            ) from error
        raise
    finally:
        threading.excepthook = thread_failed


def _tracker_failed(failed: threading.ExceptHookArgs) -> None:
    """Print one line if a tracker's thread cannot write. If the disk is full, the next checkpoint raises the full error."""
    if isinstance(failed.exc_value, OSError):
        sys.stderr.write(f"a tracker cannot write any more: {failed.exc_value}\n")
    else:
        threading.__excepthook__(failed)


def kept(checkpoints: Path) -> str:
    """Return which checkpoint a failed run has, for messages."""
    steps = checkpoint.steps(checkpoints)
    return f"the checkpoint of step {steps[-1]:,} was kept" if steps else "there is no checkpoint yet"


def _error_number(error: OSError | SafetensorError) -> int:
    """Return the error number of the operating system; safetensors has it in its message only."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 0


def _cause(error: OSError) -> OSError:
    """Return the error of the operating system, which names the file."""
    return error.__cause__ if isinstance(error.__cause__, OSError) else error


def first_bad_module(model: nn.Module, forward: Callable[[], Any]) -> str:
    """Run ``forward`` again and return the module whose output was the first that is not finite."""
    found: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, given: Any, out: Any) -> None:
            if not found and any(_is_bad(x) for x in _tensors(out)):
                own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
                bad = [name for name, x in own if _is_bad(x)]
                found.append((name or "the loss") + (f", whose {' and '.join(bad)} is not finite" if bad else ""))

        return look

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in hooks:
            handle.remove()
    return found[0] if found else "no module when it was computed again"


def bad_gradients(model: nn.Module) -> str:
    """Return the last parameter with a gradient that is not finite, the likeliest origin, and how many more there are."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and _is_bad(p.grad)]
    return "".join(bad[-1:]) + (f" and {len(bad) - 1} more before it" if len(bad) > 1 else "")


def bad_weights(model: nn.Module) -> str:
    """Return the parameters that are not finite on this process."""
    return some([name for name, p in model.named_parameters() if _is_bad(p)])


def bad_tensors(groups: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return the tensors of a checkpoint that are not finite."""
    return some([f"{name} ({group})" for group, tensors in groups.items() for name, value in tensors.items() if _is_bad(value)])


def some(names: Sequence[object]) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(map(str, names[:MAX_SHOWN])) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")


def _is_bad(x: Tensor) -> bool:
    own: Tensor = x.to_local() if hasattr(x, "to_local") else x  # of a sharded tensor
    return own.is_floating_point() and not bool(torch.isfinite(own).all())


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (dict, tuple, list)):
        for value in out.values() if isinstance(out, dict) else out:
            yield from _tensors(value)
