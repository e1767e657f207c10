"""Downloads over bad lines: continued where they broke off, checked, and there whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import socket
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from permuteformer.folders import flush, new_folder, read_json, write_json
from permuteformer.tasks.catalogue import Download, RemoteFile
from permuteformer.tasks.readers.problems import BadItem
from permuteformer.tasks.transfer import FetchError, Part, Progress, Unusable, transfer
from permuteformer.words import size_in_words

log = logging.getLogger(__name__)

PACKED = "packed"
"""The folder, in the data folder, where archives are kept: entries of the catalogue share them."""

MARK = ".fetched.json"
"""In an unpacked folder: by its absence, folders that were made by hand or generated are told from fetched ones."""

BLOCK_BYTES = 2**20


def fetch(download: Download, folder: Path, *, progress: Progress | None = None, timeout_seconds: float = 30, attempts: int = 5) -> Path:
    """Download, check and unpack into ``folder``; return the folder with the data, ``folder / download.folder``.

    What is there already is not fetched again. What broke off, by a lost line, Ctrl-C or ``kill -9``, is continued by the next call.
    Archives stay in ``folder / "packed"``; once unpacked they may be deleted.

    Args:
        download: an entry of the catalogue, or one of your own.
        folder: the data folder; it is made if it is not there.
        progress: called with the bytes of the file that are there and its size, or ``None`` if the server does not say it.
        timeout_seconds: how long the server may be silent.
        attempts: how often an address may fail in a row before the next one is tried.
    """
    if attempts < 1:
        raise ValueError(f"attempts must be 1 or more; it is {attempts}")
    if timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds must be above 0; it is {timeout_seconds}")
    target = folder / download.folder
    store = folder / PACKED if download.unpack != "none" else target
    if _is_done(download, store, target):
        return target
    store.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        for filename in sorted(file.filename for file in download.files):
            locks.enter_context(_alone(store / filename))
        if _is_done(download, store, target):  # another process was faster
            return target
        if download.unpack != "none" and target.exists():
            raise FetchError(f"{target} is there, but was not fetched: tasks use it as it is; move it away to fetch {download.name}")
        missing = [file for file in download.files if not _is_whole(file, store / file.filename)]
        _check_space(download, missing, store)
        for file in missing:
            _download(file, store / file.filename, progress or _silent, timeout_seconds, attempts, download.note)
        if download.unpack != "none":
            _unpack(download, store, target)
    return target


def _silent(done: int, size: int | None) -> None:
    """No progress is shown."""


def _is_done(download: Download, store: Path, target: Path) -> bool:
    if download.unpack != "none":
        return (target / MARK).is_file()  # the folder got its name when it was whole
    return all(_is_recorded(store / file.filename) for file in download.files)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps other processes off a file. The operating system gives the lock back when this process dies."""
    holder = path.with_name(f".{path.name}.holder.json")
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        who = read_json(holder)
        named = f" (process {who['pid']} on {who['host']})" if {"pid", "host"} <= who.keys() else ""
        raise FetchError(f"another process{named} is fetching {path}; wait until it is done, or stop it and try again") from None
    try:
        write_json(holder, {"pid": os.getpid(), "host": socket.gethostname()})
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _check_space(download: Download, missing: list[RemoteFile], store: Path) -> None:
    """Refuse before the first byte what cannot fit."""
    sizes = [file.size for file in missing]
    packed = sum(size for size in sizes if size is not None) if None not in sizes else download.bytes_packed
    packed = max(packed - sum(Part(store / file.filename).size for file in missing), 0) if missing else 0
    unpacked = 0 if download.unpack == "none" else download.bytes_unpacked or 0
    free = shutil.disk_usage(store).free
    if packed + unpacked > free:
        raise FetchError(
            f"{download.name} needs {size_in_words(packed + unpacked)} in {store.parent} ({size_in_words(packed)} to download, "
            f"{size_in_words(unpacked)} to unpack), and {size_in_words(free)} are free: "
            f"make room for {size_in_words(packed + unpacked - free)}, "
            "or choose another data folder (PERMUTEFORMER_DATA)"
        )


