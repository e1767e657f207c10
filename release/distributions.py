"""Build the wheel and the source distribution, twice, and look at what is in them. ``make release`` calls it.

    python release/distributions.py            # into dist/
    python release/distributions.py --look     # at those that are there

The wheel is built from the source distribution, so one that lacks a file does not go out. Two builds must be equal, byte for byte.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "permuteformer/ops/native/_kernel.so"
NOT_SHIPPED = (".cpp", ".h", ".so", ".pyc")
"""Of the package's folder: sources of the kernel, and what was built for this machine."""
IN_SOURCE = ("pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "CITATION.cff", "constraints.txt", "requirements.lock")


def main() -> None:
    """Build, check, compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--once", action="store_true", help="do not build a second time to compare")
    parser.add_argument("--look", action="store_true", help="build nothing: look at what is there")
    arguments = parser.parse_args()
    output: Path = arguments.output
    if arguments.look:
        there = sorted(output.glob("permuteformer-*"))
        found = [problem for path in there for problem in problems(path)] if there else [f"{output} has no distributions"]
        sys.exit("\n".join(found) or None)
    if output.exists() and any(output.glob("permuteformer-*")):
        sys.exit(f"{output} has distributions already: delete them first, so that no old one is published")
    build(output)
    found = [problem for path in sorted(output.glob("permuteformer-*")) for problem in problems(path)]
    if not arguments.once:
        found += differences(output)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(output.glob("permuteformer-*")))], check=True)
    if found:
        sys.exit("\n".join(found))
    for path in sorted(output.iterdir()):
        print(f"{path.name}  {path.stat().st_size:,} bytes")


def build(output: Path) -> None:
    """A source distribution, and a wheel from it, by the tools that are locked: an environment of its own would fetch others."""
    output.mkdir(parents=True, exist_ok=True)
    environment = {"SOURCE_DATE_EPOCH": _time_of_commit(), **os.environ}
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(ROOT)], check=True, env=environment, cwd=output
    )


def _time_of_commit() -> str:
    """Files are dated by the last commit, not by the clock; without a repository, by hatchling's own fixed date."""
    log = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return log.stdout.strip() or "1580601600"


def differences(output: Path) -> list[str]:
    """What of a second build is not what the first one was."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        return [
            f"{path.name}: a second build gives other bytes"
            for path in sorted(output.glob("permuteformer-*"))
            if not (again := Path(folder, path.name)).exists() or again.read_bytes() != path.read_bytes()
        ]


def problems(path: Path) -> list[str]:
    """What is wrong with a distribution; nothing, as it should be."""
    found = _of_wheel(path) if path.suffix == ".whl" else _of_source(path)
    return [f"{path.name}: {problem}" for problem in found]


def version() -> str:
    """Of the package, from the one place where it stands."""
    text = (ROOT / "src" / "permuteformer" / "version.py").read_text(encoding="utf-8")
    return str(re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0])


def _of_wheel(path: Path) -> list[str]:
    found = []
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        about = f"permuteformer-{version()}.dist-info"
        package = ROOT / "src" / "permuteformer"
        wanted = {
            f"permuteformer/{file.relative_to(package).as_posix()}"
            for file in package.rglob("*")
            if file.is_file() and file.suffix not in NOT_SHIPPED
        }
        expected = {*wanted, *(f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"))}
        found += [f"{name} is missing" for name in sorted(expected - names)]
        found += [f"{name} does not belong there" for name in sorted(names - expected - {KERNEL})]
        if f"{about}/WHEEL" not in names or f"{about}/METADATA" not in names:
            return found
        said = email.message_from_bytes(wheel.read(f"{about}/WHEEL"))
        tags, tag = said.get_all("Tag", []), path.stem.split("-", 2)[2]
        platforms = tag.split("-")[2].split(".")
        if sorted(tags) != sorted(f"py3-none-{each}" for each in platforms):
            found.append(f"WHEEL says {', '.join(tags)}, and the name {tag}: it must be py3-none-PLATFORM in both")
        if (KERNEL in names) == (tag == "py3-none-any"):
            found.append(f"the tag is {tag}, and the kernel is {'in it' if KERNEL in names else 'not there'}")
        if (said["Root-Is-Purelib"] == "true") != (tag == "py3-none-any"):
            found.append(f"Root-Is-Purelib is {said['Root-Is-Purelib']}, and the tag {tag}")
        metadata = email.message_from_bytes(wheel.read(f"{about}/METADATA"))
        if metadata["Version"] != version():
            found.append(f"its version is {metadata['Version']}, and that of the package {version()}")
        found += [f"{name} has the path of this machine in it" for name in sorted(names) if _has_path(wheel.read(name))]
    return found


def _of_source(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        names = {member.name.split("/", 1)[-1] for member in archive.getmembers()}
        files = (member for member in archive.getmembers() if member.isfile())
        found = [f"{member.name} has the path of this machine in it" for member in files if _has_path(_content(archive, member))]
    package = ROOT / "src" / "permuteformer"
    wanted = {*IN_SOURCE, *(f.relative_to(ROOT).as_posix() for f in package.rglob("*") if f.is_file() and f.suffix not in (".so", ".pyc"))}
    found += [f"{name} is missing" for name in sorted(wanted - names)]
    found += [f"{name} does not belong there" for name in sorted(names) if name.startswith("results/") or name.endswith((".so", ".pyc"))]
    return found


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""


def _has_path(content: bytes) -> bool:
    return any(place.encode() in content for place in (str(ROOT), str(Path.home() / "")) if len(place) > 1)


if __name__ == "__main__":
    main()
