"""Commands of training as real processes, one or several: forked off a server that has imported everything, so that they start at once."""

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
from dataclasses import dataclass
from pathlib import Path

from permuteformer.experiments.base import Experiment

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["permuteformer.train.loop", "permuteformer.cli", "transformers", "datasets", "torch.utils.tensorboard"])

PREPARED = Path(tempfile.gettempdir()) / f"prepared-{os.getpid()}"
"""The cache of data of all these commands, made by the first of them."""

SHARED = {"XDG_CACHE_HOME": str(PREPARED), "PERMUTEFORMER_CACHE": str(PREPARED), "OMP_NUM_THREADS": "1"}
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "hidden_dropout": 0.2}
TINY_TEXT = {**TINY, "hidden_size": 32, "num_attention_heads": 4, "attention": {"name": "linear", "feature_multiplier": 4}}
"""Whose permutations repeat after more tokens than a text has."""


def digits(**fields):
    """The words of a command that trains a tiny model on a few digits, 5 batches an epoch; with dropout."""
    return _words("digits", {**TINY, "batch_size": 8, "train_items": 40, "validation_items": 20, "test_items": 20, **fields})


def text(*task, **fields):
    """Of a tiny language model of bytes, tested at twice the length too. The text is a file, unless a task's name is given."""
    few = {"length": 48, "context": 16, "train_items": 22, "validation_items": 6, "test_items": 6}
    if not task:
        path = _prepared() / "text.txt"
        path.write_text("".join(f"The cat number {n} sat on mat {n * n % 7}.\n\nIt slept.\n" for n in range(300)))
        task = ("lm", str(path))
    return _words(*task, {**TINY_TEXT, "batch_size": 4, **few, "test_lengths": 96, **fields})


def pairs(**fields):
    """Of a tiny matcher of short texts, of which some have fewer tokens than others have processes."""
    path = _prepared() / "pairs.csv"
    path.write_text("first,second,label\n" + "".join(f"{'a' * (n % 9)},{'b' * (n % 23)},{n % 2}\n" for n in range(1, 61)))
    return _words("match", str(path), {**TINY_TEXT, "batch_size": 8, **fields})


def tiny(task="digits", **fields):
    """An experiment of the same size, for this process."""
    few = {"batch_size": 8, "train_items": 40, "validation_items": 20, "test_items": 20}
    options = {} if task == "digits" else {"corpus": "topics", "length": 48, "context": 16}
    own = {name: fields.pop(name) for name in list(fields) if name in TINY_TEXT}
    model, size = ("permuteformer-image", TINY) if task == "digits" else ("permuteformer-lm", TINY_TEXT)
    return Experiment(task=task, task_options=options, model=model, model_fields={**size, **own}, **{**few, **fields})


def _words(*task_and_fields):
    *task, fields = task_and_fields
    words = ["train", *task]
    for name, value in fields.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [json.dumps(value) if isinstance(value, dict) else str(value)])]
    return words


class Command:
    """A command of permuteformer on some processes, as torchrun would start them.

    ``at`` is an ``At``, for a signal to one of them. ``poison`` names a function of this module that is called in every process first.
    What is said goes to ``terminal``, or else to files.
    """

    def __init__(self, *words, output=None, processes=1, at=None, poison=None, environment=None, terminal=None):
        self.words = [*map(str, words), *([] if output is None else ["--output", str(output)])]
        self.said = [_prepared() / f"said-{os.urandom(4).hex()}" for _ in range(processes)]
        port = _free_port()
        self.processes = []
        for rank, said in enumerate(self.said):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = {**os.environ, **SHARED, **(environment or {}), **(place if processes > 1 else {})}
            arguments = (self.words, {k: str(v) for k, v in variables.items()}, terminal or str(said), at, poison, rank)
            self.processes.append(SERVER.Process(target=_run, args=arguments))
            self.processes[-1].start()

    def wait(self, seconds=100):
        """The exit codes, or the signals that ended them as negative numbers."""
        for process in self.processes:
            process.join(seconds)
            if process.exitcode is None:
                for other in self.processes:
                    other.kill()
                raise TimeoutError(f"{self.words} hangs: {self.text}")
        return [process.exitcode for process in self.processes]

    @property
    def text(self):
        """What it said, all processes one after another."""
        return "\n".join(said.read_text(errors="replace") if said.exists() else "" for said in self.said)

    def succeed(self):
        codes = self.wait()
        assert codes == [0] * len(codes), self.text
        return self


