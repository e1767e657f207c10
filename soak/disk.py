"""A disk that is full or read-only stops a command with a sentence, nothing is lost by it, and with room it goes on as if nothing had been.

The disk is a small tmpfs, and read-only a mount of it, where one may mount; else the size of files is limited (``ulimit -f``), and the
folder has no permission to write. Lines say which.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from permuteformer.train.checkpoint import load
from soak.processes import TERM, UPDATE, At, Command, digits, steps, training
from soak.scale import share
from soak.whole import different_run, files, left_over

DISK_BYTES = 4 * 2**20
WORDS = [*digits(steps=9, evaluate_every=4)]
FEW = {"steps": 1, "batch_size": 8, "train_items": 8, "validation_items": 8, "test_items": 8}
GO_ON = ["--checkpoint-minutes", "0"]
STOPPED = "and training stopped; the checkpoint of step 6 stays."


def run(scale: float, folder: Path, seed: int) -> Iterator[dict[str, object]]:
    """A line a place that cannot be written."""
    disk = folder / "disk"
    disk.mkdir()
    whole = folder / "whole"
    Command(*WORDS, output=whole).succeed()
    if not mount(disk):
        yield _limited_files(folder / "limited", whole)
        if os.geteuid():
            yield from _read_only(folder / "here", whole, _without_permission)
        return
    try:
        yield from _full(disk, whole, folder, scale)
    finally:
        umount(disk)
    yield _limited_files(folder / "limited", whole)
    assert mount(disk)
    try:
        yield from _read_only(disk, whole, _remounted)
    finally:
        umount(disk)


def mount(place: Path) -> bool:
    """A small disk at ``place``; false where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True).returncode == 0
    return False


