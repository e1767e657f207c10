"""Jobs are run, skipped, gone on with and gathered; memory and failures are told apart."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from permuteformer.experiments import Cell, Column, Experiment, Measurement, Plan, Table
from permuteformer.report.load import load
from permuteformer.reproduce.collect import collect
from permuteformer.reproduce.jobs import all_jobs, jobs_of
from permuteformer.reproduce.run import run

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
DIGITS = Experiment(
    task="digits", model="permuteformer-image", model_fields=TINY, steps=4, batch_size=8, validation_items=20, test_items=20, warmup_steps=1
)
STEP = Measurement(kind="training", task="lm-bytes", model="permuteformer-lm", model_fields=TINY, length=64, repeats=1)


@pytest.fixture
def console():
    return Console(file=io.StringIO())


def said(console):
    return console.file.getvalue()


def test_a_table_from_nothing_to_records(tmp_path, console):
    cells = [
        Cell("1", "permuteformer", "digits", 0, DIGITS),
        Cell("1", "permuteformer-1d", "digits", 0, DIGITS),  # the same work
        Cell("1", "permuteformer", "digits", 1, replace(DIGITS, seed=1)),
        Cell("speed", "permuteformer-lm", "64", 0, STEP),
    ]
    jobs = jobs_of(cells, tmp_path / "runs")
    assert [len(job.also) for job in jobs] == [1, 0, 0]
    assert run(jobs, preset="quick", command="permuteformer reproduce", at_once=2, data=None, console=console) == {}
    assert [job.result["status"] for job in jobs] == ["finished"] * 3

    records = collect(jobs, tmp_path / "runs", "quick", "another command")
    assert {record.command for record in records} == {"permuteformer reproduce"}
    assert [record.run for record in records] == [cell.name for cell in (cells[0], cells[1], cells[2], cells[3])]
    assert records[0].result == records[1].result
    assert records[0].row != records[1].row
    written = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert len(written) == 4
    assert written[3]["result"]["seconds_best"] > 0
    assert {line["run"] for line in map(json.loads, (tmp_path / "runs" / "looks.jsonl").read_text().splitlines())} == {cells[0].name}
    assert {record.run for record in load([tmp_path / "runs" / "results.jsonl"]).records} == {cell.name for cell in cells}

    before = {job.path: job.path.stat().st_mtime_ns for job in jobs}
    assert (
        run(jobs, preset="quick", command="permuteformer reproduce", at_once=2, data=None, console=console) == {}
    )  # nothing is left to do
    assert {job.path: job.path.stat().st_mtime_ns for job in jobs} == before
    assert not list((tmp_path / "runs").rglob("*.job.json"))


def test_another_budget_is_another_job(tmp_path):
    (job,) = jobs_of([Cell("1", "permuteformer", "digits", 0, DIGITS)], tmp_path)
    job.path.mkdir(parents=True)
    (job.path / "experiment.json").write_text(json.dumps({"experiment": DIGITS.to_json()}))
    (job.path / "result.json").write_text(json.dumps({"status": "finished"}))
    assert job.result
    (other,) = jobs_of([Cell("1", "permuteformer", "digits", 0, replace(DIGITS, steps=5))], tmp_path)
    assert not other.result


def test_what_fails_is_told_and_the_rest_goes_on(tmp_path, console):
    wrong = replace(DIGITS, model="permuteformer-lm")  # causal, for a task that is not
    jobs = jobs_of([Cell("1", "wrong", "digits", 0, wrong), Cell("1", "permuteformer", "digits", 0, DIGITS)], tmp_path)
    failures = run(jobs, preset="quick", command="permuteformer reproduce", at_once=1, data=None, console=console)
    assert list(failures) == [jobs[0].cell.name]
    assert "does not fit task 'digits'" in failures[jobs[0].cell.name]
    assert jobs[1].result["status"] == "finished"
    assert not jobs[0].result


def test_out_of_memory_is_a_result(tmp_path, console):
    sizes = {**TINY, "hidden_size": 2**13, "intermediate_size": 2**20}  # a matrix of 32 GiB
    huge, step = replace(DIGITS, model="transformer-image", model_fields=sizes), replace(STEP, model="transformer-lm", model_fields=sizes)
    jobs = jobs_of([Cell("1", "huge", "digits", 0, huge), Cell("speed", "huge", "64", 0, step)], tmp_path)
    assert run(jobs, preset="quick", command="permuteformer reproduce", at_once=1, data=None, console=console) == {}
    assert [job.result["status"] for job in jobs] == ["out of memory"] * 2
    assert {record.status for record in collect(jobs, tmp_path, "quick", "")} == {"out of memory"}


def test_terminated_it_saves_and_goes_on(tmp_path):
    long = replace(DIGITS, steps=5000, evaluate_every=5000)  # a line in its record every 25 steps
    (job,) = jobs_of([Cell("1", "permuteformer", "digits", 0, long)], tmp_path)
    code = f"""
