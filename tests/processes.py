"""Commands of permuteformer in real processes: started, traced, killed, and their results compared."""

import functools
import itertools
import json
import multiprocessing
import os
import pkgutil
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
PRELOADED = "permuteformer.train.loop permuteformer.cli permuteformer.report transformers pyarrow pandas torch.utils.tensorboard"
SERVER.set_forkserver_preload(PRELOADED.split(" "))

TINY = (
    "--model.hidden-size 16 --model.num-hidden-layers 1 --model.num-attention-heads 2 --model.intermediate-size 32 "
    "--model.hidden-dropout 0.2 --batch-size 8 --train-items 40 --validation-items 20 --test-items 20"
).split()
DIGITS = ["train", "digits", *TINY, "--steps", "13", "--evaluate-every", "4"]
EVERY_STEP = ["--checkpoint-minutes", "0"]

UPDATE, EVALUATE = "permuteformer.train.step.Updater.update", "permuteformer.train.loop.evaluate"

TIMES = (
    "seconds logged_seconds tokens_per_second memory_bytes peak_memory_bytes metrics_bytes started resumed command revision clean".split(
        " "
    )
)
"""Values in JSON files that differ between two runs; the revision does if somebody commits meanwhile."""
TEXTS = ("log.txt", "README.md", "checksums.json")
"""Files that contain times."""
UNFINISHED = re.compile(r"\.(partial|new|replaced|removed|next|old)$")


class Command:
    """A command in processes that are forked from a server that has imported everything, so that it starts at once.

    Args:
        words: of the command line.
        processes: how many, as torchrun would start them.
        before: called with the rank in every process, before the command; picklable.
        environment: further variables.
    """

    def __init__(self, *words, processes=1, before=None, environment=None):
        self.words = [str(word) for word in words]
        self.outputs = [scratch() / f"output-{os.urandom(6).hex()}" for _ in range(processes)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = []
        for rank, output in enumerate(self.outputs):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = {**os.environ, **shared(), **(environment or {}), **(place if processes > 1 else {})}
            arguments = (self.words, {name: str(value) for name, value in variables.items()}, output, before, rank)
            self.processes.append(SERVER.Process(target=_run, args=arguments))
            self.processes[-1].start()

    def wait(self, seconds=300):
        """Return the exit codes; those of killed processes are negative."""
        for process in self.processes:
            process.join(seconds)
            if process.exitcode is None:
                for other in self.processes:
                    other.kill()
                raise TimeoutError(f"{self.words} hangs: {self.text}")
        return [process.exitcode for process in self.processes]

    def end(self, code=0, seconds=300):
        """Wait until all processes exit with ``code`` and without a traceback, and return what they printed, in one line."""
        assert self.wait(seconds) == [code] * len(self.processes), self.text
        assert "Traceback" not in self.text, self.text
        return " ".join(self.text.split())

    @property
    def text(self):
        return "\n".join(output.read_text(errors="replace") for output in self.outputs if output.exists())


@functools.cache
def _scratch():
    return tempfile.TemporaryDirectory(prefix="soak-")  # deleted when the tests end


def scratch():
    """Return a folder for outputs and prepared data."""
    return Path(_scratch().name)


def shared():
    """Return the variables of all processes."""
    return {"XDG_CACHE_HOME": str(scratch() / "cache"), "OMP_NUM_THREADS": "1"}


def _run(words, variables, output, before, rank):
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["permuteformer", *words]
    import torch

    from permuteformer.cli import main

    torch.set_num_threads(1)
    if before is not None:
        before(rank)
    main()


def at_call(name, number, action):
    """Have ``action()`` called before call ``number`` of the function with this dotted name."""
    holder, _, attribute = name.rpartition(".")
    holder = pkgutil.resolve_name(holder)
    function, calls = getattr(holder, attribute), itertools.count(1)

    @functools.wraps(function)
    def counted(*arguments, **options):
        if number in (next(calls), None):
            action()
        return function(*arguments, **options)

    setattr(holder, attribute, counted)


def signal_at(rank, name, number, sent=signal.SIGKILL, of_rank=0):
    """Have a process send itself a signal at a call."""
    if rank == of_rank:
        at_call(name, number, lambda: os.kill(os.getpid(), sent))


PHASES = {"cache": "data preparation", "checkpoints": "checkpoint", "model": "model", "report": "report"}
"""Activity of a process, by the path that it writes."""
CHANGES = {"open": None, "os.rename": 2, "os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.truncate": None, "shutil.rmtree": 1}
"""Audit events of changes, and the place of the folder that a relative path belongs to."""


def trace(rank, path, folder, number=None, sent=signal.SIGKILL):
    """Write time and phase to ``path`` before each file change below ``folder``, update and evaluation; send a signal at one of them."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    lines, phase = itertools.count(), "start"

    def event(new=None):
        nonlocal phase
        phase = new or phase
        os.write(file, f"{time.monotonic():.6f} {phase}\n".encode())
        if next(lines) == number:
            os.kill(os.getpid(), sent)

    def audit(name, arguments):
        if name not in CHANGES or (name == "open" and not opens_to_write(*arguments[1:])):
            return
        place, changed = CHANGES[name], str(arguments[0])
        if changed.startswith(folder):
            event(next((title for part, title in PHASES.items() if part in changed[len(folder) :]), "run folder"))
        elif place is not None and arguments[place] not in (-1, None):
            event()

    fsync = os.fsync
    os.fsync = lambda handle: (event(), fsync(handle))[1]
    event()
    at_call(UPDATE, None, lambda: event("training step"))
    at_call(EVALUATE, None, lambda: event("evaluation"))
    sys.addaudithook(audit)


def opens_to_write(mode, flags):
    """Return whether the arguments of an audited ``open`` write."""
    return any(letter in mode for letter in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def read_trace(path):
    """Return the events of a trace as pairs of time and phase."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(time), phase) for time, _, phase in (line.partition(" ") for line in lines)]


def files(folder):
    """Return the files below a folder by their paths, without locks."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def unfinished(folder):
    """Return what a killed process was writing, and nothing has removed."""
    return [path.name for path in folder.rglob("*") if UNFINISHED.search(path.name)]


def differences(run, whole):
    """Return the files in which a finished run differs from an undisturbed one, times aside."""
    ours, theirs = ({name: timeless(name, content) for name, content in files(folder).items()} for folder in (run, whole))
    return [name for name in sorted({*ours, *theirs}) if not name.startswith("tensorboard/") and ours.get(name) != theirs.get(name)]


def timeless(name, content):
    """Return the content of a file of a run without times."""
    if Path(name).name in TEXTS:
        return None
    if name.endswith(".jsonl"):
        return [_without_times(json.loads(line)) for line in content.splitlines()]
    return _without_times(json.loads(content)) if name.endswith(".json") else content


def _without_times(content):
    if isinstance(content, dict):
        return {name: _without_times(value) for name, value in content.items() if name not in TIMES}
    return content


def steps(run):
    """Return the steps of the checkpoints of a run."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
