"""Of two processes one is lost: the other stops within a minute and says so, and the run goes on to the bytes of an undisturbed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from soak.processes import KILL, SHARED, UPDATE, At, Command, digits, steps
from soak.scale import share
from soak.whole import different_run

MINUTE = 60.0
LOST = "another of the 2 processes of this run was lost, and training stopped; "
EVERY_STEP = ["--checkpoint-minutes", "0"]
WORDS = [*digits(steps=13, evaluate_every=4), *EVERY_STEP]
LONG_STEPS = 1500
"""Long enough to be killed in the middle of; at a small scale 400 must do."""

PLACES = {
    "in a training step": (UPDATE, 8),
    "in an evaluation": ("permuteformer.train.loop.evaluate", 2),
    "while a checkpoint is written": ("permuteformer.train.loop.save", 5),
    "in its first step": (UPDATE, 1),
    "at the end of the run": ("permuteformer.train.loop.finish", 1),
}
CASES = [(rank, where) for where in PLACES for rank in (1, 0)] + [(0, "in data preparation")]


def run(scale: float, folder: Path, seed: int) -> Iterator[dict[str, object]]:
    """A line a lost process."""
    whole = folder / "whole"
    Command(*WORDS, output=whole, processes=2).succeed()
    for rank, where in share(CASES, scale):
        yield _lost(folder / "run", rank, where, whole)
        shutil.rmtree(folder / "run", ignore_errors=True)
    if Path("/proc").exists():
        whole, words = folder / "long", digits(steps=max(round(LONG_STEPS * min(scale, 1.0)), 400), evaluate_every=100)
        Command(*words, output=whole, processes=2).succeed()
        for rank in share((1, 0), scale):
            yield _lost_of_torchrun(folder / "run", rank, words, whole)
            shutil.rmtree(folder / "run", ignore_errors=True)


def _lost(run: Path, rank: int, where: str, whole: Path) -> dict[str, object]:
    """One of two, at a place; the two are started as torchrun starts them, and nobody ends the other."""
    name, number = PLACES.get(where, ("permuteformer.tasks.base.prepare", 1))
    killed = Command(*WORDS, output=run, processes=2, at=At(name, number, KILL, rank=rank))
    lost, other = killed.processes[rank], killed.processes[1 - rank]
    lost.join(600)
    begun = time.monotonic()
    codes = killed.wait()
    seconds = time.monotonic() - begun
    said = LOST in killed.sentence and "Traceback" not in killed.text
    Command(*WORDS, output=run, processes=2).succeed()
    wrong = different_run(run, whole)
    ok = lost.exitcode == -KILL and other.exitcode == 1 and said and seconds < MINUTE and not wrong
    what = f"process {rank} lost {where}"
    return {"what": what, "ok": ok, "codes": codes, "seconds until the other stopped": round(seconds, 2), "said": said, "wrong": wrong}


def _lost_of_torchrun(run: Path, rank: int, words: list[str], whole: Path) -> dict[str, object]:
    """By torchrun itself, as a user starts it; it ends the other where that does not end by itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "permuteformer"]
    said = run.with_name("said")
    with said.open("w") as file:
        torchrun = subprocess.Popen([*command, *words, "--output", str(run)], stdout=file, stderr=file, env={**os.environ, **SHARED})
    try:
        while not steps(run):
            assert torchrun.poll() is None, said.read_text()
            time.sleep(0.05)
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        assert len(children) == 2
        begun = time.monotonic()
        os.kill(int(children[rank]), KILL)
        code = torchrun.wait(2 * MINUTE)
        seconds = time.monotonic() - begun
    finally:
        torchrun.kill()
    at = steps(run)[-1]
    resumed = Command("resume", run, processes=2).succeed()
    wrong = different_run(run, whole)
    ok = code != 0 and seconds < MINUTE and not wrong and f"going on from step {at:,}" in resumed.text
    what = f"process {rank} of torchrun lost"
    return {"what": what, "ok": ok, "code": code, "seconds until all stopped": round(seconds, 2), "gone on from": at, "wrong": wrong}
