"""Estimates of time and memory grow with the work, and a finished run of the same row replaces them."""

from dataclasses import replace

import pytest

from permuteformer.experiments import PLANS
from permuteformer.reproduce.estimate import estimate, matmul_peak
from permuteformer.reproduce.jobs import jobs_of

from .test_run import DIGITS, STEP, job_of, write_run


def estimated(work, folder, finished=(), data=None):
    return estimate(job_of(work, folder), [*finished], 1e10, data)


def test_twice_the_steps_take_twice_as_long(tmp_path):
    one, two = (estimated(replace(DIGITS, steps=steps), tmp_path) for steps in (10, 20))
    assert two.seconds == pytest.approx(2 * one.seconds)
    assert one.memory_bytes == two.memory_bytes > 0
    assert not one.measured


def test_longer_sequences_take_more_time_and_memory(tmp_path):
    one, two = (estimated(replace(STEP, length=length), tmp_path) for length in (64, 128))
    assert two.seconds > 1.5 * one.seconds
    assert two.memory_bytes > one.memory_bytes


def test_a_finished_run_of_the_same_row_replaces_the_estimate(tmp_path):
    other = job_of(replace(DIGITS, seed=3), tmp_path)
    write_run(other, status="finished", seconds=12.5, peak_memory_bytes=99)
    guess = estimated(DIGITS, tmp_path, [other])
    assert (guess.seconds, guess.memory_bytes, guess.measured) == (12.5, 99, True)
    assert not estimated(replace(DIGITS, batch_size=9), tmp_path, [other]).measured


@pytest.mark.parametrize("table", ["1", "4"])
def test_without_data_the_official_sizes_are_assumed(tmp_path, table):
    for job in jobs_of(PLANS["paper"].cells([table], seeds=1), tmp_path):
        guess = estimate(job, [], 1e12, str(tmp_path))
        assert guess.seconds > 3600
        assert guess.memory_bytes > 5e8


def test_logits_of_a_large_vocabulary_take_memory(tmp_path):
    work = PLANS["paper"].cells(["4"], seeds=1)[0].work
    few, all = (estimated(replace(work, micro_batch_size=size), tmp_path, data=str(tmp_path)).memory_bytes for size in (1, work.batch_size))
    assert all - few > 127 * 512 * 267_744 * 4


def test_the_matmul_peak_is_that_of_a_computer():
    assert 1e8 < matmul_peak() < 1e15
