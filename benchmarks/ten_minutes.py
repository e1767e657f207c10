"""Goes through docs/ten-minutes.md as a newcomer does: every command and every block of it, in an empty folder, timed.

python benchmarks/ten_minutes.py [--folder FOLDER]    # writes results/docs/ten-minutes.jsonl, and docs/pictures/report.png by chromium

A copy of what is committed is installed into a fresh environment, with whatever package index pip is set to.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ten-minutes.md"
RESULTS = ROOT / "results" / "docs" / "ten-minutes.jsonl"
PICTURE = ROOT / "docs" / "pictures" / "report.png"


def main() -> None:
    """Run the page, and keep what it said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="an empty folder to work in; a temporary one unless told")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
        lines = [run(section, kind, block, folder) for section, kind, block in steps(PAGE.read_text())]
        lines.append(run("labels", "sh", "cat labels.csv", folder))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
        photograph(folder / "report" / "index.html", PICTURE)


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """Section, kind and text of every command and every block of Python."""
    section = ""
    for heading, kind, block in re.findall(r"^## ([^\n]+)|^```(sh|python)[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        section = heading or section
        if kind == "python":
            yield section, kind, block
        for command in block.splitlines() if kind == "sh" else ():
            yield section, kind, command


def run(section: str, kind: str, block: str, folder: Path) -> dict[str, Any]:
    """One step in the environment that the page made; ends where it fails."""
    words = (
        ["bash", "-c", f"[ ! -d .venv ] || . .venv/bin/activate; {block}"]
        if kind == "sh"
        else [".venv/bin/python", "-W", "ignore", "-c", block]
    )
    names = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name in names or name.startswith("PIP_")}
    environment |= {"COLUMNS": "80", "XDG_CACHE_HOME": str(folder / ".cache")}
    begun, used = time.perf_counter(), processor_seconds()
    done = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds, used = time.perf_counter() - begun, processor_seconds() - used
    print(f"{seconds:7.1f} s, {used:7.1f} s of a core  {block.splitlines()[0]}", flush=True)
    if done.returncode:
        sys.exit(done.stdout)
    output = "" if "pip install" in block else done.stdout.replace(f"{folder}/", "").rstrip() + "\n"
    command = block if kind == "sh" else "the block of Python"
    times = {"seconds": round(seconds, 1), "processor_seconds": round(used, 1), "load": round(os.getloadavg()[0], 1)}
    return {"section": section, "command": command, **times, "output": output}


def processor_seconds() -> float:
    """What all processes that were started took so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def photograph(page: Path, picture: Path) -> None:
    """A picture of the top of a page, of few colours, as small as it can be read."""
    from PIL import Image

    picture.parent.mkdir(exist_ok=True)
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1500", f"--screenshot={picture}"]
    subprocess.run(["chromium", *words, page.resolve().as_uri()], check=True, capture_output=True)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(picture, optimize=True)


if __name__ == "__main__":
    main()
