"""Batches of a split: in which order, of which items, on how many workers; all of it decided by a seed and an epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import DataLoader, Sampler

from permuteformer.tasks.base import Batch, Task

POOL = 64
"""Batches that are sorted by length together."""


class BatchSampler(Sampler[list[int]]):
    """The numbers of the items of one batch after another, for one epoch.

    Every item comes once an epoch, in batches that another epoch mixes differently. By length, items are shuffled first, then sorted in
    pools of 64 batches, cut into batches, and these shuffled over the whole epoch: batches are of like lengths, but when an item comes, and
    with which others of its length, stays a matter of chance.

    Args:
        count: items.
        batch_size: items a batch; the last one may be smaller.
        seed: of the order.
        epoch: counted from 0; each has an order of its own.
        shuffle: false for items in their order.
        lengths: batch items of like lengths.
        start: leave out so many batches at the beginning, which were done before.

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
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more; it is {batch_size}")
        if start < 0:
            raise ValueError(f"start must be 0 or more; it is {start}")
        if lengths is not None and len(lengths) != count:
            raise ValueError(f"lengths must be one for each of the {count} items; there are {len(lengths)}")
        self.count, self.batch_size, self.seed, self.epoch, self.shuffle, self.lengths = count, batch_size, seed, epoch, shuffle, lengths
        self.start = start

    def __len__(self) -> int:
        return max(-(-self.count // self.batch_size) - self.start, 0)

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(self.count) if self.shuffle else np.arange(self.count)
        size = self.batch_size
        if self.lengths is not None:
            pool = POOL * size if self.shuffle else max(self.count, 1)
            pools = [order[n : n + pool] for n in range(0, self.count, pool)]
            order = np.concatenate([p[np.argsort(self.lengths[p], kind="stable")] for p in pools]) if pools else order
        starts = np.arange(0, self.count, size)
        if self.lengths is not None and self.shuffle:
            rng.shuffle(starts)
        for first in starts[self.start :]:
            yield order[first : first + size].tolist()


def loader(
    task: Task,
    split: str,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool | None = None,
    by_length: bool = False,
    start: int = 0,
    workers: int = 0,
) -> DataLoader[Batch]:
    """The batches of a split, made in this process or by ``workers`` others: they are the same.

    Args:
        task: the task.
        split: ``"train"``, ``"validation"`` or ``"test"``.
        batch_size: items a batch.
        seed: of the order.
        epoch: each has an order of its own.
        shuffle: the training split is shuffled unless told, the others are not.
        by_length: batch items of like lengths, so that little is padding.
        start: leave out so many batches at the beginning, which were done before.
        workers: processes that make batches ahead.

    >>> from permuteformer.tasks import TASKS
    >>> batch = next(iter(loader(TASKS["digits"](), "train", 64)))
    >>> batch.input_ids.shape    # b l
    torch.Size([64, 66])
    """
    items = task.dataset(split)
    order = BatchSampler(
        len(items),
        batch_size,
        seed=seed,
        epoch=epoch,
        shuffle=split == "train" if shuffle is None else shuffle,
        lengths=task.lengths(split) if by_length else None,
        start=start,
    )
    return DataLoader(items, batch_sampler=order, collate_fn=task.collate, num_workers=workers)  # type: ignore[arg-type]
