"""Prepared data: read once, stored as Arrow, mapped into memory ever after; there whole, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from permuteformer.folders import AlreadyThere, folder_lock, new_folder, prepared_folder, read_json, remove_folder
from permuteformer.tasks.readers.problems import Problems
from permuteformer.tasks.splits import hold_out
from permuteformer.texts import printable

if TYPE_CHECKING:
    import pyarrow as pa

    from permuteformer.tasks.base import Source, Task

Row = dict[str, Any]

VERSION = 1
"""Of the form of what is stored: another one makes all caches anew."""

PATHS = 20
"""Paths of the source that are kept with the data; they may be a million."""

REPORTED = 100
"""Items between two calls of ``progress``."""

BATCH_BYTES = 16 * 2**20
"""About how much is kept in memory before it is written."""


class Prepared:
    """A folder of prepared data: an Arrow file a split, and ``info.json``, which says what it is and what was wrong with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info: dict[str, Any] = json.loads((folder / "info.json").read_text(encoding="utf-8"))

    def open(self, split: str) -> Items:
        """The items of a split."""
        if split not in self.info["splits"]:
            there = ", ".join(self.info["splits"]) or "none"
            raise ValueError(f"the data has no {split} split ({self.info['title']}; there is {there})")
        return Items(self.folder / f"{split}.arrow")


