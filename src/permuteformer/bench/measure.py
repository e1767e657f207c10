"""Time and memory of one case, in this process.

``python -m permuteformer.bench.measure JSON`` makes a case ready, says so by a line of JSON, and then does what the bytes of standard
input ask for: a turn of calls for each ``t``, and for an ``e`` the result. ``bench.apart`` talks to it so.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import time
from typing import Any

import torch

from permuteformer.bench.apart import malloc_settings, ran_out_of_memory
from permuteformer.bench.case import BLANK, OUT_OF_MEMORY, Case
from permuteformer.bench.subjects import make
from permuteformer.train.environment import environment, peak_memory, resident_memory
from permuteformer.train.limits import limit_memory, when_parent_ends

TURN = b"t"


class Timed:
    """A case that is made, and called once before it is timed.

    The peak of memory is that of the whole process where there is no GPU, so measure in a new one (``bench.apart``).

    Args:
        case: what to time.
        device: where; a GPU if there is one.
    """

    def __init__(self, case: Case, device: str | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.idle = resident_memory()
        self.seconds: list[float] = []
        with self._random_numbers():
            torch.manual_seed(0)
            self.subject = make(case.subject, dict(case.options), str(self.device))
            self.ready = resident_memory()
            if self.device.type == "cuda":
                self.ready = torch.cuda.memory_allocated(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            self._call()

    def turn(self, seconds: float = 0.0) -> None:
        """Calls one after another, for so long; one at least."""
        begin = time.perf_counter()
        with self._random_numbers():
            self.seconds.append(self._call())
            while time.perf_counter() - begin < seconds:
                self.seconds.append(self._call())

    def result(self) -> dict[str, Any]:
        """What it took so far."""
        best, subject, is_gpu = min(self.seconds), self.subject, self.device.type == "cuda"
        epoch = None if subject.calls_per_epoch is None else best * subject.calls_per_epoch
        return {
            **BLANK,
            "status": "finished",
            "seconds_best": best,
            "seconds_median": statistics.median(self.seconds),
            "seconds_spread": [best, max(self.seconds)],
            "repeats": len(self.seconds),
            "seconds_per_epoch": epoch,
            "estimated": epoch is not None,  # from a few steps
            "peak_memory_bytes": peak_memory(self.device),
            "memory_is": "allocated on the device" if is_gpu else "resident in the process",
            "idle_memory_bytes": self.idle,
            "ready_memory_bytes": self.ready,
            "parameters": subject.parameters,
            "flops": subject.flops,
            "device": torch.cuda.get_device_name(self.device) if is_gpu else self.device.type,
            "threads": torch.get_num_threads(),
            "malloc": malloc_settings(),
        }

    def _call(self) -> float:
        begin = time.perf_counter()
        self.subject.step()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - begin

    def _random_numbers(self) -> Any:
        """A block after which random numbers go on as if nothing had been."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])


def measure(case: Case, repeats: int, device: str | None = None) -> dict[str, Any]:
    """Time a case so often, here."""
    timed = Timed(case, device)
    for _ in range(repeats):
        timed.turn()
    return timed.result()


def main() -> None:
    """Serve the process that started this one."""
    parser = argparse.ArgumentParser(prog="python -m permuteformer.bench.measure", description="Time a case, turn by turn.")
    parser.add_argument("case", help="a case, as JSON")
    parser.add_argument("--turn-seconds", type=float, default=0.0, help="how long a turn is; it is one call at least")
    parser.add_argument("--threads", type=int, help="threads of a CPU; torch decides unless told")
    parser.add_argument("--memory-bytes", type=int, help="memory that may be had; more is refused")
    parser.add_argument("--device", help="where; a GPU if there is one")
    arguments = parser.parse_args()
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    when_parent_ends(lambda: os._exit(1), asked.put)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no reply

    def reply(**content: Any) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    limit_memory(arguments.memory_bytes)
    try:
        timed = Timed(Case(**json.loads(arguments.case)), arguments.device)
        reply(status="ready")
        while asked.get() == TURN:
            timed.turn(arguments.turn_seconds)
            reply(status="ready", seconds_best=min(timed.seconds))
        result = timed.result()
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        message = str(error).strip().splitlines()
        result = {"status": OUT_OF_MEMORY, "message": message[0] if message else type(error).__name__}
    reply(**result, environment=environment(device=str(result.get("device") or "cpu")))


if __name__ == "__main__":
    main()
