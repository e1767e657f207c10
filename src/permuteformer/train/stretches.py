"""Sequence parallelism in training: which share of a batch a process has, and which stretch of its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad

from permuteformer.ops.sequence_parallel import SequenceGroup
from permuteformer.tasks import Batch
from permuteformer.tasks.base import UNSCORED


@dataclass(frozen=True)
class Place:
    """Where a process stands among all of them."""

    share: int = 0
    """The share of every batch that it has."""
    shares: int = 1
    sequence: SequenceGroup | None = None
    """The processes that hold the rows of its share together; ``None`` where it has them alone."""

    @property
    def stretch(self) -> int:
        """Which stretch of those rows is its own."""
        return 0 if self.sequence is None else self.sequence.rank

    @property
    def stretches(self) -> int:
        """In how many stretches rows are cut."""
        return 1 if self.sequence is None else self.sequence.size

    def scores(self, kind: str) -> bool:
        """Whether it adds to the metrics: of rows the first of their processes, of tokens each for its own."""
        return kind == "lm" or self.stretch == 0


def find_place(accelerator: Accelerator, sequence_parallel: int) -> Place:
    """The place of this process: neighbours hold rows together, so that they are on one machine where a machine has so many."""
    if sequence_parallel == 1:
        return Place(accelerator.process_index, accelerator.num_processes)
    shares = accelerator.num_processes // sequence_parallel
    mesh = init_device_mesh(accelerator.device.type, (shares, sequence_parallel), mesh_dim_names=("data", "sequence"))
    return Place(mesh.get_local_rank("data"), shares, SequenceGroup(mesh.get_group("sequence")))


def cut(batch: Batch, kind: str, stretch: int, stretches: int, for_loss: bool = True) -> tuple[Batch, bool]:
    """One stretch of every row, and whether its loss counts.

    Stretches are of like lengths, and of one token at least: rows shorter than that are padded. Of rows with one label the first stretch
    counts. Of labels of tokens each stretch has its own; ``for_loss``, one without a label gets one that does not count, as the mean
    over none is no number.
    """
    second_ids, second_mask = batch.second_input_ids, batch.second_key_mask

    def own(x: Tensor, hidden: int = 0) -> Tensor:
        if x.shape[1] < stretches:
            x = pad(x, (0, 0) * (x.dim() - 2) + (0, stretches - x.shape[1]), value=hidden)
        length = x.shape[1]
        return x[:, stretch * length // stretches : (stretch + 1) * length // stretches].contiguous()

    labels, counts = batch.labels, stretch == 0
    if kind == "lm":
        labels = own(labels, UNSCORED)
        counts = bool((labels != UNSCORED).any())
        if for_loss and not counts:
            labels = torch.where(torch.arange(labels.numel()).view_as(labels) == 0, 0, labels)
    return replace(
        batch,
        input_ids=own(batch.input_ids),
        key_mask=own(batch.key_mask),
        labels=labels,
        positions=None if batch.positions is None else own(batch.positions),
        second_input_ids=None if second_ids is None else own(second_ids),
        second_key_mask=None if second_mask is None else own(second_mask),
    ), counts
