"""Labels for new items by a trained model, one batch after another, however many there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from permuteformer.tasks import Batch
from permuteformer.tasks.readers.problems import Problems
from permuteformer.train.build import inputs
from permuteformer.train.saved import Trained
from permuteformer.train.unlabelled import Source, Unlabelled, read


@dataclass(frozen=True)
class Prediction:
    """What the model says of one item."""

    line: int | None
    """The line that it starts at, from 1; in Parquet the row's number; ``None`` for an image by itself."""
    id: str | None
    """Its value of the column of ids, if there is one; of an image its name."""
    label: str
    probability: float
    """Of the label."""
    probabilities: tuple[float, ...]
    """Of all labels, in the order of ``Trained.labels``."""
    cut: bool
    """Whether the text was longer than the model reads, so that its end was cut off."""


def predict(
    trained: Trained,
    source: Source,
    *,
    columns: Mapping[str, str] | None = None,
    batch_size: int = 32,
    problems: Problems | None = None,
) -> Iterator[Prediction]:
    """Predictions for the items of ``source``, in their order. Only a batch of them is in memory.

    Args:
        trained: a classifier or matcher, of ``permuteformer.train.saved.load``.
        source: of texts a table (CSV, TSV, JSON lines, Parquet), a text file (a text a line), ``"-"`` for lines of standard input, or a
            stream of bytes; of pairs a table; of images a folder, an archive, one image, or a table of paths from its own folder.
        columns: of a table: ``{"text": NAME}``, ``first`` and ``second``, or ``image``; and ``id``. What is not told is as in training if
            there is such a column, else guessed from its name.
        batch_size: items at a time.
        problems: takes items that cannot be read: with ``Problems(skip=True)`` they are counted; the first one raises, unless told.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number from 1 on; it is {batch_size!r}")
    taken = Problems() if problems is None else problems
    return _predicted(trained, read(trained, source, columns or {}, taken), batch_size, taken)


def _predicted(trained: Trained, items: Iterator[Unlabelled], batch_size: int, problems: Problems) -> Iterator[Prediction]:
    found = False
    while batch := list(islice(items, batch_size)):
        found = True
        for item, row in zip(batch, probabilities(trained, batch).tolist(), strict=True):
            best = max(range(len(row)), key=row.__getitem__)
            yield Prediction(item.line, item.id, trained.labels[best], row[best], tuple(row), item.cut)
    if not found:
        skipped = f": all {problems.count:,} items were bad; the first is {problems.shown[0]}" if problems.count else ""
        raise ValueError(f"there is nothing to predict{skipped}")


@torch.inference_mode()
def probabilities(trained: Trained, items: list[Unlabelled]) -> Tensor:
    """Of all labels, for each item: ``b n`` float64."""
    batch = batch_of(trained, items).to(trained.model.device)
    logits: Tensor = trained.model(**inputs(batch, trained.model.config, trained.kind)).logits.cpu().double()
    for item, row in zip(items, logits, strict=True):
        if not row.isfinite().all():
            raise ValueError(
                f"{item.place}: the model's answer is not a number, but {row.tolist()}: look at how its training ended ({trained.folder}), "
                "and train it anew, as with a lower learning rate"
            )
    return logits.softmax(-1)


def batch_of(trained: Trained, items: list[Unlabelled]) -> Batch:
    """As ``collate`` of the task, which has labels besides."""
    none = torch.zeros(len(items), dtype=torch.int64)
    first, *second = ([item.values[part] for item in items] for part in range(len(items[0].values)))
    input_ids, key_mask, positions = trained.input.encode(first)
    batch = Batch(none, input_ids, key_mask, none, positions)
    if not second:
        return batch
    second_input_ids, second_key_mask, _ = trained.input.encode(second[0])
    return Batch(none, input_ids, key_mask, none, second_input_ids=second_input_ids, second_key_mask=second_key_mask)