import sys
from pathlib import Path
from rich.console import Console
from permuteformer.experiments import Cell, Experiment
from permuteformer.reproduce.jobs import jobs_of
from permuteformer.reproduce.run import Interrupted, run
jobs = jobs_of([Cell("1", "permuteformer", "digits", 0, Experiment.from_json({long.to_json()!r}))], Path({str(tmp_path)!r}))
try:
    run(jobs, preset="quick", command="permuteformer reproduce", at_once=1, data=None, console=Console())
except Interrupted:
    sys.exit(7)
"""
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        limit = time.monotonic() + 120
        while not job.progress and time.monotonic() < limit:
            time.sleep(0.2)
        assert job.progress, "training did not begin"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 7
    finally:
        process.kill()
        process.wait()
    assert list((job.path / "checkpoints").glob("step-*"))
    assert not job.result


def test_what_a_person_killed_is_begun_again(tmp_path, console, monkeypatch):
    """SIGKILL is a result only where the machine says that it killed for want of memory."""
    from permuteformer.reproduce import run as module

    def ended(killed):
        (job,) = jobs_of([Cell("1", "permuteformer", "digits", 0, DIGITS)], tmp_path)
        job.path.mkdir(parents=True, exist_ok=True)
        (job.path / "experiment.json").write_text(json.dumps({"experiment": DIGITS.to_json()}))
        job.path.with_name(f"{job.path.name}.{module.SAID}").write_text("")
        process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        process.wait()
        monkeypatch.setattr(module, "_killed_for_memory", lambda: killed)
        failures = {}
        module._ended(module.Running(job, process, None, 0, 3), failures)
        return job.result.get("status"), list(failures)

    assert ended(3) == (None, ["table1/digits/permuteformer-seed0"])
    assert ended(4) == ("out of memory", [])


def test_a_call_for_a_part_leaves_the_rest_in_the_results(tmp_path):
    column = Column(name="digits", task="digits", model="{row}-image", model_fields=TINY, settings={"steps": 1})
    table = Table(name="1", title="", rows=("performer", "permuteformer"), columns=(column,))
    plan = Plan(name="quick", title="", tables=(table,), seeds=1)
    for job in jobs_of(plan.cells(seeds=3), tmp_path)[:5]:  # of the third seed one row only
        job.path.mkdir(parents=True)
        content = {"format": 1, "version": "1", "experiment": job.cell.work.to_json(), "task": {}, "config": {}, "cell": None}
        (job.path / "experiment.json").write_text(json.dumps(content))
        (job.path / "result.json").write_text(json.dumps({"status": "finished", "value": 0.5}))
    records = collect(all_jobs(plan, tmp_path), tmp_path, "quick", "")
    assert sorted((record.row, record.seed) for record in records) == [
        ("performer", 0),
        ("performer", 1),
        ("performer", 2),
        ("permuteformer", 0),
        ("permuteformer", 1),
    ]


def test_a_run_that_is_broken_off_in_a_line_shows_the_line_before(tmp_path):
    (job,) = jobs_of([Cell("1", "permuteformer", "digits", 0, DIGITS)], tmp_path)
    job.path.mkdir(parents=True)
    assert job.progress == {}
    (job.path / "metrics.jsonl").write_text('{"event": "train", "step": 3, "epoch": 0.5, "loss": 1.0}\n{"event": "tra')
    assert job.progress["step"] == 3
    assert Path(job.path).name == "permuteformer-seed0"
