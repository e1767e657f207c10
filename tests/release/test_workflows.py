"""Workflows are safe, small in what they may do, and run what the README and the Makefile say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path):
    content = yaml.safe_load(path.read_text())
    return {"on": content.pop(True), **content}  # YAML 1.1 reads on as true


def commands(path):
    return [step["run"] for job in load(path)["jobs"].values() for step in job.get("steps", []) if "run" in step]


def test_a_linter_of_safety_finds_nothing():
    program = Path(sys.executable).with_name("zizmor")
    done = subprocess.run([str(program), "--offline", "--no-progress", str(ROOT / ".github")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed" in done.stderr


def test_the_linter_sees_what_is_unsafe(tmp_path):
    unsafe = tmp_path / ".github" / "workflows" / "tests.yml"
    unsafe.parent.mkdir(parents=True)
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    unsafe.write_text(re.sub(r"actions/checkout@\w+", "actions/checkout@main", text).replace("make test", "echo ${{ github.head_ref }}"))
    program = Path(sys.executable).with_name("zizmor")
    done = subprocess.run([str(program), "--offline", "--no-progress", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "unpinned-uses" in done.stdout
    assert "template-injection" in done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_little_and_ends(path):
    workflow = load(path)
    assert workflow["permissions"] == {}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert "permissions" in job, name
        assert "uses" in job or job["timeout-minutes"] <= 60, name
        for step in job.get("steps", []):
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
                assert step.get("with", {}).get("persist-credentials") is False or "checkout" not in step["uses"]


def test_they_run_the_commands_of_the_readme():
    readme, makefile = ((ROOT / name).read_text() for name in ("README.md", "Makefile"))
    run = [word for path in WORKFLOWS for line in commands(path) for word in re.findall(r"\bmake ([a-z]+)", line)]
    assert {"test", "run", "docs", "release", "audit"} == set(run)
    for target in run:
        if target != "docs" or re.search(r"^docs:", makefile, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no {target}"
    for target in ("test", "run"):
        assert re.search(rf"^make {target} ", readme, re.MULTILINE)


def test_every_python_that_is_meant_to_work_is_tested():
    matrix = load(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert {system.split("-")[0] for system in matrix["system"]} == {"ubuntu", "macos"}


def test_a_release_is_attested_before_it_is_published():
    jobs = load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["attest"]["needs"] == ["wheels", "source"]
    assert jobs["pypi"]["needs"] == "attest"
    assert jobs["github"]["needs"] == "pypi"
    used = [step["uses"].split("@")[0] for step in jobs["attest"]["steps"]]
    assert {"actions/attest-build-provenance", "actions/attest-sbom"} <= set(used)
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
