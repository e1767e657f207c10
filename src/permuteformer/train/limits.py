"""Memory that a process may have, so that running out of it is an error and not the end of the machine."""

from __future__ import annotations

from pathlib import Path


def limit_memory(memory_bytes: int | None) -> None:
    """Refuse this process more memory than that; and where the machine runs out, this process is the one to go."""
    if memory_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return
