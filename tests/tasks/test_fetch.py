"""Downloads from a real HTTP server on this machine, which can be made to fail."""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import namedtuple
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from small_data import tar_bytes, zip_bytes

from permuteformer.storage import WriteError
from permuteformer.tasks import TASKS
from permuteformer.tasks import fetch as fetching
from permuteformer.tasks.downloads import DOWNLOADS, Download, find_download
from permuteformer.tasks.fetch import FetchError, fetch


def sha256(content):
    return hashlib.sha256(content).hexdigest()


NOISE = random.Random(0).randbytes(300_000)
MEMBERS = {"top/noise.bin": NOISE, "top/a/one.txt": b"1", "top/a/deep/two.txt": b"2", "top/b/three.txt": b"3", "other/top/four.txt": b"4"}
BODY = tar_bytes(MEMBERS.items(), "w:gz")
OTHER = random.Random(1).randbytes(len(BODY))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests.append({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}})
        if server.statuses:
            return self.answer(server.statuses.pop(0), {}, b"no")
        if self.path.startswith("/moved"):
            return self.answer(302, {"Location": server.moved_to}, b"")
        if self.path not in ("/file.bin", "/mirror/file.bin"):
            return self.answer(404, {}, b"<html>not here</html>")
        headers, start = {"ETag": server.etag, "Last-Modified": server.last_modified}, 0
        requested = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if requested and server.ranges and (server.blind or self.headers["If-Range"] == (server.etag or server.last_modified)):
            start = int(requested[1])
            headers["Content-Range"] = f"bytes {start}-{len(server.body) - 1}/{len(server.body)}"
        headers["Content-Length"] = str(len(server.body) - start)
        return self.answer(206 if "Content-Range" in headers else 200, headers, server.body[start:])

    def answer(self, status, headers, body):
        self.send_response(status, self.server.reason)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        cut = self.server.cuts.pop(0) if status in (200, 206) and self.server.cuts else None
        with contextlib.suppress(OSError):  # the client closed the connection
            self.wfile.write(body[:cut])
        if cut is not None and self.server.silent:
            time.sleep(20)
        self.close_connection = True

    def log_message(self, *message):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    body, etag, last_modified, moved_to = BODY, '"one"', "Mon, 01 Jan 2024 00:00:00 GMT", "/file.bin"
    reason = None
    ranges = True
    blind = False  # sends the requested range whatever If-Range says
    silent = False  # keeps a cut connection open

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.cuts, self.statuses = [], []  # of the next answers: bytes before the connection is cut, status codes
        self.requests = []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def set(self, settings):
        vars(self).update({name: list(value) if isinstance(value, list) else value for name, value in settings.items()})

    def url(self, path="/file.bin"):
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def ranges_requested(self):
        return [request.get("range") for request in self.requests]


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    limits = {"ATTEMPTS": 3, "PROGRESS_BYTES": 30_000, "BLOCK_BYTES": 10_000, "WAIT_SECONDS": 0.001, "TIMEOUT_SECONDS": 0.5}
    for name, value in limits.items():
        monkeypatch.setattr(fetching, name, value)


@pytest.fixture
def server():
    with Server() as server:
        yield server


def download(*urls, body=BODY, published=True, **changes):
    fields = {"name": "data", "title": "Data", "tasks": (), "root": "top", "licence": "none", "bytes_unpacked": 0}
    return Download(**fields | {"urls": urls, "bytes_packed": len(body), "sha256": sha256(body) if published else None} | changes)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def assert_fetched(entry, folder):
    assert (fetch(entry, folder) / "noise.bin").read_bytes() == NOISE
    assert names(folder) == ["packed", "top"]
    assert names(folder / "packed") == ["file.bin", "file.bin.json"]


def interrupt(entry, folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "ATTEMPTS", 1)
        with pytest.raises(FetchError):
            fetch(entry, folder)
    assert names(folder) == ["packed"]


