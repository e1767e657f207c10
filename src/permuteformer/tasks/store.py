"""The store: rows of a task, read once, written as Arrow files and memory-mapped from then on."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from permuteformer.formatting import printable
from permuteformer.storage import FolderExists, folder_lock, new_folder, prepared_folder, read_own_json, remove_folder
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.splits import HELD_OUT, assign_splits

if TYPE_CHECKING:
    import pyarrow as pa

    from permuteformer.tasks.base import Source, Task

Row = dict[str, Any]

VERSION = 2
"""Version of the layout on disk. Changing it invalidates all cached stores."""

MAX_PATHS = 20
"""Paths of the source that are recorded; there may be a million."""
PROGRESS_ROWS = 100
"""Rows between two calls of ``progress``."""
BATCH_BYTES = 16 << 20
"""About how much is held in memory before it is written."""


class Store:
    """The stored rows of a task: a folder with an Arrow file per split and ``info.json``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info: dict[str, Any] = json.loads((folder / "info.json").read_text(encoding="utf-8"))

    @property
    def splits(self) -> dict[str, int]:
        """Splits and their numbers of rows."""
        return dict(self.info["splits"])

    @property
    def digest(self) -> str:
        """Hash of all rows and the names of labels. The names of the files do not count."""
        return str(self.info["digest"])

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels that reading the data has shown, sorted, numbers by value."""
        return tuple(sorted(self.info.get("labels", ()), key=_label_order))

    def rows(self, split: str) -> Items:
        """Return the rows of a split."""
        if split not in self.splits:
            raise ValueError(f"the data has no {split} split ({self.info['title']} has {', '.join(self.splits) or 'none'})")
        ranks = [self.labels.index(label) for label in self.info["labels"]] if self.labels else None
        return Items(self.folder / f"{split}.arrow", ranks)


class Items(Sequence[Row]):
    """The rows of an Arrow file, read on access. Each row has its number as ``id``.

    Labels are numbered on disk in order of appearance; ``ranks[n]`` is the class of stored label n.
    """

    def __init__(self, path: Path, ranks: Sequence[int] | None = None) -> None:
        self.path, self.ranks = path, ranks
        self._table: pa.Table = read_table(path)
        self._columns = dict(zip(self._table.column_names, self._table.columns, strict=True))
        self._labels = self._final_labels()

    def __reduce__(self) -> Any:  # worker processes open the file themselves
        return Items, (self.path, self.ranks)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        row = {name: column[number].as_py() for name, column in self._columns.items()}
        if self._labels is not None:
            row["label"] = int(self._labels[number])
        return {"id": number, **row}

    def _final_labels(self) -> np.ndarray | None:
        if self.ranks is None:
            return None
        try:
            return np.asarray(np.array(self.ranks)[self._columns["label"].to_numpy()])
        except (KeyError, IndexError):
            raise ValueError(f"{self.path} is damaged (its labels): delete its folder, and it is prepared again") from None

    def column(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the numbers of a column."""
        if name == "label" and self._labels is not None:
            return self._labels[start:stop]
        numbers: np.ndarray = self._columns[name][start:stop].to_numpy()
        return numbers

    def byte_lengths(self, name: str) -> np.ndarray:
        """Return the sizes of the values of a binary column, without reading them."""
        import pyarrow.compute as pc

        lengths: np.ndarray = pc.binary_length(self._columns[name]).to_numpy()
        return lengths.astype(np.int64)


