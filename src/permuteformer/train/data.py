"""Batches of a run: their order, decided by seed and epoch, and the share of each that a process computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from permuteformer.experiments.experiment import Experiment
from permuteformer.ops.checks import check_integer
from permuteformer.tasks import Batch, Task
from permuteformer.tasks.inputs import UNSCORED
from permuteformer.tasks.store import sample_numbers
from permuteformer.train.distributed import Distributed, shard_rows
from permuteformer.train.failures import ignore_signals

POOL = 64
"""Batches that are sorted by length together."""


class BatchSampler(Sampler[list[int]]):
    """Yields the numbers of the items of each batch of one epoch.

    With ``lengths``, items are shuffled, sorted by length in pools of 64 batches and cut into batches, which are shuffled again: items of a
    batch have similar lengths, but a random order.

    Args:
        count: number of items.
        batch_size: items per batch; the last one may be smaller.
        seed: seed of the order.
        epoch: counted from 0; each epoch has its own order.
        shuffle: whether to shuffle.
        lengths: tokens of every item.
        start: number of batches to skip at the beginning.

    >>> list(BatchSampler(5, 2, shuffle=False))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
        lengths: np.ndarray | None = None,
        start: int = 0,
    ) -> None:
        check_integer(batch_size=batch_size)
        check_integer(0, start=start)
        if lengths is not None and len(lengths) != count:
            raise ValueError(f"lengths must have one number for each of the {count} items, got {len(lengths)}")
        self.count, self.batch_size, self.seed, self.epoch, self.shuffle = count, batch_size, seed, epoch, shuffle
        self.lengths, self.start = lengths, start

    def __len__(self) -> int:
        return max(-(-self.count // self.batch_size) - self.start, 0)

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(self.count) if self.shuffle else np.arange(self.count)
        first_items = np.arange(0, self.count, self.batch_size)
        if self.lengths is not None:
            pool_size = POOL * self.batch_size if self.shuffle else max(self.count, 1)
            for first in range(0, self.count, pool_size):
                pool = order[first : first + pool_size]
                order[first : first + pool_size] = pool[np.argsort(self.lengths[pool], kind="stable")]
            if self.shuffle:
                rng.shuffle(first_items)
        for first in first_items[self.start :]:
            yield order[first : first + self.batch_size].tolist()


@dataclass(frozen=True)
class MicroBatch:
    """Items that a process computes at a time. Its share of a batch is a list of them, of the same length on all processes."""

    batch: Batch
    labels: int
    """Number of labels that the loss is the mean over. 0 if another process counts those of these rows, of which this one holds a shard."""
    tokens: int
    """Number of tokens without padding."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on another device."""
        return replace(self, batch=self.batch.to(device))


def training_shares(
    task: Task, experiment: Experiment, distributed: Distributed, epoch: int = 0, start: int = 0, workers: int = 0
) -> DataLoader[list[MicroBatch]]:
    """Return this process's share of each batch of an epoch, from batch ``start`` on. All shares together are those of one process."""
    numbers = sample_numbers(len(task.items("train")), experiment.train_items)
    lengths = task.lengths("train")[numbers] if experiment.by_length else None
    return DataLoader(
        _Shares(task, numbers, experiment, distributed, epoch),  # type: ignore[arg-type]
        batch_sampler=BatchSampler(len(numbers), experiment.batch_size, seed=experiment.seed, epoch=epoch, lengths=lengths, start=start),
        collate_fn=list,
        num_workers=workers,
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,  # others outlive a process that is killed
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # else it would draw from the generator of dropout
    )


class _Shares(Dataset[MicroBatch]):
    """Makes this process's share of a batch from the places of the batch's items in ``numbers``."""

    def __init__(self, task: Task, numbers: np.ndarray, experiment: Experiment, distributed: Distributed, epoch: int) -> None:
        self.items, self.input, self.numbers = task.items("train"), task.input, numbers
        self.micro_batch_size = experiment.micro_batch_size
        self.data_rank, self.data_size = distributed.data_rank, distributed.data_size
        self.sequence_rank, self.sequence_size = distributed.sequence_rank, distributed.sequence_size
        self.seed = int(np.random.SeedSequence([experiment.seed, epoch]).generate_state(1)[0])

    def __getitems__(self, batch: list[int]) -> list[MicroBatch]:
        """Return as many micro-batches on all processes, which wait for each other: one without items left adds one that counts nothing."""
        own = batch[self.data_rank :: self.data_size]
        most = -(-len(batch) // self.data_size)
        size = self.micro_batch_size or most
        share = [self._micro_batch(own[first : first + size]) for first in range(0, len(own), size)]
        if len(share) < -(-most // size):
            share.append(replace(self._micro_batch(batch[:1]), labels=0, tokens=0))
        return share

    def _micro_batch(self, places: list[int]) -> MicroBatch:
        items = [self.items[n] for n in self.numbers[places].tolist()]
        whole = self.input.collate(items, training=True, seed=self.seed)
        batch, counts = shard_rows(whole, self.sequence_rank, self.sequence_size)
        labels = int((batch.labels != UNSCORED).sum()) if counts else 0
        return MicroBatch(batch, labels, sum(int(mask.sum()) for mask in (batch.mask, batch.second_mask) if mask is not None))


def evaluation_batches(
    task: Task, split: str, *, batch_size: int, items: int | None, distributed: Distributed
) -> Iterator[tuple[int, Batch, bool]]:
    """Yield this process's batches of a split: their numbers, the batches, and whether this process scores them.

    Every process gets the same number of batches, since a sharded model computes on all processes at once: one without a batch of its own
    gets the first again, which it does not score.
    """
    dataset = task.items(split)
    numbers = sample_numbers(len(dataset), items)
    batches = list(BatchSampler(len(numbers), batch_size, shuffle=False, lengths=task.lengths(split)[numbers]))
    rank, size = distributed.data_rank, distributed.data_size
    for number in range(rank, -(-len(batches) // size) * size, size):
        is_own = number < len(batches)
        whole = task.input.collate([dataset[n] for n in numbers[batches[number if is_own else 0]].tolist()])
        batch, counts = shard_rows(whole, distributed.sequence_rank, distributed.sequence_size, training=False)
        yield number, batch, is_own and (counts or batch.labels.dim() == 2)
