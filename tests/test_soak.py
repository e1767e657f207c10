"""The soak in short: every part at a small scale, and the runner of parts. ``make soak`` is the long form."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from soak import runner
from soak.processes import SHARED, Command, digits
from soak.scale import share
from soak.whole import different_run, files, left_over, wrongly_believed

SHORT = {"kills": 0.03, "disk": 0.05, "clock": 0.1, "workers": 0.01, "checkpoints": 0.02, "readers": 0.1, "flat": 0.002}


@pytest.fixture(autouse=True)
def own_variables(cache, monkeypatch):
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("part", SHORT)
def test_in_short(part, tmp_path):
    if part == "flat" and not Path("/proc").exists():
        pytest.skip("memory is read from /proc")
    lines = list(importlib.import_module(f"soak.{part}").run(SHORT[part], tmp_path, 1))
    assert lines
    assert not [line for line in lines if not line["ok"]]


def test_every_part_says_what_it_proves():
    assert {*SHORT, "finite"} <= set(runner.parts())
    assert all(proves.endswith(".") for proves in runner.parts().values())


def test_by_the_runner(tmp_path):
    """In a process of its own, as ``python -m soak`` does it: the last of the parts in short."""
    failures = runner.soak(["finite"], 0.03, 3, tmp_path, Console(quiet=True))
    header, *lines = map(json.loads, (tmp_path / "finite.jsonl").read_text().splitlines())
    assert failures == []
    assert (header["part"], header["seed"], header["scale"]) == ("finite", 3, 0.03)
    assert header["command"] == "python -m soak finite --scale 0.03 --seed 3"
    assert len(lines) >= 5
    assert all(line["ok"] for line in lines)


def test_a_part_that_fails_is_a_case_that_is_not_ok(monkeypatch):
    def run(scale, folder, seed):
        yield {"what": "well", "ok": folder.is_dir()}
        raise ZeroDivisionError("in the middle")

    broken = ModuleType("soak.broken")
    broken.run = run
    monkeypatch.setitem(sys.modules, "soak.broken", broken)
    monkeypatch.setattr(runner.signal, "signal", lambda *given: None)
    come, go = runner.SPAWN.Pipe(duplex=False)
    runner._part("broken", 1.0, 0, go)
    assert come.recv() == {"what": "well", "ok": True}
    failed = come.recv()
    assert failed["ok"] is False
    assert "in the middle" in failed["error"]


def test_what_is_wrong_is_seen(tmp_path):
    """The checks of the soak have teeth."""
    folder = tmp_path / "a"
    Command(*digits(steps=2, evaluate_every=1), output=folder / "run").succeed()
    shutil.copytree(folder / "run", tmp_path / "b" / "run")
    run, whole, cache = tmp_path / "b" / "run", folder / "run", tmp_path / "cache"
    assert different_run(run, whole) == []
    assert wrongly_believed(run, cache, whole, cache) == []
    model = run / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"!")
    assert different_run(run, whole) == ["model/model.safetensors"]
    assert wrongly_believed(run, cache, whole, cache) == ["model"]
    (run / ".model.partial").mkdir()
    assert left_over(run) == [".model.partial"]
    state = next(run.glob("checkpoints/*/state.json"))
    state.write_bytes(state.read_bytes()[:-1])
    assert any("is damaged" in problem for problem in wrongly_believed(run, cache, whole, cache))
    (cache / "entry").mkdir(parents=True)
    (cache / "entry" / "info.json").write_text("{}")
    assert "cache: entry" in wrongly_believed(run, cache, whole, tmp_path / "other")
    assert files(cache) == {"entry/info.json": b"{}"}


def test_a_share_of_cases():
    assert share(range(10), 1.0) == list(range(10))
    assert share(range(10), 5.0) == list(range(10))
    assert len(share(range(10), 0.01)) == 1
