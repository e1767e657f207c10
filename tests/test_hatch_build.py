"""The build of the CPU kernel: without OpenMP, as on macOS, and for one processor."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import hatch_build  # noqa: E402

PROGRAM = """
import torch
import permuteformer
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention

q, k, v = (torch.randn(1, 3, 2100, 16, requires_grad=True) for _ in range(3))
for causal in (False, True):
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, causal=causal, backend="native")
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(torch.equal(one, other) for one, other in zip(*found))
    torch.testing.assert_close(found[0][0], linear_attention(q, k, v, feature_map=relu_eps, causal=causal, backend="torch")[0])
print(permuteformer.__file__)
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_kernel_without_openmp_gives_the_same_bits_with_any_number_of_threads(tmp_path):
    package = tmp_path / "permuteformer"
    shutil.copytree(ROOT / "src" / "permuteformer", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    kernel = package / "ops" / "native" / "_kernel.so"
    hatch_build.build(kernel.parent, kernel, ["-O0", "-fno-openmp"])
    assert b"libgomp" not in kernel.read_bytes()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str(package / "__init__.py")


@pytest.mark.parametrize(
    ("machine", "variables", "tag"),
    [
        ("arm64", {}, "macosx_11_0_arm64"),
        ("arm64", {"MACOSX_DEPLOYMENT_TARGET": "14.5"}, "macosx_14_0_arm64"),
        ("x86_64", {}, "macosx_10_13_x86_64"),
        ("arm64", {"ARCHFLAGS": "-arch x86_64"}, "macosx_10_13_x86_64"),
        ("arm64", {"ARCHFLAGS": "-arch x86_64 -arch arm64"}, None),
    ],
)
def test_a_wheel_for_macos_is_for_one_processor(machine, variables, tag, monkeypatch):
    for name in ("ARCHFLAGS", "MACOSX_DEPLOYMENT_TARGET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "10.13")
    if tag is None:
        with pytest.raises(OSError, match="ARCHFLAGS.*x86_64.*arm64"):
            hatch_build.platform_tag()
        return
    assert hatch_build.platform_tag() == tag
    flags = hatch_build._flags_of_system()
    assert "-fopenmp" not in flags
    assert flags[flags.index("-arch") + 1] == tag.split("_", 3)[3]
