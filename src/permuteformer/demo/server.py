"""The HTTP server of the page, for this machine only: it checks every request, and answers bad ones with a message as JSON."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from permuteformer.demo.answers import Answers
from permuteformer.demo.turns import Busy, Stopping

HOST = "127.0.0.1"
"""The only address the server listens on."""
LARGEST_BODY = 1_000_000
"""Bytes."""
CONNECTIONS = 128
"""Open connections; further ones get a 503."""
SECONDS = 30.0
"""Time after which an idle connection is closed."""
AGAIN = {"Retry-After": "1"}

PAGE = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
"""The files that are served; no other file can be read."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """A server on ``HOST`` with one thread per connection, ``CONNECTIONS`` at most."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(self, answers: Answers, port: int) -> None:
        self.answers = answers
        self.page = {path: (files("permuteformer.demo").joinpath(name).read_bytes(), kind) for path, (name, kind) in PAGE.items()}
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(f"port {port} is in use: pass another --port, or --port 0 for any free one") from None
            if error.errno == errno.EACCES:
                raise OSError(f"port {port} is not allowed: pass a --port of at least 1024, or --port 0 for any free one") from None
            raise

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The allowed Host headers. Another name that resolves to this address is refused (DNS rebinding)."""
        return tuple(f"{name}:{self.server_port}" for name in (HOST, "localhost"))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection, or answer 503 if there are too many."""
        if not self._free.acquire(blocking=False):
            body = json.dumps({"error": "too many connections: try again in a second"}).encode()
            head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            with suppress(OSError):
                request.sendall(head.encode() + b"Retry-After: 1\r\nConnection: close\r\n\r\n" + body)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve the connection, then free its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that the client closed."""

    def stop(self) -> None:
        """Refuse new requests, and let running ones end."""
        self.answers.turns.stop()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "permuteformer", ""
    timeout = SECONDS

    def do_GET(self) -> None:
        """Serve the files of the page and the description of the demo."""
        if not self._is_for_us():
            return
        if self.path in self.server.page:
            content, kind = self.server.page[self.path]
            self._send(HTTPStatus.OK, content, f"{kind}; charset=utf-8")
        elif self.path == "/api/about":
            self._json(HTTPStatus.OK, self.server.answers.about())
        elif self.path in self.server.answers.routes:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, f"{self.path} needs POST", {"Allow": "POST"})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "path not found: the page is at /")

    def do_POST(self) -> None:
        """Answer a request, a JSON object."""
        if not self._is_for_us() or (body := self._body()) is None:
            return
        answer = self.server.answers.routes.get(self.path)
        if answer is None:
            known = self.path in (*self.server.page, "/api/about")
            message = f"{self.path} needs GET" if known else "path not found: does it need a run? Pass one to permuteformer demo"
            code = HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND
            self._refuse(code, message, {"Allow": "GET"} if known else {})
            return
        try:
            with self.server.answers.turns.place():
                found = answer(body)
                if isinstance(found, Iterator):
                    self._stream(found)
                else:
                    self._json(HTTPStatus.OK, found)
        except Busy:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests are waiting: try again in a second", AGAIN)
        except Stopping:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down", AGAIN)
        except (ValueError, TypeError) as error:  # messages of the library
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client is gone
        except Exception as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}")

    def _is_for_us(self) -> bool:
        """Refuse requests that other sites make, and return whether this one is allowed."""
        if self.headers.get("Host") not in self.server.hosts:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, f"Host must be that of {self.server.address}")
            return False
        origin = self.headers.get("Origin")
        ours = origin is None or origin in {f"http://{host}" for host in self.server.hosts}
        if not ours or self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            self._refuse(HTTPStatus.FORBIDDEN, "requests from other sites are refused")
            return False
        return True

    def _body(self) -> dict[str, Any] | None:
        """Return the JSON object of the request, or refuse it and return ``None``."""
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json")
            return None
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "Content-Length must be the number of bytes")
            return None
        if len(length) > 12 or int(length) > LARGEST_BODY:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request must have at most {LARGEST_BODY:,} bytes")
            return None
        try:
            content = self.rfile.read(int(length))
            body = json.loads(content)
        except (TimeoutError, ConnectionError):
            self.close_connection = True
            return None
        except (ValueError, RecursionError):
            self._refuse(HTTPStatus.BAD_REQUEST, "the request is not JSON")
            return None
        if not isinstance(body, dict):
            self._refuse(HTTPStatus.BAD_REQUEST, "the request must be a JSON object")
            return None
        return body

    def _stream(self, pieces: Iterator[dict[str, Any]]) -> None:
        """Send each piece as a line of JSON when it is ready. An error becomes the last line."""
        self._head(HTTPStatus.OK, {"Content-Type": "application/x-ndjson; charset=utf-8", "Transfer-Encoding": "chunked"})
        try:
            for piece in pieces:
                self._chunk(piece)
        except OSError:
            self.close_connection = True  # the stop button
            return
        except Stopping:
            self._chunk({"error": "the server is shutting down"})
        except (ValueError, TypeError) as error:
            self._chunk({"error": str(error)})
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, content: dict[str, Any]) -> None:
        line = json.dumps(content).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _json(self, code: HTTPStatus, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(code, json.dumps(content).encode(), "application/json; charset=utf-8", headers)

    def _refuse(self, code: HTTPStatus, message: str, headers: dict[str, str] | None = None) -> None:
        """Send an error and close the connection: unread bytes of this request would be taken for the next one."""
        self.close_connection = True
        try:
            self._json(code, {"error": message}, {**(headers or {}), "Connection": "close"})
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            return
        self._drain()

    def _drain(self) -> None:
        """Read the rest of the request for a moment: closing with unread data can drop the response."""
        self.connection.settimeout(0.5)
        left = 4 * LARGEST_BODY
        try:
            while left > 0 and (some := self.rfile.read1(1 << 16)):
                left -= len(some)
        except (OSError, ValueError):
            return

    def _send(self, code: HTTPStatus, content: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self._head(code, {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, code: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send errors of the standard library as JSON. Unknown methods and versions are client errors."""
        mistakes = {501: HTTPStatus.METHOD_NOT_ALLOWED, 505: HTTPStatus.BAD_REQUEST}
        status = mistakes.get(code) or HTTPStatus(code)
        allowed = {"Allow": "GET, POST"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        self.request_version = self.protocol_version  # a request that was not parsed counts as HTTP/0.9, which has no headers
        self._refuse(status, status.description or status.phrase, allowed)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
