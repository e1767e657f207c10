"""Jobs are run once, resumed and collected; lack of memory is a result, other failures are not."""

import io
import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from permuteformer.experiments import Cell, Column, Experiment, Measurement, Plan, Table
from permuteformer.experiments.layout import RUN_FORMAT
from permuteformer.report.runs import load_runs
from permuteformer.reproduce import run as run_module
from permuteformer.reproduce.jobs import all_jobs, collect, jobs_of
from permuteformer.reproduce.run import Running, run

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
DIGITS = Experiment(
    task="digits", model="permuteformer-image", model_fields=TINY, steps=4, batch_size=8, validation_items=20, test_items=20, warmup_steps=1
)
STEP = Measurement(kind="training", task="lm-bytes", model="permuteformer-lm", model_fields=TINY, length=64, repeats=1)


def job_of(work, folder, row="permuteformer"):
    (job,) = jobs_of([Cell("1", row, "digits", 0, work)], folder)
    return job


def run_quick(jobs, at_once=1):
    return run(jobs, preset="quick", command="permuteformer reproduce", at_once=at_once, data=None, console=Console(file=io.StringIO()))


def write_run(job, **result):
    """Write a run folder of a job; without a result it is not finished."""
    job.path.mkdir(parents=True)
    content = {"format": RUN_FORMAT, "version": "1", "experiment": job.cell.work.to_json(), "task": {}, "config": {}, "cell": None}
    (job.path / "experiment.json").write_text(json.dumps(content))
    if result:
        (job.path / "result.json").write_text(json.dumps(result))


def test_jobs_are_run_once_and_collected(tmp_path):
    cells = [
        Cell("1", "permuteformer", "digits", 0, DIGITS),
        Cell("1", "permuteformer-1d", "digits", 0, DIGITS),  # the same work
        Cell("1", "permuteformer", "digits", 1, replace(DIGITS, seed=1)),
        Cell("speed", "permuteformer-lm", "64", 0, STEP),
    ]
    jobs = jobs_of(cells, tmp_path)
    assert [len(job.also) for job in jobs] == [1, 0, 0]
    assert run_quick(jobs, at_once=2) == {}
    assert [job.result["status"] for job in jobs] == ["finished"] * 3

    runs = collect(jobs, tmp_path, "quick", "another command")
    assert {run.command for run in runs} == {"permuteformer reproduce"}
    assert [run.name for run in runs] == [cell.name for cell in cells]
    assert runs[0].result == runs[1].result
    assert [run.row for run in runs[:2]] == ["permuteformer", "permuteformer-1d"]
    assert runs[3].result["seconds_best"] > 0
    assert {run.name for run in load_runs([tmp_path / "results.jsonl"]).runs} == {cell.name for cell in cells}
    maps = [json.loads(line) for line in (tmp_path / "attention_maps.jsonl").read_text().splitlines()]
    assert [line["run"] for line in maps] == [cells[0].name]
    for recorded in runs:
        assert {"revision", "clean", "threads", "backend", "versions"} <= recorded.environment.keys()
        assert recorded.environment["threads"] >= 1
        assert recorded.environment["backend"].split()[0] in ("native", "torch", "cuda")

    before = {job.path: job.path.stat().st_mtime_ns for job in jobs}
    assert run_quick(jobs) == {}
    assert {job.path: job.path.stat().st_mtime_ns for job in jobs} == before
    assert not list(tmp_path.rglob("*.job.json"))


def test_other_settings_are_another_job_and_the_micro_batch_size_is_not(tmp_path):
    job = job_of(DIGITS, tmp_path)
    write_run(job, status="finished")
    assert job.result
    assert not job_of(replace(DIGITS, steps=5), tmp_path).result
    assert job_of(replace(DIGITS, micro_batch_size=2), tmp_path).result


def test_a_failure_is_returned_and_other_jobs_run(tmp_path):
    wrong = replace(DIGITS, model="permuteformer-lm")  # causal, for a task that is not
    jobs = [job_of(wrong, tmp_path, "wrong"), job_of(DIGITS, tmp_path)]
    failures = run_quick(jobs)
    assert list(failures) == ["table1/digits/wrong-seed0"]
    assert "'permuteformer-lm'" in failures["table1/digits/wrong-seed0"]
    assert [job.result.get("status") for job in jobs] == [None, "finished"]


def test_lack_of_memory_is_a_result(tmp_path):
    sizes = {**TINY, "hidden_size": 2**13, "intermediate_size": 2**20}  # a matrix of 32 GiB
    huge, step = replace(DIGITS, model="transformer-image", model_fields=sizes), replace(STEP, model="transformer-lm", model_fields=sizes)
    jobs = jobs_of([Cell("1", "huge", "digits", 0, huge), Cell("speed", "huge", "64", 0, step)], tmp_path)
    assert run_quick(jobs) == {}
    assert [job.result["status"] for job in jobs] == ["out of memory"] * 2
    assert {record.status for record in collect(jobs, tmp_path, "quick", "")} == {"out of memory"}


def test_sigterm_saves_running_jobs(tmp_path, monkeypatch):
    job = job_of(replace(DIGITS, steps=5000, evaluate_every=5000), tmp_path)
    show = run_module._show

    def show_and_terminate(one, progress):
        show(one, progress)
        if one.job.progress:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(run_module, "_show", show_and_terminate)
    with pytest.raises(KeyboardInterrupt):
        run_quick([job])
    assert list((job.path / "checkpoints").glob("step-*"))
    assert not job.result


@pytest.mark.parametrize(("killed_by_the_system", "status"), [(False, None), (True, "out of memory")])
def test_a_killed_run_is_out_of_memory_only_if_the_system_killed_it(killed_by_the_system, status, tmp_path, monkeypatch):
    job = job_of(DIGITS, tmp_path)
    write_run(job)
    job.path.with_name(f"{job.path.name}.{run_module.OUTPUT}").write_text("")
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    process.wait()
    monkeypatch.setattr(run_module, "_killed_for_memory", lambda: 3 + killed_by_the_system)
    failures = {}
    run_module._record(Running(job, process, None, 0, killed_before=3), failures)
    assert job.result.get("status") == status
    assert list(failures) == ([] if killed_by_the_system else ["table1/digits/permuteformer-seed0"])


def test_results_of_all_seeds_are_collected(tmp_path):
    column = Column(name="digits", task="digits", model="{row}-image", model_fields=TINY, settings={"steps": 1})
    table = Table(name="1", title="", rows=("performer", "permuteformer"), columns=(column,))
    plan = Plan(name="quick", title="", tables=(table,), seeds=1)
    for job in jobs_of(plan.cells(seeds=3), tmp_path)[:5]:  # of the third seed only one row
        write_run(job, status="finished", value=0.5)
    records = collect(all_jobs(plan, tmp_path), tmp_path, "quick", "")
    runs = {(row, seed) for row in ("performer", "permuteformer") for seed in range(3)} - {("permuteformer", 2)}
    assert {(record.row, record.seed) for record in records} == runs


def test_progress_ignores_a_line_that_is_cut_off(tmp_path):
    job = job_of(DIGITS, tmp_path)
    job.path.mkdir(parents=True)
    assert job.progress == {}
    (job.path / "metrics.jsonl").write_text('{"event": "train", "step": 3, "epoch": 0.5, "loss": 1.0}\n{"event": "tra')
    assert job.progress["step"] == 3
