"""What may come of an input: it is taken, or refused by an error of our own in one sentence. All else is a finding."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Protocol

SECONDS = 20.0
"""Of one input; a machine that is busy is not a hang."""

MEMORY = 3 << 29
"""Bytes that inputs may take beyond what stood ready."""

LONGEST = 3_000
"""Characters of a refusal."""

OWN = (ValueError, TypeError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
"""Besides errors that the package defines; none of their subclasses, which are libraries'."""

FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
    "webbrowser.open",
)
PLACES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "shutil.rmtree")


class Target(Protocol):
    """What inputs are given to. It is made once in a process, with a folder of its own."""

    def attempt(self, random: Random) -> bool:
        """Draw an input and give it. Whether it was taken; a refusal may also be raised."""


class Wrong(AssertionError):
    """An input had an effect that it must not have."""


class Cut(ValueError):
    """Where long work would begin, which an input is not to do."""


def cut(*arguments: Any, **options: Any) -> Any:
    """In the place of long work."""
    raise Cut("cut off here")


class Slow(BaseException):
    """An input took too long; not an ``Exception``, so that nothing catches it."""


def judged(target: Target, random: Random, effects: list[str]) -> tuple[bool, dict[str, str] | None]:
    """Whether an input was taken, and what is wrong about what came of it."""
    taken, finding = False, None
    try:
        with _at_most(SECONDS):
            taken = target.attempt(random)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if said := complaint(error):
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "permuteformer" in frame.filename]
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"
            finding = {"error": f"{type(error).__name__}: {error}"[:300], "why": said, "where": where}
    if effects:
        finding = {"error": "; ".join(effects)[:300], "why": "an effect that no input may have", "where": ""}
        effects.clear()
    return taken, finding


def complaint(error: BaseException) -> str | None:
    """What is wrong with an error as a refusal."""
    cause = error.__cause__ if type(error).__module__ == "huggingface_hub.errors" else None  # which wraps what we said
    error = cause or error
    if type(error) not in OWN and not type(error).__module__.startswith("permuteformer"):
        return "not an error of ours"
    return wrong_words(str(error))


def wrong_words(said: str) -> str | None:
    """What is wrong with a sentence."""
    if not said.strip():
        return "it says nothing"
    if len(said) > LONGEST:
        return f"{len(said)} characters"
    return None if all(line.isprintable() for line in said.split("\n")) else "it cannot be printed"


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Slow(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def watch(folder: Path) -> list[str]:
    """From here on, effects beyond the folder, and programs that are started, are listed in what this returns; and they do not happen."""
    effects: list[str] = []
    root = os.path.join(os.path.realpath(folder), "")

    def outside(path: Any) -> bool:
        if isinstance(path, int) or path is None:
            return False
        full = os.path.abspath(os.fsdecode(path))
        return not (full + os.sep).startswith(root) and full != os.devnull

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if event in FORBIDDEN or ((writes or event in PLACES) and outside(arguments[0])):
            effects.append(f"{event} {arguments[:2]!r:.200}")
            raise PermissionError(f"{event} was not to happen")

    sys.addaudithook(hook)
    return effects


def peak_kilobytes() -> int:
    """The most memory that this process has had."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    words = Path("/proc/self/status").read_text().split()  # the other counts what the process that started this one had
    return int(words[words.index("VmHWM:") + 1])


def limit_memory() -> None:
    """An input that asks for more gets a ``MemoryError``, which is a finding."""
    if sys.platform != "linux":
        return
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
