"""Builds the CPU kernel when the package is installed; without a C++ compiler it is left out, and the package works without it."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # python hatch_build.py, and tests: where only the compiler is needed
    BuildHookInterface = object

PLACE = Path("src", "permuteformer", "ops", "native")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-DNDEBUG"]
X86 = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma"],
}
"""Instruction sets that are chosen from when the kernel runs, and what the compiler must be told of each."""


class KernelBuilder(BuildHookInterface):  # type: ignore[type-arg]
    """Puts ``_kernel.so`` beside its sources, and into the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, before files are gathered."""
        if self.target_name != "wheel":
            return
        kernel = Path(self.root) / PLACE / "_kernel.so"
        kernel.unlink(missing_ok=True)
        try:
            build(kernel.parent, kernel)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            self.app.display_warning(f"the CPU kernel is not built, and PyTorch computes in its place: {said.strip()[:1000]}")
            return
        build_data["artifacts"].append(str(PLACE / "_kernel.so"))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def build(sources: Path, kernel: Path, flags: list[str] | None = None) -> None:
    """Compile the kernel. ``CXX`` names the compiler, and ``CXXFLAGS`` adds to its flags, as everywhere."""
    compiler = [*shlex.split(os.environ.get("CXX", "")), *([] if "CXX" in os.environ else [_compiler()])]
    options = [*FLAGS, *(flags or []), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    sets = {"baseline": [], **(X86 if platform.machine() in ("x86_64", "AMD64") else {})}
    with tempfile.TemporaryDirectory() as folder:
        objects = {"module": [*compiler, *options, "-c", str(sources / "module.cpp")]}
        for name, own in sets.items():
            objects[name] = [*compiler, *options, *own, f"-DISA={name}", "-c", str(sources / "isa.cpp")]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, ([*command, "-o", f"{folder}/{name}.o"] for name, command in objects.items())))
        made = Path(folder) / "_kernel.so"
        _run([*compiler, *options, "-shared", *(f"{folder}/{name}.o" for name in objects), "-o", str(made)])
        shutil.copyfile(made, kernel.with_suffix(".new"))
        kernel.with_suffix(".new").replace(kernel)


def _compiler() -> str:
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise OSError("there is no C++ compiler: c++, g++ and clang++ are not found")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":  # python hatch_build.py [FLAGS …]: in place, for those who work on it
    here = Path(__file__).parent / PLACE
    build(here, here / "_kernel.so", sys.argv[1:])
