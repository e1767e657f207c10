"""Downloads over bad lines: continued where they broke off, checked, and there whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import socket
import ssl
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from permuteformer.tasks.catalogue import Download, RemoteFile
from permuteformer.tasks.folders import new_folder
from permuteformer.tasks.readers.problems import BadItem

log = logging.getLogger(__name__)

Progress = Callable[[int, "int | None"], None]

PACKED = "packed"
"""The folder, in the data folder, where archives are kept: entries of the catalogue share them."""

MARK = ".fetched.json"
"""In an unpacked folder: by its absence, folders that were made by hand or generated are told from fetched ones."""

FIRST_WAIT_SECONDS = 1.0
"""Before the second attempt; every further wait is twice as long."""
LONGEST_WAIT_SECONDS = 120.0
PROGRESS_BYTES = 2**20
"""An attempt that got this much further begins the count of failures anew: a long download may break off many times."""
BLOCK_BYTES = 2**20


class FetchError(RuntimeError):
    """A download that could not be had, with what was tried and what to do."""


class _TryAgain(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class _Unusable(Exception):
    """An address that need not be tried again."""


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
        who = _read_json(holder)
        named = f" (process {who['pid']} on {who['host']})" if {"pid", "host"} <= who.keys() else ""
        raise FetchError(f"another process{named} is fetching {path}; wait until it is done, or stop it and try again") from None
    try:
        _write_json(holder, {"pid": os.getpid(), "host": socket.gethostname()})
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _check_space(download: Download, missing: list[RemoteFile], store: Path) -> None:
    """Refuse before the first byte what cannot fit."""
    sizes = [file.size for file in missing]
    packed = sum(size for size in sizes if size is not None) if None not in sizes else download.bytes_packed
    packed = max(packed - sum(_Part(store / file.filename).size for file in missing), 0) if missing else 0
    unpacked = 0 if download.unpack == "none" else download.bytes_unpacked or 0
    free = shutil.disk_usage(store).free
    if packed + unpacked > free:
        raise FetchError(
            f"{download.name} needs {_readable(packed + unpacked)} in {store.parent} ({_readable(packed)} to download, "
            f"{_readable(unpacked)} to unpack), and {_readable(free)} are free: make room for {_readable(packed + unpacked - free)}, "
            "or choose another data folder (PERMUTEFORMER_DATA)"
        )


def _readable(size: int) -> str:
    """A size for people.

    >>> _readable(8_230_000_000), _readable(1_500)
    ('8.2 GB', '1.5 kB')
    """
    for unit, bytes_each in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= bytes_each:
            return f"{size / bytes_each:.1f} {unit}"
    return f"{size} bytes"


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
        _write_json(partial / MARK, {"download": download.name, "files": {name: _read_json(_record(store / name)) for name in names}})


def _record(path: Path) -> Path:
    """Where a file's address, size and sums are noted once it has been found right."""
    return path.with_name(f"{path.name}.json")


def _is_recorded(path: Path) -> bool:
    return path.is_file() and _read_json(_record(path)).get("size") == path.stat().st_size


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
    before = _read_json(_record(path))
    # Without a published sum, the sum of the first download is what later ones are held against.
    remembered = before.get("sha256") if file.sha256 is None and file.md5 is None else None
    expected = {"size": file.size, "sha256": file.sha256 or remembered, "md5": file.md5}
    for name, is_ in {"size": size, **sums}.items():
        if expected[name] not in (None, is_):
            since = f" as at the first download (delete {_record(path)} to take the new one)" if remembered else ""
            bad = _set_aside(found, path)
            return f"its {name} is {is_}, and must be {expected[name]}{since}; it is kept as {bad}"
    _flush(found)
    os.replace(found, path)
    _flush(path.parent)
    _write_json(_record(path), {"url": url, "size": size, **sums})
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


