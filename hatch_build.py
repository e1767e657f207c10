"""Builds the CPU kernel when the package is installed; without a C++ compiler it is left out, and the package works without it."""

from __future__ import annotations

import os
import platform
import re
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
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]
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
        build_data["tag"] = f"py3-none-{platform_tag()}"


def platform_tag() -> str:
    """Of the machine that the kernel is for. It knows no Python, so one wheel serves all of them.

    On Linux it is the plain tag, which ``auditwheel repair`` replaces by that of the oldest system that the kernel runs on.
    """
    if platform.system() == "Darwin":
        major, minor = _oldest_macos()
        return f"macosx_{major}_{0 if major > 10 else minor}_{_machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _machine() -> str:
    """The processor that is built for: of this machine, or the one of ``ARCHFLAGS``, by which others are asked for on macOS."""
    asked = re.findall(r"-arch[ =](\w+)", os.environ.get("ARCHFLAGS", "")) if platform.system() == "Darwin" else []
    if len(asked) > 1:
        raise OSError(f"ARCHFLAGS asks for {' and '.join(asked)}, and the kernel is built for one processor: build a wheel for each")
    return asked[0] if asked else platform.machine()


def _oldest_macos() -> tuple[int, int]:
    """The first version of macOS that the kernel is to run on: ``MACOSX_DEPLOYMENT_TARGET``, else that of this Python."""
    target = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or str(sysconfig.get_config_var("MACOSX_DEPLOYMENT_TARGET"))
    major, minor = (int(part) for part in f"{target}.0".split(".")[:2])
    return max((major, minor), (11, 0)) if _machine() == "arm64" else (major, minor)


def _flags_of_system() -> list[str]:
    """OpenMP on Linux; not on macOS, where Apple's compiler has none, and two in a process, ours and torch's, would end it."""
    if platform.system() == "Darwin":
        return ["-pthread", "-arch", _machine(), f"-mmacosx-version-min={'.'.join(map(str, _oldest_macos()))}"]
    return ["-fopenmp"]


def build(sources: Path, kernel: Path, flags: list[str] | None = None) -> None:
    """Compile the kernel. ``CXX`` names the compiler, and ``CXXFLAGS`` adds to its flags, as everywhere."""
    compiler = [*shlex.split(os.environ.get("CXX", "")), *([] if "CXX" in os.environ else [_compiler()])]
    options = [*FLAGS, *_flags_of_system(), *(flags or []), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    sets = {"baseline": [], **(X86 if _machine() in ("x86_64", "AMD64") else {})}
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
