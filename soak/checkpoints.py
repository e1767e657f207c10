"""A checkpoint of which a file is cut short or has one bit flipped is noticed every time, and the one before it is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from permuteformer.train.checkpoint import load, load_latest
from soak.processes import KILL, UPDATE, At, Command, digits
from soak.scale import share
from soak.whole import different_run

FLIPS = 200
"""Bits of each file, at scale 1."""

WORDS = [*digits(steps=13, evaluate_every=4), "--checkpoint-minutes", "0"]


def run(scale: float, folder: Path, seed: int) -> Iterator[dict[str, object]]:
    """A line a file and kind of damage, and a line a run that goes on after one."""
    rng = random.Random(seed)
    whole, under_way = folder / "whole", folder / "under-way"
    Command(*WORDS, output=whole).succeed()
    killed = Command(*WORDS, output=under_way, at=At(UPDATE, 11, KILL))
    assert killed.wait() == [-KILL], killed.text
    checkpoints = under_way / "checkpoints"
    good, problems = load_latest(checkpoints)
    assert good is not None
    assert not problems
    last = checkpoints / f"step-{good.step:09d}"
    for file in sorted(last.iterdir()):
        content = file.read_bytes()
        for how, pieces in _damages(content, max(round(FLIPS * scale), 2), rng).items():
            yield {"what": f"{file.name}, {how}", **_noticed(checkpoints, good.step, file, pieces), "bytes": len(content)}
            file.write_bytes(content)
        file.unlink()
        yield {"what": f"{file.name}, gone", **_noticed(checkpoints, good.step, file, [None])}
        file.write_bytes(content)
    assert load(checkpoints, good.step).step == good.step
    for name in share([file.name for file in sorted(last.iterdir())], scale):
        for how, damage in _DAMAGE.items():
            yield _gone_on_with(under_way, whole, last.name, name, how, damage, folder)


def _damages(content: bytes, flips: int, rng: random.Random) -> dict[str, list[bytes | None]]:
    cuts = sorted({len(content) * tenth // 10 for tenth in range(10)} | {len(content) - 1})
    flipped: list[bytes | None] = []
    for bit in sorted(rng.sample(range(8 * len(content)), min(flips, 8 * len(content)))):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        flipped.append(bytes(changed))
    return {"cut short": [content[:length] for length in cuts], "bit flipped": flipped, "a byte more": [content + b"\0"]}


def _noticed(checkpoints: Path, step: int, file: Path, contents: list[bytes | None]) -> dict[str, object]:
    """How often a damage was noticed, and the checkpoint before it found, with finite weights that are its own."""
    before, _ = sorted(int(path.name[5:]) for path in checkpoints.glob("step-*"))[-2:]
    theirs = load(checkpoints, before).tensors
    noticed = used = 0
    for content in contents:
        if content is not None:
            file.write_bytes(content)
        found, problems = load_latest(checkpoints)
        noticed += len(problems) == 1 and f"step-{step:09d} is damaged" in problems[0]
        used += found is not None and found.step == before and _equal(found.tensors, theirs)
    return {"ok": noticed == used == len(contents), "damaged": len(contents), "noticed": noticed, "the one before used": used}


def _equal(one: dict[str, dict[str, torch.Tensor]], other: dict[str, dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(value, other[group][name]) for group, tensors in one.items() for name, value in tensors.items())


def _half(content: bytearray) -> bytearray:
    return content[: len(content) // 2]


def _flip(content: bytearray) -> bytearray:
    content[len(content) // 2] ^= 1
    return content


_DAMAGE: dict[str, Callable[[bytearray], bytearray]] = {"cut short": _half, "bit flipped": _flip}


def _gone_on_with(
    under_way: Path, whole: Path, last: str, name: str, how: str, damage: Callable[[bytearray], bytearray], folder: Path
) -> dict[str, object]:
    """The command itself: it says what is damaged, and ends with the bytes of the undisturbed run."""
    run = folder / "resumed"
    shutil.copytree(under_way, run)
    file = run / "checkpoints" / last / name
    file.write_bytes(damage(bytearray(file.read_bytes())))
    resumed = Command("resume", run, "--checkpoint-minutes", "0").succeed()
    wrong = different_run(run, whole)
    said = f"{last} is damaged" in resumed.sentence and "the checkpoint before it is used" in resumed.sentence
    logged = f"{last} is damaged" in (run / "log.txt").read_text()
    shutil.rmtree(run)
    return {"what": f"{name}, {how}, gone on with", "ok": said and logged and not wrong, "said": said, "wrong": wrong}
