"""Cases in their own processes, which may run out of memory, fail, hang or be killed; alternating cases; curves by length."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from permuteformer.bench import runner
from permuteformer.bench.runner import BLANK, run_case, run_curves, run_groups, start_process
from permuteformer.bench.sweeps import Case
from permuteformer.machine import available_memory

MB = 2**20
OP = Case("op", {"method": "sdpa", "length": 64})
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
MODEL = {"task": "lra-text", "model": "permuteformer-text", "kind": "training", "length": 40, "batch_size": 2, "model_fields": SMALL}
LONG = Case("op", {"method": "sdpa", "length": 32_768, "batch": 64})
"""Takes minutes per call."""


@pytest.fixture
def started(monkeypatch):
    """Processes, as they are started."""
    found = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return found


class TestProcess:
    def test_it_finishes(self, monkeypatch):
        """Its peak of memory is its own: a child of Linux would inherit that of this process."""
        monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
        ballast = b"\1" * (700 * MB)
        result = run_case(Case("model", {**MODEL, "items": 10}), 2, threads=1)
        assert len(ballast) == 700 * MB
        assert result["status"] == "finished"
        assert result["threads"] == 1
        assert result["malloc"]["MALLOC_ARENA_MAX"] == "1"
        assert result["idle_memory_bytes"] <= result["ready_memory_bytes"] <= result["peak_memory_bytes"] < 800 * MB
        assert result["memory_limit_bytes"] <= available_memory()
        assert result["seconds_per_epoch"] == 5 * result["seconds_best"]

    def test_out_of_memory_is_a_result(self):
        greedy = {**MODEL, "model": "transformer-text", "length": 4000, "batch_size": 16, "model_fields": {**SMALL, "num_hidden_layers": 2}}
        result = run_case(Case("model", greedy), 1, threads=1, memory_bytes=600 * MB)
        assert result.keys() >= BLANK.keys()
        assert result["status"] == "out of memory"
        assert "allocate" in result["message"]
        assert result["seconds_best"] is None
        assert (result["threads"], result["memory_limit_bytes"]) == (1, 600 * MB)

    def test_a_failure_has_the_last_line_of_the_error(self):
        result = run_case(Case("model", {**MODEL, "task": "digits", "model": "permuteformer-image", "length": 64}), 1, threads=1)
        assert result["status"] == "failed"
        assert re.match("ValueError: length.*66.*64", result["message"])

    def test_a_process_that_hangs_is_killed(self, started):
        result = run_case(LONG, 1, threads=1, call_seconds=1)
        assert result["status"] == "failed"
        assert re.search(r"\b1 seconds", result["message"])
        assert started[0].returncode == -signal.SIGKILL

    def test_killed_is_out_of_memory(self, started):
        with start_process(OP, threads=1) as process:
            assert process.turn() > 0
            os.kill(started[0].pid, signal.SIGKILL)
            assert process.turn() is None
            result = process.result()
        assert (result["status"], result["seconds_best"]) == ("out of memory", None)

    def test_the_end_without_a_reply(self):
        assert runner.failure(-11, "\n")["status"] == "failed"
        assert "-11" in runner.failure(-11, "\n")["message"]
        assert runner.failure(-6, "terminate called\n  what():  std::bad_alloc\n")["status"] == "out of memory"
        assert runner.failure(1, "an old MemoryError\nValueError: no\n") == {"status": "failed", "message": "ValueError: no"}

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
    def test_it_does_not_outlive_its_parent(self, how):
        """And the parent does not import torch."""
        program = f"""
            import sys
            from permuteformer.bench.runner import run_case
            from permuteformer.bench.sweeps import Case
            assert "torch" not in sys.modules
            run_case(Case("op", {LONG.options!r}), 1, threads=1)
            """
        parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stderr=subprocess.DEVNULL)
        try:
            child = wait_for(lambda: Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())[0]
            if how != signal.SIGINT:
                wait_for(lambda: len(list(Path(f"/proc/{child}/task").iterdir())) > 1)  # its watching thread runs
            parent.send_signal(how)
            assert parent.wait(timeout=20) != 0
            wait_for(lambda: not is_running(child))
        finally:
            parent.kill()
            parent.wait()


class TestGroups:
    def test_cases_alternate_and_a_failure_does_not_stop_the_others(self, started):
        cases = {"a": OP, "wrong": Case("op", {"method": "sdpaa"}), "b": OP}
        steps = []
        lines = list(run_groups("ops", {"g": cases}, 3, lambda *step: steps.append((len(started), *step)), turn_seconds=0.01, threads=1))
        assert [(line["row"], line["result"]["status"]) for line in lines] == [("a", "finished"), ("wrong", "failed"), ("b", "finished")]
        assert "'sdpaa'" in lines[1]["result"]["message"]
        assert lines[0]["result"]["repeats"] > 3  # a turn has several calls
        assert lines[0]["environment"]["versions"]["torch"]
        assert [count for count, *_ in steps] == [0, 1, 2, 3, *[3] * 9]  # all are prepared before the first turn
        assert sum(step for *_, step in steps) == 3 + 9
        assert all(process.returncode is not None for process in started)

    def test_one_case_at_a_time_computes(self, fake_processes):
        cases = {str(length): Case("op", {"length": length}) for length in (1, 2)}
        lines = list(run_groups("ops", {"g": cases}, 3, lambda *_: None))
        assert [line["result"]["seconds_best"] for line in lines] == [1, 2]
        assert fake_processes.turns == list(cases.values()) * 3


class FakeProcesses:
    """Processes that take ``seconds(length)`` per call, and together have ``memory`` bytes, of which each needs its length."""

    def __init__(self):
        self.turns, self.used, self.seconds, self.memory = [], 0, float, 10**9

    @contextmanager
    def start(self, case, **options):
        process = FakeProcess(self, case)
        try:
            yield process
        finally:
            process.free()


class FakeProcess:
    def __init__(self, all_of_them, case):
        self.all, self.case, self.size = all_of_them, case, case.options["length"]
        self.fits = self.all.used + self.size <= self.all.memory
        self.seconds = self.all.seconds(self.size) if self.fits else None
        self.held = self.size if self.fits else 0
        self.all.used += self.held

    def turn(self):
        self.all.turns.append(self.case)
        return self.seconds

    def result(self):
        self.free()
        return {**BLANK, "status": "finished" if self.fits else "out of memory", "seconds_best": self.seconds}

    def free(self):
        self.all.used -= self.held
        self.held = 0


@pytest.fixture
def fake_processes(monkeypatch):
    fake = FakeProcesses()
    monkeypatch.setattr(runner, "start_process", fake.start)
    return fake


def curve(lengths, limit_seconds):
    cases = {length: Case("op", {"length": length}) for length in lengths}
    return list(run_curves("scaling", {"g": {"r": cases}}, 2, limit_seconds, lambda *_: None))


class TestCurves:
    def test_a_curve_ends_before_a_call_beyond_the_limit(self, fake_processes):
        fake_processes.seconds = lambda length: length**2
        lines = curve((1, 2, 4, 8, 16), limit_seconds=20)
        assert [(line["length"], line["result"]["status"]) for line in lines] == [
            *((length, "finished") for length in (1, 2, 4)),
            (8, "not run"),
        ]
        assert re.search("64 s.*20 s", lines[-1]["result"]["message"])

    def test_a_length_that_lacks_memory_beside_the_shorter_one_runs_alone(self, fake_processes):
        fake_processes.memory = 16
        lines = curve((2, 8, 16, 32, 64), limit_seconds=1000)
        assert [line["result"]["status"] for line in lines] == ["finished", "finished", "finished", "out of memory"]
        assert fake_processes.used == 0

    def test_each_length_alternates_with_the_shorter_one(self):
        curves = {"g": {"sdpa": {n: Case("op", {"method": "sdpa", "length": n}) for n in (8, 16)}}}
        lines = list(run_curves("scaling", curves, 2, 20, lambda *_: None, threads=1))
        assert [(line["length"], line["result"]["repeats"], line["result"]["threads"]) for line in lines] == [(8, 4, 1), (16, 2, 1)]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} seconds")