def _unpack(download: Download, store: Path, target: Path) -> None:
    from permuteformer.tasks.readers.archives import extract

    names = [file.filename for file in download.files]
    with new_folder(target) as partial:
        staging = partial / ".unpacking"
        staging.mkdir()
        for path in (store / name for name in names):
            if not (tarfile.is_tarfile if download.unpack == "tar" else zipfile.is_zipfile)(path):
                raise FetchError(f"{path} is not a {download.unpack} archive; delete it, and fetch again")
            try:
                extract(path, staging, download.keeps)
            except BadItem as problem:
                raise FetchError(f"{problem}. To download it again, delete {path}") from problem
        top = staging / download.root
        if not top.is_dir() or not any(top.iterdir()):
            looked_for = ", ".join(download.wanted) or download.root or "file"
            raise FetchError(f"{', '.join(names)} in {store} has no {looked_for}; is it another archive of that name?")
        for child in list(top.iterdir()):
            child.rename(partial / child.name)
        shutil.rmtree(staging)
        write_json(partial / MARK, {"download": download.name, "files": {name: read_json(_record(store / name)) for name in names}})


def _record(path: Path) -> Path:
    """Where a file's address, size and sums are noted once it has been found right."""
    return path.with_name(f"{path.name}.json")


def _is_recorded(path: Path) -> bool:
    return path.is_file() and read_json(_record(path)).get("size") == path.stat().st_size


def _is_whole(file: RemoteFile, path: Path) -> bool:
    """Whether the file is there and right. One that somebody put there is checked first."""
    if path.is_file() and not _is_recorded(path):
        if problem := _accept(file, path, path, url=None):
            raise FetchError(f"{path} was there, but {problem}; put the right file there, or fetch again")
        return True
    return path.is_file()


def _accept(file: RemoteFile, found: Path, path: Path, url: str | None) -> str:
    """Check a whole file, give it its name, and note its sums; or set it aside, and return what is wrong with it."""
    size, sums = found.stat().st_size, _sums(found)
    before = read_json(_record(path))
    # Without a published sum, the sum of the first download is what later ones are held against.
    remembered = before.get("sha256") if file.sha256 is None and file.md5 is None else None
    expected = {"size": file.size, "sha256": file.sha256 or remembered, "md5": file.md5}
    for name, is_ in {"size": size, **sums}.items():
        if expected[name] not in (None, is_):
            since = f" as at the first download (delete {_record(path)} to take the new one)" if remembered else ""
            bad = _set_aside(found, path)
            return f"its {name} is {is_}, and must be {expected[name]}{since}; it is kept as {bad}"
    flush(found)
    os.replace(found, path)
    flush(path.parent)
    write_json(_record(path), {"url": url, "size": size, **sums})
    if file.sha256 is None and file.md5 is None and not remembered:
        log.warning("no sum is published for %s: its sha256 is %s, kept in %s for the next time", path, sums["sha256"], _record(path))
    return ""


def _sums(path: Path) -> dict[str, str]:
    sums = {"sha256": hashlib.sha256(), "md5": hashlib.md5(usedforsecurity=False)}
    with path.open("rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            for each in sums.values():
                each.update(block)
    return {name: each.hexdigest() for name, each in sums.items()}


def _set_aside(found: Path, path: Path) -> Path:
    for number in itertools.count(1):
        bad = path.with_name(f"{path.name}.bad" if number == 1 else f"{path.name}.bad{number}")
        if not bad.exists():
            break
    os.replace(found, bad)
    return bad


def _download(file: RemoteFile, path: Path, progress: Progress, timeout_seconds: float, attempts: int, note: str) -> None:
    """Try the addresses in order, the one of which a part is there first."""
    part, tried = Part(path), []
    for url in sorted(file.urls, key=lambda url: url != part.version().get("url")):
        try:
            transfer(url, file, part, progress, timeout_seconds, attempts)
            problem = _accept(file, part.path, path, url)
            part.notes.unlink(missing_ok=True)
        except Unusable as reason:
            problem = str(reason)
        if not problem:
            return
        log.info("%s: %s", url, problem)
        tried.append(f"{url}: {problem}")
    advice = f"Try again later, or put the file by hand at {path}"
    raise FetchError("\n  ".join([f"{path.name} could not be had:", *tried]) + "\n" + "\n".join(filter(None, [advice, note])))
