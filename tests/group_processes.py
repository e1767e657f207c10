"""Processes that hold rows together, over gloo: started once, and given one piece of work after another.

Work is a function of this module or of another that can be imported; it is called with the rank and the arguments in every process.
"""

import importlib
import socket
import traceback

from processes import SERVER

SECONDS = 60
"""Longer than any work takes."""


def errors_of(tries):
    """Return the messages of functions that raise ``ValueError``, by name."""
    messages = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except ValueError as error:
            messages[name] = str(error)
    return messages


class Processes:
    """``number`` processes of one group, until ``close``."""

    def __init__(self, number):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(number):
            ours, theirs = SERVER.Pipe()
            self.processes.append(SERVER.Process(target=_serve, args=(rank, number, port, theirs), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def __call__(self, function, *arguments, **named):
        """Return the results of ``function``, ``"module.name"``, of all processes, in the order of ranks."""
        for pipe in self.pipes:
            pipe.send((function, arguments, named))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(SECONDS):
                self.close()
                raise TimeoutError(f"{function} hangs on process {rank}")
            found.append(pipe.recv())
        for rank, (well, result) in enumerate(found):
            assert well, f"process {rank}:\n{result}"
        return [result for _, result in found]

    def close(self):
        for process in self.processes:
            process.kill()


def _serve(rank, number, port, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # uninitialised memory is NaN
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=number)
    while True:
        try:
            function, arguments, named = pipe.recv()
        except EOFError:
            return
        module, _, name = function.rpartition(".")
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(rank, *arguments, **named)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
