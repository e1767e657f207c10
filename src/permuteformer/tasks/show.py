"""A few items for a person to look at: text as text, images as one sheet of them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from permuteformer.folders import write_whole
from permuteformer.tasks.base import Task
from permuteformer.texts import printable

SHEET_COLUMNS = 6
CELL_PIXELS = 128
CAPTION_PIXELS = 16


@dataclass(frozen=True)
class Sample:
    """An item in words."""

    id: int
    label: str
    texts: list[str]


def sample(task: Task, split: str, count: int, seed: int = 0) -> list[int]:
    """The numbers of a few items, drawn with a seed, in order."""
    total = len(task.dataset(split))
    return sorted(np.random.default_rng(seed).choice(total, min(count, total), replace=False).tolist())


def samples(task: Task, split: str, count: int, seed: int = 0, characters: int = 600) -> Iterator[Sample]:
    """A few items of a split in words, cut to so many characters; what would control a terminal is escaped."""
    items = task.dataset(split)
    for n in sample(task, split, count, seed):
        item = items[n]
        texts = [_cut(text, characters) for text in task.words(item)]
        yield Sample(n, "" if task.kind == "lm" else task.labels[int(task.collate([item]).labels)], texts)


def contact_sheet(task: Task, split: str, count: int, path: Path, seed: int = 0) -> int:
    """Write a PNG of a few images with their labels; gives how many there are."""
    from PIL import Image, ImageDraw

    if task.grid is None:
        raise ValueError(f"{task.name} has no images to show")
    height, width = task.grid
    numbers = sample(task, split, count, seed)
    zoom = max(CELL_PIXELS // max(height, width), 1)
    rows = -(-len(numbers) // SHEET_COLUMNS)
    gap = 8
    cell = (width * zoom + gap, height * zoom + CAPTION_PIXELS + gap)
    sheet = Image.new("L", (min(len(numbers), SHEET_COLUMNS) * cell[0] + gap, rows * cell[1] + gap), 255)
    draw = ImageDraw.Draw(sheet)
    items = task.dataset(split)
    for place, n in enumerate(numbers):
        item = items[n]
        pixels = np.frombuffer(item["value"], dtype=np.uint8).reshape(height, width)
        x, y = gap + place % SHEET_COLUMNS * cell[0], gap + place // SHEET_COLUMNS * cell[1]
        image = Image.fromarray(pixels.copy()).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
        sheet.paste(image, (x, y + CAPTION_PIXELS))
        label = task.labels[int(task.collate([item]).labels)]
        draw.text((x, y), f"{n}: {printable(label, 20)}".encode("ascii", "replace").decode(), fill=0)
    png = io.BytesIO()
    sheet.save(png, format="PNG")
    write_whole(path, png.getvalue())
    return len(numbers)


def _cut(text: str, characters: int) -> str:
    lines = [printable(line, characters) for line in text[: characters + 1].split("\n")]
    shown = "\n".join(lines)
    return shown if len(text) <= characters else shown[:characters] + f"… ({len(text):,} characters)"