def test_a_download_is_verified_extracted_and_not_repeated(server, tmp_path):
    entry, folder, steps = download(server.url()), tmp_path / "new", []
    assert fetch(entry, folder, progress=lambda *step: steps.append(step)) == folder / "top"
    assert_fetched(entry, folder)
    assert json.loads((folder / "top" / ".fetched.json").read_text()) == {"download": "data", "sha256": sha256(BODY)}
    assert [steps[0], steps[-1]] == [(0, len(BODY)), (len(BODY), len(BODY))]
    assert steps == sorted(steps)
    shutil.rmtree(folder / "packed")
    assert fetch(entry, folder) == folder / "top"
    [request] = server.requests
    assert "urllib" not in request["user-agent"].lower()


@given(cuts=st.lists(st.integers(0, 120_000), max_size=4), ranges=st.booleans())
def test_a_download_is_resumed_wherever_it_was_cut(cuts, ranges):
    with pytest.MonkeyPatch.context() as patch, Server() as server, tempfile.TemporaryDirectory() as folder:
        patch.setattr(fetching, "ATTEMPTS", 6)
        server.cuts, server.ranges = list(cuts), ranges
        assert_fetched(download(server.url()), Path(folder))
        expected, position = [None], 0
        for cut in cuts:
            position = min(position + cut if ranges else cut, len(BODY))
            if position == len(BODY):
                break
            expected.append(f"bytes={position}-" if position else None)
        assert server.ranges_requested() == expected


CUT, RESUMED = {"cuts": [100_000]}, "bytes=100000-"


@pytest.mark.parametrize(
    ("at_first", "then", "requested"),
    [
        (CUT, {}, [None, RESUMED]),
        (CUT | {"etag": None}, {}, [None, RESUMED]),
        (CUT | {"etag": None, "last_modified": None}, {}, [None, None]),
        (CUT | {"body": OTHER, "etag": '"zero"'}, {"body": BODY, "etag": '"one"'}, [None, RESUMED]),  # answered from the start
        (CUT | {"body": OTHER, "etag": '"zero"'}, {"body": BODY, "etag": '"one"', "blind": True}, [None, RESUMED, None]),
        (CUT | {"body": OTHER + b"more"}, {"body": BODY}, [None, RESUMED, None]),  # another size, the same ETag
        ({"statuses": [408]}, {"statuses": [429, 503]}, [None] * 4),
        ({"cuts": [100_000], "silent": True}, {}, [None, RESUMED]),
        ({"cuts": [30_000]}, {"cuts": [30_000] * 8}, [None, *(f"bytes={30_000 * n}-" for n in range(1, 10))]),  # more than ATTEMPTS
    ],
)
def test_the_next_call_resumes_the_same_version_only(server, tmp_path, monkeypatch, at_first, then, requested):
    entry = download(server.url(), published=False)
    server.set(at_first)
    interrupt(entry, tmp_path, monkeypatch)
    server.set({"cuts": [], **then})
    assert_fetched(entry, tmp_path)
    assert server.ranges_requested() == requested


def test_redirects_keep_the_range(server, tmp_path):
    server.cuts = [100_000]
    assert_fetched(download(server.url("/moved/file.bin")), tmp_path)
    assert server.ranges_requested() == [None, None, RESUMED, RESUMED]


@pytest.mark.parametrize("notes", ["", "{", "[]", '{"url": 3}', '{"url": "URL"}', '{"url": "URL", "version": "1", "size": 7}', "COMPLETE"])
def test_a_part_is_used_only_with_its_notes(server, tmp_path, notes):
    complete = notes == "COMPLETE"
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "file.bin.part").write_bytes(BODY if complete else OTHER[:1000])
    notes = json.dumps({"url": "URL", "version": '"one"', "size": len(BODY)}) if complete else notes
    (tmp_path / "packed" / "file.bin.json").write_text(notes.replace("URL", server.url()))
    assert_fetched(download(server.url()), tmp_path)
    assert len(server.requests) == (0 if complete else 1)


