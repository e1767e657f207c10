"""Commands of permuteformer as real processes, forked off a server that has imported everything, so that they start at once."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["permuteformer.train.loop", "permuteformer.cli", "permuteformer.report", "transformers", "pyarrow", "torch.utils.tensorboard"]
)

PREPARED = Path(tempfile.gettempdir()) / f"prepared-{os.getpid()}"
"""The cache of data of all these commands, made by the first of them."""

SHARED = {"XDG_CACHE_HOME": str(PREPARED), "PERMUTEFORMER_CACHE": str(PREPARED), "OMP_NUM_THREADS": "1"}
TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "hidden_dropout": 0.2}

KILL, TERM, INTERRUPT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
UPDATE = "permuteformer.train.loop.Updater.__call__"


def digits(**fields: Any) -> list[str]:
    """The words of a command that trains a tiny model on a few digits, 5 batches an epoch; with dropout."""
    return training("digits", fields={**TINY, "batch_size": 8, "train_items": 40, "validation_items": 20, "test_items": 20, **fields})


def training(*task: str, fields: Mapping[str, Any]) -> list[str]:
    """The words of a command that trains."""
    words = ["train", *task]
    for name, value in fields.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [json.dumps(value) if isinstance(value, dict) else str(value)])]
    return words


@dataclass(frozen=True)
class At:
    """When a signal comes: at call ``number`` of the function of a dotted name."""

    name: str
    number: int
    sent: int
    rank: int = 0
    group: bool = False
    """Whether workers get it too."""


class Command:
    """A command of permuteformer on some processes, as torchrun would start them.

    Args:
        words: of the command line.
        output: what ``--output`` says, if anything.
        processes: how many.
        at: a signal to one of them.
        poison: called with the rank in every process first; it must be picklable.
        environment: further variables.
        terminal: where what is said goes; to files unless told.
    """

    def __init__(
        self,
        *words: object,
        output: Path | None = None,
        processes: int = 1,
        at: At | None = None,
        poison: Callable[[int], None] | None = None,
        environment: Mapping[str, object] | None = None,
        terminal: str | None = None,
    ) -> None:
        self.words = [*map(str, words), *([] if output is None else ["--output", str(output)])]
        self.said = [prepared() / f"said-{os.urandom(4).hex()}" for _ in range(processes)]
        port = _free_port()
        self.processes = []
        for rank, said in enumerate(self.said):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = {**os.environ, **SHARED, **(environment or {}), **(place if processes > 1 else {})}
            arguments = (self.words, {k: str(v) for k, v in variables.items()}, terminal or str(said), at, poison, rank)
            self.processes.append(SERVER.Process(target=_run, args=arguments))
            self.processes[-1].start()

    def wait(self, seconds: float = 600) -> list[int]:
        """The exit codes, or the signals that ended them as negative numbers."""
        for process in self.processes:
            process.join(seconds)
            if process.exitcode is None:
                for other in self.processes:
                    other.kill()
                raise TimeoutError(f"{self.words} hangs: {self.text}")
        return [process.exitcode or 0 for process in self.processes]

    @property
    def text(self) -> str:
        """What it said, all processes one after another."""
        return "\n".join(said.read_text(errors="replace") if said.exists() else "" for said in self.said)

    @property
    def sentence(self) -> str:
        """What it said, in one line."""
        return " ".join(self.text.split())

    def succeed(self) -> Command:
        """Wait for it to end well."""
        codes = self.wait()
        assert codes == [0] * len(codes), self.text
        return self


def fail(command: Command, code: int = 1) -> str:
    """Its words, where it ends with this exit code and without a traceback."""
    codes = command.wait()
    assert codes == [code] * len(codes), command.text
    assert "Traceback" not in command.text, command.text
    return command.sentence


def weights(folder: Path) -> bytes:
    """The file of the weights of a run that has ended."""
    return (folder / "model" / "model.safetensors").read_bytes()


def record(folder: Path) -> list[dict[str, Any]]:
    """The lines of the metrics, without times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "tokens_per_second", "memory_bytes")} for line in lines]


def result(folder: Path) -> dict[str, Any]:
    """What came of a run, without times and memory; nothing where it has not ended."""
    path = folder / "result.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {name: value for name, value in content.items() if name not in ("seconds", "peak_memory_bytes")}


def steps(folder: Path) -> list[int]:
    """The steps there are checkpoints of."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


@functools.cache
def prepared() -> Path:
    """A folder for what commands share, until this process ends."""
    PREPARED.mkdir(exist_ok=True)
    atexit.register(shutil.rmtree, PREPARED, ignore_errors=True)
    return PREPARED


def find(name: str) -> tuple[Any, str]:
    """``package.module.Class.method`` as the object that has it and the last name."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            holder: Any = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:-1]:
            holder = getattr(holder, part)
        return holder, parts[-1]
    raise LookupError(name)


def _run(words: list[str], variables: dict[str, str], said: str, at: At | None, poison: Callable[[int], None] | None, rank: int) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["permuteformer", *words]
    import torch

    torch.set_num_threads(1)
    os.setsid()
    if at is not None and rank == at.rank:
        _signal_at(at)
    if poison is not None:
        poison(rank)
    from permuteformer.cli import app

    app()


def _signal_at(at: At) -> None:
    holder, attribute = find(at.name)
    function, calls = getattr(holder, attribute), []

    @functools.wraps(function)
    def counted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == at.number:
            if at.group:  # by another process, since workers are used to being ended by this one
                subprocess.run(["kill", f"-{int(at.sent)}", "--", f"-{os.getpid()}"], start_new_session=True)
            else:
                os.kill(os.getpid(), at.sent)
        return function(*given, **named)

    setattr(holder, attribute, counted)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
