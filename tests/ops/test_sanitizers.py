"""The CPU kernel accesses no memory that is not its own, and has no undefined behaviour, by sanitizers of the compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-g"]
BUILD = "import sys; from pathlib import Path; import hatch_build as h; h.build(Path(h.PLACE), Path(sys.argv[1]), sys.argv[2:])"


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_sanitizers_find_nothing(tmp_path):
    kernel = str(tmp_path / "_kernel.so")
    subprocess.run([sys.executable, "-c", BUILD, kernel, *FLAGS], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    found = (
        subprocess.run(["c++", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True)
        for name in ("libasan", "libubsan")
    )
    environment = {**os.environ, "LD_PRELOAD": ":".join(each.stdout.strip() for each in found), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, str(ROOT / "tests" / "sanitized.py"), kernel]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
