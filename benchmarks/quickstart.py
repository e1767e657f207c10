"""Run and time the commands and blocks of docs/quickstart.md in an empty folder, as a new user would.

    python benchmarks/quickstart.py    writes results/docs/quickstart.jsonl; then run: python docs/measured.py

The committed files are copied and installed into a new environment, from pip's package index.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from permuteformer.machine import environment

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quickstart.md"
RESULTS = ROOT / "results" / "docs" / "quickstart.jsonl"
END = "## Other data"
"""The first section that is not run: it is about other files."""


def main() -> None:
    """Run the page and write its outputs and times."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
        lines = [run(section, kind, block, folder) for section, kind, block in steps(PAGE.read_text().partition(END)[0])]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield section, language and text of every command and every block of Python."""
    section = ""
    for heading, kind, block in re.findall(r"^## ([^\n]+)|^```(sh|python)[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        section = heading or section
        if kind == "python":
            yield section, kind, block
        for command in block.splitlines() if kind == "sh" else ():
            yield section, kind, command


def run(section: str, kind: str, block: str, folder: Path) -> dict[str, Any]:
    """Run a step in the environment that the page made, and return its times and output. A step that fails ends this program."""
    shell = ["bash", "-c", f"[ ! -d .venv ] || . .venv/bin/activate; {block}"]
    command = shell if kind == "sh" else [".venv/bin/python", "-W", "ignore", "-c", block]
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS")
    variables = {name: value for name, value in os.environ.items() if name in kept or name.startswith("PIP_")}
    variables |= {"COLUMNS": "80", "XDG_CACHE_HOME": str(folder / ".cache")}
    begin, used = time.perf_counter(), processor_seconds()
    done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    times = {"seconds": round(time.perf_counter() - begin, 1), "processor_seconds": round(processor_seconds() - used, 1)}
    print(times, block.splitlines()[0], flush=True)
    if done.returncode:
        sys.exit(done.stdout)
    return {
        "section": section,
        "command": block if kind == "sh" else "the block of Python",
        **times,
        "load": round(os.getloadavg()[0], 1),
        "output": "" if "pip install" in block else done.stdout.replace(f"{folder}/", "").rstrip() + "\n",
        "environment": environment(),
    }


def processor_seconds() -> float:
    """Return the processor time of all child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