def _flush(path: Path) -> None:
    """Have the disk hold it, so that a power cut does not leave a name without its bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _set_aside(found: Path, path: Path) -> Path:
    for number in itertools.count(1):
        bad = path.with_name(f"{path.name}.bad" if number == 1 else f"{path.name}.bad{number}")
        if not bad.exists():
            break
    os.replace(found, bad)
    return bad


def _read_json(path: Path) -> dict[str, Any]:
    """What a small file of our own says; nothing if it is not there or broke off."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.new")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)


class _Part:
    """The part of a file that is there, and of which version of which address it is."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}.part")
        self.notes = path.with_name(f"{path.name}.part.json")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def version(self) -> dict[str, Any]:
        return _read_json(self.notes) if self.size else {}

    def begin(self, version: dict[str, Any]) -> None:
        """Start over. Old bytes go before the new version is noted, so that a crash between the two cannot mix them."""
        self.path.write_bytes(b"")
        _write_json(self.notes, version)


def _download(file: RemoteFile, path: Path, progress: Progress, timeout_seconds: float, attempts: int, note: str) -> None:
    """Try the addresses in order, the one of which a part is there first."""
    part, tried = _Part(path), []
    for url in sorted(file.urls, key=lambda url: url != part.version().get("url")):
        try:
            _load(url, file, part, progress, timeout_seconds, attempts)
            problem = _accept(file, part.path, path, url)
            part.notes.unlink(missing_ok=True)
        except _Unusable as reason:
            problem = str(reason)
        if not problem:
            return
        log.info("%s: %s", url, problem)
        tried.append(f"{url}: {problem}")
    advice = f"Try again later, or put the file by hand at {path}"
    raise FetchError("\n  ".join([f"{path.name} could not be had:", *tried]) + "\n" + "\n".join(filter(None, [advice, note])))


def _load(url: str, file: RemoteFile, part: _Part, progress: Progress, timeout_seconds: float, attempts: int) -> None:
    """Bring the whole file from one address into the part, in as many attempts as it takes."""
    failures, reached = 0, part.size
    while problem := _attempt(url, file, part, progress, timeout_seconds):
        failures = 1 if part.size >= reached + PROGRESS_BYTES else failures + 1
        reached = max(reached, part.size)
        if failures >= attempts:
            raise _Unusable(f"{problem} (after {failures} attempts)")
        wait_seconds = min(FIRST_WAIT_SECONDS * 2 ** (failures - 1), LONGEST_WAIT_SECONDS)
        if problem.wait_seconds is not None:
            wait_seconds = problem.wait_seconds
        if wait_seconds > LONGEST_WAIT_SECONDS:
            raise _Unusable(f"{problem}, and asks to wait for {wait_seconds:,.0f} seconds")
        log.info("%s: %s; next attempt in %.0f seconds", url, problem, wait_seconds)
        time.sleep(wait_seconds)


def _attempt(url: str, file: RemoteFile, part: _Part, progress: Progress, timeout_seconds: float) -> _TryAgain | None:
    """One request. Returns nothing when the part is the whole file, else what went wrong that may pass."""
    try:
        _request(url, file, part, progress, timeout_seconds)
    except _TryAgain as problem:
        return problem
    return None


def _request(url: str, file: RemoteFile, part: _Part, progress: Progress, timeout_seconds: float) -> None:
    """Ask for what is missing, and append it to the part."""
    version = part.version() if part.version().get("url") == url else {}
    if version and version.get("size") == part.size:
        return  # it broke off between the last byte and the check
    validator: str = version.get("etag") or version.get("last_modified") or ""
    start = part.size if validator else 0
    headers: dict[str, str] = {"User-Agent": "permuteformer", "Accept-Encoding": "identity"}  # some servers refuse urllib's own name
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    try:
        response = urllib.request.build_opener(_Redirects).open(urllib.request.Request(url, headers=headers), timeout=timeout_seconds)
    except HTTPError as error:
        with error:
            if error.code != 416 or not start:
                raise _refusal(error) from None
            if _content_range(error.headers)[1] == start:
                return
            part.begin({})
            raise _TryAgain("has no more of that version of the file") from None
    except (OSError, HTTPException) as error:
        raise _lost(error, timeout_seconds) from None
    with response:
        start, size = _place(response, url, file, part, start)
        _receive(response, part, start, size if size is not None else file.size, progress, timeout_seconds)


def _place(response: HTTPResponse, url: str, file: RemoteFile, part: _Part, start: int) -> tuple[int, int | None]:
    """Where the bytes of the response belong, and how many the file has."""
    etag, last_modified = response.headers["ETag"], response.headers["Last-Modified"]
    if response.status == 206 and start:
        begins, size = _content_range(response.headers)
        before = part.version()
        now = {"etag": etag, "last_modified": last_modified, "size": size}
        if begins == start and all(before.get(name) in (None, value) or value is None for name, value in now.items()):
            return start, before.get("size")
        part.begin({})
        raise _TryAgain("has another version of the file than before")
    if response.status != 200:
        raise _Unusable(f"answered {response.status} {response.reason}")
    length = response.headers["Content-Length"]
    size = int(length) if length is not None and length.isdigit() else None
    if size is not None and file.size not in (None, size):
        raise _Unusable(f"has a file of {size:,} bytes, and {file.filename} has {file.size:,}")
    if etag is not None and etag.startswith("W/"):
        etag = None  # says that two versions are alike, not that they are equal
    part.begin({"url": url, "etag": etag, "last_modified": last_modified, "size": size})
    return 0, size


def _receive(response: HTTPResponse, part: _Part, done: int, size: int | None, progress: Progress, timeout_seconds: float) -> None:
    try:
        with part.path.open("ab") as handle:
            progress(done, size)
            while block := _read(response, timeout_seconds):
                handle.write(block)
                done += len(block)
                progress(done, size)
    except OSError as error:
        raise FetchError(f"cannot write {part.path}: {error.strerror}; what is there stays, to be continued") from error
    if size is not None and done > size:
        part.begin({})
        raise _TryAgain(f"sent {done:,} bytes of a file of {size:,}")
    if size is not None and done < size:
        raise _TryAgain(f"the connection ended after {done:,} of {size:,} bytes")


def _read(response: HTTPResponse, timeout_seconds: float) -> bytes:
    try:
        return response.read1(BLOCK_BYTES)
    except (OSError, HTTPException) as error:
        raise _lost(error, timeout_seconds) from None


def _content_range(headers: Message) -> tuple[int | None, int | None]:
    """First byte and size of the whole, of ``bytes 5-9/10`` or ``bytes */10``."""
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", headers["Content-Range"] or "")
    first, size = match.groups() if match else (None, None)
    return int(first) if first else None, int(size) if size else None


def _refusal(error: HTTPError) -> Exception:
    message = f"answered {error.code} {error.reason}"
    return _TryAgain(message, _retry_after(error.headers)) if error.code in (408, 425, 429) or error.code >= 500 else _Unusable(message)


def _retry_after(headers: Message) -> float | None:
    """Seconds that the server asks to wait: it gives a number, or a date."""
    asked = headers["Retry-After"] or ""
    if asked.isdigit():
        return float(asked)
    try:
        return max(parsedate_to_datetime(asked).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _lost(error: Exception, timeout_seconds: float) -> Exception:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return _Unusable(f"has a certificate that cannot be trusted ({reason.verify_message})")
    if isinstance(reason, TimeoutError):
        return _TryAgain(f"was silent for {timeout_seconds:g} seconds")
    return _TryAgain(f"the connection was lost ({reason or type(reason).__name__})")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https only, and not from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("https", urlsplit(req.full_url).scheme):
            fp.close()
            raise _Unusable(f"sends on to {newurl}, away from https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
