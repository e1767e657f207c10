"""Install what is in dist/ into an empty environment and try it there: the wheel, and the source with a compiler and without.

python release/fresh.py            # some minutes: torch is installed
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_COMPILER = {"CXX": "/nonexistent/c++", "CC": "/nonexistent/cc"}
SAID = "the CPU kernel is not built, and PyTorch computes in its place"


def main() -> None:
    """Three ways in, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    dist: Path = parser.parse_args().dist.resolve()
    wheel, source = (_only(dist, pattern) for pattern in ("permuteformer-*.whl", "permuteformer-*.tar.gz"))
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "environment" / "bin" / "python"
        venv.create(Path(folder) / "environment", with_pip=True)
        shutil.copy(ROOT / "release" / "smoke.py", folder)
        install(python, "--constraint", str(ROOT / "constraints.txt"), str(wheel))
        try_out(python, "torch" if "none-any" in wheel.name else "native", wheel.name)
        again = ("--no-deps", "--force-reinstall", "--no-cache-dir", "--verbose", str(source))
        install(python, *again)
        try_out(python, "native", f"{source.name}, with a compiler")
        log = install(python, *again, **NO_COMPILER)
        if log.count(SAID) != 1:
            sys.exit(f"without a compiler the installation says {log.count(SAID)} times, and not once: {SAID}\n{log[-3000:]}")
        try_out(python, "torch", f"{source.name}, without a compiler")


def _only(dist: Path, pattern: str) -> Path:
    found = sorted(dist.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{dist} must have one {pattern}; it has {len(found)}: run release/distributions.py")
    return found[0]


def install(python: Path, *words: str, **variables: str) -> str:
    """With pip; gives what it said."""
    return _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *words], None, **variables)


def try_out(python: Path, wanted: str, what: str) -> None:
    """The smoke test, away from the repository, which Python must not see."""
    folder = python.parents[2]
    print(f"{what}: {_run([str(python), 'smoke.py', wanted], folder).strip().splitlines()[-1]}", flush=True)


def _run(command: list[str], cwd: Path | None, **variables: str) -> str:
    environment = {**os.environ, **variables}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-5000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
