"""Where a run took place: versions, machine, command."""

from __future__ import annotations

import datetime
import os
import platform
import resource
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import permuteformer

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "numpy")


def environment(processes: int = 1, device: str = "cpu") -> dict[str, Any]:
    """What numbers depend on besides the experiment. No name of a machine or a person is in it."""
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": ["permuteformer", *(Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:])],
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "processes": processes,
        "versions": {"permuteformer": permuteformer.__version__, **{name: version(name) for name in PACKAGES}},
    }


def peak_memory(device: torch.device) -> int:
    """The most bytes that were in use: of the device, or of the process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