@pytest.mark.parametrize(
    ("settings", "changes", "message", "requests"),
    [
        *(({"statuses": [status]}, {}, str(status), 1) for status in (206, 403, 404, 410)),
        ({"statuses": [404], "reason": "\x1b[31mNo"}, {}, r"404 \\x1b\[31mNo", 1),
        ({"statuses": [500] * 9}, {}, "500.*3 attempts", 3),
        ({"cuts": [0] * 9}, {}, f"0 of {len(BODY):,} bytes.*3 attempts", 3),
        ({"cuts": [100_000] * 9, "ranges": False}, {}, "100,000 of .*3 attempts", 3),
        ({"cuts": [0] * 9, "silent": True}, {}, "timed out.*3 attempts", 3),
        ({"body": BODY + b"more"}, {}, f"{len(BODY) + 4:,}.*{len(BODY):,}", 1),
        ({"body": BODY[:-1]}, {}, f"{len(BODY) - 1:,}.*{len(BODY):,}", 1),
        ({"body": BODY * 3}, {"published": False}, f"{3 * len(BODY):,}.*{len(BODY):,}", 1),
        ({"body": BODY[:100]}, {"published": False}, f"100 .*{len(BODY):,}", 1),
        ({"body": OTHER}, {}, f"{sha256(OTHER)}.*{sha256(BODY)}.*file.bin.bad", 1),
        ({"moved_to": "file:///etc/hostname"}, {}, "file:///etc/hostname", 1),
        ({"moved_to": "ftp://127.0.0.1/a"}, {}, "ftp://127.0.0.1/a", 1),
        ({"moved_to": "http://localhost:1/a"}, {}, "http://localhost:1/a", 1),
        ({"moved_to": f"https://{'a' * 64}.invalid/"}, {}, "label", 1),
        ({"moved_to": "/moved/again"}, {}, "302", 5),
        *(
            ({}, {"urls": (url,)}, f"{url}.*not an https", 0)
            for url in ("http://example.org/file.bin", "ftp://example.org/file.bin", "file:///file.bin", "example.org/file.bin")
        ),
        ({}, {"urls": ("http://127.0.0.1:9/file.bin",)}, "refused.*3 attempts", 0),
    ],
)
def test_failures_are_reported_on_one_line_with_advice(server, tmp_path, settings, changes, message, requests):
    server.set(settings)
    changes = {"urls": (server.url("/moved/file.bin" if "moved_to" in settings else "/file.bin"),), **changes}
    steps = [0]
    with pytest.raises(FetchError, match=message) as error:
        fetch(download(note="Generate it.", **changes), tmp_path, progress=lambda done, size: steps.append(done))
    assert str(error.value).isprintable()
    for part in (*changes["urls"], f"save it as {tmp_path / 'packed' / 'file.bin'}", "Generate it."):
        assert part in str(error.value)
    assert len(server.requests) == requests
    assert names(tmp_path) == ["packed"]
    assert "file.bin" not in names(tmp_path / "packed")
    assert ("file.bin.bad" in names(tmp_path / "packed")) == ("file.bin.bad" in message)
    assert max(steps) <= len(BODY) + 10_000


def test_a_wrong_file_at_one_address_is_replaced_from_the_next(server, tmp_path):
    with Server() as wrong:
        wrong.body = OTHER
        fetch(download(wrong.url(), server.url()), tmp_path)
    assert (tmp_path / "packed" / "file.bin").read_bytes() == BODY
    assert (tmp_path / "packed" / "file.bin.bad").read_bytes() == OTHER


def test_addresses_are_tried_in_order_but_that_of_the_part_first(server, tmp_path, monkeypatch):
    missing, file, mirror = server.url("/missing/file.bin"), server.url(), server.url("/mirror/file.bin")
    server.cuts = [100_000]
    interrupt(download(missing, file), tmp_path, monkeypatch)
    server.statuses = [404]
    assert_fetched(download(missing, file, mirror), tmp_path)
    assert [server.url(request["path"]) for request in server.requests] == [missing, file, file, missing, mirror]
    assert server.ranges_requested() == [None, None, RESUMED, None, None]


