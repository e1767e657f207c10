"""LRA Pathfinder: are two discs connected by a dashed line?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from permuteformer.storage import data_folder, read_own_json
from permuteformer.tasks.base import SPLITS, TASKS, Recipe, Source
from permuteformer.tasks.generators.base import Generated, GenerateOptions
from permuteformer.tasks.generators.pathfinder import LEVELS, OFFICIAL_COUNTS, PADDLES, SPLITS_FILE, generate_pathfinder
from permuteformer.tasks.inputs import Image
from permuteformer.tasks.lra import LraTask, check_choice
from permuteformer.tasks.readers.archives import read_inside
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.readers.images import gray_image
from permuteformer.tasks.readers.text import lines
from permuteformer.tasks.store import Row
from permuteformer.tokens import IMAGE_SIDE

FOLDERS = (".", "lra_release", "lra_release/lra_release")
EMPTY = (32, "easy", ["imgs/0", "sample_172.png"])
"""An image of the official data that is an empty file."""


@TASKS.register("lra-pathfinder")
@dataclass(kw_only=True, eq=False)
class LraPathfinder(LraTask):
    """Images with two discs and many dashed lines.

    The splits are the first 80 %, the next 10 % and the last 10 % of the images in the order of the metadata, as LRA's and the authors'.

    >>> LraPathfinder(resolution=64, level="easy").input.grid
    (64, 64)
    """

    title = "are two discs connected?"
    licence = "none stated; generated: yours"
    recipe = Recipe("pathfinder", {"batch_size": 256, "epochs": 80, "learning_rate": 5e-4, "warmup_steps": 4000})
    official_items = OFFICIAL_COUNTS
    layouts = tuple(f"{folder}/pathfinder32/curv_contour_length_14/{{imgs,metadata}}".removeprefix("./") for folder in FOLDERS)
    advice = "generate it: permuteformer data generate lra-pathfinder, or download it: permuteformer data fetch lra-pathfinder (8 GB)"

    resolution: int = IMAGE_SIDE
    """Pixels per side: 32 (the paper's), 64, 128, or 256, which cannot be generated."""
    level: str = "hard"
    """Lines of 6 ("easy"), 9 ("intermediate") or 14 dashes ("hard", the paper's)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("resolution", self.resolution, (32, 64, 128, 256))
        check_choice("level", self.level, tuple(LEVELS))

    @property
    def input(self) -> Image:
        return Image(("apart", "joined"), (self.resolution, self.resolution), self.alphabet(pixels=True))

    def notes(self) -> list[str]:
        easier = f"level {self.level!r}: lines of {PADDLES[self.level]} dashes, where the paper has {PADDLES['hard']}"
        return super().notes() + ([easier] if self.level != "hard" else [])

    def sources(self, folder: Path) -> Iterator[Source]:
        for place in FOLDERS:
            level = folder / place / f"pathfinder{self.resolution}" / LEVELS[self.level]
            metadata = sorted((level / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.stem))
            if metadata and (level / "imgs").is_dir():
                title = f"{place}/{level.parent.name}/{level.name}".removeprefix("./")
                generated = level / SPLITS_FILE
                paths = (level / "imgs", *metadata, *([generated] if generated.is_file() else []))
                note = "images of permuteformer's generator, not the official ones" if generated.is_file() else ""
                yield Source(title, paths, partial(self._read, level, metadata), note=note)

    def _read(self, level: Path, metadata: list[Path], errors: Errors) -> Iterator[tuple[str, Row]]:
        total = sum(1 for file in metadata for _ in lines(file, Errors(skip=True)))  # splits are shares of it
        train_end, validation_end = _split_ends(level, total)
        number = 0
        seen: set[tuple[str, ...]] = set()
        for file in metadata:
            for line, text in lines(file, errors):
                split = "train" if number < train_end else "validation" if number < validation_end else "test"
                number += 1
                with errors.at(file, line):
                    if (image := tuple(text.split()[:2])) in seen:
                        raise ValueError(f"the image {'/'.join(image)} occurs twice")
                    seen.add(image)
                    if (row := self._read_image(level, text.split())) is not None:
                        yield split, row

    def _read_image(self, level: Path, fields: list[str]) -> Row | None:
        """Read the image of a line of metadata: folder, file, index, label and more. The ``.npy`` files are text."""
        if len(fields) < 4 or fields[3] not in ("0", "1"):
            raise ValueError("a line must have folder, file, index, label (0 or 1), …, separated by blanks")
        name = f"{fields[0]}/{fields[1]}"
        data = read_inside(name, level)
        if not data and (self.resolution, self.level, fields[:2]) == EMPTY:
            return None
        try:
            image = gray_image(data)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if image.shape != (self.resolution, self.resolution):
            raise ValueError(f"{name} must have {self.resolution} x {self.resolution} pixels, got {image.shape[1]} x {image.shape[0]}")
        return {"value": image.tobytes(), "label": int(fields[3])}

    def generate(self, options: GenerateOptions) -> Generated:
        """Generate images in the layout of the official ones."""
        return generate_pathfinder(data_folder(self.data), options, self.resolution, self.level)


def _split_ends(level: Path, total: int) -> tuple[float, float]:
    """Return where training and validation images end: as the generator recorded it, else after 80 % and 90 %."""
    recorded = read_own_json(level / SPLITS_FILE)
    train, validation, test = (recorded.get(split) for split in SPLITS)
    if isinstance(train, int) and isinstance(validation, int) and isinstance(test, int) and train + validation + test == total:
        return train, train + validation
    return 0.8 * total, 0.9 * total
