"""The machine and this process: what records say of them, memory, and child processes. Only functions import torch."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permuteformer.version import __version__

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "transformers", "accelerate", "pyarrow", "safetensors", "numpy")

OUT_OF_MEMORY = re.compile(
    "not enough memory|can't allocate memory|cannot allocate memory|out of memory|OutOfMemoryError|MemoryError|bad_alloc|unable to allocate"
    "|thread creation failed|can't start new thread",
    re.IGNORECASE,
)
"""Messages for lack of memory, of torch on CPU and GPU, Python, C++, NumPy, and where a thread gets no stack."""

WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA"

ABSOLUTE = re.compile(r"""(?<![^\s=:,"'\[({])(?:file://|~)?/(?:[^\s/,"'\])}]*/)*([^\s/,"'\])}]*)""")
"""An absolute path at the start of a word or after a sign within it; its last name is kept."""


def environment(processes: int = 1, device: str = "cpu") -> dict[str, Any]:
    """Return what results depend on besides the experiment: revision, threads, backend, versions. It names no host and no user."""
    import torch

    from permuteformer.ops.linear import backend_in_use

    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_memory(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "backend": backend_in_use(device),
        "processes": processes,
        **revision(),
        "versions": {"permuteformer": __version__, **{name: version(name) for name in PACKAGES}},
    }


@functools.cache
def revision() -> dict[str, Any]:
    """Return the commit of the running code, and whether no tracked file outside results differs; ``None`` outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails if the checkout is of a project that only installed this package
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/results")
        return {"revision": git("rev-parse", "HEAD").strip(), "clean": not changed}
    except (OSError, subprocess.CalledProcessError):
        return {"revision": None, "clean": None}


def command_line() -> list[str]:
    """Return the command of this process for records, without folders."""
    return ["permuteformer", *map(without_folders, sys.argv[1:])]


def without_folders(word: str) -> str:
    """Return a command-line word in which absolute paths are cut to their last name.

    >>> [without_folders(word) for word in ("train", "/home/me/data.csv", "--output=/runs/a", "--corpus", "a/b", "1/2")]
    ['train', 'data.csv', '--output=a', '--corpus', 'a/b', '1/2']
    """
    return ABSOLUTE.sub(r"\1", word)


def total_memory() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int | None:
    """Return the bytes a process can still get, of the machine and of the container if that has a limit; ``None`` if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(free)) if free else None


def resident_memory(field: str = "VmRSS") -> int | None:
    """Return the resident bytes of this process, now or (``VmHWM``) at most; ``None`` without ``/proc``."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:")), None)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes allocated on a GPU, or else the peak resident bytes of this process."""
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resident_memory("VmHWM")
    if peak is not None:  # on Linux, where ru_maxrss includes the size of the parent process
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def is_out_of_memory(message: str) -> bool:
    """Return whether an error message is about lack of memory.

    >>> is_out_of_memory("RuntimeError: DefaultCPUAllocator: can't allocate memory"), is_out_of_memory("ValueError: length must be 1026")
    (True, False)
    """
    return OUT_OF_MEMORY.search(message) is not None


def limit_memory(memory_bytes: int | None) -> None:
    """Limit the memory of this process, and make it the first one the system kills when memory runs out."""
    import resource

    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def when_parent_ends(act: Callable[[], None], on_byte: Callable[[bytes], None] = lambda byte: None) -> None:
    """Call ``act`` when standard input closes, which the parent holds open while it lives; until then pass each byte to ``on_byte``."""

    def watch() -> None:
        while byte := os.read(0, 1):  # not sys.stdin: this thread would hold its lock when the process exits
            on_byte(byte)
        act()

    threading.Thread(target=watch, daemon=True).start()


def bfloat16_advice(device: str) -> str:
    """Return what to know about bfloat16 on this device, if anything."""
    if device != "cpu" or os.environ.get(WITHOUT_AMX):
        return ""
    return (
        "bfloat16 on a CPU: some virtual machines report AMX but do not allow it; if training ends with an illegal instruction, set "
        f"{WITHOUT_AMX}=AVX512_CORE_FP16 and repeat the command"
    )


def malloc_settings() -> dict[str, str]:
    """Return the settings of the C allocator in the environment: they decide when memory is given back."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
