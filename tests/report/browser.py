"""Chromium without a window, driven over a pipe by its DevTools protocol: no package is needed for it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip

KEYS = {"Enter": 13, "Tab": 9, "End": 35, "ArrowRight": 39}


def find() -> str | None:
    """The program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a fresh profile.

    ``problems`` are exceptions, and errors and warnings of its console; ``requests`` is everything that it asked the network for.
    """

    def __init__(self, seconds: float = 60) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._seconds, self._number, self._events, self._rest = seconds, 0, [], b""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, self._write = os.pipe()
        self._read, back = os.pipe()

        def pipes() -> None:  # the protocol is spoken on descriptors 3 and 4
            one, two = os.dup(there), os.dup(back)
            os.dup2(one, 3)
            os.dup2(two, 4)

        program = find()
        assert program is not None
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        os.set_blocking(self._read, False)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def open(self, path: Path | str, width=1200, height=900, dark=False, still=False) -> None:
        """Load a file or an address and wait until it is loaded. ``still`` asks for no motion."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce" if still else "no-preference"}
        self.call("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in wishes.items()])
        self._events.clear()
        self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        self._until(lambda message: message.get("method") == "Page.loadEventFired")

    def run(self, script: str):
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **more)

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click on the middle of an element, as a mouse does."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y, width, height = self.run(f"(({{x, y, width, height}}) => [x, y, width, height])({find}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x + width / 2, y=y + height / 2, button="left", clickCount=1)

    def until(self, script: str, seconds: float = 30) -> None:
        """Wait for an expression in the page to become true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"not within {seconds} s: {script}"
            time.sleep(0.05)

    def picture(self) -> bytes:
        """A screenshot of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def call(self, method: str, **parameters) -> dict:
        """A command of the protocol, and its answer."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if getattr(self, "_session", None) and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _until(self, wanted) -> dict:
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            for i, message in enumerate(self._events):
                if wanted(message):
                    return self._events.pop(i)
            try:
                self._rest += os.read(self._read, 1 << 20) or b""
            except BlockingIOError:
                time.sleep(0.01)
                continue
            *whole, self._rest = self._rest.split(b"\0")
            for text in whole:
                message = json.loads(text)
                self._note(message)
                self._events.append(message)
        raise TimeoutError(f"the browser did not answer within {self._seconds} s")

    def _note(self, message: dict) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif (method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning")) or (
            method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning")
        ):
            self.problems.append(json.dumps(parameters))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
