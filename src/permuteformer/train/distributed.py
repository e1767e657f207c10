"""Processes of a run: start and end, communication, trackers, and the shard of a row that each process holds."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, LoggerType, ProjectConfiguration, broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad

from permuteformer.experiments.experiment import RunOptions
from permuteformer.ops.sequence_parallel import SequenceGroup
from permuteformer.registry import unknown
from permuteformer.storage import atomic_write
from permuteformer.tasks import Batch
from permuteformer.tasks.inputs import UNSCORED

T = TypeVar("T")


@dataclass(frozen=True)
class Distributed:
    """The processes of a run, as this one sees them.

    Groups of ``sequence_size`` processes hold the same rows, a shard of the sequence each; the groups divide every batch.
    """

    accelerator: Accelerator
    data_rank: int = 0
    """Group of this process."""
    data_size: int = 1
    """Number of groups."""
    sequence: SequenceGroup | None = None
    """The processes of its group; ``None`` if it is alone."""

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self.accelerator.process_index)

    @property
    def size(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def sequence_rank(self) -> int:
        """Shard of the sequence that this process holds."""
        return 0 if self.sequence is None else self.sequence.rank

    @property
    def sequence_size(self) -> int:
        """Number of shards of a sequence."""
        return 1 if self.sequence is None else self.sequence.size

    def all_sum(self, *numbers: float) -> list[float]:
        """Return the sums of numbers over all processes, which must call it together."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        summed: list[float] = self.accelerator.reduce(own, "sum").tolist()
        return summed

    def gather(self, values: list[T]) -> list[T]:
        """Return the lists of all processes, joined in the order of their numbers."""
        gathered: list[T] = gather_object(values)
        return gathered

    def on_main(self, action: Callable[[], T]) -> T:
        """Call ``action`` on the main process and return its result, or raise its exception, on all of them."""
        outcome: list[T | Exception | None] = [None]
        if self.is_main:
            try:
                outcome = [action()]
            except Exception as error:
                outcome = [error]
        broadcast_object_list(outcome)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]  # type: ignore[return-value]


@contextmanager
def start(precision: str, folder: Path, options: RunOptions) -> Iterator[Distributed]:
    """Start the processes of a run, and end them with the block, so that another run can start."""
    trackers = _trackers(options.track)
    if precision == "float16" and not torch.cuda.is_available():
        raise ValueError("precision float16 needs a GPU: use float32 or bfloat16 on a CPU")
    _check_processes(int(os.environ.get("WORLD_SIZE", 1)), options)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else it ignores torchrun without a GPU, and picks a Mac's GPU, which has no float64
        mixed_precision={"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[precision],
        log_with=trackers or None,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "tensorboard")),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],  # they do not change
    )
    try:
        yield _place(accelerator, options.sequence_parallel)
    finally:
        for tracker in accelerator.trackers:
            with suppress(OSError, AttributeError):  # its disk is full, or it was never opened
                tracker.finish()
        accelerator.state.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _place(accelerator: Accelerator, sequence_parallel: int) -> Distributed:
    """Neighbouring processes hold rows together, so that they are on one machine if it has enough of them."""
    if sequence_parallel == 1:
        return Distributed(accelerator, accelerator.process_index, accelerator.num_processes)
    groups = accelerator.num_processes // sequence_parallel
    mesh = init_device_mesh(accelerator.device.type, (groups, sequence_parallel), mesh_dim_names=("data", "sequence"))
    return Distributed(accelerator, mesh.get_local_rank("data"), groups, SequenceGroup(mesh.get_group("sequence")))


def _check_processes(processes: int, options: RunOptions) -> None:
    shards = options.sequence_parallel
    if options.shard and processes < 2:
        raise ValueError("--shard needs two or more processes: torchrun --nproc-per-node 2 -m permuteformer train …")
    if processes % shards:
        raise ValueError(
            f"--sequence-parallel {shards} needs a multiple of {shards} processes, got {processes}: "
            f"torchrun --nproc-per-node {shards} -m permuteformer train … --sequence-parallel {shards}"
        )


def fully_shard_model(model: Any) -> Any:
    """Shard the weights of each block, then the rest, over the processes (FSDP). Accelerate does so for GPUs only."""
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return model


def shard_rows(batch: Batch, shard: int, shards: int, training: bool = True) -> tuple[Batch, bool]:
    """Return one shard of every row, and whether its loss counts.

    Shards have almost equal lengths of at least one token: shorter rows are padded. If rows have one label, the first shard counts it. If
    tokens have labels, each shard has its own; in training, a shard without any gets one that does not count, as a mean over none is NaN.
    """
    if shards == 1:
        return batch, True

    def own(x: Tensor, fill: int = 0) -> Tensor:
        if x.shape[1] < shards:
            x = pad(x, (0, 0) * (x.dim() - 2) + (0, shards - x.shape[1]), value=fill)
        length = x.shape[1]
        return x[:, shard * length // shards : (shard + 1) * length // shards].contiguous()

    names = ("input_ids", "mask", "positions", "second_input_ids", "second_mask")
    sharded: dict[str, Tensor] = {name: own(x) for name in names if (x := getattr(batch, name)) is not None}
    if batch.labels.dim() == 1:
        return replace(batch, **sharded), shard == 0
    labels = own(batch.labels, UNSCORED)
    counts = bool((labels != UNSCORED).any())
    if training and not counts:
        labels = labels.clone()  # it may share the batch's memory
        labels[0, 0] = 0
    return replace(batch, **sharded, labels=labels), counts


def start_trackers(accelerator: Accelerator, folder: Path, settings: dict[str, Any], step: int) -> None:
    """Open the trackers of a run that continues after ``step``."""
    trackers = [str(tracker) for tracker in accelerator.log_with]
    options: dict[str, dict[str, object]] = {"tensorboard": {"purge_step": step + 1}}  # hides points after the checkpoint
    if "wandb" in trackers and accelerator.is_main_process:
        options["wandb"] = {"name": folder.resolve().name, "dir": str(folder), "resume": "allow", "id": _run_id(folder)}
    accelerator.init_trackers("permuteformer", init_kwargs={tracker: options.get(tracker, {}) for tracker in trackers})
    for tracker in accelerator.trackers:
        if tracker.name != "tensorboard":  # takes numbers and words only
            tracker.store_init_configuration(settings)


def _run_id(folder: Path) -> str:
    """Return the id by which a tracker recognises a resumed run."""
    path = folder / ".identity"
    if not path.exists():
        atomic_write(path, secrets.token_hex(8).encode())
    return path.read_text()


def _trackers(track: Sequence[str] | None) -> list[str]:
    """Return the trackers to use, by default TensorBoard if it is installed; raise for one that is unknown or not installed."""
    if track is None:
        return ["tensorboard"] if find_spec("tensorboard") else []
    known = [str(kind) for kind in LoggerType if kind is not LoggerType.ALL]
    chosen = [name for name in track if name != "none"]
    for name in chosen:
        if name not in known:
            raise ValueError(unknown("tracker (--track)", name, [*known, "none"]))
        if LoggerType(name) not in get_available_trackers():
            raise ValueError(f"--track {name} is not installed: pip install {name.replace('_', '-')}, or use --track none")
    return chosen