class Items(Sequence[Row]):
    """The rows of an Arrow file, read as they are asked for. Each has its number as ``id``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        self._table: pa.Table = read_table(self.path)
        self._batches: list[pa.RecordBatch] = self._table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)

    def __getstate__(self) -> Path:  # worker processes open the file themselves
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path = path
        self._open()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(list(range(*index.indices(len(self)))))
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Several at once, as ``DataLoader`` asks for them."""
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> Row:
        """Of the batch that holds it: Arrow's own ``take`` would bring all batches together first."""
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"item {index} of {len(self):,} in {self.path.name}")
        which = int(np.searchsorted(self._ends, number, side="right"))
        batch = self._batches[which]
        place = number - int(self._ends[which]) + batch.num_rows
        return {"id": number, **{name: column[place].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}}

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return list(self._table.column_names)

    def column(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Numbers of one column."""
        stop = len(self) if stop is None else min(stop, len(self))
        part: np.ndarray = self._table.column(name).slice(start, max(stop - start, 0)).to_numpy()
        return part

    def byte_lengths(self, name: str) -> np.ndarray:
        """The sizes of the values of a column of bytes, without reading them."""
        import pyarrow.compute as pc

        lengths: np.ndarray = pc.binary_length(self._table.column(name)).to_numpy()
        return lengths.astype(np.int64)


def read_table(path: Path) -> pa.Table:
    """An Arrow file, mapped; raises unless it holds columns of bytes and whole numbers, as they are written here.

    Caches may be shared. Arrow believes what a file says of its offsets, and would read memory that is not its own.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:  # which stays mapped as long as the table is there
            table: pa.Table = pa.ipc.open_stream(file).read_all()
            table.validate(full=True)
    except Exception as error:  # of many types
        raise ValueError(f"{path} is damaged ({printable(str(error))}): delete its folder, and it is made anew") from None
    plain = all(pa.types.is_integer(kind) or kind in (pa.binary(), pa.large_binary()) for kind in table.schema.types)
    plain = plain and all(name.isidentifier() for name in table.schema.names)
    if not plain or b"huggingface" in (table.schema.metadata or {}):
        raise ValueError(f"{path} was not written here ({printable(str(table.schema))}): delete its folder, and it is made anew")
    return table


def prepare(task: Task, source: Source, progress: Callable[[int], None] | None = None) -> Prepared:
    """The task's data from the cache, or read from ``source`` into it.

    The entry is found by what it was made from: the task's recipe, and names, sizes and times of change of the source's files. Two
    processes that want the same entry make it once.
    """
    folder = prepared_folder() / f"{task.name}-{_key(task, source)[:16]}"
    if folder.exists() and not is_whole(folder):  # a disk that lost something, or a person who deleted it
        with folder_lock(folder):
            if folder.exists() and not is_whole(folder):  # nobody has mended it meanwhile
                remove_folder(folder)
    if not folder.exists():
        try:
            with new_folder(folder, "choose another folder with PERMUTEFORMER_CACHE") as partial:
                _write(task, source, partial, progress)
        except AlreadyThere:
            pass  # another process was faster
    prepared = Prepared(folder)
    problems = prepared.info["problems"]
    if problems["count"] and not task.skip_bad:
        first = "\n".join(f"  {problem}" for problem in problems["shown"])
        raise ValueError(
            f"{problems['count']:,} items of {source.title} cannot be used; mend them, or leave them out with skip_bad (--skip-bad):\n"
            f"{first}"
        )
    return prepared


def _key(task: Task, source: Source) -> str:
    recipe = {
        "version": VERSION,
        "task": task.name,
        "columns": dict(task.columns),
        "recipe": task.recipe(),
        "source": source.title,
        "paths": [(str(path.absolute()), *_signature(path)) for path in source.paths],
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _signature(path: Path) -> tuple[int, int | str]:
    """Size and time of change; of a folder how many files it has, and a hash of the names, sizes and times of all of them."""
    if not path.is_dir():
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    count, digest, waiting = 0, hashlib.sha256(), [str(path)]
    while waiting:
        with os.scandir(waiting.pop()) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
                continue
            status = entry.stat(follow_symlinks=False)
            digest.update(f"{os.path.relpath(entry.path, path)!r} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogatepass"))
            count += 1
    return count, digest.hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether everything that was written is there, to its size."""
    info = read_json(folder / "info.json")
    sizes, splits, problems = (info.get(name) for name in ("sizes", "splits", "problems"))
    if (
        not isinstance(sizes, dict)
        or not isinstance(splits, dict)
        or not isinstance(problems, dict)
        or not isinstance(info.get("title"), str)
    ):
        return False
    if (
        not isinstance(problems.get("count"), int)
        or not isinstance(problems.get("shown"), list)
        or set(sizes) != {f"{s}.arrow" for s in splits}
    ):
        return False
    return all((file := folder / name).is_file() and file.stat().st_size == size for name, size in sizes.items())


def _write(task: Task, source: Source, folder: Path, progress: Callable[[int], None] | None) -> None:
    problems = Problems(skip=task.skip_bad)
    counts: dict[str, int] = {}
    with ExitStack() as stack:
        writers: dict[str, _Writer] = {}
        done = 0
        items = source.read(problems)
        for split, row in hold_out(items) if task.validate_on == "train" else items:
            if split not in writers:
                writers[split] = stack.enter_context(_Writer(folder / f"{split}.arrow", task.columns))
            done += writers[split].add(row)
            if progress is not None and done >= REPORTED:
                progress(done)
                done = 0
        for split, writer in writers.items():
            writer.flush()
            counts[split] = writer.count
    if not any(counts.values()):
        skipped = f": all {problems.count:,} items were bad; the first is {problems.shown[0]}" if problems.count else ""
        raise ValueError(f"{source.title} ({', '.join(map(str, source.paths[:3]))}) has no items{skipped}")
    info = {
        "task": task.name,
        "title": source.title,
        "note": source.note,
        "paths": [str(path) for path in source.paths[:PATHS]],
        "recipe": task.recipe(),
        "splits": {split: counts[split] for split in ("train", "validation", "test") if split in counts},
        "problems": {"count": problems.count, "shown": problems.shown},
        "sizes": {f"{split}.arrow": (folder / f"{split}.arrow").stat().st_size for split in counts},
        **task.learned(),
    }
    (folder / "info.json").write_text(json.dumps(info), encoding="utf-8")


class _Writer:
    """Rows to an Arrow stream, a batch at a time. A row may hold whole columns, as arrays."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        import pyarrow as pa

        self.schema: pa.Schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in columns.items()])
        self.count = 0
        self._file = open(path, "wb")  # noqa: SIM115
        self._stream = pa.ipc.new_stream(self._file, self.schema)
        self._rows: list[Row] = []
        self._bytes = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        self._file.close()

    def add(self, row: Row) -> int:
        """Take a row, or several as arrays; gives how many they are."""
        self._rows.append(row)
        self._bytes += 100 + sum(
            getattr(value, "nbytes", None) or (len(value) if isinstance(value, bytes) else 0) for value in row.values()
        )
        if self._bytes >= BATCH_BYTES:
            self.flush()
        first = next(iter(row.values()))
        return len(first) if isinstance(first, np.ndarray) else 1

    def flush(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        columns = []
        for field in self.schema:
            values = [row[field.name] for row in self._rows]
            together = np.concatenate(values) if isinstance(values[0], np.ndarray) else values
            columns.append(pa.array(together, field.type))
        batch = pa.record_batch(columns, schema=self.schema)
        self._stream.write_batch(batch)
        self.count += batch.num_rows
        self._rows, self._bytes = [], 0
