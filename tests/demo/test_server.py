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

import pytest
from demo.conftest import ask, serving
from typer.testing import CliRunner

from permuteformer.cli import app
from permuteformer.demo.answers import LONGEST_TEXT
from permuteformer.demo.server import HOST, LARGEST_BODY
from permuteformer.demo.turns import Busy, Stopping, Turns

HEAD = {"features": 16, "permutation": "random", "seed": 0, "head": 0, "r": "default", "axes": 1, "causal": True, "alike": True}
GENERATE = {"prompt": "The ", "tokens": 20, "temperature": 1.0, "seed": 0}


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
        assert ask(other, "/api/predict", {"texts": ["x"]})[0] == 404


def test_a_prediction_and_its_explanation(server):
    status, _, found = ask(server, "/api/predict", {"texts": ["a good film"]})
    assert status == 200
    assert sum(found["probabilities"].values()) == pytest.approx(1)
    status, _, why = ask(server, "/api/explain", {"texts": ["a good film"]})
    assert status == 200
    assert why["probability"] == pytest.approx(max(found["probabilities"].values()))
    assert why["answer"] in why["message"]
    assert "".join(why["parts"][0]["tokens"]) == "a good film"


def test_a_text_is_streamed_and_equals_that_of_generate(speaker):
    from permuteformer.train.generate import generate

    with serving(speaker) as server:
        status, headers, lines = ask(server, "/api/generate", GENERATE)
        assert status == 200
        assert headers["Transfer-Encoding"] == "chunked"
        assert lines[-1]["tokens"] == 20
        assert len(lines) > 5
        assert "".join(line.get("text", "") for line in lines) == "".join(generate(speaker, "The ", 20))
        assert ask(server, "/api/explain", {"texts": ["The ca"]})[2]["kind"] == "lm"
        assert ask(server, "/api/predict", {"texts": ["The ca"]})[0] == 404


@pytest.mark.parametrize("r", ["default", 0.9, 1, None])
@pytest.mark.parametrize(("axes", "causal"), [(1, True), (1, False), (2, False)])
def test_positions_of_every_kind_of_model(server, axes, causal, r):
    status, _, found = ask(server, "/api/positions", {**HEAD, "axes": axes, "causal": causal, "r": r, "head": 1})
    assert status == 200
    assert (found["axes"], found["two_sided"], found["decay_axis"]) == (axes, not causal, axes - 1)
    assert (found["r"] is None) is (r is None)
    if causal or axes == 2:  # the default of causal
        body = {**HEAD, "axes": axes, "r": r, "head": 1}
        del body["causal"]
        assert ask(server, "/api/positions", body)[2] == found