def umount(place: Path) -> None:
    """Take the disk away."""
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, free: int) -> None:
    """Leave nothing of the disk but about ``free`` bytes."""
    file = disk / "filler"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)) == 4096:
            pass
    os.truncate(file, max(file.stat().st_size // 4096 * 4096 - free, 0))


def _full(disk: Path, whole: Path, folder: Path, scale: float) -> Iterator[dict[str, object]]:
    begun = folder / "begun"
    stopped = Command(*WORDS, output=begun, at=At(UPDATE, 6, TERM))
    assert stopped.wait() == [128 + TERM], stopped.text
    shutil.rmtree(begun / "tensorboard")
    needed = 2 * sum(map(len, files(begun).values()))
    for free in share([needed * n // 12 // 4096 * 4096 for n in range(12)], scale):
        yield _full_training(disk, begun, whole, free)
    table = folder / "table.csv"
    table.write_text("text,label\n" + "".join(f"the {n * n % 1009} cats of {n},{'abc'[n % 3]}\n" for n in range(20_000)))
    words = training(
        "classify", str(table), fields={"steps": 1, "train_items": 8, "validation_items": 8, "test_items": 8, "hidden_size": 16}
    )
    for free in share((0, 4096, 200_000, 500_000), scale):
        yield _full_cache(disk, [*words, "--output", str(folder / "of-table")], free)
        shutil.rmtree(folder / "of-table", ignore_errors=True)
    for free in share((0, 4096, 100_000), scale):
        yield _full_report(disk, whole, free)


def _full_training(disk: Path, begun: Path, whole: Path, free: int) -> dict[str, object]:
    run = disk / "run"
    shutil.copytree(begun, run)
    fill(disk, free)
    first = Command("resume", run, *GO_ON)
    (code,) = first.wait()
    said = f"the disk is full, {STOPPED.replace('step 6', f'step {steps(run)[-1]}')} Make room, then go on with:" in first.sentence
    kept = load(run / "checkpoints", steps(run)[-1]).step >= 6
    (disk / "filler").unlink()
    Command("resume", run).succeed()
    # Steps of checkpoints depend on when the disk was full; what they lead to does not.
    wrong = [name for name in different_run(run, whole) if not name.startswith("checkpoints")]
    wrong += [f"left: {name}" for name in left_over(run)]
    shutil.rmtree(run)
    ok = kept and not wrong and "Traceback" not in first.text and (code == 0 or (code == 1 and said))
    stopped = "" if code else ", which was enough"
    return {"what": f"training, disk full but for {free} bytes{stopped}", "ok": ok, "by": "tmpfs", "code": code, "wrong": wrong}


def _full_cache(disk: Path, words: list[str], free: int) -> dict[str, object]:
    cache = disk / "cache"
    fill(disk, free)
    environment = {"PERMUTEFORMER_CACHE": cache}
    first = Command(*words, environment=environment)
    (code,) = first.wait()
    said = "the disk is full, and nothing is kept of" in first.sentence and "PERMUTEFORMER_CACHE" in first.sentence
    entries = [path.name for path in cache.iterdir() if path.suffix != ".lock"] if cache.exists() else []
    (disk / "filler").unlink()
    Command(*words, environment=environment).succeed()
    shutil.rmtree(cache)
    ok = code == 1 and said and not entries and "Traceback" not in first.text
    return {"what": f"data preparation, disk full but for {free} bytes", "ok": ok, "by": "tmpfs", "code": code, "left": entries}


def _full_report(disk: Path, run: Path, free: int) -> dict[str, object]:
    output = disk / "report"
    Command("report", run, output=output).succeed()
    whole = files(output)
    (output / "report.md").write_text("the old one")
    before = files(output)
    fill(disk, free)
    first = Command("report", run, output=output)
    (code,) = first.wait()
    said = f"the disk is full, and nothing is kept of {disk}" in first.sentence and "choose another folder with --output" in first.sentence
    stays = files(output) == before
    (disk / "filler").unlink()
    Command("report", run, output=output).succeed()
    wrong = left_over(disk) + ([] if files(output) == whole else ["report"])
    shutil.rmtree(output)
    ok = code == 1 and said and stays and not wrong and "Traceback" not in first.text
    return {
        "what": f"report, disk full but for {free} bytes",
        "ok": ok,
        "by": "tmpfs",
        "code": code,
        "old one stays": stays,
        "wrong": wrong,
    }


def _limited_files(run: Path, whole: Path) -> dict[str, object]:
    first = Command(*WORDS, output=run, poison=small_files)
    (code,) = first.wait()
    said = "a file may not grow any further (ulimit -f), and training stopped; there is no checkpoint yet. Make room" in first.sentence
    empty = os.listdir(run / "checkpoints") == []
    Command("resume", run).succeed()
    wrong = different_run(run, whole)
    ok = code == 1 and said and empty and not wrong and "Traceback" not in first.text
    return {"what": "training, a file may not grow", "ok": ok, "by": "ulimit -f", "code": code, "wrong": wrong}


def small_files(rank: int) -> None:
    """No file may be larger than the weights."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))


@contextlib.contextmanager
def _remounted(place: Path) -> Iterator[str]:
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    try:
        yield "read-only mount"
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)


@contextlib.contextmanager
def _without_permission(place: Path) -> Iterator[str]:
    folders = [place, *(path for path in place.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    try:
        yield "permissions"
    finally:
        for path in folders:
            path.chmod(0o755)


def _read_only(disk: Path, whole: Path, closed: Callable[[Path], contextlib.AbstractContextManager[str]]) -> Iterator[dict[str, object]]:
    """A new run, one that goes on, a cache and a report in a place that may not be written, and then may."""
    disk.mkdir(exist_ok=True)
    run, cache = disk / "run", {"PERMUTEFORMER_CACHE": disk / "cache"}
    with closed(disk) as by:
        new, of_cache = Command(*WORDS, output=run), Command(*WORDS, output=disk.with_name("run"), environment=cache)
        report = Command("report", whole, output=disk / "report")
        yield _refused("a new run", new, f"{run} cannot be written, ", by, disk)
        yield _refused("data preparation", of_cache, "PERMUTEFORMER_CACHE", by, disk)
        yield _refused("a report", report, f"{disk / 'report'} cannot be written, ", by, disk)
    stopped = Command(*WORDS, output=run, environment=cache, at=At(UPDATE, 6, TERM))
    assert stopped.wait() == [128 + TERM], stopped.text
    before = files(run)
    with closed(disk) as by:
        line = _refused("a run that goes on", Command("resume", run, environment=cache), f"{run} cannot be written, ", by, disk)
        yield {**line, "ok": line["ok"] and files(run) == before}
        elsewhere = disk.with_name("elsewhere")
        Command(*WORDS, output=elsewhere, environment=cache).succeed()
        wrong = different_run(elsewhere, whole)
        yield {"what": "read-only: a cache that is there, read", "ok": not wrong, "by": by, "wrong": wrong}
    Command("resume", run, environment=cache).succeed()
    wrong = [name for name in different_run(run, whole) if not name.startswith("checkpoints")]
    yield {"what": "writable again: the run goes on", "ok": not wrong, "by": by, "wrong": wrong}


def _refused(what: str, command: Command, words: str, by: str, folder: Path) -> dict[str, object]:
    (code,) = command.wait()
    said = words in command.sentence and "Traceback" not in command.text
    told = command.sentence.replace(str(folder), "FOLDER")[:300]
    return {"what": f"read-only: {what}", "ok": code == 1 and said, "by": by, "code": code, "said": told}
