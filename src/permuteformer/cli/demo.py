"""The command that serves an interactive page."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from permuteformer.cli.console import say


def demo(folder: Path | None = None, *, port: int = 8000, browser: bool = True, device: str | None = None) -> None:
    """Serve an interactive page on this machine: what permutations do to features, and what a trained model answers.

    The page is at 127.0.0.1, not reachable from other machines, and needs no network. Ctrl-C ends it.

    Args:
        folder: a finished run, or a model that reads bytes; default: the page without a model.
        port: port of the page; 0 for any that is free.
        browser: open the page in a browser.
    """
    from permuteformer.demo.api import Api
    from permuteformer.demo.server import Server
    from permuteformer.train.trained_model import load

    if not 0 <= port < 65_536:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    server = Server(Api(None if folder is None else load(folder, device=device)), port)
    say(f"the page is at {server.address}; Ctrl-C ends it")
    try:
        if browser:
            webbrowser.open(server.address)
        server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        server.stop()
        say("the page is closed")
