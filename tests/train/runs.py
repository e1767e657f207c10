"""Tiny experiments, their command lines, and faults that tests inject into them."""

import fcntl
import json
import math
import os
import pty
import resource
import struct
import termios
import threading
from functools import partial

import torch
from processes import UPDATE, Command, at_call, scratch

from permuteformer.experiments.experiment import Experiment, RunOptions
from permuteformer.train.step import Updater

QUIET = RunOptions(quiet=True, track=())

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "hidden_dropout": 0.2}
TEXT_SIZES = {**SIZES, "hidden_size": 32, "num_attention_heads": 4, "attention": {"name": "linear", "feature_multiplier": 4}}
"""With these, permutations repeat after more tokens than a text has."""

IMAGES = {"batch_size": 8, "train_items": 40, "validation_items": 20, "test_items": 20}
TEXTS = {"batch_size": 4, "train_items": 22, "validation_items": 6, "test_items": 6}
WINDOWS = {"length": 48, "context": 16}
TASKS = {
    "digits": ("permuteformer-image", SIZES, {}, IMAGES),
    "lm": ("permuteformer-lm", TEXT_SIZES, WINDOWS, TEXTS),
    "lm-bytes": ("permuteformer-lm", TEXT_SIZES, {"corpus": "topics", **WINDOWS}, TEXTS),
    "match": ("permuteformer-retrieval", TEXT_SIZES, {}, {"batch_size": 8}),
}
"""Preset, fields of the model, options of the task and settings of training."""


def tiny(task="digits", **fields):
    """Return a tiny experiment. Fields may be those of the model too; the data of ``lm`` and ``match`` is written."""
    preset, sizes, options, settings = TASKS[task]
    if task in ("lm", "match"):
        options = {**options, "path": str(_data(task))}
    own = {name: fields.pop(name) for name in list(fields) if name in (*TEXT_SIZES, "position")}
    return Experiment(task=task, task_options=options, model=preset, model_fields={**sizes, **own}, **{**settings, **fields})


def _data(task):
    if task == "lm":
        path = scratch() / "text.txt"
        content = "".join(f"The cat number {n} sat on mat {n * n % 7}.\n\nIt slept.\n" for n in range(300))
    else:  # some texts have fewer tokens than others have processes
        path = scratch() / "pairs.csv"
        content = "first,second,label\n" + "".join(f"{'a' * (n % 9)},{'b' * (n % 23)},{n % 2}\n" for n in range(1, 61))
    if not path.exists():
        path.write_text(content)
    return path


def words(experiment):
    """Return the command line of an experiment."""
    content = experiment.to_json()
    options, model_fields = content.pop("task_options"), content.pop("model_fields")
    task, path = content.pop("task"), options.pop("path", None)
    content["test_lengths"] = ",".join(map(str, content["test_lengths"]))
    content |= {f"task.{name}": value for name, value in options.items()} | {f"model.{name}": value for name, value in model_fields.items()}
    line = ["train", task, *([] if path is None else [path])]
    for name, value in content.items():
        if value not in (None, "") and not isinstance(value, bool):
            line += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return line


def record(folder, *events):
    """Return the lines of the metrics file with these events; default: all."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if not events or line["event"] in events]


def result(folder):
    return json.loads((folder / "result.json").read_text())


def at_step(step, change):
    """Have ``change(updater)`` called before an update."""
    update = Updater.update

    def changed(self, share, number, *arguments, **options):
        if number == step:
            change(self)
        return update(self, share, number, *arguments, **options)

    Updater.update = changed


def spoil(rank, kind, name="model.layers.0.contract.weight", value=math.nan, step=6, of_rank=None):
    """Have a number become ``value`` at a step: of a weight, a gradient, the state of Adam, the input of the model or the loss."""
    if of_rank in (None, rank):
        at_step(step, lambda updater: SPOILS[kind](updater, name, value))


def _own(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _spoil_weight(updater, name, value):
    _own(updater.unwrapped_model.get_parameter(name).data).view(-1)[1:2] = value


def _spoil_gradient(updater, name, value):
    backward = updater._backward

    def spoiled(*arguments):
        losses = backward(*arguments)
        _own(updater.unwrapped_model.get_parameter(name).grad).view(-1)[1:2] = value
        return losses

    updater._backward = spoiled


def _spoil_adam(updater, name, value):
    _own(updater.optimizer.state[updater.unwrapped_model.get_parameter(name)]["exp_avg_sq"]).view(-1)[1:2] = value


def _spoil_input(updater, name, value):
    def hook(module, given, out):
        changed = out.clone()
        changed[0, -1] = value
        return changed

    updater.unwrapped_model.get_submodule(name).register_forward_hook(hook)


def _spoil_loss(updater, name, value):
    compute = updater._loss
    updater._loss = lambda *arguments: compute(*arguments) + value  # gradients stay finite


SPOILS = {"weight": _spoil_weight, "gradient": _spoil_gradient, "adam": _spoil_adam, "input": _spoil_input, "loss": _spoil_loss}


def signal_workers_too(rank, number, sent):
    """Have the process and its workers get a signal at an update."""
    os.setpgrp()
    at_call(UPDATE, number, lambda: os.killpg(0, sent))


def limit_file_size(rank, size):
    """Have the disk quota be used up for files larger than ``size``."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def use_threads(rank, number):
    """Have torch compute with this number of threads."""
    torch.set_num_threads(number)


def redirect(rank, path, stream=1):
    """Have a stream written to a path, such as a named pipe or a terminal."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_NOCTTY), stream)


def terminal_output(*command, stream=1, columns=80):
    """Return what a command writes to a terminal, and its other output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    pieces = []

    def read():
        while True:
            try:
                pieces.append(os.read(ours, 65536))
            except OSError:  # no process has the other end any more
                return

    reader = threading.Thread(target=read)
    reader.start()
    before = partial(redirect, path=os.ttyname(theirs), stream=stream)
    other = Command(*command, before=before, environment={"TERM": "xterm", "COLUMNS": str(columns)}).end()
    os.close(theirs)
    reader.join(20)
    os.close(ours)
    return b"".join(pieces), other
