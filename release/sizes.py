"""How much each dependency of the package takes on the disk, and what would go with it. Of what is installed where this runs.

python release/sizes.py tensorboard datasets > results/release/sizes.jsonl     # and what these would add
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import tomllib  # type: ignore[import-not-found]  # of Python 3.11 and newer
from distributions import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def main() -> None:
    """A line a dependency, the largest first, and one for all."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = [canonicalize_name(Requirement(text).name) for text in about["dependencies"]]
    everything = closure(direct)
    rows: list[dict[str, Any]] = []
    for name in direct:
        gone = everything - closure(other for other in direct if other != name)
        here = {"name": name, "version": distribution(name).version, "bytes": size(name)}
        rows.append({**here, "gone": sorted(gone), "gone_bytes": sum(map(size, gone))})
    for row in sorted(rows, key=lambda row: -row["bytes"]):
        print(json.dumps(row))
    for more in sys.argv[1:]:
        added = closure([more]) - everything
        here = {"name": more, "version": distribution(more).version}
        print(json.dumps({**here, "added": sorted(added), "added_bytes": sum(map(size, added))}))
    print(json.dumps({"name": "all", "packages": len(everything), "bytes": sum(map(size, everything))}))


def closure(names: Iterable[str]) -> set[str]:
    """These, and all that they need here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # of another system
            continue
        found.add(name)
        asked = (Requirement(text) for text in needs)
        waiting += [canonicalize_name(each.name) for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def size(name: str) -> int:
    """Bytes of its files."""
    files = (Path(str(file.locate())) for file in distribution(name).files or [])
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    main()
