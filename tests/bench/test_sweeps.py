"""What is measured, and what is to be reached."""

import pytest

from permuteformer.bench import run, sweeps
from permuteformer.bench.bars import BARS, Bar, worst_doubling
from permuteformer.bench.case import BLANK, Case
from permuteformer.bench.subjects import SUBJECTS
from permuteformer.models import PRESETS


def every_group():
    return {
        "ops": sweeps.ops(),
        "train": sweeps.models("training"),
        "latency": sweeps.models("inference"),
        "decode": sweeps.decode(),
    }


class TestSweeps:
    def test_every_case_names_what_there_is(self):
        curves = [case for rows in sweeps.scaling().values() for cases in rows.values() for case in cases.values()]
        for case in [case for groups in every_group().values() for group in groups for case in group.cases.values()] + curves:
            assert case.subject in SUBJECTS
            assert case.options.get("model", "permuteformer-text") in PRESETS

    def test_every_bar_is_of_cases_that_are_measured(self):
        for name, groups in every_group().items():
            cases = {group.name: group.cases for group in groups}
            for bar in BARS[name]:
                assert {bar.case, bar.against} <= cases[bar.group].keys()

    def test_rows_and_tasks_are_checked(self):
        with pytest.raises(ValueError, match=r"unknown row 'preformer'.*did you mean 'reformer'"):
            sweeps.models("training", ["text"], ["preformer"])
        with pytest.raises(ValueError, match=r"unknown task 'imag'.*did you mean 'image'"):
            sweeps.models("training", ["imag"])
        with pytest.raises(ValueError, match="lengths must be 4 or more"):
            sweeps.scaling([512, 2])
        assert list(sweeps.models("training", ["text"], ["performer", "performer", "permuteformer"])[0].cases) == [
            "permuteformer",
            "performer",
        ]


class TestBars:
    def test_ratios(self):
        results = {
            "permuteformer": {"seconds_best": 1.0, "peak_memory_bytes": 30, "ready_memory_bytes": 20, "flops": 10},
            "formula": {"seconds_best": 4.0, "peak_memory_bytes": 60, "ready_memory_bytes": 20, "flops": 10},
            "sdpa": {"seconds_best": None},
        }
        assert Bar("g", "formula", 1).ratio(results) == 0.25
        assert Bar("g", "formula", 1, quantity="extra memory").ratio(results) == 0.25
        assert Bar("g", "formula", 1, quantity="time of a floating-point operation").ratio(results) == 0.25
        assert Bar("g", "sdpa", 1).ratio(results) is None
        assert Bar("g", "matmul", 1).ratio(results) is None

    def test_the_worst_doubling_counts(self):
        def line(length, seconds):
            return {"group": sweeps.CURVE, "row": "permuteformer", "length": length, "result": {"seconds_best": seconds}}

        lines = [line(4096, 1.0), line(8192, 9.0), line(16384, 18.0), line(32768, 45.0), line(65536, None)]
        assert worst_doubling(lines) == 2.5
        assert worst_doubling(lines[:1]) is None


class TestByLength:
    def test_a_curve_ends_before_it_takes_too_long(self, monkeypatch):
        class Squared:
            def __init__(self, case, **how):
                self.seconds = case.options["length"] ** 2

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def turn(self):
                return self.seconds

            def end(self):
                return {**BLANK, "status": "finished", "seconds_best": self.seconds}

        monkeypatch.setattr(run, "Apart", Squared)
        cases = {n: Case("op", {"length": n}) for n in (1, 2, 4, 8, 16)}
        lines = list(run.by_length("scaling", {"g": {"r": cases}}, turns=2, limit_seconds=20))
        assert [line["result"]["status"] for line in lines] == ["finished", "finished", "finished", "not run"]
        assert lines[-1]["result"]["message"] == "by the lengths before, it would take 64 s a call, and the limit is 20 s"

    def test_memory_that_the_shorter_one_holds_is_not_missing(self, monkeypatch):
        held = {}

        class Large:
            def __init__(self, case, **how):
                self.size = case.options["length"]

            def __enter__(self):
                self.fits = self.size + sum(held.values()) <= 16
                held[id(self)] = self.size if self.fits else 0
                return self

            def __exit__(self, *_):
                held.pop(id(self), None)

            def turn(self):
                return float(self.size) if self.fits else None

            def end(self):
                held.pop(id(self))
                return {**BLANK, "status": "finished" if self.fits else "out of memory", "seconds_best": self.turn()}

        monkeypatch.setattr(run, "Apart", Large)
        cases = {n: Case("op", {"length": n}) for n in (2, 8, 16, 32, 64)}
        lines = list(run.by_length("scaling", {"g": {"r": cases}}, turns=2, limit_seconds=1000))
        assert [line["result"]["status"] for line in lines] == ["finished", "finished", "finished", "out of memory"]
        assert not held

    def test_real_ones(self):
        curves = {"g": {"sdpa": {n: Case("op", {"method": "sdpa", "length": n}) for n in (8, 16)}}}
        lines = list(run.by_length("scaling", curves, turns=2, limit_seconds=20, turn_seconds=0, threads=1))
        assert [(line["length"], line["result"]["repeats"], line["result"]["threads"]) for line in lines] == [(8, 4, 1), (16, 2, 1)]
        assert lines[0]["environment"]["versions"]["torch"]
