"""Checkpoints: whole or not there, and never believed without a check."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from permuteformer.folders import flush, json_of, remove_folder, whole_folder
from permuteformer.texts import printable

SUMS = "sums.json"
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after a step."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    """Names of files to names of tensors."""


class Damaged(ValueError):
    """A checkpoint that is not what was written."""


def save(folder: Path, step: int, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Write a checkpoint into ``folder``, whole or not at all. It takes the place of one of the same step when it is written."""
    path = folder / _name(step)
    with whole_folder(path) as partial:
        for name, group in tensors.items():
            save_file({key: value.contiguous() for key, value in group.items()}, partial / f"{name}.safetensors")
        (partial / STATE).write_text(json.dumps(state))
        (partial / SUMS).write_text(json.dumps({file.name: _sum(file) for file in sorted(partial.iterdir())}))
        if path.exists():
            for file in partial.iterdir():  # the old one stays until the disk has the new one
                flush(file)
            replaced = path.with_name(f".{path.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
    return path


def steps(folder: Path) -> list[int]:
    """The steps there are checkpoints of, in order."""
    found = (re.fullmatch(r"step-(\d{9,})", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def load(folder: Path, step: int) -> Checkpoint:
    """Read a checkpoint; raises ``Damaged`` where a byte is not what was written."""
    path = folder / _name(step)
    try:
        sums = json_of(path / SUMS)
        if not isinstance(sums, dict) or not all(name == Path(name).name and (path / name).is_file() for name in sums):
            raise Damaged(f"{path} is damaged: {SUMS} must name files that are there")
        wrong = [name for name, value in sums.items() if _sum(path / name) != value]
        if STATE not in sums or wrong:
            raise Damaged(f"{path} is damaged: {', '.join(wrong) or SUMS}")
        state = json_of(path / STATE)
        if not isinstance(state, dict):
            raise Damaged(f"{path} is damaged: {STATE} must be an object")
        files = {name.removesuffix(".safetensors"): path / name for name in sums if name.endswith(".safetensors")}
        return Checkpoint(step, state, {name: load_file(file) for name, file in files.items()})
    except Damaged:
        raise
    except (OSError, ValueError, AttributeError, TypeError, SafetensorError) as error:
        raise Damaged(f"{path} is damaged: {printable(str(error))}") from error


def load_latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The last checkpoint that is good, and what is wrong with those after it."""
    problems: list[str] = []
    for step in reversed(steps(folder)):
        try:
            return load(folder, step), problems
        except Damaged as error:
            problems.append(str(error))
    return None, problems


def tidy(folder: Path, newest: int, keep: set[int], last: int = 2) -> None:
    """Delete all but the ``last`` checkpoints up to step ``newest`` and those of the steps to ``keep``.

    One before the last is there in case that is damaged. Those after ``newest`` were damaged, else the run had gone on from them. What a
    killed process left behind goes too.
    """
    there = steps(folder)
    kept = {step for step in there if step <= newest}
    kept = {*sorted(kept)[-last:], *(kept & keep)}
    for step in there:
        if step not in kept:
            remove_folder(folder / _name(step))
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(2**20):
            yield block