def test_without_a_published_checksum_later_downloads_match_the_first(server, tmp_path, caplog):
    entry = download(server.url(), published=False)
    for expected_warnings in (["WARNING"], []):
        assert_fetched(entry, tmp_path)
        assert [record.levelname for record in caplog.records if sha256(BODY) in record.message] == expected_warnings
        caplog.clear()
        shutil.rmtree(tmp_path / "top")
        (tmp_path / "packed" / "file.bin").unlink()
    server.body = OTHER
    with pytest.raises(FetchError, match=f"{sha256(OTHER)}.*{sha256(BODY)}.*delete .*file.bin.json"):
        fetch(entry, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [(BODY, None), (OTHER, f"{sha256(OTHER)}.*{sha256(BODY)}"), (BODY[:-1], f"{len(BODY) - 1:,}.*{len(BODY):,}")]
)
def test_an_archive_saved_by_hand_is_verified(server, tmp_path, content, message):
    path = tmp_path / "packed" / "file.bin"
    path.parent.mkdir()
    path.write_bytes(content)
    if message:
        with pytest.raises(FetchError, match=message):
            fetch(download(server.url()), tmp_path)
        assert names(path.parent) == ["file.bin.bad"]
    assert server.requests == []
    assert (fetch(download(server.url()), tmp_path) / "noise.bin").read_bytes() == NOISE
    assert len(server.requests) == (1 if message else 0)


def test_redirects_do_not_leave_https():
    request, follow = urllib.request.Request("https://example.org/a"), fetching._SafeRedirects().redirect_request
    for url in ("http://example.org/a", "http://127.0.0.1/a"):
        with pytest.raises(urllib.error.HTTPError, match=url) as error:
            follow(request, io.BytesIO(), 302, "Found", {}, url)
        error.value.close()
    assert follow(request, io.BytesIO(), 302, "Found", {}, "https://example.com/b").full_url == "https://example.com/b"


def test_an_unknown_host_is_not_asked_again(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(FetchError, match="service not known(?!.*attempts)"):
        fetch(download("https://data.invalid/file.bin"), tmp_path)


@pytest.mark.parametrize("part", [0, 100_000])
def test_space_is_checked_before_the_first_request(server, tmp_path, monkeypatch, part):
    entry, needed = download(server.url(), bytes_unpacked=2_000_000), 2_000_000 + len(BODY) - part
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "file.bin.part").write_bytes(BODY[:part])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(needed - 1))
    with pytest.raises(FetchError, match=rf"data needs 2\.\d MB in {tmp_path} .*PERMUTEFORMER_DATA"):
        fetch(entry, tmp_path)
    assert server.requests == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(needed))
    assert_fetched(entry, tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_not_a_lost_connection(server, tmp_path):
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "file.bin.part").symlink_to("/dev/full")
    with pytest.raises(WriteError, match="disk is full.*file.bin"):
        fetch(download(server.url()), tmp_path)
    assert len(server.requests) == 1


CHILD = """
import sys
from pathlib import Path
from permuteformer.tasks.downloads import Download
from permuteformer.tasks.fetch import fetch
fields = dict(name="data", title="", tasks=(), root="top", licence="", bytes_packed=int(sys.argv[2]), bytes_unpacked=0)
fetch(Download(urls=(sys.argv[1],), **fields), Path(sys.argv[3]), progress=lambda done, size: print(done, flush=True))
"""


def test_a_second_process_is_refused_and_resumes_after_the_first_is_killed(server, tmp_path):
    server.cuts, server.silent = [100_000], True
    command = [sys.executable, "-c", CHILD, server.url(), str(len(BODY)), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(fetching.__file__).parents[2])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as first:
        while int(first.stdout.readline()) < 100_000:
            pass
        with pytest.raises(FetchError, match="another process.*file.bin"):
            fetch(download(server.url()), tmp_path)
        assert len(server.requests) == 1
        first.kill()
    size = (tmp_path / "packed" / "file.bin.part").stat().st_size
    assert size >= 100_000 - 2**16  # the rest was in a buffer of the killed process
    assert_fetched(download(server.url()), tmp_path)
    assert server.ranges_requested() == [None, f"bytes={size}-"]


def test_a_folder_that_was_not_fetched_is_kept(server, tmp_path):
    (tmp_path / "top").mkdir()
    with pytest.raises(FetchError, match=f"{tmp_path / 'top'} .*move"):
        fetch(download(server.url()), tmp_path)
    assert names(tmp_path / "top") == server.requests == []


