"""Many readers of a cache that is being built see all of it or wait, and it is built once; of two runs in one folder one is refused."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import shutil
import threading
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
    words = digits(steps=200, evaluate_every=50)
    Command(*words, output=whole).succeed()
    for number in range(max(round(10 * scale), 1)):
        yield _two_runs(folder / f"runs-{number}", words, whole, rng, in_a_step=number % 2 == 0)


def _many_readers(cache: Path, table: Path, rows: int, rng: random.Random, killed: bool) -> dict[str, object]:
    """Readers that come one after another within the time of building; where ``killed``, the one that builds is killed."""
    cache.mkdir()
    boards = [Board(cache.with_name(f"{cache.name}-board-{number}")) for number in range(READERS)]
    pipes, processes = list[Connection](), []
    lives = rng.random() * 0.2 if killed else None
    for board in boards:
        ours, theirs = SERVER.Pipe(duplex=False)
        processes.append(SERVER.Process(target=_read, args=(str(table), str(cache), rng.random() * 0.5, str(board.path), lives, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    found, lost = [], []
    for pipe, process in zip(pipes, processes, strict=True):
        try:
            found.append(pipe.recv())
        except EOFError:
            process.join()
            lost.append(process.exitcode)
        process.join()
    builders = sum(board.changes for board in boards)
    for board in boards:
        board.path.unlink()
    alike = len(set(found)) == 1 and found[0][0] == rows
    entries = [path.name for path in cache.iterdir() if not path.name.startswith(".")]
    # Killed when it had built all, nobody builds again.
    ok = alike and len(entries) == 1 and not left_over(cache) and builders in ((1, 2) if killed else (1,))
    ok = ok and lost == ([-KILL] if killed else [])
    if ok:
        shutil.rmtree(cache)
    what = f"{READERS} readers of a cache that is being built" + (", by a process that is killed" if killed else "")
    return {"what": what, "ok": ok, "readers": len(found), "alike": alike, "times built": builders, "entries": len(entries)}


def _read(table: str, cache: str, delay: float, board: str, lives: float | None, answer: Connection) -> None:
    """In a process of its own: all items, as one hash. Building is a change on the board; who builds first ``lives`` so many seconds."""
    os.environ |= {**SHARED, "PERMUTEFORMER_CACHE": cache}
    from permuteformer.tasks import prepare
    from permuteformer.tasks.classify import Classify

    there = Board(Path(board))
    write = there.tell_of("data preparation", prepare._write)

    def counted(*given: Any) -> None:
        there.change()
        end = threading.Timer(lives or 0, os.kill, (os.getpid(), KILL))
        is_to_end = lives is not None and _is_first(Path(f"{cache}-builder"))
        if is_to_end:
            end.start()
        write(*given)
        if is_to_end:
            end.join()

    prepare._write = counted  # type: ignore[assignment]
    time.sleep(delay)
    task, digest, count = Classify(table), hashlib.sha256(), 0
    for split in ("train", "validation", "test"):
        items = task.items(split)
        for start in range(0, len(items), 1000):
            digest.update(repr(items[start : start + 1000]).encode())
        count += len(items)
    answer.send((count, digest.hexdigest()))


def _is_first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _two_runs(folder: Path, words: list[str], whole: Path, rng: random.Random, in_a_step: bool) -> dict[str, object]:
    """Two commands for one folder: the second comes while the first trains, and is told so; or at any moment, and may find it finished."""
    folder.mkdir()
    board = Board(folder / "board")
    poison = functools.partial(watch, board=str(board.path), folder=str(folder))
    first = Command(*words, output=folder / "run", poison=poison)
    begun, apart = time.monotonic(), rng.random() * 1.5
    while board.began("training step") == 0 if in_a_step else time.monotonic() < begun + apart:
        assert first.processes[0].is_alive() or not in_a_step, first.text
        time.sleep(0.001)
    apart = time.monotonic() - begun
    goes_on = (folder / "run" / "experiment.json").exists() and rng.random() < 0.5
    second = Command("resume", folder / "run") if goes_on else Command(*words, output=folder / "run")
    codes = sorted([*first.wait(), *second.wait()])
    refused = "is in use by another process: wait for it to end, or choose another folder" in first.sentence + second.sentence
    wrong = different_run(folder / "run", whole)
    ok = not wrong and codes == [0, int(refused)] and "Traceback" not in first.text + second.text and (refused or not in_a_step)
    if ok:
        shutil.rmtree(folder)
    return {
        "what": "two runs in one folder" + (", the second in a step of the first" if in_a_step else ""),
        "ok": ok,
        "seconds apart": round(apart, 2),
        "refused": refused,
        "codes": codes,
        "wrong": wrong,
    }
