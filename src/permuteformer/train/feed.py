"""What each process is fed: its share of every batch, in an order that seed and epoch decide."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from permuteformer.tasks import Batch, Task
from permuteformer.tasks.base import UNSCORED
from permuteformer.tasks.batches import BatchSampler
from permuteformer.train.interrupt import ignore_signals
from permuteformer.train.stretches import Place, cut


@dataclass(frozen=True)
class Piece:
    """Items that a process computes at a time. Its share of a batch is a list of them, of the same length on all processes."""

    batch: Batch
    counts: bool = True
    """False where a process has nothing left when another has: it computes along, since they wait for each other, and adds nothing."""
    scores: bool = True
    """False where another process counts the labels of these rows, of which this one holds a stretch."""

    @property
    def scored(self) -> int:
        """Labels that the loss is the mean over."""
        return int((self.batch.labels != UNSCORED).sum()) if self.counts and self.scores else 0

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        masks = (self.batch.key_mask, self.batch.second_key_mask)
        return sum(int(mask.sum()) for mask in masks if mask is not None) if self.counts else 0

    def to(self, device: torch.device) -> Piece:
        """The same on another device."""
        return Piece(self.batch.to(device), self.counts, self.scores)


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
    place: Place = Place(),  # noqa: B008
    workers: int = 0,
) -> DataLoader[list[Piece]]:
    """The shares of one epoch, from its batch number ``start`` on. All processes together see the batches of one process."""
    dataset = task.dataset("train")
    used = chosen(len(dataset), items)
    lengths = task.lengths("train")[used] if by_length else None
    order = BatchSampler(len(used), batch_size, seed=seed, epoch=epoch, lengths=lengths, start=start)
    return DataLoader(
        _Chosen(dataset, used),  # type: ignore[arg-type]
        batch_sampler=_Shares(order, place.share, place.shares, micro_batch_size),
        collate_fn=_Pieces(task, micro_batch_size, place.stretch, place.stretches),
        num_workers=workers,
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,  # else they outlive a process that is killed
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # else it draws from the numbers of dropout, once for every time that a run goes on
    )


def evaluation_batches(
    task: Task,
    split: str,
    *,
    batch_size: int,
    items: int | None,
    place: Place = Place(),  # noqa: B008
) -> Iterator[tuple[int, Batch]]:
    """Batches of a split with their numbers, of which each share has its own, dealt in turn.

    Every process gets as many, since a sharded model computes on all of them at once: one without a batch of its own gets the first,
    with the number -1.
    """
    dataset = task.dataset(split)
    used = chosen(len(dataset), items)
    batches = list(BatchSampler(len(used), batch_size, shuffle=False, lengths=task.lengths(split)[used]))
    for number in range(place.share, -(-len(batches) // place.shares) * place.shares, place.shares):
        own = number < len(batches)
        batch = task.collate(_items(dataset, used[batches[number if own else 0]]))
        if place.stretches > 1:
            batch = cut(batch, task.kind, place.stretch, place.stretches, for_loss=False)[0]
        yield number if own else -1, batch


class _Shares(Sampler[list[int]]):
    """Of each batch the items of one process; and one that does not count, as a negative number, if it has a piece less than others."""

    def __init__(self, order: BatchSampler, process: int, processes: int, piece: int | None) -> None:
        self.order, self.process, self.processes, self.piece = order, process, processes, piece

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[int]]:
        for ids in self.order:
            own = ids[self.process :: self.processes]
            most = -(-len(ids) // self.processes)
            piece = self.piece or most
            yield own + [~ids[0]] * (-(-most // piece) - -(-len(own) // piece))


class _Chosen(Dataset[tuple[Any, bool]]):
    def __init__(self, items: Sequence[Any], used: np.ndarray) -> None:
        self.items, self.used = items, used

    def __getitems__(self, numbers: list[int]) -> list[tuple[Any, bool]]:
        items = _items(self.items, self.used[[n if n >= 0 else ~n for n in numbers]])
        return [(item, n >= 0) for item, n in zip(items, numbers, strict=True)]


class _Pieces:
    def __init__(self, task: Task, size: int | None, stretch: int, stretches: int) -> None:
        self.task, self.size, self.stretch, self.stretches = task, size, stretch, stretches

    def __call__(self, items: Sequence[tuple[Any, bool]]) -> list[Piece]:
        own = [item for item, counts in items if counts]
        size = self.size or max(len(own), 1)
        pieces = [self._piece(own[n : n + size], True) for n in range(0, len(own), size)]
        return pieces + [self._piece([item], False) for item, counts in items if not counts]

    def _piece(self, items: list[Any], counts: bool) -> Piece:
        batch, scores = self.task.collate(items), True
        if self.stretches > 1:
            batch, scores = cut(batch, self.task.kind, self.stretch, self.stretches)
        return Piece(batch, counts, scores)


def _items(dataset: Sequence[Any], numbers: np.ndarray) -> list[Any]:
    """All at once where a dataset can, which takes a tenth of the time."""
    at_once = getattr(dataset, "__getitems__", None)
    return list(at_once(numbers.tolist())) if at_once else [dataset[n] for n in numbers.tolist()]
