"""Checkpoints: atomic, checksummed folders of weights, optimizer state and progress."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from permuteformer.formatting import printable
from permuteformer.storage import atomic_folder, fsync, read_json, remove_folder

CHECKSUMS = "checksums.json"
STATE = "state.json"

Tensors = dict[str, Tensor]

FULL = StateDictOptions(full_state_dict=True)  # with cpu_offload other processes than the main one would get nothing


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensors]
    """Tensors by file: ``"model"`` and ``"optimizer"``."""


class Damaged(ValueError):
    """A checkpoint whose files are not the ones that were written."""


def save(folder: Path, step: int, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Write a checkpoint atomically; one of the same step is deleted when all files of the new one are on disk."""
    path = folder / _name(step)
    with atomic_folder(path) as partial:
        for name, group in tensors.items():
            save_file({key: value.contiguous() for key, value in group.items()}, partial / f"{name}.safetensors")
        (partial / STATE).write_text(json.dumps(state))
        (partial / CHECKSUMS).write_text(json.dumps({file.name: _checksum(file) for file in sorted(partial.iterdir())}))
        if path.exists():
            for file in partial.iterdir():
                fsync(file)
            remove_folder(path)
    return path


def steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints, in order."""
    found = (re.fullmatch(r"step-(\d{9,})", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def load(folder: Path, step: int) -> Checkpoint:
    """Read a checkpoint; raise ``Damaged`` if a file has changed since it was written."""
    path = folder / _name(step)
    try:
        sums = read_json(path / CHECKSUMS)
        if not all(name == Path(name).name and (path / name).is_file() for name in sums):
            raise ValueError(f"{CHECKSUMS} names a file that is missing")
        if wrong := [name for name in {STATE, *sums} if sums.get(name) != _checksum(path / name)]:
            raise ValueError(", ".join(sorted(wrong)))
        state = read_json(path / STATE)
        if not isinstance(state, dict):
            raise ValueError(f"{STATE} must be an object")
        files = {name.removesuffix(".safetensors"): path / name for name in sums if name.endswith(".safetensors")}
        return Checkpoint(step, state, {name: load_file(file) for name, file in files.items()})
    except (OSError, ValueError, AttributeError, TypeError, SafetensorError) as error:
        raise Damaged(f"{path} is damaged: {printable(str(error))}") from error


def load_latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the latest checkpoint that is not damaged, and what is wrong with later ones."""
    damaged: list[str] = []
    for step in reversed(steps(folder)):
        try:
            return load(folder, step), damaged
        except Damaged as error:
            damaged.append(str(error))
    return None, damaged


def remove_old(folder: Path, newest: int, keep: set[int], last: int = 2) -> None:
    """Delete all checkpoints but the ``last`` ones up to step ``newest`` and those of the steps to ``keep``.

    The one before the last is kept in case that is damaged. Checkpoints after ``newest`` are damaged: the run did not resume from them.
    Leftovers of a killed process are deleted too.
    """
    found = steps(folder)
    good = {step for step in found if step <= newest}
    kept = {*sorted(good)[-last:], *(good & keep)}
    for step in found:
        if step not in kept:
            remove_folder(folder / _name(step))
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def model_tensors(model: nn.Module) -> Tensors:
    """Return weights and buffers, unsharded, on the CPU; tied weights once. All processes must call it."""
    _reshard(model)
    state, own = get_model_state_dict(model, options=FULL), _own_names(model)
    return {name: value.detach().cpu() for name, value in state.items() if name in own and isinstance(value, Tensor)}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> Tensors:
    """Return the optimizer's state by the names of the weights. All processes must call it."""
    _reshard(model)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    return {f"{name}/{key}": value.cpu() for name, entry in state.items() for key, value in entry.items()}  # type: ignore[union-attr]


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights and buffers into a model; raise ``ValueError`` if they are those of another one."""
    _reshard(model)
    if others := _own_names(model) ^ set(tensors):
        raise ValueError(f"the weights are of another model: {', '.join(sorted(others)[:3])} is in one of them only")
    try:
        set_model_state_dict(model, dict(tensors), options=StateDictOptions(full_state_dict=True, strict=False))  # without tied names
    except RuntimeError as error:
        raise ValueError(f"the weights are of another model: {error}") from None


def load_optimizer(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Copy the state into an optimizer; raise ``ValueError`` if it is that of another model."""
    _reshard(model)
    state: dict[str, dict[str, Tensor]] = {}
    shapes = {name: value.shape for name, value in model.named_parameters()}
    for name, value in tensors.items():
        weight, _, key = name.rpartition("/")
        if weight not in shapes:
            raise ValueError(f"the optimizer is of another model: it has {name}")
        if value.shape != (torch.Size() if key == "step" else shapes[weight]):
            raise ValueError(f"the optimizer is of another model: {name} is {tuple(value.shape)}, not {tuple(shapes[weight])}")
        state.setdefault(weight, {})[key] = value
    groups = get_optimizer_state_dict(model, optimizer, options=FULL)["param_groups"]
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups}, options=FULL)  # type: ignore[dict-item]


def _own_names(model: nn.Module) -> set[str]:
    """Return the names of weights and saved buffers; tied weights have one."""
    return {name for name, _ in (*model.named_parameters(), *model.named_buffers())} & set(model.state_dict())


def _reshard(model: nn.Module) -> None:
    """After an evaluation a sharded model has some weights unsharded, which the optimizer does not know."""
    if isinstance(model, FSDPModule):
        model.reshard()
