"""What a run is carried out with: processes, precision, trackers. What is not there is said before anything is done."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, LoggerType, ProjectConfiguration

from permuteformer.experiments.base import Experiment
from permuteformer.folders import write_whole
from permuteformer.ops.checks import check_integer
from permuteformer.registry import unknown

PACKAGES = {"comet_ml": "comet-ml"}
"""What to install for a tracker, where it has another name."""

WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA"


def start(precision: str, track: Sequence[str], shard: bool, sequence_parallel: int, folder: Path) -> Accelerator:
    """The processes of this run, and where its trackers write. ``end`` ends it."""
    _check_trackers(track)
    if precision == "float16" and not torch.cuda.is_available():
        raise ValueError("precision float16 needs a GPU; on a CPU use float32 or bfloat16")
    _check_processes(int(os.environ.get("WORLD_SIZE", 1)), shard, sequence_parallel)
    return Accelerator(
        # Not told so, it makes no processes of torchrun's out of those without a GPU; and a Mac's has no float64, in which sums are.
        cpu=not torch.cuda.is_available(),
        mixed_precision={"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[precision],
        log_with=list(track) or None,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "tensorboard")),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],  # they do not change
    )


def start_trackers(accelerator: Accelerator, track: Sequence[str], folder: Path, experiment: Experiment, step: int) -> None:
    """Open the trackers of a run that goes on after ``step``."""
    options: dict[str, dict[str, object]] = {"tensorboard": {"purge_step": step + 1}}  # what was written after the checkpoint is not shown
    if "wandb" in track and accelerator.is_main_process:
        options["wandb"] = {"name": folder.resolve().name, "dir": str(folder), "resume": "allow", "id": _identity(folder)}
    accelerator.init_trackers("permuteformer", init_kwargs={tracker: options.get(tracker, {}) for tracker in track})
    for tracker in accelerator.trackers:
        if tracker.name != "tensorboard":  # which takes numbers and words only
            tracker.store_init_configuration(experiment.to_json())


def end(accelerator: Accelerator) -> None:
    """Close the trackers and part from the other processes; after an exception too. Then another run may be started."""
    for tracker in accelerator.trackers:
        with suppress(OSError, AttributeError):  # its disk is full, which was said, or it was never opened
            tracker.finish()
    accelerator.state.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def advice(precision: str, device: torch.device) -> str:
    """What to know about a precision on this device, if there is anything."""
    if precision != "bfloat16" or device.type != "cpu" or os.environ.get(WITHOUT_AMX):
        return ""
    return (
        "bfloat16 on a CPU: some virtual machines say that they have AMX and do not let it be used; if this ends with an illegal "
        f"instruction, set {WITHOUT_AMX}=AVX512_CORE_FP16 and give the command again"
    )


def _check_processes(processes: int, shard: bool, sequence_parallel: int) -> None:
    if shard and processes < 2:
        raise ValueError("--shard shares out a model over processes, and this is one: torchrun --nproc-per-node 2 -m permuteformer train …")
    check_integer(sequence_parallel=sequence_parallel)
    if processes % sequence_parallel:
        there = "this is one" if processes == 1 else f"these are {processes}"
        raise ValueError(
            f"--sequence-parallel {sequence_parallel} spreads every row over {sequence_parallel} processes, and {there}: start so many, "
            f"or a multiple, torchrun --nproc-per-node {sequence_parallel} -m permuteformer train … --sequence-parallel {sequence_parallel}"
        )


def usual_trackers() -> tuple[str, ...]:
    """Without a word: TensorBoard where it is installed (``pip install 'permuteformer[tensorboard]'``), else none."""
    return ("tensorboard",) if find_spec("tensorboard") else ()


def _check_trackers(track: Sequence[str]) -> None:
    known = [str(kind) for kind in LoggerType if kind is not LoggerType.ALL]
    for name in track:
        if name not in known:
            raise ValueError(unknown("tracker (--track)", name, [*known, "none"]))
        if LoggerType(name) not in get_available_trackers():
            raise ValueError(f"track: {name} is not installed; pip install {PACKAGES.get(name, name)}, or choose --track none")


def _identity(folder: Path) -> str:
    """By which a tracker knows a run again that goes on."""
    path = folder / ".identity"
    if not path.exists():
        write_whole(path, secrets.token_hex(8).encode())
    return path.read_text()
