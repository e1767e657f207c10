"""Times one case in this process.

``python -m permuteformer.bench.worker JSON`` prepares a case, and answers each byte of standard input by a line of JSON: after a ``t`` it
times a turn of calls, after an ``e`` it prints the result. ``bench.runner`` starts it; the JSON has the case and the settings.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import time
from typing import Any

import torch

from permuteformer import machine
from permuteformer.bench.runner import OUT_OF_MEMORY
from permuteformer.bench.subjects import make
from permuteformer.bench.sweeps import Case


class Timer:
    """Prepares a case, calls it once, and then times it.

    On a CPU the peak of memory is that of the whole process, so use a new process for each case.

    Args:
        case: what to time.
        device: cpu or cuda; default: a GPU if there is one.
    """

    def __init__(self, case: Case, device: str | None = None) -> None:
        self.device = choose_device(device)
        self.idle = machine.resident_memory()
        self.seconds: list[float] = []
        torch.manual_seed(0)
        self.subject = make(case.subject, case.options, str(self.device))
        self.ready = machine.resident_memory()
        if self.device.type == "cuda":
            self.ready = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._call()

    def turn(self, seconds: float = 0.0) -> None:
        """Time calls for a number of seconds, at least one call."""
        end = time.perf_counter() + seconds
        self.seconds.append(self._call())
        while time.perf_counter() < end:
            self.seconds.append(self._call())

    def result(self) -> dict[str, Any]:
        """Return time and memory so far."""
        best, subject, is_gpu = min(self.seconds), self.subject, self.device.type == "cuda"
        epoch = None if subject.calls_per_epoch is None else best * subject.calls_per_epoch
        return {
            "status": "finished",
            "seconds_best": best,
            "seconds_median": statistics.median(self.seconds),
            "seconds_spread": [best, max(self.seconds)],
            "peak_memory_bytes": machine.peak_memory(self.device),
            "memory_is": "allocated on the device" if is_gpu else "resident in the process",
            "repeats": len(self.seconds),
            "seconds_per_epoch": epoch,
            "estimated": epoch is not None,
            "idle_memory_bytes": self.idle,
            "ready_memory_bytes": self.ready,
            "parameters": subject.parameters,
            "flops": subject.flops,
            "device": torch.cuda.get_device_name(self.device) if is_gpu else self.device.type,
            "threads": torch.get_num_threads(),
            "malloc": machine.malloc_settings(),
        }

    def _call(self) -> float:
        begin = time.perf_counter()
        self.subject.step()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - begin


def choose_device(name: str | None) -> torch.device:
    """Return the device of this name; default: a GPU if there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def main() -> None:
    """Time a case for the process that started this one."""
    settings = json.loads(sys.argv[1])
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    machine.when_parent_ends(lambda: os._exit(1), requests.put)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that nothing else prints into the replies

    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    machine.limit_memory(settings["memory_bytes"])
    try:
        timer = Timer(Case(**settings["case"]), settings["device"])
        print(json.dumps({"status": "ready"}), file=replies)
        while requests.get() == b"t":
            timer.turn(settings["turn_seconds"])
            print(json.dumps({"status": "ready", "seconds_best": min(timer.seconds)}), file=replies)
        result = timer.result()
    except (RuntimeError, MemoryError) as error:
        if not machine.is_out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        result = {"status": OUT_OF_MEMORY, "message": str(error).strip().partition("\n")[0] or type(error).__name__}
    environment = machine.environment(device=choose_device(settings["device"]).type)
    del environment["command"]  # the user's is that of the parent process
    print(json.dumps({**result, "environment": environment}), file=replies)


if __name__ == "__main__":
    main()
