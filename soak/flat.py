"""Memory, file descriptors and threads stay flat over 20,000 training steps and 1,000,000 generated tokens.

Training is the command; so are 100,000 tokens of one text. The million is ten texts side by side, from one state. The process itself looks
120 times a run. Flat is: over the last two thirds, the straight line through the resident memory rises by less than 4 MiB, and there are
no more file descriptors or threads at the end than at the beginning of them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from soak.processes import SERVER, TINY, UPDATE, Command, digits, find, training

STEPS, TOKENS, TEXTS = 20_000, 100_000, 10
LOOKS = 120
SHOWN = 24
"""Points of a curve that are kept."""

MOST_GROWTH = 4 * 2**20
READ = "permuteformer.train.generate.Generation._read"


def run(scale: float, folder: Path, seed: int) -> Iterator[dict[str, object]]:
    """A line a run that is long."""
    steps, tokens = max(round(STEPS * scale), LOOKS), max(round(TOKENS * scale), LOOKS)
    words = digits(steps=steps, evaluate_every=max(steps // 20, 1), learning_rate=1e-4, warmup_steps=100)
    yield _command(f"{steps:,} training steps", [*words, "--output", folder / "run"], UPDATE, steps, folder / "looks")
    text = folder / "text.txt"
    text.write_text("".join(f"The cat number {n} sat on mat {n * n % 7}.\n\nIt slept.\n" for n in range(300)))
    fields = {**TINY, "steps": 20, "batch_size": 4, "length": 48, "context": 16, "validation_items": 4, "test_items": 4}
    Command(*training("lm", str(text), fields=fields), output=folder / "speaks").succeed()
    generate = ["generate", folder / "speaks", "--tokens", tokens, "--output", folder / "said.txt"]
    yield _command(f"{tokens:,} generated tokens, one text", generate, READ, tokens, folder / "looks")
    looks = folder / "side-by-side"
    process = SERVER.Process(target=_side_by_side, args=(str(folder / "speaks"), tokens, seed, str(looks)))
    process.start()
    process.join()
    yield _flat(f"{TEXTS * tokens:,} generated tokens, {TEXTS} texts side by side", looks, process.exitcode or 0)


def _command(what: str, words: list[Any], name: str, calls: int, looks: Path) -> dict[str, object]:
    looks.unlink(missing_ok=True)
    command = Command(*words, poison=functools.partial(look_at_calls, name=name, every=max(calls // LOOKS, 1), looks=str(looks)))
    (code,) = command.wait(7200)
    return {**_flat(what, looks, code), **({"said": command.sentence[-500:]} if code else {})}


def _flat(what: str, looks: Path, code: int) -> dict[str, object]:
    points = [json.loads(line) for line in looks.read_text().splitlines()]
    later = points[len(points) // 3 :]
    calls, memory = (np.array([point[key] for point in later], dtype=float) for key in ("calls", "memory_bytes"))
    slope = float(np.polyfit(calls, memory, 1)[0])
    growth = slope * float(calls[-1] - calls[0])
    more = {key: later[-1][key] - later[0][key] for key in ("files", "threads")}
    ok = code == 0 and len(points) >= LOOKS and growth < MOST_GROWTH and max(more.values()) <= 0
    line: dict[str, object] = {"what": what, "ok": ok, "code": code, "growth_bytes": round(growth), "bytes_a_call": round(slope, 2)}
    kept = [points[round(n * (len(points) - 1) / (SHOWN - 1))] for n in range(SHOWN)]
    return {**line, **{f"more {key}": count for key, count in more.items()}, "most_growth_bytes": MOST_GROWTH, "curve": kept}


def look_at_calls(rank: int, name: str, every: int, looks: str) -> None:
    """Have this process note its memory, file descriptors and threads at every so many calls of a function."""
    holder, attribute = find(name)
    function, calls = getattr(holder, attribute), [0]

    @functools.wraps(function)
    def counted(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] % every == 0:
            _look(calls[0], looks)
        return function(*given, **named)

    setattr(holder, attribute, counted)


def _side_by_side(run: str, tokens: int, seed: int, looks: str) -> None:
    """In a process of its own: many texts, a token of each at a time, drawn from the model's answer."""
    import torch

    from permuteformer.models.cache import PermuteFormerCache
    from permuteformer.train.saved import load

    torch.set_num_threads(1)
    model = load(Path(run), device="cpu").model
    cache, draw = PermuteFormerCache(model.config.num_hidden_layers), torch.Generator().manual_seed(seed)
    ids = torch.ones(TEXTS, 1, dtype=torch.int64)
    with torch.inference_mode():
        for number in range(1, tokens + 1):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
            ids = torch.multinomial(logits.softmax(-1), 1, generator=draw)
            if number % max(tokens // LOOKS, 1) == 0:
                _look(number, looks)


def _look(calls: int, looks: str) -> None:
    """At this process; from /proc, which Linux has."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory, threads = int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"])
    with open(looks, "a", encoding="utf-8") as file:
        now = {"calls": calls, "memory_bytes": memory, "files": len(os.listdir("/proc/self/fd")), "threads": threads}
        file.write(json.dumps(now) + "\n")
