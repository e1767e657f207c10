"""The locks, constraints.txt, pyproject.toml and docs/dependencies.md say the same, and the locks trust hashes alone."""

import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "release/tools.lock")
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def requirements(name):
    """Of a file: what is required, and the hashes of each."""
    text = re.sub(r"\\\n", " ", (ROOT / name).read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(Requirement(line.split(" --hash")[0]), re.findall(r"--hash=(\S+)", line)) for line in lines]


def environment(python, system):
    machine = {"linux": "x86_64", "darwin": "arm64"}[system]
    names = {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": system, "platform_machine": machine}
    return {**default_environment(), **names, "platform_system": {"linux": "Linux", "darwin": "Darwin"}[system], "os_name": "posix"}


def versions(name, python, system):
    """The version of each name, for one Python and system."""
    found = {}
    for each, _ in requirements(name):
        if each.marker is None or each.marker.evaluate(environment(python, system)):
            key = canonicalize_name(each.name)
            assert key not in found, f"{name} has two versions of {key} for Python {python} on {system}"
            found[key] = str(each.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_all_hashes_and_names_no_index(name):
    for each, hashes in requirements(name):
        assert hashes, f"{each.name} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes)
        assert re.fullmatch(r"==[^*,]+", str(each.specifier)), f"{each} is not one version"
        assert each.url is None
    assert "://" not in (ROOT / name).read_text()
    assert "--index" not in (ROOT / name).read_text()


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_lock_constraints_and_pyproject_agree(python, system):
    locked, pinned = (versions(name, python, system) for name in ("requirements.lock", "constraints.txt"))
    for text in ABOUT["project"]["dependencies"]:
        needed = Requirement(text)
        assert needed.specifier.contains(locked[canonicalize_name(needed.name)]), f"{needed} is not what is locked"
    for name, version in locked.items():
        if not name.startswith(("nvidia-", "cuda-", "triton")):  # what a torch for CUDA brings
            assert pinned.get(name) == version, f"{name} {version} is locked, and constraints.txt has {pinned.get(name)}: run make lock"
    for extra in ABOUT["project"]["optional-dependencies"].values():
        for needed in map(Requirement, extra):
            name = canonicalize_name(needed.name)
            if name in pinned:
                assert needed.specifier.contains(pinned[name]), f"{needed} is not what constraints.txt has"
            else:
                assert name == "triton"


def test_tools_of_a_release_are_locked():
    tools = versions("release/tools.lock", "3.12", "linux")
    for needed in map(Requirement, ABOUT["dependency-groups"]["release"]):
        assert needed.specifier.contains(tools[canonicalize_name(needed.name)])
    assert Requirement(ABOUT["build-system"]["requires"][0]).specifier.contains(tools["hatchling"])


def test_the_page_has_a_row_for_each_dependency():
    page = (ROOT / "docs" / "dependencies.md").read_text()
    named = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert sorted(named) == sorted(Requirement(text).name for text in ABOUT["project"]["dependencies"])


def test_its_numbers_are_those_of_the_results():
    page = (ROOT / "docs" / "dependencies.md").read_text()
    rows = {row["name"]: row for row in map(json.loads, (ROOT / "results" / "release" / "sizes.jsonl").read_text().splitlines())}
    for needed in map(Requirement, ABOUT["project"]["dependencies"]):
        row = rows[needed.name]
        assert re.search(rf"^\| `{needed.name}` \|.*\| {row['bytes'] / 1e6:.0f} \| {row['gone_bytes'] / 1e6:.0f} \|$", page, re.MULTILINE)
    assert f"All in all {rows['all']['packages']} packages and {rows['all']['bytes'] / 1e6:,.0f} MB" in page
    for name in ("datasets", "tensorboard"):
        assert f"({len(rows[name]['added'])} packages, {rows[name]['added_bytes'] / 1e6:.0f} MB" in page


def test_what_the_package_imports_is_what_it_says_it_needs():
    """Nothing that only happens to be there."""
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:import|from) ([a-zA-Z_]\w*)", path.read_text(), re.MULTILINE))
    needed = {canonicalize_name(Requirement(text).name) for text in ABOUT["project"]["dependencies"]}
    names = {"PIL": "pillow"}
    outside = {canonicalize_name(names.get(name, name)) for name in imported if name not in sys.stdlib_module_names} - {"permuteformer"}
    asked_for = {"triton", "fla", "performer-pytorch", "huggingface-hub", "wandb"}  # extras, peers; and what transformers stands on
    assert needed - outside == set()
    assert outside - needed <= asked_for, outside - needed


@pytest.mark.slow
def test_an_audit_finds_what_an_advisory_says(tmp_path):
    """pip-audit, as ``make audit`` calls it, asks a list of advisories of OSV's form that is served here."""
    program = ROOT / ".venv" / "tools" / "bin" / "pip-audit"
    if not program.exists():
        pytest.skip("needs the tools of a release: make .venv/release")
    advisory = {"id": "TEST-1", "modified": "2026-01-01T00:00:00Z", "summary": "pillow opens what it should not", "details": "as it says"}
    affected = {"package": {"ecosystem": "PyPI", "name": "pillow"}, "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]}

    class Advisories(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = asked["package"]["name"].lower() == "pillow"
            body = json.dumps({"vulns": [{**advisory, "affected": [affected]}]} if known else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Advisories)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        options = ["--vulnerability-service", "osv", "--osv-url", url, "--format", "json", "--cache-dir", str(tmp_path)]
        files = ["--disable-pip", "--require-hashes", "--requirement", str(ROOT / "requirements.lock")]
        done = subprocess.run([str(program), *files, *options], capture_output=True, text=True, check=False)
    finally:
        server.shutdown()
        server.server_close()
    found = {each["name"]: [one["id"] for one in each["vulns"]] for each in json.loads(done.stdout)["dependencies"]}
    assert done.returncode == 1, done.stderr
    assert {name for name, ids in found.items() if ids} == {"pillow"}
    assert found["torch"] == []
