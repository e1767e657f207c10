"""One file over HTTP: continued where it broke off, in as many attempts as it takes."""

from __future__ import annotations

import logging
import re
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from permuteformer.folders import read_json, write_json
from permuteformer.tasks.catalogue import RemoteFile

log = logging.getLogger(__name__)

Progress = Callable[[int, "int | None"], None]

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


class Unusable(Exception):
    """An address that need not be tried again."""


class Part:
    """The part of a file that is there, and of which version of which address it is."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}.part")
        self.notes = path.with_name(f"{path.name}.part.json")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def version(self) -> dict[str, Any]:
        return read_json(self.notes) if self.size else {}

    def begin(self, version: dict[str, Any]) -> None:
        """Start over. Old bytes go before the new version is noted, so that a crash between the two cannot mix them."""
        self.path.write_bytes(b"")
        write_json(self.notes, version)


def transfer(url: str, file: RemoteFile, part: Part, progress: Progress, timeout_seconds: float, attempts: int) -> None:
    """Bring the whole file from one address into the part, in as many attempts as it takes."""
    failures, reached = 0, part.size
    while problem := _attempt(url, file, part, progress, timeout_seconds):
        failures = 1 if part.size >= reached + PROGRESS_BYTES else failures + 1
        reached = max(reached, part.size)
        if failures >= attempts:
            raise Unusable(f"{problem} (after {failures} attempts)")
        wait_seconds = min(FIRST_WAIT_SECONDS * 2 ** (failures - 1), LONGEST_WAIT_SECONDS)
        if problem.wait_seconds is not None:
            wait_seconds = problem.wait_seconds
        if wait_seconds > LONGEST_WAIT_SECONDS:
            raise Unusable(f"{problem}, and asks to wait for {wait_seconds:,.0f} seconds")
        log.info("%s: %s; next attempt in %.0f seconds", url, problem, wait_seconds)
        time.sleep(wait_seconds)


def _attempt(url: str, file: RemoteFile, part: Part, progress: Progress, timeout_seconds: float) -> _TryAgain | None:
    """One request. Returns nothing when the part is the whole file, else what went wrong that may pass."""
    try:
        _request(url, file, part, progress, timeout_seconds)
    except _TryAgain as problem:
        return problem
    return None


def _request(url: str, file: RemoteFile, part: Part, progress: Progress, timeout_seconds: float) -> None:
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


def _place(response: HTTPResponse, url: str, file: RemoteFile, part: Part, start: int) -> tuple[int, int | None]:
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
        raise Unusable(f"answered {response.status} {response.reason}")
    length = response.headers["Content-Length"]
    size = int(length) if length is not None and length.isdigit() else None
    if size is not None and file.size not in (None, size):
        raise Unusable(f"has a file of {size:,} bytes, and {file.filename} has {file.size:,}")
    if etag is not None and etag.startswith("W/"):
        etag = None  # says that two versions are alike, not that they are equal
    part.begin({"url": url, "etag": etag, "last_modified": last_modified, "size": size})
    return 0, size


def _receive(response: HTTPResponse, part: Part, done: int, size: int | None, progress: Progress, timeout_seconds: float) -> None:
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
    return _TryAgain(message, _retry_after(error.headers)) if error.code in (408, 425, 429) or error.code >= 500 else Unusable(message)


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
        return Unusable(f"has a certificate that cannot be trusted ({reason.verify_message})")
    if isinstance(reason, socket.gaierror):
        return Unusable(f"has a host that cannot be found ({reason.strerror}): is there a network?")
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
            raise Unusable(f"sends on to {newurl}, away from https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
