"""What CHANGELOG.md says of a version; refuses where version.py, CITATION.cff and the changelog do not agree on it.

python release/notes.py 1.2.3 > notes.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from distributions import ROOT, version


def main() -> None:
    """Print the section."""
    wanted = sys.argv[1]
    if found := disagreements(wanted):
        sys.exit("\n".join(found))
    print(section(wanted))


def disagreements(wanted: str, root: Path = ROOT) -> list[str]:
    """Why this version is not ready; nothing where it is. A version of development has no section of its own yet, but ``Unreleased``."""
    cited = re.findall(r"^version: (.+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    found = []
    if wanted != version():
        found.append(f"the release is {wanted}, and src/permuteformer/version.py says {version()}")
    if cited != [wanted]:
        found.append(f"the release is {wanted}, and CITATION.cff says {', '.join(cited) or 'nothing'}")
    if not section(wanted, root):
        found.append(f"CHANGELOG.md has no section [{_title(wanted)}], or nothing is in it")
    return found


def section(wanted: str, root: Path = ROOT) -> str:
    """The text between the heading of a version and the next one."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(_title(wanted))}\].*?\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def _title(wanted: str) -> str:
    return "Unreleased" if ".dev" in wanted else wanted


if __name__ == "__main__":
    main()
