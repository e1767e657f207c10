"""Sweeps name cases that exist, and performance targets compare cases that are measured."""

import pytest

from permuteformer.bench import sweeps
from permuteformer.bench.subjects import METHODS, SUBJECTS
from permuteformer.bench.targets import DOUBLING, MEMORY, TARGETS, TIME_PER_FLOP, Target, measured_ratios, worst_doubling
from permuteformer.models import PRESETS

GROUPS = {
    "ops": sweeps.ops(),
    "train": sweeps.models("training"),
    "latency": sweeps.models("inference"),
    "decode": sweeps.decode(),
}


def test_every_case_names_a_subject_and_a_preset():
    assert {*GROUPS, "scaling"} == set(sweeps.SWEEPS)
    cases = [case for groups in GROUPS.values() for group in groups.values() for case in group.values()]
    cases += [case for rows in sweeps.scaling().values() for curve in rows.values() for case in curve.values()]
    for case in cases:
        assert case.subject in SUBJECTS
        assert case.options.get("model", "permuteformer-text") in PRESETS
        assert case.options.get("method", "sdpa") in METHODS


def test_rows_tasks_and_lengths_are_checked():
    with pytest.raises(ValueError, match=r"'preformer'.*'reformer'"):
        sweeps.models("training", ["text"], ["preformer"])
    with pytest.raises(ValueError, match=r"'imag'.*'image'"):
        sweeps.models("training", ["imag"])
    with pytest.raises(ValueError, match=r"lengths.*2"):
        sweeps.scaling([512, 2])
    assert list(sweeps.models("training", ["text"], ["performer", "performer", "permuteformer"])["text"]) == ["permuteformer", "performer"]


def test_every_target_compares_measured_cases():
    for sweep, groups in GROUPS.items():
        for target in TARGETS[sweep]:
            assert {target.case, target.against} <= groups[target.group].keys()


def test_ratios():
    results = {
        "permuteformer": {"seconds_best": 1.0, "peak_memory_bytes": 30, "ready_memory_bytes": 20, "flops": 10},
        "formula": {"seconds_best": 4.0, "peak_memory_bytes": 60, "ready_memory_bytes": 20, "flops": 10},
        "sdpa": {"seconds_best": None},
    }
    assert Target("g", "formula", 1).ratio(results) == 0.25
    assert Target("g", "formula", 1, quantity=MEMORY).ratio(results) == 0.25
    assert Target("g", "formula", 1, quantity=TIME_PER_FLOP).ratio(results) == 0.25
    assert Target("g", "sdpa", 1).ratio(results) is None
    assert Target("g", "matmul", 1).ratio(results) is None


def test_targets_without_results_are_left_out():
    lines = [
        {"group": "image", "row": row, "length": None, "result": {"seconds_best": best}}
        for row, best in {"permuteformer": 1.0, "performer": 2.0}.items()
    ]
    assert [(group, at_most, ratio) for group, _, at_most, ratio in measured_ratios("latency", lines)] == [("image", 1.03, 0.5)]


def test_the_worst_doubling_counts():
    def line(length, seconds):
        return {"group": sweeps.CAUSAL_CURVE, "row": "permuteformer", "length": length, "result": {"seconds_best": seconds}}

    lines = [line(4096, 1.0), line(8192, 9.0), line(16384, 18.0), line(32768, 45.0), line(65536, None)]
    assert worst_doubling(lines) == 2.5
    assert worst_doubling(lines[:1]) is None
    assert [ratios[2:] for ratios in measured_ratios("scaling", lines)] == [(DOUBLING, 2.5)]