def read_table(path: Path) -> pa.Table:
    """Map an Arrow file into memory; raise unless it holds binary and integer columns, as this module writes them.

    Caches may be shared, and Arrow trusts the offsets in a file: a damaged one could make it read memory of other data.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:  # stays mapped as long as the table exists
            table: pa.Table = pa.ipc.open_stream(file).read_all()
            table.validate(full=True)
    except Exception as error:  # of many types
        raise ValueError(f"{path} is damaged ({printable(str(error))}): delete its folder, and it is prepared again") from None
    if not all(pa.types.is_integer(kind) or kind in (pa.binary(), pa.large_binary()) for kind in table.schema.types):
        raise ValueError(f"{path} has other columns ({printable(str(table.schema))}): delete its folder, and it is prepared again")
    return table


def prepare(task: Task, progress: Callable[[int], None] | None = None) -> Store:
    """Return the store of a task from the cache, or read its source into it. Processes that need the same store write it once.

    The cache key is a hash of the task's options and of paths, sizes and modification times of the source's files.
    """
    source = task.source
    folder = prepared_folder() / f"{task.name}-{_key(task, source)[:16]}"
    if folder.exists() and not is_complete(folder):
        with folder_lock(folder):
            if folder.exists() and not is_complete(folder):  # no other process has repaired it meanwhile
                remove_folder(folder)
    if not folder.exists():
        try:
            with new_folder(folder, "choose another folder with PERMUTEFORMER_CACHE") as partial:
                _write(task, source, partial, progress)
        except FolderExists:
            pass  # another process was faster
    store = Store(folder)
    errors = store.info["errors"]
    if errors["count"] and not task.skip_bad:
        first = "\n".join(f"  {error}" for error in errors["shown"])
        raise ValueError(f"{errors['count']:,} items of {source.title} cannot be read; fix them, or use --skip-bad:\n{first}")
    return store


def is_complete(folder: Path) -> bool:
    """Return whether a store has all of its files, each of its recorded size."""
    info = read_own_json(folder / "info.json")
    try:
        about = info["title"], info["note"], info["digest"], info["errors"]["count"], info["errors"]["shown"]
        sizes = {f"{split}.arrow": (folder / f"{split}.arrow").stat().st_size for split in info["splits"]}
    except (KeyError, TypeError, ValueError, OSError):
        return False
    return tuple(map(type, about)) == (str, str, str, int, list) and sizes == info.get("sizes")


def _key(task: Task, source: Source) -> str:
    content = {
        "version": VERSION,
        "task": task.name,
        "columns": dict(task.columns),
        "options": task.cache_key(),
        "source": source.title,
        "paths": [(str(path.absolute()), *_signature(path)) for path in source.paths],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _signature(path: Path) -> tuple[int, int | str]:
    """Return the size and modification time of a file, or the number of files of a folder and a hash of their names, sizes and times."""
    if not path.is_dir():
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    count, digest = 0, hashlib.sha256()
    for root, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(root, name)
            status = os.stat(file, follow_symlinks=False)
            line = f"{os.path.relpath(file, path)!r} {status.st_size} {status.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogatepass"))
            count += 1
    return count, digest.hexdigest()


def _write(task: Task, source: Source, folder: Path, progress: Callable[[int], None] | None) -> None:
    errors = Errors(skip=task.skip_bad)
    writers: dict[str, _Writer] = {}
    with ExitStack() as stack:
        waiting = 0
        rows = source.rows(errors)
        for split, row in assign_splits(rows, HELD_OUT, seed=0) if task.validation_split == "train" else rows:
            if split not in writers:
                writers[split] = stack.enter_context(_Writer(folder / f"{split}.arrow", task.columns))
            waiting += writers[split].add(row)
            if progress is not None and waiting >= PROGRESS_ROWS:
                progress(waiting)
                waiting = 0
    writers = {split: writers[split] for split in ("train", "validation", "test") if split in writers and writers[split].count}
    if not writers:
        skipped = f": all {errors.count:,} items are bad; the first is {errors.shown[0]}" if errors.count else ""
        raise ValueError(f"{source.title} ({', '.join(map(str, source.paths[:3]))}) has no items{skipped}")
    metadata = task.metadata()
    digests = {split: writer.digest.hexdigest() for split, writer in sorted(writers.items())}
    info = {
        "task": task.name,
        "title": source.title,
        "note": source.note,
        "paths": [str(path) for path in source.paths[:MAX_PATHS]],
        "options": task.cache_key(),
        "splits": {split: writer.count for split, writer in writers.items()},
        "digest": hashlib.sha256(json.dumps([digests, metadata], sort_keys=True).encode()).hexdigest(),
        "errors": {"count": errors.count, "shown": errors.shown},
        "sizes": {f"{split}.arrow": (folder / f"{split}.arrow").stat().st_size for split in writers},
        **metadata,
    }
    (folder / "info.json").write_text(json.dumps(info), encoding="utf-8")


class _Writer:
    """Writes rows to an Arrow stream in batches. The values of a row are single ones, or arrays of several rows."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        import pyarrow as pa

        self.schema: pa.Schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in columns.items()])
        self.count = 0
        self.digest = hashlib.blake2b(digest_size=16)
        self._file = open(path, "wb")  # noqa: SIM115
        self._stream = pa.ipc.new_stream(self._file, self.schema)
        self._rows: list[Row] = []
        self._bytes = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        with self._file, self._stream:  # closed also if the disk is full
            if kind is None:
                self.flush()

    def add(self, row: Row) -> int:
        """Add a row, or several as arrays; return their number."""
        self._rows.append(row)
        for value in row.values():
            content = value if isinstance(value, bytes) else value.tobytes() if isinstance(value, np.ndarray) else b"%d" % value
            self.digest.update(b"%d " % len(content) + content)
            self._bytes += 100 + len(content)
        if self._bytes >= BATCH_BYTES:
            self.flush()
        first = next(iter(row.values()))
        return len(first) if isinstance(first, np.ndarray) else 1

    def flush(self) -> None:
        """Write the rows that are held in memory."""
        import pyarrow as pa

        if not self._rows:
            return
        columns = []
        for field in self.schema:
            values = [row[field.name] for row in self._rows]
            columns.append(pa.array(np.concatenate(values) if isinstance(values[0], np.ndarray) else values, field.type))
        batch = pa.record_batch(columns, schema=self.schema)
        self._stream.write_batch(batch)
        self.count += batch.num_rows
        self._rows, self._bytes = [], 0


def _label_order(label: str) -> tuple[float, str]:
    try:
        number = float(label)
    except ValueError:
        number = math.inf
    return (number if math.isfinite(number) else math.inf), label


def sample_numbers(count: int, items: int | None) -> np.ndarray:
    """Return the numbers of ``items`` of ``count`` items, drawn at random but always the same; all if ``items`` is ``None``."""
    if items is None or items >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:items])
