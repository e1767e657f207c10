"""A release: what the wheel and the source distribution contain, versions, dependencies, and the workflows."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import permuteformer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import hatch_build  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE_FILES = (path for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so"))
PACKAGE = {path.relative_to(ROOT / "src").as_posix() for path in PACKAGE_FILES}
SOURCES = {name for name in PACKAGE if name.endswith((".cpp", ".h"))}
KERNEL = "permuteformer/ops/native/_kernel.so"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


def hatchling(folder, target, output, **variables):
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(output)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={**os.environ, **variables})
    (made,) = output.iterdir()
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(hatchling(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """A wheel from it, not optimised, which is quick."""
    return hatchling(source, "wheel", tmp_path_factory.mktemp("wheel"), CXXFLAGS="-O0")


def test_the_source_distribution_has_all_that_a_build_and_the_tests_need(source):
    names = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {f"src/{name}" for name in PACKAGE} <= names
    assert {"pyproject.toml", "hatch_build.py", "constraints.txt", "LICENSE", "release/smoke.py", "tests/checks.py"} <= names
    assert not [name for name in names if name.startswith("results/") or name.endswith((".so", ".pyc"))]


@needs_compiler
def test_the_wheel_has_the_package_its_data_and_the_kernel_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        paths = [name for name in archive.namelist() if str(ROOT).encode() in archive.read(name)]
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert names == PACKAGE - SOURCES | {KERNEL}
    assert paths == [], "a path of this machine"
    assert wheel.name == f"permuteformer-{permuteformer.__version__}-py3-none-{hatch_build.platform_tag()}.whl"


def test_without_a_compiler_the_wheel_has_no_kernel(source, tmp_path):
    pure = hatchling(source, "wheel", tmp_path, CXX="/nonexistent/c++")
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as archive:
        assert KERNEL not in archive.namelist()


def test_changelog_and_citation_have_the_version():
    version = permuteformer.__version__
    section = "Unreleased" if ".dev" in version else version
    assert re.search(rf"^## \[{re.escape(section)}\][^\n]*\n+(?!## )\S", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["preferred-citation"]["year"]) == (version, 2021)


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_constraints_have_one_version_of_every_dependency(python):
    marker = {"python_version": python, "python_full_version": f"{python}.0", "platform_system": "Linux"}
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#") and ((pin := Requirement(line)).marker is None or pin.marker.evaluate(marker)):
            assert canonicalize_name(pin.name) not in pins
            pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    extras = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    for needed in map(Requirement, [*PROJECT["dependencies"], *extras]):
        if needed.name != "triton":  # a torch for CUDA names its version
            assert needed.specifier.contains(pins[canonicalize_name(needed.name)]), needed


def test_imports_are_the_dependencies_and_contributing_says_why():
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    imported = {name for text in texts for name in re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)}
    names = {canonicalize_name({"PIL": "pillow"}.get(name, name)) for name in imported if name not in sys.stdlib_module_names}
    needed = [Requirement(text).name for text in PROJECT["dependencies"]]
    optional = {"triton", "fla", "performer-pytorch", "wandb", "huggingface-hub"}  # extras and peers; and what transformers is built on
    assert set(needed) <= names <= {*needed, *optional, "permuteformer"}
    table = re.findall(r"^\| `([a-z0-9-]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(needed)


def test_workflows_call_targets_that_exist_on_every_supported_python():
    jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    run = "\n".join(step.get("run", "") for job in jobs for step in job.get("steps", []))
    targets = set(re.findall(r"\bmake ([a-z-]+)", run))
    assert {"test", "run", "docs", "release"} <= targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert all((ROOT / path).exists() for path in re.findall(r"python (\S+\.py)", run))
    supported = [text.rsplit(" ", 1)[1] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", text)]
    assert WORKFLOWS["tests"]["jobs"]["test"]["strategy"]["matrix"]["python"] == supported


def test_workflows_are_safe():
    """As zizmor judges; permissions are those that a job names."""
    assert all(workflow["permissions"] == {} for workflow in WORKFLOWS.values())
    zizmor = Path(sys.executable).with_name("zizmor")
    done = subprocess.run([str(zizmor), "--offline", "--no-progress", str(ROOT / ".github")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