def test_downloads_extract_their_folders_from_a_shared_archive(server, tmp_path):
    for root, members, expected in (
        ("top", ("a/deep", "b/"), {"a/deep/two.txt", "b/three.txt"}),
        ("top/a", ("",), {"one.txt", "deep/two.txt"}),
        ("other", ("",), {"top/four.txt"}),
    ):
        folder = fetch(download(server.url(), root=root, members=members), tmp_path)
        assert folder == tmp_path / Path(root).name
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert found.pop(".fetched.json")
        assert found == {name: MEMBERS[f"{root}/{name}"] for name in expected}
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body", [tar_bytes([("top/a", b"a"), ("../up", b"b")]), BODY[:100_000], b"<html>log in</html>" * 9, zip_bytes([("a", b"a")])]
)
def test_an_archive_that_cannot_be_used_leaves_no_folder(server, tmp_path, body):
    server.body = body
    archive = tmp_path / "packed" / "file.bin"
    with pytest.raises(FetchError, match=f"(?=.*{archive}).*delete .*fetch again"):
        fetch(download(server.url(), body=body, published=False), tmp_path)
    assert names(tmp_path) == ["packed"]
    assert not (tmp_path.parent / "up").exists()
    archive.unlink()
    server.body = BODY
    assert_fetched(download(server.url(), published=False), tmp_path)


LRA = {f"listops-1000/basic_{split}.tsv": b"Source\tTarget\r\n" for split in ("train", "val", "test")}
LRA |= {f"tsv_data/new_aan_pairs.{split}.tsv": b"0.0\ta\tb\tb'c'\tb'd'\n" for split in ("train", "eval", "test")}
LRA |= {f"pathfinder32/curv_contour_length_14/{name}": b"x" for name in ("metadata/0.npy", "metadata/1.npy", "imgs/0/sample_0.png")}
LAYOUTS = {
    "aclImdb": {f"aclImdb/{split}/{label}/0_9.txt": b"text" for split in ("train", "test") for label in ("neg", "pos", "unsup")},
    "cifar-10": {f"cifar-10-batches-py/{name}": b"batch" for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")},
    **dict.fromkeys(
        ("lra_release", "lra-listops", "lra-retrieval", "lra-pathfinder"),
        {f"lra_release/lra_release/{name}": content for name, content in LRA.items()}
        | {"lra_release/listops-1000/basic_train.tsv": b"again"},
    ),
    **{
        f"{name}{raw}": {f"{name}{raw}/wiki.{split}.{ending}": b" text\n" for split in ("train", "valid", "test")}
        for name in ("wikitext-103", "wikitext-2")
        for raw, ending in (("", "tokens"), ("-raw", "raw"))
    },
}


@pytest.mark.parametrize("name", DOWNLOADS)
def test_tasks_find_the_fetched_folder(server, tmp_path, name):
    entry = DOWNLOADS[name]
    files = [*LAYOUTS[name].items(), ("readme.html", b"other")]
    server.body = zip_bytes(files) if entry.filename.endswith(".zip") else tar_bytes(files, "w:gz")
    folder = fetch(replace(entry, urls=(server.url(),), bytes_packed=len(server.body), bytes_unpacked=0, sha256=None), tmp_path)
    assert names(tmp_path) == sorted([folder.name, "packed"])
    assert not list(folder.rglob("unsup"))
    for task in entry.tasks:
        source = TASKS[task](data=str(tmp_path), **({"raw": True} if name.endswith("-raw") else {})).source
        assert source.paths
        assert all(path.is_relative_to(folder) and path.exists() for path in source.paths)


def test_the_downloads_are_consistent():
    assert set(LAYOUTS) == set(DOWNLOADS)
    for name, entry in DOWNLOADS.items():
        assert find_download(entry.name) is DOWNLOADS[name]
        assert re.fullmatch("[0-9a-f]{64}", entry.sha256 or "0" * 64)
        assert all(task in find_download(task).tasks for task in entry.tasks)
    with pytest.raises(ValueError, match="did you mean 'wikitext-103'"):
        find_download("wikitext103")