def fail(command, code=1):
    """Its words, where it ends with this exit code and without a traceback."""
    codes = command.wait()
    assert codes == [code] * len(codes), command.text
    assert "Traceback" not in command.text, command.text
    return " ".join(command.text.split())


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def record(folder):
    """The lines of the metrics, without times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "tokens_per_second", "memory_bytes")} for line in lines]


def steps(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


@functools.cache
def _prepared():
    PREPARED.mkdir(exist_ok=True)
    atexit.register(shutil.rmtree, PREPARED, ignore_errors=True)
    return PREPARED


def _run(words, variables, said, at, poison, rank):
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
        globals()[poison](rank)
    from permuteformer.cli import app

    app()


@dataclass(frozen=True)
class At:
    """When a signal comes: at call ``number`` of the function of a dotted name."""

    name: str
    number: int
    sent: int
    rank: int = 0
    group: bool = False
    """Whether workers get it too."""


def _signal_at(at):
    holder, attribute = _find(at.name)
    function, calls = getattr(holder, attribute), []

    @functools.wraps(function)
    def counted(*given, **named):
        calls.append(1)
        if len(calls) == at.number:
            if at.group:  # by another process, since workers are used to being ended by this one
                subprocess.run(["kill", f"-{int(at.sent)}", "--", f"-{os.getpid()}"], start_new_session=True)
            else:
                os.kill(os.getpid(), at.sent)
        return function(*given, **named)

    setattr(holder, attribute, counted)


def _find(name):
    """``package.module.Class.method`` as the object that has it and the last name."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            holder = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:-1]:
            holder = getattr(holder, part)
        return holder, parts[-1]
    raise LookupError(name)


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


KILL, TERM, INTERRUPT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
UPDATE = "permuteformer.train.loop.Updater.__call__"


def _at_step(number, change):
    """Has ``change(updater)`` called before update ``number``."""
    from permuteformer.train.update import Updater

    update = Updater.__call__

    def changed(self, share, step, *rest, **named):
        if step == number:
            change(self)
        return update(self, share, step, *rest, **named)

    Updater.__call__ = changed


def nan_in_a_weight(rank):
    """At step 6, on all processes."""
    _at_step(6, lambda updater: updater.bare.model.layers[0].expand.weight.data.mul_(float("nan")))


def small_files(rank):
    """No file may be larger than the weights."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))


def interrupted_already(rank):
    """A Ctrl-C came before update 6, and another one comes."""

    def change(updater):
        os.kill(os.getpid(), INTERRUPT)

    _at_step(6, change)


def _loss_on_rank_1(rank, spoil):
    def change(updater):
        loss = updater.loss
        updater.loss = lambda *given: spoil(loss(*given)) if rank == 1 else loss(*given)

    _at_step(6, change)


def nan_on_rank_1(rank):
    _loss_on_rank_1(rank, lambda loss: loss * float("nan"))


def infinite_on_rank_1(rank):
    """An infinite loss, with gradients that are finite."""
    _loss_on_rank_1(rank, lambda loss: loss + float("inf"))


def nan_in_a_gradient(rank):
    """Of one weight, on one process, while losses are finite."""

    def change(updater):
        norm = updater._gradient_norm

        def spoiled():
            gradient = updater.bare.get_parameter("model.layers.0.contract.weight").grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("nan"))
            return norm()

        updater._gradient_norm = spoiled

    if rank == 1:
        _at_step(6, change)
