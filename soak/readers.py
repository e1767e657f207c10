"""Many readers of a cache that is being built see all of it or wait, and it is built once; of two runs in one folder one is refused."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import shutil
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from soak.moments import Board, watch
from soak.processes import KILL, SERVER, SHARED, Command, digits
from soak.whole import different_run, left_over

READERS = 24
ROWS = 30_000


def run(scale: float, folder: Path, seed: int) -> Iterator[dict[str, object]]:
    """A line a cache that many read, a line a folder that two want."""
    rng, rows = random.Random(seed), ROWS if scale > 0.5 else ROWS // 5
    table = folder / "table.csv"
    table.write_text("text,label\n" + "".join(f"the {n * n % 1009} cats of {n},{'abc'[n % 3]}\n" for n in range(rows)))
    for number in range(max(round(6 * scale), 2)):
        yield _many_readers(folder / f"cache-{number}", table, rows, rng, killed=number % 2 == 1)
    whole = folder / "whole"
    words = digits(steps=40, evaluate_every=10)
    Command(*words, output=whole).succeed()
    for number in range(max(round(10 * scale), 1)):
        yield _two_runs(folder / f"runs-{number}", words, whole, rng)


def _many_readers(cache: Path, table: Path, rows: int, rng: random.Random, killed: bool) -> dict[str, object]:
    """Readers that come one after another within the time of building; where ``killed``, the one that builds is killed."""
    cache.mkdir()
    boards = [Board(cache.with_name(f"{cache.name}-board-{number}")) for number in range(READERS)]
    pipes, processes = list[Connection](), []
    for board in boards:
        ours, theirs = SERVER.Pipe(duplex=False)
        processes.append(SERVER.Process(target=_read, args=(str(table), str(cache), rng.random() * 0.5, str(board.path), theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    was_killed = _kill_the_builder(processes, boards) if killed else None
    found, lost = [], []
    for number, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        try:
            found.append(pipe.recv())
        except EOFError:
            lost.append(number)
        process.join()
    builders = sum(board.changes for board in boards)
    for board in boards:
        board.path.unlink()
    alike = len(set(found)) == 1 and found[0][0] == rows
    entries = [path.name for path in cache.iterdir() if not path.name.startswith(".")]
    ok = alike and len(entries) == 1 and not left_over(cache) and builders == 1 + (was_killed is not None)
    ok = ok and lost == ([] if was_killed is None else [was_killed])
    if ok:
        shutil.rmtree(cache)
    what = f"{READERS} readers of a cache that is being built" + (", by a process that is killed" if killed else "")
    return {"what": what, "ok": ok, "readers": len(found), "alike": alike, "times built": builders, "entries": len(entries)}


def _kill_the_builder(processes: list[Any], boards: list[Board]) -> int | None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends and any(process.is_alive() for process in processes):
        for number, board in enumerate(boards):
            if board.phase != "between" and processes[number].is_alive():
                os.kill(processes[number].pid, KILL)
                return number
        time.sleep(0.001)
    return None


def _read(table: str, cache: str, delay: float, board: str, answer: Connection) -> None:
    """In a process of its own: all items, as one hash. Building is a change on the board."""
    os.environ |= {**SHARED, "PERMUTEFORMER_CACHE": cache}
    from permuteformer.tasks import prepare
    from permuteformer.tasks.classify import Classify

    there = Board(Path(board))
    write = there.tell_of("data preparation", prepare._write)

    def counted(*given: Any) -> None:
        there.change()
        write(*given)

    prepare._write = counted  # type: ignore[assignment]
    time.sleep(delay)
    task, digest, count = Classify(table), hashlib.sha256(), 0
    for split in ("train", "validation", "test"):
        items = task.items(split)
        for start in range(0, len(items), 1000):
            digest.update(repr(items[start : start + 1000]).encode())
        count += len(items)
    answer.send((count, digest.hexdigest()))


def _two_runs(folder: Path, words: list[str], whole: Path, rng: random.Random) -> dict[str, object]:
    """Two commands for the same folder, a moment apart: one trains, the other is told so, or finds it finished."""
    folder.mkdir()
    board = Board(folder / "board")
    poison = functools.partial(watch, board=str(board.path), folder=str(folder))
    first = Command(*words, output=folder / "run", poison=poison)
    apart = rng.random() * 1.5
    time.sleep(apart)
    goes_on = (folder / "run" / "experiment.json").exists() and rng.random() < 0.5
    second = Command("resume", folder / "run") if goes_on else Command(*words, output=folder / "run")
    codes = sorted([*first.wait(), *second.wait()])
    refused = "is in use by another process: wait for it to end, or choose another folder" in first.sentence + second.sentence
    wrong = different_run(folder / "run", whole)
    ok = not wrong and codes == [0, int(refused)] and "Traceback" not in first.text + second.text
    if ok:
        shutil.rmtree(folder)
    return {
        "what": "two runs in one folder",
        "ok": ok,
        "seconds apart": round(apart, 2),
        "refused": refused,
        "codes": codes,
        "wrong": wrong,
    }
