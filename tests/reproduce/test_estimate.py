"""Estimates: more work takes longer, and a run of the same row knows best."""

import json
from dataclasses import replace

import pytest

from permuteformer.experiments import PLANS, Cell
from permuteformer.reproduce.estimate import estimate, measured_rate
from permuteformer.reproduce.jobs import jobs_of

from .test_run import DIGITS, STEP


def of(work, jobs=(), folder=None, data=None):
    (job,) = jobs_of([Cell("1", "row", "column", getattr(work, "seed", 0), work)], folder)
    return estimate(job, [*jobs], 1e10, data)


def test_twice_the_steps_take_twice_as_long(tmp_path):
    one, two = (of(replace(DIGITS, steps=steps), folder=tmp_path) for steps in (10, 20))
    assert two.seconds == pytest.approx(2 * one.seconds)
    assert one.memory_bytes == two.memory_bytes > 0
    assert not one.measured


def test_a_longer_sequence_takes_longer_and_more(tmp_path):
    one, two = (of(replace(STEP, length=length), folder=tmp_path) for length in (64, 128))
    assert two.seconds > 1.5 * one.seconds
    assert two.memory_bytes > one.memory_bytes


def test_a_run_of_the_same_row_knows_best(tmp_path):
    (other,) = jobs_of([Cell("1", "row", "column", 3, replace(DIGITS, seed=3))], tmp_path)
    other.path.mkdir(parents=True)
    (other.path / "experiment.json").write_text(json.dumps({"experiment": replace(DIGITS, seed=3).to_json()}))
    (other.path / "result.json").write_text(json.dumps({"status": "finished", "seconds": 12.5, "peak_memory_bytes": 99}))
    guess = of(DIGITS, [other], tmp_path)
    assert (guess.seconds, guess.memory_bytes, guess.measured) == (12.5, 99, True)


@pytest.mark.parametrize("table", ["1", "4"])
def test_without_data_the_official_sizes_are_taken(tmp_path, table):
    for job in jobs_of(PLANS["paper"].cells([table], seeds=1), tmp_path):
        guess = estimate(job, [], 1e12, str(tmp_path))
        assert guess.seconds > 3600
        assert guess.memory_bytes > 5e8


def test_scores_of_many_words_take_memory(tmp_path):
    words = next(job for job in jobs_of(PLANS["paper"].cells(["4"], seeds=1), tmp_path))
    few = of(replace(words.cell.work, micro_batch_size=1), folder=tmp_path, data=str(tmp_path))
    all_at_once = of(replace(words.cell.work, micro_batch_size=None), folder=tmp_path, data=str(tmp_path))
    assert all_at_once.memory_bytes - few.memory_bytes > 127 * 512 * 267_744 * 4


def test_the_rate_is_that_of_a_computer():
    assert 1e8 < measured_rate() < 1e15