def wrong(**fields):
    return {**HEAD, **fields}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/api/positions", {}, "axes"),
        ("/api/positions", wrong(features=1), "features must be an integer from 2 to 128, got 1"),
        ("/api/positions", wrong(features=10**9), "got 1000000000"),
        ("/api/positions", wrong(features=16.5), "features"),
        ("/api/positions", wrong(features="16"), "features"),
        ("/api/positions", wrong(features=True), "features"),
        ("/api/positions", wrong(seed=-1), "seed"),
        ("/api/positions", wrong(seed=10**4000), "seed"),
        ("/api/positions", wrong(permutation="shuffle"), "random, max_order, none, got 'shuffle'"),
        ("/api/positions", wrong(permutation=["random"]), "permutation"),
        ("/api/positions", wrong(r=0), "1e-06 to 1, got 0"),
        ("/api/positions", wrong(r=1.01), "got 1.01"),
        ("/api/positions", wrong(r="paper"), "'default', null or a number"),
        ("/api/positions", wrong(r=["default"]), "got ['default']"),
        ("/api/positions", wrong(r=True), "got True"),
        ("/api/positions", wrong(r=0, causal=False), "1e-06 to 1, got 0"),
        ("/api/positions", wrong(r=-0.5, causal=False, axes=2), "got -0.5"),
        ("/api/positions", wrong(r=float("nan")), "got nan"),
        ("/api/positions", wrong(r=float("inf")), "got inf"),
        ("/api/positions", wrong(r=10**400), "1e-06 to 1"),
        ("/api/positions", wrong(axes=3), "1 to 2, got 3"),
        ("/api/positions", wrong(axes=2), "causal must be false with axes=2"),
        ("/api/positions", wrong(causal=0), "causal must be true or false, got 0"),
        ("/api/positions", wrong(causal=None), "got None"),
        ("/api/positions", wrong(axes=2, causal=False, features=3), "4 to 128, got 3"),
        ("/api/positions", wrong(alike=1), "alike must be true or false, got 1"),
        ("/api/positions", wrong(colour="red"), "unknown field 'colour'"),
        ("/api/predict", {}, "either texts"),
        ("/api/predict", {"texts": "x"}, "list of one or two"),
        ("/api/predict", {"texts": [1]}, "characters, got 1"),
        ("/api/predict", {"texts": ["a", "b"]}, "2"),
        ("/api/predict", {"texts": ["a" * (LONGEST_TEXT + 1)]}, "20,000 characters, got 20,001"),
        ("/api/predict", {"image": "AAAA"}, "image"),
        ("/api/explain", {"image": "not base64"}, "got 'not base64'"),
        ("/api/explain", {"texts": [""]}, "nothing to explain"),
    ],
)
def test_a_bad_request_gets_a_message(server, path, body, message):
    status, headers, found = ask(server, path, body)
    assert status == 400
    assert message in found["error"]
    assert "Traceback" not in json.dumps(found)
    assert headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"path": "/nowhere"}, 404),
        ({"path": "/../../etc/passwd"}, 404),
        ({"path": "/page.html?x=1"}, 404),
        ({"path": "/api/nothing", "body": {}}, 404),
        ({"path": "/api/positions"}, 405),
        ({"path": "/", "body": {}}, 405),
        ({"path": "/", "method": "PUT"}, 405),
        ({"path": "/", "method": "DELETE"}, 405),
        ({"path": "/", "method": "HEAD"}, 405),
        ({"path": "/", "method": "BREW"}, 405),
        ({"path": "/api/positions", "body": HEAD, "headers": {"Content-Type": "text/plain"}}, 415),
        ({"path": "/api/positions", "body": HEAD, "headers": {"Content-Type": "application/x-www-form-urlencoded"}}, 415),
        ({"path": "/api/positions", "raw": b"{"}, 400),
        ({"path": "/api/positions", "raw": b"[]"}, 400),
        ({"path": "/api/positions", "raw": b"\xff\xfe"}, 400),
        ({"path": "/api/positions", "raw": b"[" * 100_000}, 400),
        ({"path": "/api/positions", "raw": b" " * (LARGEST_BODY + 1)}, 413),
        ({"path": "/api/positions", "body": HEAD, "headers": {"Host": "evil.example"}}, 421),
        ({"path": "/", "headers": {"Host": "evil.example:8000"}}, 421),
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
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"POST /api/positions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /api/positions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: -5\r\n\r\n", 411),
        (b"POST /api/positions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 99999999999999999\r\n\r\n", 413),
    ],
)
def test_malformed_requests(server, sent, status):
    with socket.create_connection((HOST, server.server_port), timeout=30) as connection:
        connection.sendall(sent.replace(b"%s", f"{HOST}:{server.server_port}".encode()))
        answer = b""
        while some := connection.recv(65536):
            answer += some
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
    texts = [{"texts": [f"text number {n}"]} for n in range(50)]

    def visit(n):
        pages = [ask(server, path)[0] for path in ("/", "/page.js")]
        head = ask(server, "/api/positions", {**HEAD, "seed": n})
        answer = ask(server, "/api/predict" if n % 5 else "/api/explain", texts[n])
        return [*pages, head[0], answer[0]], head[2], answer[2]

    found = at_once(50, visit)
    assert [status for statuses, _, _ in found for status in statuses] == [200] * 200
    for n in (1, 17, 49):  # each gets the answer to its own request
        assert found[n][1] == ask(server, "/api/positions", {**HEAD, "seed": n})[2]
        again = ask(server, "/api/predict", texts[n])[2]["probabilities"]
        assert found[n][2]["probabilities"] == pytest.approx(again)
    with serving(speaker) as other:
        spoken = at_once(50, lambda n: ask(other, "/api/generate", {**GENERATE, "seed": n % 5}))
        assert [status for status, _, _ in spoken] == [200] * 50
        assert len({json.dumps([line.get("text") for line in lines]) for _, _, lines in spoken}) == 5


def test_a_full_queue_answers_503(classifier):
    turns = Turns(places=2)
    with serving(classifier, turns) as server, turns.turn(), ThreadPoolExecutor(2) as pool:  # keeps the model busy
        waiting = [pool.submit(ask, server, "/api/predict", {"texts": ["a"]}) for _ in range(2)]
        end = time.monotonic() + 20
        while len(turns._waiting) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        status, headers, found = ask(server, "/api/predict", {"texts": ["b"]})
        assert status == 503
        assert headers["Retry-After"] == "1"
        assert "too many requests" in found["error"]
        assert ask(server, "/")[0] == 200  # the page itself needs no model
        turns._give()
        assert [one.result()[0] for one in waiting] == [200, 200]
        turns._take()


def test_the_stop_button_ends_the_text(speaker):
    with serving(speaker) as server:
        body = json.dumps({**GENERATE, "tokens": 2000}).encode()
        head = f"POST /api/generate HTTP/1.1\r\nHost: {HOST}:{server.server_port}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((HOST, server.server_port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b"200 OK" in connection.recv(1000)
        places = server.answers.turns._places
        end = time.monotonic() + 20
        while places._value < places._initial_value and time.monotonic() < end:
            time.sleep(0.02)
        assert places._value == places._initial_value  # its place is free again


def test_turns_are_in_order_of_arrival():
    turns, order = Turns(), []

    def wait(number):
        with turns.turn():
            order.append(number)

    with turns.turn():
        threads = []
        for n in range(5):
            threads.append(threading.Thread(target=wait, args=(n,)))
            threads[-1].start()
            while len(turns._waiting) <= n:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(5))
    small = Turns(places=1)
    with small.place(), pytest.raises(Busy), small.place():
        pass
    small.stop()
    with pytest.raises(Stopping):
        small.check()


def test_a_port_in_use_is_an_error(server):
    result = CliRunner().invoke(app, ["demo", "--no-browser", "--port", str(server.server_port)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert f"port {server.server_port} is in use" in result.output
    assert "--port 0" in result.output


def command(*words):
    program = [sys.executable, "-m", "permuteformer", "demo", "--no-browser", *map(str, words)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_the_command_while_it_generates(speaker):
    process = command(speaker.folder, "--port", 0)
    try:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline()).group(1))
        body = json.dumps({**GENERATE, "tokens": 2000}).encode()
        head = f"POST /api/generate HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((HOST, port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b"200 OK" in connection.recv(1000)
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=30)
            assert time.monotonic() - begun < 15
        assert process.returncode == 0, errors
        assert "closed" in rest
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
