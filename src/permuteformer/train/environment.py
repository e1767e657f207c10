"""Where a run took place: versions, machine, command."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import permuteformer
from permuteformer.ops.linear import backend_in_use

PACKAGES = ("torch", "transformers", "accelerate", "pyarrow", "safetensors", "numpy")

ABSOLUTE = re.compile(r"""(?<![^\s=:,"'\[({])(?:file://|~)?/(?:[^\s/,"'\])}]*/)*([^\s/,"'\])}]*)""")
"""A path from the root, at the beginning of a word or after a sign within it; the last name is kept."""


def environment(processes: int = 1, device: str = "cpu") -> dict[str, Any]:
    """What numbers depend on besides the experiment. No name of a machine or a person is in it."""
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": ["permuteformer", *map(without_folders, sys.argv[1:])],
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "linear_attention": backend_in_use(device),
        "processes": processes,
        **revision(),
        "versions": {"permuteformer": permuteformer.__version__, **{name: version(name) for name in PACKAGES}},
    }


@functools.cache
def revision() -> dict[str, Any]:
    """The commit of the code that runs, and whether tracked files (other than results) differ from it; ``None`` outside a git checkout."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        folder = Path(permuteformer.__file__).parent
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails where the checkout is of a project that installed this package
        commit = git("rev-parse", "HEAD").stdout.strip()
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/results").stdout
    except (OSError, subprocess.CalledProcessError):
        return {"revision": None, "clean": None}
    return {"revision": commit, "clean": not changed}


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resumed(first: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of a run that goes on: that of its beginning, and of each time after it what differs.

    >>> resumed({"started": 1, "cores": 2}, {"started": 5, "cores": 2})
    {'started': 1, 'cores': 2, 'resumed': [{'started': 5}]}
    """
    differing = {name: value for name, value in now.items() if first.get(name) != value}
    return {**first, "resumed": [*first.get("resumed", []), differing]}


def without_folders(word: str) -> str:
    """A word of a command line, where of paths from the root only the last name is left.

    >>> [without_folders(word) for word in ("train", "/home/me/data.csv", "--output=/runs/a", "--corpus", "a/b", "1/2")]
    ['train', 'data.csv', '--output=a', '--corpus', 'a/b', '1/2']
    """
    return ABSOLUTE.sub(r"\1", word)


def peak_memory(device: torch.device) -> int:
    """The most bytes that were in use: of the device, or of the process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resident_memory("VmHWM")
    if peak is not None:  # on Linux, where ru_maxrss would tell how large the process was that started this one
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_memory(which: str = "VmRSS") -> int | None:
    """Bytes of this process in memory, now or (``VmHWM``) at most; none where there is no ``/proc``."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{which}:")), None)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
