"""LRA Pathfinder: are two discs joined by a dashed line?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from permuteformer.folders import content_of, read_json
from permuteformer.tasks import protocol as protocols
from permuteformer.tasks.base import SPLITS, TASKS, Classification, Source
from permuteformer.tasks.generators.pathfinder import LEVELS, PADDLES, SPLITS_FILE
from permuteformer.tasks.inputs import Pixels
from permuteformer.tasks.own import inside
from permuteformer.tasks.prepare import Row
from permuteformer.tasks.readers.archives import MAX_MEMBER_BYTES
from permuteformer.tasks.readers.images import gray_image
from permuteformer.tasks.readers.lines import lines
from permuteformer.tasks.readers.problems import BadItem, Problems

RESOLUTIONS = (32, 64, 128, 256)
PLACES = (".", "lra_release", "lra_release/lra_release")


@TASKS.register("lra-pathfinder")
class LraPathfinder(Classification):
    """Images with two discs and many dashed lines.

    The splits are the first 80, the next 10 and the last 10 of a hundred images, in the order of the metadata, as LRA's and the authors'.

    Args:
        resolution: pixels of a side: 32 (the paper's), 64, 128, or 256, which is read and not generated.
        level: ``"easy"``, ``"intermediate"`` or ``"hard"``, the paper's: lines of 6, 9 or 14 dashes.
        protocol: ``"lra"`` or ``"paper"``: whose tokens.
        validate_on: ``"given"``, or ``"test"``, what the paper's authors did and the default of their protocol.
        data: the data folder.
        skip_bad: leave out what cannot be read, and count it. The official set has an empty image, ``sample_172.png`` of the easy level at
            32 pixels, which is left out always.

    >>> LraPathfinder(resolution=64, level="easy").grid
    (64, 64)
    """

    title = "are two discs joined?"
    licence = "none stated; generated: yours"
    official_items = 200_000
    layouts = tuple(f"{place}/pathfinder32/curv_contour_length_14/{{imgs,metadata}}".removeprefix("./") for place in PLACES)
    advice = "make it: permuteformer data generate lra-pathfinder, or get the official one: permuteformer data fetch lra-pathfinder (8 GB)"

    def __init__(
        self,
        resolution: int = 32,
        level: str = "hard",
        protocol: str = "lra",
        validate_on: str | None = None,
        data: str | None = None,
        skip_bad: bool = False,
    ) -> None:
        if resolution not in RESOLUTIONS:
            raise ValueError(f"resolution must be one of {', '.join(map(str, RESOLUTIONS))}; it is {resolution!r}")
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(map(repr, LEVELS))}; it is {level!r}")
        self.resolution, self.level, self.protocol = resolution, level, protocol
        self.validate_on = protocols.validation(protocol, validate_on, "given")
        self.input = Pixels(protocols.alphabet(protocol, pixels=True), (resolution, resolution))
        self.data, self.skip_bad = data, skip_bad

    @property
    def labels(self) -> list[str]:
        return ["apart", "joined"]

    def recipe(self) -> dict[str, object]:
        return {"resolution": self.resolution, "level": self.level}

    def notes(self) -> list[str]:
        easier = f"level {self.level!r}, target snakes of {PADDLES[self.level]} paddles, where the paper has {PADDLES['hard']}"
        return super().notes() + ([easier] if self.level != "hard" else [])

    def sources(self, folder: Path) -> Iterator[Source]:
        for place in PLACES:
            level = folder / place / f"pathfinder{self.resolution}" / LEVELS[self.level]
            metadata = sorted((level / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.stem))
            if metadata and (level / "imgs").is_dir():
                title = f"{place}/{level.parent.name}/{level.name}".removeprefix("./")
                noted = level / SPLITS_FILE
                paths = (level / "imgs", *metadata, *([noted] if noted.is_file() else []))
                note = "images of permuteformer's own generator, not the official ones" if noted.is_file() else ""
                yield Source(title, paths, partial(self._read, level, metadata), note)

    def _read(self, level: Path, metadata: list[Path], problems: Problems) -> Iterator[tuple[str, Row]]:
        # A count first, as splits are shares of it. Complaints come in the second reading.
        total = sum(1 for _ in chain.from_iterable(lines(path, Problems(skip=True)) for path in metadata))
        train, validation = _split_ends(level, total)
        number = 0
        seen: set[tuple[str, ...]] = set()
        for file in metadata:
            for line, text in lines(file, problems):
                split = "train" if number < train else "validation" if number < validation else "test"
                number += 1
                try:
                    if (image := tuple(text.split()[:2])) in seen:
                        raise ValueError(f"the image {'/'.join(image)} was there before")
                    seen.add(image)
                    row = self._image(level, text)
                except ValueError as error:
                    problems.add(BadItem(file, line, str(error)))
                    continue
                if row is not None:
                    yield split, row

    def _image(self, level: Path, line: str) -> Row | None:
        """What a line of metadata tells of: folder, file, index, label and more. The files are text, whatever their ending says."""
        fields = line.split()
        if len(fields) < 4 or fields[3] not in ("0", "1"):
            raise ValueError("a line must be: folder, file, index, label (0 or 1), …, separated by blanks")
        path = inside(Path(fields[0], fields[1]), level)
        if not path.is_file():
            raise ValueError(f"there is no image {fields[0]}/{fields[1]}")
        data = content_of(path, MAX_MEMBER_BYTES)
        if not data and self._known_empty(fields):
            return None
        try:
            image = gray_image(data)
        except ValueError as error:
            raise ValueError(f"{fields[0]}/{fields[1]}: {error}") from None
        if image.shape != self.input.grid:
            raise ValueError(
                f"{fields[0]}/{fields[1]} must be {self.resolution} x {self.resolution} pixels; it is {image.shape[1]} x {image.shape[0]}"
            )
        return {"value": image.tobytes(), "label": int(fields[3])}

    def _known_empty(self, fields: list[str]) -> bool:
        return (self.resolution, self.level) == (32, "easy") and fields[:2] == ["imgs/0", "sample_172.png"]


def _split_ends(level: Path, total: int) -> tuple[float, float]:
    """Where the training and the validation images end: as the generator noted it, else after 80 and 90 of a hundred."""
    noted = read_json(level / SPLITS_FILE)
    train, validation, test = (noted.get(split) for split in SPLITS)
    if isinstance(train, int) and isinstance(validation, int) and isinstance(test, int) and train + validation + test == total:
        return train, train + validation
    return 0.8 * total, 0.9 * total
