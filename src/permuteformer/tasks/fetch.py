"""Resumable, checksummed downloads."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from permuteformer.formatting import format_bytes, printable
from permuteformer.storage import new_folder, read_own_json, readable_disk_errors, write_json
from permuteformer.tasks.downloads import Download
from permuteformer.tasks.readers.archives import extract
from permuteformer.tasks.readers.errors import BadItem

log = logging.getLogger(__name__)

MARK = ".fetched.json"
"""File in every fetched folder. A folder without it was generated or made by hand."""
ATTEMPTS = 5
"""Consecutive failures after which the next address is tried."""
PROGRESS_BYTES = 2**20
"""After this many new bytes the count of failures starts again: a long download may be interrupted many times."""
WAIT_SECONDS = 1.0
"""Wait before the second attempt, doubled for each further one."""
TIMEOUT_SECONDS = 30.0
BLOCK_BYTES = 2**20
HEADERS = {"User-Agent": "permuteformer"}  # some servers refuse the user agent of urllib
ELSEWHERE = "choose another data folder (--data or PERMUTEFORMER_DATA)"

Progress = Callable[[int, int], None]


class FetchError(OSError):
    """A download failed; the message says why and what to do."""


class _Interrupted(FetchError):
    """An attempt failed; the next one may succeed."""


def fetch(download: Download, folder: Path, *, progress: Progress | None = None) -> Path:
    """Download, verify and extract into ``folder / download.folder``, and return that folder; do nothing if it was fetched before.

    An interrupted download is resumed by the next call. The archive stays in ``folder / "packed"``; it can be deleted.

    Args:
        download: one of ``DOWNLOADS``.
        folder: the data folder.
        progress: called with the number of bytes downloaded so far and the size of the archive.

    Raises:
        FetchError: no address provides the file, it is not the expected one, or it does not fit on the disk.
        OSError: the data folder cannot be written.
    """
    target = folder / download.folder
    if (target / MARK).is_file():
        return target
    archive = _Archive(download, folder / "packed", progress or (lambda done, size: None))
    try:
        with readable_disk_errors(archive.path, ELSEWHERE):
            archive.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(archive.path.with_name(f".{download.filename}.lock"), timeout=0):
                if not (target / MARK).is_file():  # another process may have written it since
                    _fetch(archive, target)
    except Timeout:
        raise FetchError(f"another process is fetching {archive.path}; wait until it has finished, then try again") from None
    return target


def _fetch(archive: _Archive, target: Path) -> None:
    name = archive.download.name
    if target.exists():
        raise FetchError(f"{target} exists and was not fetched, so tasks use it as it is; move it away to fetch {name}")
    missing = 0 if archive.path.is_file() else max(archive.download.bytes_packed - archive.part_size(), 0)
    unpacked = archive.download.bytes_unpacked or 0
    free = shutil.disk_usage(target.parent).free
    if missing + unpacked > free:
        raise FetchError(
            f"{name} needs {format_bytes(missing + unpacked)} in {target.parent} ({format_bytes(missing)} to download, "
            f"{format_bytes(unpacked)} to extract), and {format_bytes(free)} are free; free some space, or {ELSEWHERE}"
        )
    sha256 = archive.verify(archive.path) if archive.path.is_file() else archive.get()
    _extract(archive, target, {"download": name, "sha256": sha256})
    if archive.expected_sha256() is None:
        archive.note(sha256=sha256)
        log.warning("%s has no published checksum; later downloads must have the same sha256, %s", archive.path, sha256)


def _extract(archive: _Archive, target: Path, mark: dict[str, Any]) -> None:
    download, path = archive.download, archive.path
    with new_folder(target, ELSEWHERE) as partial:
        unpacked = partial / ".unpacked"
        try:
            count = extract(path, unpacked, download.wants)
        except BadItem as error:
            raise FetchError(f"{error}; delete {path}, then fetch again") from None
        if not count:
            raise FetchError(f"{path} has no files of {download.name} below {download.root}; delete it, then fetch again")
        for child in list((unpacked / download.root).iterdir()):
            child.rename(partial / child.name)
        shutil.rmtree(unpacked)
        write_json(partial / MARK, mark)


class _Archive:
    """An archive on disk, its part while it is downloaded, and notes about both.

    The notes are the address of the part, the version and size of the file there, and the SHA-256 of the first complete download.
    """

    def __init__(self, download: Download, folder: Path, progress: Progress) -> None:
        self.download, self.progress = download, progress
        self.path = folder / download.filename
        self.part = folder / f"{download.filename}.part"
        self.notes = folder / f"{download.filename}.json"

    def part_size(self) -> int:
        return self.part.stat().st_size if self.part.is_file() else 0

    def note(self, **changes: Any) -> None:
        write_json(self.notes, {**read_own_json(self.notes), **changes})

    def expected_sha256(self) -> str | None:
        return self.download.sha256 or read_own_json(self.notes).get("sha256")

    def verify(self, path: Path) -> str:
        """Return the SHA-256 of the archive at ``path``. If it is not the expected file, rename it and raise."""
        digest, size = hashlib.sha256(), path.stat().st_size
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        found, expected = digest.hexdigest(), self.expected_sha256()
        if not self.download.allows(size):
            problem = f"{size:,} bytes, expected {self.download.bytes_packed:,}"
        elif expected not in (None, found):
            first = "" if self.download.sha256 else f" as in the first download (delete {self.notes} to accept the new file)"
            problem = f"sha256 {found}, expected {expected}{first}"
        else:
            return found
        bad = self.path.with_name(f"{self.path.name}.bad")
        os.replace(path, bad)
        raise FetchError(f"{self.path.name} has {problem}; it was renamed to {bad}, fetch again")

    def get(self) -> str:
        """Download from the first address that works, starting with that of an interrupted download. Return the SHA-256."""
        failures, last = [], read_own_json(self.notes).get("url")
        for url in sorted(self.download.urls, key=lambda url: url != last):
            try:
                self._transfer(url)
                sha256 = self.verify(self.part)
            except FetchError as error:
                log.info("%s: %s", url, error)
                failures.append(f"{url}: {error}")
            else:
                os.replace(self.part, self.path)
                return sha256
        advice = f"try again later, or download it yourself and save it as {self.path}"
        raise FetchError(f"cannot download {self.path.name} ({'; '.join(failures)}); {advice}. {self.download.note}".strip())

    def _transfer(self, url: str) -> None:
        """Download the missing bytes from one address, in several attempts if necessary."""
        parts = urlsplit(url)
        if parts.scheme != "https" and (parts.scheme, parts.hostname) != ("http", "127.0.0.1"):
            raise FetchError("not an https address")
        failures, reached = 0, self.part_size()
        while True:
            try:
                return self._request(url)
            except _Interrupted as error:
                failures = 1 if self.part_size() >= reached + PROGRESS_BYTES else failures + 1
                reached = max(reached, self.part_size())
                if failures >= ATTEMPTS:
                    raise FetchError(f"{error} ({failures} attempts)") from None
                log.info("%s: %s; trying again", url, error)
            time.sleep(WAIT_SECONDS * 2 ** (failures - 1))

    def _request(self, url: str) -> None:
        """Request the missing bytes once, and append them to the part."""
        notes, done = read_own_json(self.notes), self.part_size()
        if notes.get("url") != url or not notes.get("version"):
            done = 0  # the part is from another address, or of an unknown version
        size = notes.get("size", 0)
        if done and done == size:
            return  # the previous call ended before it verified the part
        headers = {"Range": f"bytes={done}-", "If-Range": notes["version"]} if done else {}
        request = urllib.request.Request(url, headers=HEADERS | headers)
        with _network_errors():
            response: HTTPResponse = urllib.request.build_opener(_SafeRedirects).open(request, timeout=TIMEOUT_SECONDS)
        with response:
            version = response.headers["ETag"] or response.headers["Last-Modified"]
            if done and response.status == 206:
                if (version, response.headers["Content-Range"]) != (notes["version"], f"bytes {done}-{size - 1}/{size}"):
                    self.part.unlink()
                    raise _Interrupted("the file on the server has changed")
            elif response.status == 200:
                done, size = 0, response.length or 0
                if not self.download.allows(size):
                    raise FetchError(f"the file on the server has {size:,} bytes, expected {self.download.bytes_packed:,}")
                self.part.write_bytes(b"")  # before the notes: a crash in between must not mix two versions
                self.note(url=url, version=version, size=size)
            else:
                raise FetchError(f"HTTP status {response.status}")
            self._append(response, done, size)

    def _append(self, response: HTTPResponse, done: int, size: int) -> None:
        self.progress(done, size)
        with self.part.open("ab") as file:
            while block := self._read(response):
                file.write(block)
                done += len(block)
                self.progress(done, size)
        if done != size:
            raise _Interrupted(f"received {done:,} of {size:,} bytes")

    def _read(self, response: HTTPResponse) -> bytes:
        with _network_errors():
            block: bytes = response.read1(BLOCK_BYTES)
        return block


@contextmanager
def _network_errors() -> Iterator[None]:
    """Raise ``_Interrupted`` for errors of a request that may not occur again, ``FetchError`` for others."""
    try:
        yield
    except HTTPError as error:
        with error:
            kind = _Interrupted if error.code in (408, 429) or error.code >= 500 else FetchError
            raise kind(f"HTTP status {error.code} {printable(error.reason)}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        kind = FetchError if isinstance(reason, (ValueError, socket.gaierror)) else _Interrupted  # ValueError: also bad certificates
        raise kind(printable(str(reason)) or type(reason).__name__) from None


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to https, or within one server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme != "https" and (new.scheme, new.netloc) != (old.scheme, old.netloc):
            raise HTTPError(newurl, code, f"redirect to {newurl}, which is not https", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
