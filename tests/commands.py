"""Runs a command of the command line within the test process."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from permuteformer.cli import main


class Output(str):
    """Standard output followed by standard error."""

    stdout: str
    stderr: str


def run(*words, code=0, stdin=b"", columns=300):
    """Return what a command prints; it must exit with ``code``. Lines are not broken."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape", newline="", write_through=True) for _ in "12")
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    exited = 0
    with redirect_stdout(out), redirect_stderr(err), patch("sys.stdin", given), patch.dict(os.environ, {"COLUMNS": str(columns)}):
        try:
            main([str(word) for word in words])
        except SystemExit as exit:
            exited = exit.code or 0
    stdout, stderr = (stream.buffer.getvalue().decode("utf-8", "surrogateescape") for stream in (out, err))
    assert exited == code, f"exit code {exited}, expected {code}\n{stdout}{stderr}"
    output = Output(stdout + stderr)
    output.stdout, output.stderr = stdout, stderr
    return output


def refused(*words, code=1):
    """Return the line with which a command refuses; it must be one."""
    output = run(*words, code=code)
    assert output.count("\n") == 1, output
    return output
