"""Write the locks, and ask the index whether what constraints.txt names can be installed everywhere. ``make lock`` calls it.

    python release/lock.py             # requirements.lock, release/tools.lock
    python release/lock.py --check     # writes nothing: are all versions there for every Python and system?

Hashes are those of all files that the public index lists for a version, for every system: of torch too, whose builds for CPUs alone come
from an index of PyTorch's own and have other hashes. A lock names no index.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SYSTEMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
"""Of Intel's Macs there is no torch since 2.3."""
OLDEST_MACOS = "14.0"
"""That torch is built for."""
LOCKS = {"requirements.lock": ["pyproject.toml"], "release/tools.lock": ["--group", "pyproject.toml:release"]}
"""What each is made from: what the package needs; the tools that make a release."""


def main() -> None:
    """Check, then write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    failed = [f"Python {python} on {system}:\n{words}" for python in PYTHONS for system in SYSTEMS if (words := missing(python, system))]
    if failed:
        sys.exit("\n".join(failed))
    print(f"constraints.txt can be installed with Python {', '.join(PYTHONS)} on {', '.join(SYSTEMS)}")
    if not parser.parse_args().check:
        for name, source in LOCKS.items():
            write(ROOT / name, source)


def missing(python: str, system: str) -> str:
    """What the resolver says where not everything is there as a wheel; nothing where it is."""
    words = ["--all-extras", "--only-binary", ":all:", "--python-version", python, "--python-platform", system]
    done = _compile("pyproject.toml", *words, MACOSX_DEPLOYMENT_TARGET=OLDEST_MACOS)
    return done.stderr if done.returncode else ""


def write(path: Path, source: list[str]) -> None:
    """One lock for all systems and Pythons, with markers."""
    done = _compile(*source, "--universal", "--generate-hashes", "--python-version", PYTHONS[0], "--custom-compile-command", "make lock")
    if done.returncode:
        sys.exit(done.stderr)
    partial = path.with_name(f"{path.name}.new")
    partial.write_text(done.stdout, encoding="utf-8")
    partial.replace(path)
    print(
        f"{path.relative_to(ROOT)}: {sum('==' in line and not line.lstrip().startswith('#') for line in done.stdout.splitlines())} versions"
    )


def _compile(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("uv")
    command = [str(program), "pip", "compile", "--quiet", "--no-config", "--no-annotate", "--constraint", "constraints.txt"]
    return subprocess.run([*command, *words], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
