"""The GPU's kernels compile for sm_80 and sm_90 without spilling."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install '.[cuda]'")


def run(*words, **more):
    """The script in a process of its own, where Triton compiles and does not interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, env=environment, **more)


def check(rows, sizes):
    kinds = {(row["kernel"], row["size"], row["dtype"], row["positions"], row["architecture"]) for row in rows}
    assert len(kinds) == len(rows) == 2 * 5 * 2 * len(sizes)
    assert {row["architecture"] for row in rows} == {"sm_80", "sm_90"}
    assert {row["size"] for row in rows} == set(sizes)
    for row in rows:
        assert row["spill_stores_bytes"] == row["spill_loads_bytes"] == 0
        assert 0 < row["registers"] <= 64  # 8 programs of 4 warps have room on a multiprocessor
        assert row["shared_bytes"] <= 48 * 1024


@needs_triton
def test_kernels_compile_and_do_not_spill(tmp_path):
    run("--features", 48, "--output", tmp_path, check=True)
    check([json.loads(line) for line in (tmp_path / "compile.jsonl").read_text().splitlines()], [48])


def test_the_committed_results_are_those_of_all_kernels():
    path = ROOT / "results" / "gpu" / "compile.jsonl"
    check([json.loads(line) for line in path.read_text().splitlines()], [32, 64, 128, 256])
