"""Statistics of a task's data, and samples of it: texts for the terminal, images as one PNG."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np

from permuteformer.formatting import printable
from permuteformer.storage import atomic_write
from permuteformer.tasks.base import SPLITS, Task
from permuteformer.tasks.language import Windows
from permuteformer.tasks.splits import content_hash
from permuteformer.tasks.store import Items

BLOCK = 2**20
LONG_LINE = 30
"""Tokens of a line of text that should not be in two splits; shorter ones may be."""

QUANTILES = (0, 10, 50, 90, 100)

COLUMNS, CELL, CAPTION, GAP = 6, 128, 16, 8
"""Images per row of a contact sheet, and pixels of an image, its caption and the gap between images."""


@dataclass(frozen=True)
class SplitReport:
    """Statistics of a split."""

    items: int
    """Of language models, tokens."""
    windows: int = 0
    """Of language models."""
    labels: dict[str, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Percentiles of the number of tokens per item."""
    cut: int = 0
    """Items longer than ``max_length``."""
    repeated: int = 0
    """Items equal to an earlier one of the split."""
    baselines: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Statistics of a task's data."""

    title: str
    notes: list[str]
    splits: dict[str, SplitReport]
    shared: dict[tuple[str, str], int]
    """Number of items that two splits have in common; of language models, of lines of ``LONG_LINE`` tokens and more."""
    errors: int
    shown: list[str]
    """The first errors."""


def check(task: Task, progress: Callable[[int], None] | None = None) -> Report:
    """Read all of a task's data, skip items that cannot be read, and return statistics and errors.

    >>> from permuteformer.tasks import TASKS
    >>> check(TASKS["digits"]()).splits["test"].items
    360
    """
    asked, task.skip_bad = task.skip_bad, True
    try:
        store = task.prepare(progress)
    finally:
        task.skip_bad = asked
    splits: dict[str, SplitReport] = {}
    hashes: dict[str, np.ndarray] = {}
    for split in SPLITS:
        if split not in store.splits:
            continue
        rows = store.rows(split)
        if isinstance(task.input, Windows):
            found = _line_hashes(task.input, rows)
            splits[split] = SplitReport(len(rows), windows=len(task.items(split)))
        else:
            found = np.array([content_hash(row) for row in rows], dtype=np.uint64)
            splits[split] = _report(task, split, rows, repeated=len(found) - len(np.unique(found)))
        hashes[split] = np.unique(found)
    shared = {(a, b): len(np.intersect1d(hashes[a], hashes[b], assume_unique=True)) for a, b in combinations(hashes, 2)}
    errors = store.info["errors"]
    return Report(store.info["title"], task.notes(), splits, shared, errors["count"], errors["shown"])


def _report(task: Task, split: str, rows: Items, repeated: int) -> SplitReport:
    input = task.input
    counts = np.bincount(rows.column("label"), minlength=len(input.labels)).tolist()
    tokens = input.token_counts(rows)
    lengths = np.percentile(np.minimum(tokens, input.max_length), QUANTILES, method="inverted_cdf").astype(int).tolist()
    return SplitReport(
        items=len(rows),
        labels=dict(zip(input.labels, counts, strict=True)),
        lengths=dict(zip(QUANTILES, lengths, strict=True)),
        cut=int((tokens > input.max_length).sum()),
        repeated=repeated,
        baselines=task.baselines(split),
    )


def _line_hashes(input: Windows, rows: Items) -> np.ndarray:
    end = input.tokenizer.encode_line("")[-1]
    found: list[int] = []
    rest = np.zeros(0, dtype=input.tokenizer.stored)
    for start in range(0, len(rows), BLOCK):
        tokens = np.concatenate([rest, rows.column("token", start, start + BLOCK)])
        *lines, rest = np.split(tokens, np.flatnonzero(tokens == end) + 1)
        found += [content_hash({"line": line.tobytes()}) for line in lines if len(line) > LONG_LINE]
    return np.array(found, dtype=np.uint64)


@dataclass(frozen=True)
class Sample:
    """An item for display."""

    id: int
    label: str
    texts: list[str]


def samples(task: Task, split: str, count: int, seed: int = 0, characters: int = 600) -> Iterator[Sample]:
    """Yield a few items of a split as text, cut to ``characters`` and safe for a terminal."""
    items, input = task.items(split), task.input
    for n in _draw(len(items), count, seed):
        texts = [_cut(text, characters) for text in input.texts(items[n])]
        yield Sample(n, input.labels[items[n]["label"]] if input.labels else "", texts)


def contact_sheet(task: Task, split: str, count: int, path: Path, seed: int = 0) -> int:
    """Write a PNG of a few images with their labels; return their number."""
    from PIL import Image, ImageDraw

    input = task.input
    if input.grid is None:
        raise ValueError(f"{task.name} has no images to show")
    height, width = input.grid
    rows = task.rows(split)
    numbers = _draw(len(rows), count, seed)
    zoom = max(CELL // max(height, width), 1)
    cell_width, cell_height = width * zoom + GAP, height * zoom + CAPTION + GAP
    size = min(len(numbers), COLUMNS) * cell_width + GAP, -(-len(numbers) // COLUMNS) * cell_height + GAP
    sheet = Image.new("L", size, 255)
    draw = ImageDraw.Draw(sheet)
    for place, n in enumerate(numbers):
        pixels = np.frombuffer(rows[n]["value"], dtype=np.uint8).reshape(height, width)
        x, y = GAP + place % COLUMNS * cell_width, GAP + place // COLUMNS * cell_height
        image = Image.fromarray(pixels.copy()).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
        sheet.paste(image, (x, y + CAPTION))
        label = printable(input.labels[rows[n]["label"]], 20)
        draw.text((x, y), f"{n}: {label}".encode("ascii", "replace").decode(), fill=0)
    png = io.BytesIO()
    sheet.save(png, format="PNG")
    atomic_write(path, png.getvalue())
    return len(numbers)


def _draw(total: int, count: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).choice(total, min(count, total), replace=False)
    return sorted(int(n) for n in drawn)


def _cut(text: str, characters: int) -> str:
    shown = "\n".join(printable(line, characters) for line in text[: characters + 1].split("\n"))
    return shown if len(text) <= characters else shown[:characters] + f"… ({len(text):,} characters)"
