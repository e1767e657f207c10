"""What is published holds what it should, and works: in short here, in an empty environment among the slow tests (``make release``)."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "release"))
sys.path.insert(0, str(ROOT))
import distributions  # noqa: E402
import hatch_build  # noqa: E402

PROGRAM = """
import sys, torch
sys.path.insert(0, {release!r})
import smoke
from pathlib import Path
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.positions.permute import Permute

smoke.a_layer("native")
smoke.a_model(Path({folder!r}))
q, k, v = (torch.randn(1, 3, 2100, 16, requires_grad=True) for _ in range(3))
for causal in (False, True):
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        out, _ = linear_attention(q, k, v, feature_map=relu_eps, transform=Permute(3, 16), causal=causal, backend="native")
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(torch.equal(one, other) for more in found[1:] for one, other in zip(found[0], more))
print(smoke.__file__)
"""


def hatchling(folder, target, output, **variables):
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(output)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env={**os.environ, **variables})


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Source, and a wheel from it: not optimised, which is quick, and without OpenMP, as on macOS."""
    folder = tmp_path_factory.mktemp("built")
    hatchling(ROOT, "sdist", folder)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(folder / "source")
    (unpacked,) = (folder / "source").iterdir()
    hatchling(unpacked, "wheel", folder, CXXFLAGS="-O0 -fno-openmp")
    (wheel,) = folder.glob("*.whl")
    return source, wheel


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_both_hold_what_they_should(built):
    for path in built:
        assert distributions.problems(path) == []
    look = [sys.executable, str(ROOT / "release" / "distributions.py"), "--look", "--output"]
    assert subprocess.run([*look, str(built[1].parent)], check=False).returncode == 0
    assert "has no distributions" in subprocess.run([*look, str(ROOT / "docs")], capture_output=True, text=True, check=False).stderr
    assert built[1].name.endswith(f"-py3-none-{hatch_build.platform_tag()}.whl")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_wheel_works_and_needs_no_openmp(built, tmp_path):
    """From a folder of its own, on what is installed here; what it computes does not depend on its threads."""
    site = tmp_path / "site-packages"
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(site)
    program = PROGRAM.format(release=str(ROOT / "release"), folder=str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert b"libgomp" not in (site / distributions.KERNEL).read_bytes()


def changed(wheel, folder, change, name=None):
    """The wheel with other files: ``change`` takes names and contents and gives them back."""
    path = folder / (name or wheel.name)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w") as new:
        for file, content in change({each: old.read(each) for each in old.namelist()}).items():
            new.writestr(file, content)
    return path


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_what_is_wrong_with_a_wheel_is_seen(built, tmp_path):
    wheel = built[1]
    pure = wheel.name.replace(hatch_build.platform_tag(), "any")
    leak = {"permuteformer/py.typed": str(ROOT).encode()}
    for change, name, words in (
        (lambda files: {k: v for k, v in files.items() if not k.endswith("py.typed")}, None, "permuteformer/py.typed is missing"),
        (lambda files: {k: v for k, v in files.items() if "LICENSE" not in k}, None, "licenses/LICENSE is missing"),
        (lambda files: {**files, "tests/test_import.py": b""}, None, "tests/test_import.py does not belong there"),
        (lambda files: files, pure, "the tag is py3-none-any, and the kernel is in it"),
        (lambda files: {k: v for k, v in files.items() if k != distributions.KERNEL}, None, "the kernel is not there"),
        (lambda files: {**files, **leak}, None, "permuteformer/py.typed has the path of this machine in it"),
    ):
        found = distributions.problems(changed(wheel, tmp_path, change, name))
        assert any(words in problem for problem in found), (words, found)


@pytest.mark.parametrize(
    ("machine", "variables", "tag"),
    [
        ("arm64", {}, "macosx_11_0_arm64"),
        ("arm64", {"MACOSX_DEPLOYMENT_TARGET": "14.5"}, "macosx_14_0_arm64"),
        ("x86_64", {}, "macosx_10_13_x86_64"),
        ("arm64", {"ARCHFLAGS": "-arch x86_64"}, "macosx_10_13_x86_64"),
    ],
)
def test_tags_of_macos_are_those_of_one_processor(machine, variables, tag, monkeypatch):
    """Where Python itself is for both, which would be the tag of a wheel with a kernel for one."""
    for name in ("ARCHFLAGS", "MACOSX_DEPLOYMENT_TARGET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "10.13")
    assert hatch_build.platform_tag() == tag
    flags = hatch_build._flags_of_system()
    assert "-fopenmp" not in flags
    assert flags[flags.index("-arch") + 1] == tag.split("_", 3)[3]


def test_two_processors_at_once_are_refused(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setenv("ARCHFLAGS", "-arch x86_64 -arch arm64")
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "14.0")
    with pytest.raises(OSError, match="ARCHFLAGS asks for x86_64 and arm64, and the kernel is built for one processor"):
        hatch_build.platform_tag()


@pytest.mark.slow
def test_a_release_is_made_and_works_in_an_empty_environment():
    """``make release``: builds twice, compares, checks, installs and tries. Ten minutes and more."""
    done = subprocess.run(["make", "release"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(" works, and native computes") == 2
    assert done.stdout.count(" works, and torch computes") == 1
