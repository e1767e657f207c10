"""Downloads against a real server on this machine, which can be told to misbehave."""

import email.utils
import hashlib
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
import zipfile
from collections import namedtuple
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from permuteformer.tasks import TASKS, transfer
from permuteformer.tasks import fetch as fetching
from permuteformer.tasks.catalogue import DOWNLOADS, Download, RemoteFile, find_download
from permuteformer.tasks.fetch import FetchError, fetch

BODY = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()
MD5 = hashlib.md5(BODY).hexdigest()
OTHER = random.Random(1).randbytes(len(BODY))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        served = self.server
        served.seen.append({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}})
        if served.statuses:
            status, headers = served.statuses.pop(0)
            return self.answer(status, headers, b"no")
        if self.path.startswith("/moved"):
            return self.answer(302, {"Location": served.moved_to}, b"")
        if self.path != "/file.bin":
            return self.answer(404, {}, b"<html>not here</html>")
        body, start = served.body, 0
        headers = {"ETag": served.etag, "Last-Modified": served.last_modified}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        known = self.headers.get("If-Range")
        if asked and served.ranges and (served.blind or known in (None, served.etag, served.last_modified)):
            start = int(asked[1])
            if start >= len(body):
                return self.answer(416, {"Content-Range": f"bytes */{len(body)}"}, b"")
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        headers["Content-Length"] = str(len(body) - start + served.too_much) if served.length else None
        return self.answer(206 if "Content-Range" in headers else 200, headers, body[start:])

    def answer(self, status, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        cut = self.server.cuts.pop(0) if status in (200, 206) and self.server.cuts else None
        self.server.sent.append(len(body[:cut]))
        try:
            self.wfile.write(body[:cut])
            self.wfile.flush()
            if cut is not None and self.server.hang.is_set() is False:
                self.server.hang.wait(20)
        except OSError:
            pass  # the client has gone
        self.close_connection = True

    def log_message(self, *message):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.etag, self.last_modified = BODY, '"one"', "Mon, 01 Jan 2024 00:00:00 GMT"
        self.ranges = self.length = True
        self.blind = False
        """Continues whatever ``If-Range`` says."""
        self.too_much = 0
        self.cuts = []
        """How many bytes the next answers send before the connection ends; ``None`` for all."""
        self.statuses = []
        """Statuses and headers of the next answers."""
        self.moved_to = "/file.bin"
        self.hang = threading.Event()
        """While it is not set, a cut connection stays open and silent."""
        self.hang.set()
        self.seen, self.sent = [], []

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def url(self):
        return f"{self.address}/file.bin"

    @property
    def ranges_asked(self):
        return [request.get("range") for request in self.seen]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(transfer, "FIRST_WAIT_SECONDS", 0.001)
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.hang.set()
        server.shutdown()


def download(*urls, sha256=SHA256, md5=None, size=None, unpack="none", filename="file.bin", **more):
    file = RemoteFile(urls, filename, sha256, md5, size)
    return Download("data", "Data", (file,), "none", len(BODY), len(BODY), unpack, **more)


def names(folder):
    """What a reader of the folder sees."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def whole(folder):
    assert names(folder) == ["file.bin", "file.bin.json"]
    return (folder / "file.bin").read_bytes()


def test_a_download_is_whole_and_recorded(server, tmp_path):
    told = []
    there = fetch(download(server.url, md5=MD5, size=len(BODY)), tmp_path / "new", progress=lambda *now: told.append(now))
    assert there == tmp_path / "new" / "data"
    assert whole(there) == BODY
    assert json.loads((there / "file.bin.json").read_text()) == {"url": server.url, "size": len(BODY), "sha256": SHA256, "md5": MD5}
    assert told[0] == (0, len(BODY))
    assert told[-1] == (len(BODY), len(BODY))
    assert told == sorted(told)
    [request] = server.seen
    assert "range" not in request
    assert "urllib" not in request["user-agent"].lower()  # wikitext.smerity.com refuses that name


def test_what_is_there_is_not_asked_for_again(server, tmp_path):
    fetch(download(server.url), tmp_path)
    fetch(download(server.url), tmp_path)
    assert len(server.seen) == 1


def test_several_files(server, tmp_path):
    files = tuple(RemoteFile((server.url,), name, SHA256) for name in ("b.bin", "a.bin"))
    entry = replace(download(server.url), files=files)
    server.statuses = [(200, {"Content-Length": "2"}), (404, {})]
    with pytest.raises(FetchError, match=r"b\.bin could not be had"):
        fetch(entry, tmp_path)
    there = tmp_path / "data"
    server.statuses.clear()
    (there / "a.bin").write_bytes(BODY)
    assert fetch(entry, tmp_path) == there
    assert names(there) == ["a.bin", "a.bin.json", "b.bin", "b.bin.bad", "b.bin.json"]
    assert (there / "b.bin").read_bytes() == BODY
    for name in ("a.bin", "b.bin"):
        (there / name).unlink()
    fetch(entry, tmp_path)
    assert all((there / name).read_bytes() == BODY for name in ("a.bin", "b.bin"))
    assert len(server.seen) == 4


def test_a_file_put_there_by_hand_is_checked_and_taken(server, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file.bin").write_bytes(BODY)
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert server.seen == []
    fetch(download("http://127.0.0.1:9/"), tmp_path)  # recorded, so not even checked


def test_a_wrong_file_put_there_by_hand_is_set_aside(server, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file.bin").write_bytes(OTHER)
    with pytest.raises(FetchError, match=f"{hashlib.sha256(OTHER).hexdigest()}.*{SHA256}"):
        fetch(download(server.url), tmp_path)
    assert names(tmp_path / "data") == ["file.bin.bad"]
    assert (tmp_path / "data" / "file.bin.bad").read_bytes() == OTHER
    assert (fetch(download(server.url), tmp_path) / "file.bin").read_bytes() == BODY


def test_a_file_that_shrank_after_its_download_is_noticed(server, tmp_path):
    path = fetch(download(server.url), tmp_path) / "file.bin"
    path.write_bytes(BODY[:-1])
    with pytest.raises(FetchError, match="must be"):
        fetch(download(server.url), tmp_path)
    assert fetch(download(server.url), tmp_path)
    assert path.read_bytes() == BODY


@pytest.mark.parametrize("size", [len(BODY), None])
@pytest.mark.parametrize("length", [True, False])
def test_lost_connections_are_continued(server, tmp_path, size, length):
    server.cuts, server.length = [100_000, 50_000], length
    if not length and size is None:
        with pytest.raises(FetchError, match=SHA256):  # nothing tells the end from a cut, but the sum
            fetch(download(server.url), tmp_path)
        return
    assert whole(fetch(download(server.url, size=size), tmp_path)) == BODY
    assert server.ranges_asked == [None, "bytes=100000-", "bytes=150000-"]
    assert [request.get("if-range") for request in server.seen] == [None, '"one"', '"one"']
    assert server.sent == [100_000, 50_000, 150_000]


@given(cuts=st.lists(st.integers(0, 120_000), max_size=4), ranges=st.booleans())
def test_any_cuts(cuts, ranges):
    with pytest.MonkeyPatch.context() as patch, Server() as server, tempfile.TemporaryDirectory() as folder:
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setattr(transfer, "FIRST_WAIT_SECONDS", 0.0)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()
        server.cuts, server.ranges = list(cuts), ranges
        assert whole(fetch(download(server.url), Path(folder))) == BODY
        server.shutdown()
        expected, at = [None], 0
        for cut in cuts:
            at = min(at + cut if ranges else cut, len(BODY))
            if at == len(BODY):
                break
            expected.append(f"bytes={at}-" if at else None)
        assert server.ranges_asked == expected


def test_a_server_that_ignores_ranges_starts_over(server, tmp_path):
    server.ranges, server.cuts = False, [100_000]
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert server.ranges_asked == [None, "bytes=100000-"]
    assert server.sent == [100_000, len(BODY)]


def test_a_server_that_always_cuts_and_never_continues_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "PROGRESS_BYTES", 10)
    server.ranges, server.cuts = False, [100_000] * 20
    with pytest.raises(FetchError, match=r"100,000 of 300,000 bytes \(after 4 attempts\)"):
        fetch(download(server.url), tmp_path, attempts=4)
    assert len(server.seen) == 4


def test_progress_does_not_use_up_the_attempts(server, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "PROGRESS_BYTES", 10_000)
    server.cuts = [10_000] * 20
    assert whole(fetch(download(server.url), tmp_path, attempts=2)) == BODY
    assert len(server.seen) == 21


def test_attempts_end_where_nothing_comes(server, tmp_path):
    server.cuts = [0] * 20
    with pytest.raises(FetchError, match=r"\(after 3 attempts\)"):
        fetch(download(server.url), tmp_path, attempts=3)
    assert len(server.seen) == 3


def test_the_next_call_continues(server, tmp_path):
    server.cuts = [100_000]
    with pytest.raises(FetchError):
        fetch(download(server.url), tmp_path, attempts=1)
    assert names(tmp_path / "data") == ["file.bin.part", "file.bin.part.json"]
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert server.ranges_asked == [None, "bytes=100000-"]


@pytest.mark.parametrize("blind", [False, True])
def test_another_version_is_not_appended(server, tmp_path, blind):
    server.body, server.etag, server.cuts = OTHER, '"zero"', [100_000]
    with pytest.raises(FetchError):
        fetch(download(server.url), tmp_path, attempts=1)
    server.body, server.etag, server.blind = BODY, '"one"', blind
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert server.seen[1]["if-range"] == '"zero"'
    assert server.ranges_asked == ([None, "bytes=100000-", None] if blind else [None, "bytes=100000-"])


def test_another_size_is_another_version(server, tmp_path):
    server.body, server.cuts = OTHER + b"more", [100_000]
    with pytest.raises(FetchError):
        fetch(download(server.url), tmp_path, attempts=1)
    server.body, server.blind = BODY, True  # the same ETag, by a careless server
    assert whole(fetch(download(server.url), tmp_path)) == BODY


@pytest.mark.parametrize(
    ("etag", "last_modified", "validator"),
    [('W/"weak"', "Mon, 01 Jan 2024 00:00:00 GMT", "Mon, 01 Jan 2024 00:00:00 GMT"), (None, None, None), ('W/"weak"', None, None)],
)
def test_only_a_strong_validator_continues(server, tmp_path, etag, last_modified, validator):
    server.etag, server.last_modified, server.cuts = etag, last_modified, [100_000]
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert server.seen[1].get("if-range") == validator
    assert server.ranges_asked == [None, "bytes=100000-" if validator else None]


@pytest.mark.parametrize("notes", ["", "{", "[]", '{"url": 3}', None])
def test_a_part_of_unknown_origin_is_not_continued(server, tmp_path, notes):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file.bin.part").write_bytes(OTHER[:1000])
    if notes is not None:
        (tmp_path / "data" / "file.bin.part.json").write_text(notes)
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert server.ranges_asked == [None]


def test_a_part_that_is_whole_needs_no_request(server, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file.bin.part").write_bytes(BODY)
    (tmp_path / "data" / "file.bin.part.json").write_text(json.dumps({"url": server.url, "etag": '"one"', "size": len(BODY)}))
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert server.seen == []


def test_a_length_that_is_too_large(server, tmp_path):
    server.too_much = 7
    assert whole(fetch(download(server.url), tmp_path)) == BODY  # there is no more, says the 416
    assert server.ranges_asked == [None, "bytes=300000-"]


def test_a_length_that_is_too_small(server, tmp_path):
    server.too_much = -7
    with pytest.raises(FetchError, match="must be") as error:
        fetch(download(server.url), tmp_path)
    assert hashlib.sha256(BODY[:-7]).hexdigest() in str(error.value)


def test_a_file_of_another_size_is_not_loaded(server, tmp_path):
    with pytest.raises(FetchError, match=r"has a file of 300,000 bytes, and file\.bin has 5"):
        fetch(download(server.url, size=5), tmp_path)
    assert len(server.seen) == 1
    assert names(tmp_path / "data") == []


def test_a_wrong_sum_is_set_aside_and_said(server, tmp_path):
    server.body = OTHER
    for bad in ("file.bin.bad", "file.bin.bad2"):
        with pytest.raises(FetchError) as error:
            fetch(download(server.url), tmp_path)
        assert SHA256 in str(error.value)
        assert hashlib.sha256(OTHER).hexdigest() in str(error.value)
        assert bad in str(error.value)
        assert (tmp_path / "data" / bad).read_bytes() == OTHER
    assert names(tmp_path / "data") == ["file.bin.bad", "file.bin.bad2"]


def test_a_wrong_md5(server, tmp_path):
    with pytest.raises(FetchError, match=f"md5 is {MD5}, and must be {'0' * 32}"):
        fetch(download(server.url, sha256=None, md5="0" * 32), tmp_path)


def test_the_first_sum_is_told_and_kept(server, tmp_path, caplog):
    path = fetch(download(server.url, sha256=None), tmp_path) / "file.bin"
    assert [record.levelno for record in caplog.records if SHA256 in record.message] == [logging.WARNING]
    path.unlink()
    caplog.clear()
    fetch(download(server.url, sha256=None), tmp_path)
    assert caplog.records == []
    path.unlink()
    server.body = OTHER
    with pytest.raises(FetchError, match=f"must be {SHA256} as at the first download"):
        fetch(download(server.url, sha256=None), tmp_path)
    assert not path.exists()


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_refusal_is_final(server, tmp_path, status):
    server.statuses = [(status, {})]
    with pytest.raises(FetchError) as error:
        fetch(download(server.url, note="Generate it."), tmp_path)
    assert len(server.seen) == 1
    for said in (server.url, f"answered {status}", f"by hand at {tmp_path / 'data' / 'file.bin'}", "Generate it."):
        assert said in str(error.value)
    assert names(tmp_path / "data") == []


def test_no_network(server, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        urls = [f"http://127.0.0.1:{free.getsockname()[1]}/{name}" for name in "ab"]
        with pytest.raises(FetchError) as error:
            fetch(download(*urls), tmp_path, attempts=2)
    assert all(url in str(error.value) for url in urls)
    assert "refused" in str(error.value)
    assert "after 2 attempts" in str(error.value)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_a_busy_server_is_asked_again(server, tmp_path, status):
    server.statuses = [(status, {"Retry-After": "0"}), (status, {})]
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert len(server.seen) == 3


def test_retry_after_is_waited_for(server, tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    date = email.utils.formatdate(time.time() + 40, usegmt=True)
    server.statuses = [(503, {"Retry-After": "7"}), (503, {"Retry-After": date}), (503, {"Retry-After": "soon"}), (503, {})]
    fetch(download(server.url), tmp_path)
    assert waited[0] == 7
    assert 35 < waited[1] <= 40
    assert waited[2:] == [0.004, 0.008]


def test_a_long_retry_after_turns_to_the_next_address(server, tmp_path):
    server.statuses = [(503, {"Retry-After": "3600"})]
    assert whole(fetch(download(f"{server.address}/busy", server.url), tmp_path)) == BODY
    server.statuses = [(503, {"Retry-After": "3600"})]
    with pytest.raises(FetchError, match="wait for 3,600 seconds"):
        fetch(download(server.url), tmp_path / "other")


def test_a_silent_server_is_left_and_continued(server, tmp_path):
    server.hang.clear()
    server.cuts = [100_000]
    begun = time.monotonic()
    assert whole(fetch(download(server.url), tmp_path, timeout_seconds=0.2)) == BODY
    assert time.monotonic() - begun < 10
    assert server.ranges_asked == [None, "bytes=100000-"]
    server.cuts = [0]
    with pytest.raises(FetchError, match=r"silent for 0\.2 seconds"):
        fetch(download(server.url), tmp_path / "other", timeout_seconds=0.2, attempts=1)


def test_addresses_are_tried_in_order(server, tmp_path):
    assert whole(fetch(download(f"{server.address}/a", f"{server.address}/b", server.url), tmp_path)) == BODY
    assert [request["path"] for request in server.seen] == ["/a", "/b", "/file.bin"]
    assert json.loads((tmp_path / "data" / "file.bin.json").read_text())["url"] == server.url


def test_the_address_of_the_part_comes_first(server, tmp_path):
    wanted = download(f"{server.address}/a", server.url)
    server.cuts = [100_000]
    with pytest.raises(FetchError):
        fetch(wanted, tmp_path, attempts=1)
    fetch(wanted, tmp_path)
    assert [request["path"] for request in server.seen] == ["/a", "/file.bin", "/file.bin"]
    assert server.ranges_asked[-1] == "bytes=100000-"


def test_a_part_of_one_address_is_not_continued_from_another(server, tmp_path):
    with Server() as first:
        first.body, first.cuts = OTHER, [100_000]  # its ETag is the same
        threading.Thread(target=first.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        wanted = download(first.url, server.url)
        server.statuses = [(404, {})]
        with pytest.raises(FetchError):
            fetch(wanted, tmp_path, attempts=1)
        first.statuses = [(404, {})]
        assert whole(fetch(wanted, tmp_path)) == BODY
        first.shutdown()
    assert server.ranges_asked == [None, None]


def test_a_wrong_file_at_one_address_turns_to_the_next(server, tmp_path):
    with Server() as liar:
        liar.body = OTHER
        threading.Thread(target=liar.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        fetch(download(liar.url, server.url), tmp_path)
        liar.shutdown()
    assert names(tmp_path / "data") == ["file.bin", "file.bin.bad", "file.bin.json"]
    assert (tmp_path / "data" / "file.bin").read_bytes() == BODY


def test_redirects_keep_the_range(server, tmp_path):
    server.cuts = [100_000]
    assert whole(fetch(download(f"{server.address}/moved"), tmp_path)) == BODY
    assert server.ranges_asked == [None, None, "bytes=100000-", "bytes=100000-"]


@pytest.mark.parametrize("elsewhere", ["file:///etc/hostname", "ftp://127.0.0.1/file.bin", "/moved/again"])
def test_redirects_to_nowhere(server, tmp_path, elsewhere):
    server.moved_to = elsewhere
    with pytest.raises(FetchError, match=f"{server.address}/moved"):
        fetch(download(f"{server.address}/moved"), tmp_path)
    assert names(tmp_path / "data") == []


def test_redirects_do_not_leave_https():
    ask = urllib.request.Request("https://example.org/a")
    follow = transfer._Redirects().redirect_request
    with pytest.raises(transfer.Unusable, match="away from https"):
        follow(ask, io.BytesIO(), 302, "Found", {}, "http://example.org/a")
    assert follow(ask, io.BytesIO(), 302, "Found", {}, "https://example.org/b").full_url == "https://example.org/b"


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.org/a", "example.org/a", "http:///a", "data:,a"])
def test_other_schemes_are_refused(url):
    with pytest.raises(ValueError, match="must be an http or https address"):
        RemoteFile((url,), "a")


def test_a_proxy_of_the_environment_is_used(server, tmp_path, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.address)
    with pytest.raises(FetchError, match="404"):
        fetch(download("http://data.invalid/file.bin"), tmp_path)
    assert [request["path"] for request in server.seen] == ["http://data.invalid/file.bin"]


@pytest.mark.parametrize(("option", "value"), [("attempts", 0), ("timeout_seconds", 0)])
def test_options_are_checked(server, tmp_path, option, value):
    with pytest.raises(ValueError, match=f"{option} must be .*; it is 0"):
        fetch(download(server.url), tmp_path, **{option: value})


def disk_of(free):
    return lambda path: namedtuple("usage", "total used free")(10**12, 10**12 - free, free)


def test_space_is_asked_for_before_the_first_byte(server, tmp_path, monkeypatch):
    wanted = replace(download(server.url, size=len(BODY), unpack="tar"), bytes_unpacked=2_000_000)
    monkeypatch.setattr(shutil, "disk_usage", disk_of(1_000_000))
    with pytest.raises(FetchError) as error:
        fetch(wanted, tmp_path)
    assert str(error.value).startswith(
        f"data needs 2.3 MB in {tmp_path} (300.0 kB to download, 2.0 MB to unpack), and 1.0 MB are free: make room for 1.3 MB"
    )
    assert server.seen == []


def test_what_is_there_needs_no_space(server, tmp_path, monkeypatch):
    server.cuts = [200_000]
    with pytest.raises(FetchError):
        fetch(download(server.url), tmp_path, attempts=1)
    monkeypatch.setattr(shutil, "disk_usage", disk_of(99_999))
    with pytest.raises(FetchError, match=r"needs 100\.0 kB"):
        fetch(download(server.url), tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", disk_of(100_000))
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    monkeypatch.setattr(shutil, "disk_usage", disk_of(0))
    fetch(download(server.url), tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_disk_that_fills_up_is_no_lost_connection(server, tmp_path):
    part = tmp_path / "data" / "file.bin.part"
    part.parent.mkdir()
    part.symlink_to("/dev/full")
    with pytest.raises(FetchError, match=f"cannot write {part}: No space left"):
        fetch(download(server.url), tmp_path)
    assert len(server.seen) == 1


def test_ctrl_c_leaves_the_part(server, tmp_path):
    def interrupt(done, size):
        if done >= 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(download(server.url), tmp_path, progress=interrupt)
    there = (tmp_path / "data" / "file.bin.part").read_bytes()
    assert len(there) >= 100_000
    assert there == BODY[: len(there)]
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert server.ranges_asked == [None, f"bytes={len(there)}-"]


CHILD = """
import sys
from pathlib import Path
from permuteformer.tasks.catalogue import Download, RemoteFile
from permuteformer.tasks.fetch import FetchError, fetch
file = RemoteFile((sys.argv[1],), "file.bin", sys.argv[2])
try:
    fetch(Download("data", "Data", (file,), "none", 1, 1, "none"), Path(sys.argv[3]), progress=lambda done, size: print(done, flush=True))
except FetchError as error:
    sys.exit(str(error))
"""


def child(server, folder):
    source = Path(fetching.__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, server.url, SHA256, str(folder)],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_and_kill(server, tmp_path):
    """One downloads and hangs; another is sent away, and told by whom. The first is killed; the lock goes with it, the bytes stay."""
    server.hang.clear()
    server.cuts = [100_000]
    with child(server, tmp_path) as first:
        while int(first.stdout.readline()) < 100_000:
            pass
        with pytest.raises(FetchError, match=rf"another process \(process {first.pid} on {re.escape(socket.gethostname())}\) is fetching"):
            fetch(download(server.url), tmp_path)
        assert len(server.seen) == 1
        first.send_signal(signal.SIGKILL)
        first.communicate()
    server.hang.set()
    there = (tmp_path / "data" / "file.bin.part").stat().st_size
    assert 100_000 - 2**16 <= there <= 100_000  # what stood in the dead process's buffer is lost
    assert whole(fetch(download(server.url), tmp_path)) == BODY
    assert server.ranges_asked == [None, f"bytes={there}-"]
    assert server.sent[-1] == len(BODY) - there


def tar_of(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def zip_of(members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


MEMBERS = {"top/a/one.txt": b"one", "top/a/deep/two.txt": b"two", "top/b/three.txt": b"three", "top/ab.txt": b"four"}


@pytest.mark.parametrize(
    ("wanted", "root", "expected"),
    [
        ((), "", set(MEMBERS)),
        ((), "top", {name.removeprefix("top/") for name in MEMBERS}),
        (("top/a/",), "top", {"a/one.txt", "a/deep/two.txt"}),
        (("top/a/",), "top/a", {"one.txt", "deep/two.txt"}),
        (("top/a/deep/", "top/b/"), "", {"top/a/deep/two.txt", "top/b/three.txt"}),
    ],
)
@pytest.mark.parametrize("unpack", ["tar", "zip"])
def test_archives_are_unpacked(server, tmp_path, unpack, wanted, root, expected):
    server.body = (tar_of if unpack == "tar" else zip_of)(MEMBERS)
    filename = {"tar": "file.gz", "zip": "file.zip"}[unpack]  # the Long-Range Arena names its tar so
    entry = download(server.url, sha256=None, unpack=unpack, filename=filename, wanted=wanted, root=root)
    there = fetch(entry, tmp_path)
    found = {path.relative_to(there).as_posix(): path.read_bytes() for path in there.rglob("*") if path.is_file()}
    found.pop(".fetched.json")
    assert set(found) == expected
    for name, content in found.items():
        [original] = [each for each in MEMBERS if each.endswith(name)]
        assert content == MEMBERS[original]
    assert names(tmp_path) == ["data", "packed"]
    assert json.loads((there / ".fetched.json").read_text())["files"][filename]["sha256"] == hashlib.sha256(server.body).hexdigest()
    fetch(entry, tmp_path)
    assert len(server.seen) == 1


def test_entries_share_an_archive(server, tmp_path):
    server.body = tar_of(MEMBERS)
    both = [
        replace(download(server.url, sha256=None, unpack="tar", wanted=(f"top/{name}/",), root="top"), name=name, folder=name)
        for name in "ab"
    ]
    assert (fetch(both[0], tmp_path) / "a" / "one.txt").read_bytes() == b"one"
    assert (fetch(both[1], tmp_path) / "b" / "three.txt").read_bytes() == b"three"
    assert len(server.seen) == 1


def test_a_process_that_finds_it_done_behind_the_lock(server, tmp_path, monkeypatch):
    """Between the first look and the lock another process finishes."""
    server.body = tar_of(MEMBERS)
    entry = download(server.url, sha256=None, unpack="tar")
    looked = fetching._is_done

    def look_too_early(*arguments):
        monkeypatch.setattr(fetching, "_is_done", looked)
        fetch(entry, tmp_path)
        return False

    monkeypatch.setattr(fetching, "_is_done", look_too_early)
    assert (fetch(entry, tmp_path) / "top" / "ab.txt").read_bytes() == b"four"
    assert len(server.seen) == 1


def test_an_archive_may_be_deleted_once_it_is_unpacked(server, tmp_path):
    server.body = tar_of(MEMBERS)
    entry = download(server.url, sha256=None, unpack="tar")
    fetch(entry, tmp_path)
    (tmp_path / "packed" / "file.bin").unlink()
    fetch(entry, tmp_path)
    assert len(server.seen) == 1


@pytest.mark.parametrize("content", [None, b"mine"])
def test_a_folder_that_was_not_fetched_is_left_alone(server, tmp_path, content):
    (tmp_path / "data").mkdir()
    if content:
        (tmp_path / "data" / "mine.txt").write_bytes(content)
    with pytest.raises(FetchError, match=f"{tmp_path / 'data'} is there, but was not fetched.*move it away"):
        fetch(download(server.url, unpack="tar"), tmp_path)
    assert names(tmp_path / "data") == (["mine.txt"] if content else [])
    assert server.seen == []


@pytest.mark.parametrize("name", ["../outside.txt", "top/../../outside.txt", "/tmp/permuteformer-outside.txt"])
@pytest.mark.parametrize("unpack", ["tar", "zip"])
def test_archives_that_reach_outside_are_refused(server, tmp_path, unpack, name):
    server.body = (tar_of if unpack == "tar" else zip_of)({"top/fine.txt": b"fine", name: b"gotcha"})
    with pytest.raises(FetchError, match="do not trust the archive"):
        fetch(download(server.url, sha256=None, unpack=unpack, filename=f"file.{unpack}"), tmp_path / "data")
    assert not list(tmp_path.rglob("outside.txt"))
    assert not Path("/tmp/permuteformer-outside.txt").exists()
    assert names(tmp_path / "data") == ["packed"]


def test_a_damaged_archive_can_be_loaded_again(server, tmp_path):
    good = tar_of({"top/noise.bin": BODY})
    server.body = good[: len(good) // 2]
    entry = download(server.url, sha256=None, unpack="tar")
    packed = tmp_path / "packed" / "file.bin"
    with pytest.raises(FetchError, match=f"cut off.*delete {packed}"):
        fetch(entry, tmp_path)
    assert names(tmp_path) == ["packed"]
    packed.unlink()
    (tmp_path / "packed" / "file.bin.json").unlink()
    server.body = good
    assert (fetch(entry, tmp_path) / "top" / "noise.bin").read_bytes() == BODY


def test_an_archive_without_the_wanted_is_refused(server, tmp_path):
    server.body = tar_of(MEMBERS)
    with pytest.raises(FetchError, match="has no other/; is it another archive"):
        fetch(download(server.url, sha256=None, unpack="tar", wanted=("other/",)), tmp_path)
    assert names(tmp_path) == ["packed"]


@pytest.mark.parametrize("unpack", ["tar", "zip"])
def test_a_page_of_words_is_no_archive(server, tmp_path, unpack):
    server.body = b"<html>Please log in</html>" * 100
    with pytest.raises(FetchError, match=f"file.bin is not a {unpack} archive; delete it"):
        fetch(download(server.url, sha256=None, unpack=unpack), tmp_path)
    assert names(tmp_path) == ["packed"]


def test_the_catalogue():
    assert {
        *("aclImdb", "cifar-10", "lra_release", "lra-listops", "lra-retrieval", "lra-pathfinder"),
        *("wikitext-103", "wikitext-103-raw", "wikitext-2", "wikitext-2-raw"),
    } == set(DOWNLOADS)
    for name, entry in DOWNLOADS.items():
        assert entry.name == name
        assert entry.tasks
        [file] = entry.files
        assert file.size in (None, entry.bytes_packed)
        assert file.size is None or file.sha256
        if not file.urls[0].startswith("https:") or any(url.startswith("http:") for url in file.urls):
            assert file.sha256  # what comes unprotected must be known by its sum
    assert len({DOWNLOADS[f"lra-{task}"].files for task in ("listops", "retrieval", "pathfinder")} | {DOWNLOADS["lra_release"].files}) == 1


@pytest.mark.parametrize(
    ("entry", "kept", "left"),
    [
        ("lra-listops", "lra_release/lra_release/listops-1000/basic_train.tsv", "lra_release/listops-1000/basic_train.tsv"),
        ("lra-retrieval", "./lra_release/lra_release/tsv_data/new_aan_pairs.test.tsv", "lra_release/lra_release/pathfinder32/a"),
        ("lra-pathfinder", "lra_release/lra_release/pathfinder32/curv_baseline/metadata/0.npy", "lra_release/pathfinder128/a"),
        ("wikitext-103", "wikitext-103/wiki.train.tokens", "__MACOSX/wikitext-103/wiki.train.tokens"),
        ("wikitext-2-raw", "wikitext-2-raw/wiki.test.raw", "wikitext-2/wiki.test.tokens"),
        ("cifar-10", "cifar-10-batches-py/data_batch_1", "readme.html"),
    ],
)
def test_what_entries_keep(entry, kept, left):
    entry = find_download(entry)
    assert entry.keeps(kept)
    assert not entry.keeps(left)
    assert kept.removeprefix("./").startswith(entry.root)


LISTOPS = {f"listops-1000/basic_{split}.tsv": b"Source\tTarget\r\n" for split in ("train", "val", "test")}
PAIRS = {f"tsv_data/new_aan_pairs.{split}.tsv": b"0.0\ta\tb\tb'c'\tb'd'\n" for split in ("train", "eval", "test")}
PATHS = {f"pathfinder32/curv_contour_length_14/metadata/{number}.npy": b"imgs/0 sample_0.png 0 1\n" for number in range(2)}
PATHS |= {"pathfinder32/curv_contour_length_14/imgs/0/sample_0.png": b"image"}
LRA = {f"lra_release/lra_release/{name}": content for name, content in {**LISTOPS, **PAIRS, **PATHS}.items()}
LRA |= {"lra_release/listops-1000/basic_train.tsv": b"again", "lra_release/pathfinder128/curv_baseline/metadata/0.npy": b"large"}
LAYOUTS = {
    "aclImdb": {f"aclImdb/{split}/{label}/0_9.txt": b"text" for split in ("train", "test") for label in ("neg", "pos", "unsup")},
    "cifar-10": {f"cifar-10-batches-py/{name}": b"batch" for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")},
    **dict.fromkeys(("lra_release", "lra-listops", "lra-retrieval", "lra-pathfinder"), LRA),
    **{
        f"{name}{raw}": {f"{name}{raw}/wiki.{split}.{ending}": b" text\n" for split in ("train", "valid", "test")}
        for name in ("wikitext-103", "wikitext-2")
        for raw, ending in (("", "tokens"), ("-raw", "raw"))
    },
}


@pytest.mark.parametrize("name", DOWNLOADS)
def test_tasks_find_what_was_fetched(server, tmp_path, name):
    entry = DOWNLOADS[name]
    server.body = (tar_of if entry.unpack == "tar" else zip_of)(LAYOUTS[name])
    file = RemoteFile((server.url,), entry.files[0].filename)
    there = fetch(replace(entry, files=(file,), bytes_unpacked=0, bytes_packed=0), tmp_path)
    assert names(tmp_path) == sorted([there.name, "packed"])
    for task in entry.tasks:
        options = {"data": str(tmp_path), **({"raw": True} if name.endswith("-raw") else {})}
        source = TASKS[task](**options).source()
        assert source.paths
        assert all(path.is_relative_to(there) and path.exists() for path in source.paths)


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'wikitext-103'"):
        find_download("wikitext103")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../up"}, "name must be"),
        ({"folder": "a/b"}, "folder must be"),
        ({"files": ()}, "files of 'data' is empty"),
        ({"unpack": "rar"}, "unpack of 'data' must be"),
        ({"wanted": ("a/",)}, "are for archives"),
    ],
)
def test_entries_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        replace(download("https://example.org/a"), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"urls": ()}, "is empty"),
        ({"filename": "../a"}, "filename must be"),
        ({"filename": ".a"}, "filename must be"),
        ({"sha256": "abc"}, "sha256 of 'a' must be 64"),
        ({"md5": "Z" * 32}, "md5 of 'a' must be 32"),
    ],
)
def test_files_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RemoteFile(("https://example.org/a",), "a"), **change)
