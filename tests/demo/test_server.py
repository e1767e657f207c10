"""The HTTP server: answers, refused requests, concurrency and shutdown."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from commands import run
from demo.conftest import ask, serving

from permuteformer.demo.api import LONGEST_TEXT, Api, Stopping
from permuteformer.demo.server import HOST, LARGEST_BODY
from permuteformer.train.generate import Generation

HEAD = {"features": 16, "permutation": "random", "seed": 0, "head": 0, "r": "default", "axes": 1, "causal": True, "alike": True}
GENERATE = {"prompt": "The ", "tokens": 20, "temperature": 1.0, "seed": 0}
POST = b"POST /api/positions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server(classifier):
    with serving(classifier) as one:
        yield one


def test_the_page_and_its_headers(server):
    for path, kind in {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}.items():
        status, headers, text = ask(server, path)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert len(text) > 1000
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert not any(name.lower().startswith("access-control") for name in headers)
    assert not re.search(r"style=|onclick=|https?://", ask(server, "/")[2])
    assert server.server_address[0] == HOST == "127.0.0.1"


def test_about(server):
    assert ask(server, "/api/about")[2]["run"]["labels"] == ["bad", "good"]
    with serving() as other:
        assert ask(other, "/api/about")[2]["run"] is None
        assert ask(other, "/api/predict", {"text": "x"})[0] == 404


def test_a_prediction_and_its_explanation(server):
    status, _, (found,) = ask(server, "/api/predict", {"text": "a good film"})
    assert status == 200
    assert sum(found["probabilities"].values()) == pytest.approx(1)
    status, _, (why,) = ask(server, "/api/explain", {"text": "a good film"})
    assert status == 200
    assert why["probability"] == pytest.approx(max(found["probabilities"].values()))
    assert why["answer"] in why["message"]
    assert "".join(why["parts"][0]["tokens"]) == "a good film"


def test_a_generated_text_is_that_of_generation(speaker):
    with serving(speaker) as server:
        status, _, lines = ask(server, "/api/generate", GENERATE)
        assert status == 200
        assert lines[-1]["tokens"] == 20
        assert len(lines) > 5
        assert "".join(line.get("text", "") for line in lines) == "".join(Generation(speaker, "The ", 20))
        assert ask(server, "/api/explain", {"text": "The ca"})[2][0]["kind"] == "lm"
        assert ask(server, "/api/predict", {"text": "The ca"})[0] == 404


@pytest.mark.parametrize("r", ["default", 0.9, 1, None])
@pytest.mark.parametrize(("axes", "causal"), [(1, True), (1, False), (2, False)])
def test_positions_of_every_kind_of_model(server, axes, causal, r):
    status, _, (found,) = ask(server, "/api/positions", {**HEAD, "axes": axes, "causal": causal, "r": r, "head": 1})
    assert status == 200
    assert (found["axes"], found["two_sided"], found["decay_axis"]) == (axes, not causal, axes - 1)
    assert (found["r"] is None) is (r is None)


def wrong(**fields):
    return {**HEAD, **fields}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/api/positions", {}, "axes.*None"),
        ("/api/positions", wrong(features=1), "features.*2.*128.*1"),
        ("/api/positions", wrong(features=16.5), "features.*16.5"),
        ("/api/positions", wrong(features=True), "features.*True"),
        ("/api/positions", wrong(seed=-1), "seed.*-1"),
        ("/api/positions", wrong(seed=10**4000), "seed.*1000"),
        ("/api/positions", wrong(head=8), "head.*0.*7.*8"),
        ("/api/positions", wrong(permutation="shuffle"), "random.*max_order.*none.*'shuffle'"),
        ("/api/positions", wrong(r=0), "r .*1e-06.*1.* 0"),
        ("/api/positions", wrong(r="paper"), "'default', null.*'paper'"),
        ("/api/positions", wrong(r=["default"]), r"\['default'\]"),
        ("/api/positions", wrong(r=True), "True"),
        ("/api/positions", wrong(r=float("nan")), "nan"),
        ("/api/positions", wrong(r=10**400), "1e-06.*1000"),
        ("/api/positions", wrong(axes=3), "axes.*1, 2.*3"),
        ("/api/positions", wrong(axes=2), "causal.*false.*True"),
        ("/api/positions", wrong(causal=0), "causal.*false, true.*0"),
        ("/api/positions", wrong(axes=2, causal=False, features=3), "features.*4.*128.*3"),
        ("/api/positions", wrong(colour="red"), "'colour'"),
        ("/api/predict", {}, "text.*None"),
        ("/api/predict", {"text": ["x"]}, r"text.*\['x'\]"),
        ("/api/predict", {"text": "a", "second": "b"}, "'second'"),
        ("/api/predict", {"text": "a" * (LONGEST_TEXT + 1)}, "text.*20,000.*20,001"),
        ("/api/predict", {"image": "AAAA"}, "'image'"),
        ("/api/explain", {"text": ""}, "empty"),
    ],
)
def test_a_bad_field_gets_a_message(server, path, body, message):
    status, headers, found = ask(server, path, body)
    assert status == 400
    assert re.search(message, found["error"])
    assert "Traceback" not in json.dumps(found)
    assert headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"path": "/nowhere"}, 404),
        ({"path": "/../../etc/passwd"}, 404),
        ({"path": "/?x=1"}, 404),
        ({"path": "/api/positions"}, 404),
        ({"path": "/", "body": {}}, 404),
        ({"path": "/", "method": "HEAD"}, 501),
        ({"path": "/", "method": "BREW"}, 501),
        ({"path": "/api/positions", "body": HEAD, "headers": {"Content-Type": "text/plain"}}, 415),
        ({"path": "/api/positions", "raw": b"{"}, 400),
        ({"path": "/api/positions", "raw": b"[]"}, 400),
        ({"path": "/api/positions", "raw": b"\xff\xfe"}, 400),
        ({"path": "/api/positions", "raw": b"[" * 100_000}, 400),
        ({"path": "/api/positions", "raw": b" " * (LARGEST_BODY + 1)}, 413),
        ({"path": "/api/positions", "body": HEAD, "headers": {"Host": "evil.example"}}, 421),
        ({"path": "/", "headers": {"Host": "127.0.0.1"}}, 421),
        ({"path": "/api/positions", "body": HEAD, "headers": {"Origin": "http://evil.example"}}, 403),
        ({"path": "/api/positions", "body": HEAD, "headers": {"Origin": "null"}}, 403),
        ({"path": "/", "headers": {"Sec-Fetch-Site": "cross-site"}}, 403),
    ],
)
def test_refused_requests(server, request_, status):
    found = ask(server, **request_)
    assert found[0] == status
    if request_.get("method") != "HEAD":
        assert found[2]["error"]
    assert "default-src 'none'" in found[1]["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 421),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (POST + b"Content-Length: -5\r\n\r\n", 411),
        (POST + b"Content-Length: 99999999999999999\r\n\r\n", 413),
    ],
)
def test_malformed_requests(server, sent, status):
    with socket.create_connection((HOST, server.server_port), timeout=30) as connection:
        connection.sendall(sent.replace(b"%s", f"{HOST}:{server.server_port}".encode()))
        answer = connection.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert json.loads(body)["error"]
    assert ask(server, "/")[0] == 200  # the server still answers


def test_localhost_is_allowed(server):
    origin = {"Host": f"localhost:{server.server_port}", "Origin": f"http://localhost:{server.server_port}"}
    assert ask(server, "/api/positions", HEAD, headers=origin)[0] == 200


def at_once(count, work):
    """Start all calls at the same time."""
    barrier = threading.Barrier(count)

    def one(number):
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_fifty_concurrent_users(server, speaker):
    texts = [{"text": f"text number {n}"} for n in range(50)]

    def visit(n):
        pages = [ask(server, path)[0] for path in ("/", "/page.js")]
        head = ask(server, "/api/positions", {**HEAD, "seed": n})
        answer = ask(server, "/api/predict" if n % 5 else "/api/explain", texts[n])
        return [*pages, head[0], answer[0]], head[2], answer[2]

    found = at_once(50, visit)
    assert [status for statuses, _, _ in found for status in statuses] == [200] * 200
    for n in (1, 17, 49):  # each gets the answer to its own request
        assert found[n][1] == ask(server, "/api/positions", {**HEAD, "seed": n})[2]
        again = ask(server, "/api/predict", texts[n])[2][0]["probabilities"]
        assert found[n][2][0]["probabilities"] == pytest.approx(again)
    with serving(speaker) as other:
        spoken = at_once(50, lambda n: ask(other, "/api/generate", {**GENERATE, "seed": n % 5}))
        assert [status for status, _, _ in spoken] == [200] * 50
        assert len({json.dumps([line.get("text") for line in lines]) for _, _, lines in spoken}) == 5


def test_half_open_connections_lock_nobody_out(server):
    begin = time.monotonic()
    open_ones = [socket.create_connection((HOST, server.server_port), timeout=30) for _ in range(140)]
    try:
        for connection in open_ones:
            connection.sendall(b"POST /api/positions HTTP/1.1\r\n")
        assert ask(server, "/")[0] == 200
        assert ask(server, "/api/positions", HEAD)[0] == 200
        assert time.monotonic() - begin < 9  # before the first of them is closed for being idle
    finally:
        for connection in open_ones:
            connection.close()


@contextmanager
def streaming(port):
    """A long text that is being generated."""
    body = json.dumps({**GENERATE, "tokens": 2000}).encode()
    head = f"POST /api/generate HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((HOST, port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(1000)
        yield connection


def test_a_full_queue_refuses_and_a_stopped_text_frees_its_place(speaker):
    with serving(speaker, places=1) as server:
        with streaming(server.server_port):
            status, headers, found = ask(server, "/api/positions", HEAD)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert found["error"]
            assert ask(server, "/")[0] == 200  # the page itself needs no computation
        end = time.monotonic() + 20
        while (status := ask(server, "/api/positions", HEAD)[0]) == 503 and time.monotonic() < end:
            time.sleep(0.02)
        assert status == 200


def test_requests_alternate_with_the_tokens_of_a_text(speaker):
    with serving(speaker, places=2) as server, streaming(server.server_port) as text:
        assert ask(server, "/api/positions", HEAD)[0] == 200
        assert b'"tokens"' not in text.recv(1 << 20)  # the text has not ended


def test_shutdown_ends_an_explanation(classifier):
    api = Api(classifier)
    api.stopping.set()
    with pytest.raises(Stopping):
        next(api.explain({"text": "a good film"}))


def test_a_port_in_use_is_an_error(server):
    output = run("demo", "--no-browser", "--port", server.server_port, code=1)
    assert str(server.server_port) in output
    assert "--port 0" in output


def test_ctrl_c_ends_the_command_while_it_generates(speaker):
    command = [sys.executable, "-m", "permuteformer", "demo", "--no-browser", str(speaker.folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline()).group(1))
        with streaming(port):
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
