"""The HTTP server of the page, for this machine only. It checks every request, and one thread computes all answers, in order of arrival."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import chain
from socket import SHUT_WR
from typing import Any

from permuteformer.demo.api import Answer, Api

HOST = "127.0.0.1"
"""The only address the server listens on."""
PLACES = 64
"""Requests that are computed or wait. The next one is refused."""
CONNECTIONS = 512
"""Open connections. Further ones are closed."""
IDLE_SECONDS = 10.0
"""Time after which an idle connection is closed."""
LARGEST_BODY = 1_000_000
"""Bytes of a request."""

PAGE = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
"""The only files that can be read."""
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


class Refused(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """A server with one thread per connection, and one that computes. Start it by ``serve_forever``."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, api: Api, port: int, places: int = PLACES) -> None:
        self.api = api
        self.page = {path: (files("permuteformer.demo").joinpath(name).read_bytes(), kind) for path, (name, kind) in PAGE.items()}
        self._computer = ThreadPoolExecutor(max_workers=1)
        self._places = threading.BoundedSemaphore(places)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise OSError(f"port {port} cannot be used ({error.strerror}): pass another --port, or --port 0 for any free one") from None
        self.address = f"http://{HOST}:{self.server_port}/"
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        """The allowed Host headers. Another name that resolves to this address is refused (DNS rebinding)."""

    def compute(self, answer: Answer) -> Generator[Any, None, None]:
        """Yield the pieces of an answer. Each is computed in turn, so that requests alternate."""
        if not self._places.acquire(blocking=False):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests are waiting: try again in a second")
        try:
            while (piece := self._computer.submit(next, answer, None).result()) is not None:
                yield piece
        finally:
            self._places.release()

    def stop(self) -> None:
        """End running requests at their next step, and close the server."""
        self.api.stopping.set()
        self._computer.shutdown(cancel_futures=True)
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is room for another connection."""
        return threading.active_count() < CONNECTIONS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that the client closed."""


class Handler(BaseHTTPRequestHandler):
    """One request. A connection is closed after it (HTTP/1.0)."""

    server: Server
    timeout = IDLE_SECONDS
    default_request_version = "HTTP/1.0"  # so that the answer to a malformed request has headers
    server_version, sys_version = "permuteformer", ""

    def do_GET(self) -> None:
        """Serve the files of the page and the description of the demo."""
        with self._errors_as_json():
            self._check_site()
            if self.path in self.server.page:
                content, kind = self.server.page[self.path]
                self._send(HTTPStatus.OK, content, f"{kind}; charset=utf-8")
            elif self.path == "/api/about":
                self._send_json(HTTPStatus.OK, self.server.api.about())
            else:
                raise Refused(HTTPStatus.NOT_FOUND, "path not found: the page is at /")

    def do_POST(self) -> None:
        """Answer a JSON object by a line of JSON for each piece of the answer, as soon as it is computed."""
        with self._errors_as_json():
            self._check_site()
            if self.path not in self.server.api.routes:
                raise Refused(HTTPStatus.NOT_FOUND, "path not found: does it need a model? Pass a run to permuteformer demo")
            answer = self.server.api.routes[self.path](self._body())
            with closing(self.server.compute(answer)) as pieces:
                first = next(pieces)
                self._send_head(HTTPStatus.OK, "application/x-ndjson; charset=utf-8")
                for piece in chain([first], pieces):
                    self.wfile.write(json.dumps(piece).encode() + b"\n")

    @contextmanager
    def _errors_as_json(self) -> Iterator[None]:
        """Send an error as JSON, unless the answer has begun: then the connection is closed, and the last piece is missing."""
        self.has_begun = False
        status, message = HTTPStatus.INTERNAL_SERVER_ERROR, "internal error"
        try:
            yield
            return
        except OSError:
            return  # the client is gone
        except Refused as error:
            status, message = error.status, str(error)
        except (ValueError, TypeError) as error:
            status, message = HTTPStatus.BAD_REQUEST, str(error)
        except Exception as error:
            message = f"internal error: {type(error).__name__}"
            if self.server.api.stopping.is_set():
                status, message = HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down"
        if not self.has_begun:
            self._send_json(status, {"error": message})

    def _check_site(self) -> None:
        """Refuse requests that other sites make."""
        if self.headers.get("Host") not in self.server.hosts:
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, f"Host must be that of {self.server.address}")
        origin = self.headers.get("Origin")
        is_ours = origin is None or origin in {f"http://{host}" for host in self.server.hosts}
        if not is_ours or self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Refused(HTTPStatus.FORBIDDEN, "requests from other sites are refused")

    def _body(self) -> dict[str, Any]:
        """Return the JSON object of the request."""
        if self.headers.get_content_type() != "application/json":  # other sites may send other types without asking
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json")
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length must be the number of bytes")
        if len(length) > 12 or int(length) > LARGEST_BODY:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request must have at most {LARGEST_BODY:,} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise Refused(HTTPStatus.BAD_REQUEST, "the request is not JSON") from None
        if not isinstance(body, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "the request must be a JSON object")
        return body

    def _send_json(self, status: HTTPStatus, content: Any) -> None:
        self._send(status, json.dumps(content).encode(), "application/json; charset=utf-8")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self._send_head(status, kind)
        self.wfile.write(content)

    def _send_head(self, status: HTTPStatus, kind: str) -> None:
        self.has_begun = True
        self.send_response(status)
        again = {"Retry-After": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
        for name, value in {"Content-Type": kind, **HEADERS, **again}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send errors of the standard library as JSON too."""
        self._send_json(HTTPStatus(code), {"error": HTTPStatus(code).description or HTTPStatus(code).phrase})

    def finish(self) -> None:
        """Read the rest of the request before closing: closing with unread data can drop the answer."""
        with suppress(OSError):
            super().finish()
            self.connection.shutdown(SHUT_WR)
            self.connection.settimeout(0.5)
            for _ in range(4 * LARGEST_BODY // 65536):
                if not self.connection.recv(65536):
                    break

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
