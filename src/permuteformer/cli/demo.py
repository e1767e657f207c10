"""The command that serves a page to play with."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from permuteformer.cli.terminal import errors_in_words, say
from permuteformer.cli.use import Device


def demo(
    run: Annotated[Path | None, typer.Argument(help="A finished run, or a model of bytes, to type texts for; none unless told.")] = None,
    port: Annotated[int, typer.Option(help="Of the page; 0 for any that is free.", min=0, max=65_535)] = 8000,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    device: Device = None,
) -> None:
    """Serve a page to play with, on this machine only: what permutations do to features, and what a trained model makes of a text.

    The page is at 127.0.0.1 and can be reached from nowhere else. It needs no network. Ctrl-C ends it.
    """
    from permuteformer.demo.answers import Answers
    from permuteformer.demo.server import Server
    from permuteformer.train.saved import load_any

    with errors_in_words():
        server = Server(Answers(None if run is None else load_any(run, device=device)), port)
    say(f"the page is at {server.address}; Ctrl-C ends it")
    try:
        if browser:
            webbrowser.open(server.address)
        server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        server.stop()
        say("the page is closed")
