"""The bill of materials of a release: CycloneDX, from requirements.lock, checked against its schema. ``make release`` calls it.

python release/sbom.py dist/sbom.cdx.json
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from distributions import ROOT, version

DYNAMIC = 'dynamic = ["version"]'


def main() -> None:
    """Write it."""
    output = Path(sys.argv[1]).resolve()
    about = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if DYNAMIC not in about:
        sys.exit(f"pyproject.toml is to have {DYNAMIC}: the version stands in src/permuteformer/version.py")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        named = Path(folder) / "pyproject.toml"  # the tool does not know versions that stand elsewhere
        named.write_text(about.replace(DYNAMIC, f'version = "{version()}"'), encoding="utf-8")
        form = ["--output-reproducible", "--spec-version", "1.6", "--output-format", "JSON", "--output-file", str(output)]
        tool = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements"]
        command = [*tool, "--pyproject", str(named), "--mc-type", "library", *form, "requirements.lock"]
        subprocess.run(command, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
