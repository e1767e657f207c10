"""What each process is fed: its share of every batch, in an order that seed and epoch decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from permuteformer.tasks import Batch, Task
from permuteformer.tasks.batches import BatchSampler


@dataclass(frozen=True)
class Share:
    """One process's part of a batch, in the pieces that it computes at a time."""

    pieces: list[Batch]
    counts: bool
    """False where a batch has fewer items than there are processes: this one computes along, and adds nothing."""


def chosen(count: int, items: int | None) -> np.ndarray:
    """The numbers of the ``items`` that are used of ``count``: drawn by chance, the same in every run."""
    if items is None or items >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:items])


def training_batches(
    task: Task,
    *,
    batch_size: int,
    micro_batch_size: int | None,
    by_length: bool,
    items: int | None,
    seed: int,
    epoch: int,
    start: int = 0,
    process: int = 0,
    processes: int = 1,
    workers: int = 0,
) -> DataLoader[Share]:
    """The shares of one epoch, from its batch number ``start`` on. All processes together see the batches of one process."""
    dataset = task.dataset("train")
    used = chosen(len(dataset), items)
    order = BatchSampler(
        len(used), batch_size, seed=seed, epoch=epoch, lengths=task.lengths("train")[used] if by_length else None, start=start
    )

    shares = _Shares(order, process, processes)
    return DataLoader(
        _Chosen(dataset, used), batch_sampler=shares, collate_fn=_Pieces(task, micro_batch_size), num_workers=workers  # type: ignore[arg-type]
    )


def evaluation_batches(
    task: Task, split: str, *, batch_size: int, items: int | None, process: int = 0, processes: int = 1
) -> Iterator[tuple[int, Batch]]:
    """Batches of a split with their numbers: every ``processes``-th of them.

    Every process gets as many, since a sharded model computes on all of them at once: one without a batch of its own gets the first,
    with the number -1.
    """
    dataset = task.dataset(split)
    used = chosen(len(dataset), items)
    order = BatchSampler(len(used), batch_size, shuffle=False, lengths=task.lengths(split)[used])
    batches = list(order)
    for number in range(process, -(-len(batches) // processes) * processes, processes):
        own = number < len(batches)
        yield number if own else -1, task.collate([dataset[int(used[n])] for n in batches[number if own else 0]])


class _Shares(Sampler[list[int]]):
    """Of each batch the items of one process; where there are too few, one that does not count, as a negative number."""

    def __init__(self, order: BatchSampler, process: int, processes: int) -> None:
        self.order, self.process, self.processes = order, process, processes

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[int]]:
        for ids in self.order:
            yield ids[self.process :: self.processes] or [~ids[0]]


class _Chosen(Dataset[tuple[Any, bool]]):
    def __init__(self, items: Sequence[Any], used: np.ndarray) -> None:
        self.items, self.used = items, used

    def __getitem__(self, n: int) -> tuple[Any, bool]:
        return self.items[int(self.used[n if n >= 0 else ~n])], n >= 0


class _Pieces:
    def __init__(self, task: Task, size: int | None) -> None:
        self.task, self.size = task, size

    def __call__(self, items: Sequence[tuple[Any, bool]]) -> Share:
        size = self.size or len(items)
        pieces = [self.task.collate([item for item, _ in items[n : n + size]]) for n in range(0, len(items), size)]
        return Share(pieces, items[0][1])
