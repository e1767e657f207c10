"""Measurements: every kind of task and model in small; and in a process of its own, which may run out of memory, fail or hang."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from permuteformer.bench import apart, steps
from permuteformer.bench.apart import Apart, available_memory, measure_apart, measure_in_turns
from permuteformer.bench.case import BLANK, Case
from permuteformer.bench.items import random_items
from permuteformer.bench.measure import Timed
from permuteformer.bench.measure import measure as measure_case
from permuteformer.experiments.base import Measurement
from permuteformer.tasks import TASKS
from permuteformer.train.build import build_task

pytestmark = pytest.mark.filterwarnings("ignore:positions on axis")  # heads this small repeat early
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
MB = 2**20


def measurement(task="lra-text", model="permuteformer-text", length=40, kind="training", **fields):
    model_fields = {**SMALL, **fields.pop("model_fields", {})}
    return Measurement(
        **{"repeats": 2, "batch_size": 2, **fields}, kind=kind, task=task, model=model, length=length, model_fields=model_fields
    )


def measure(measured, device=None):
    return measure_case(Case.of(measured), measured.repeats, device)


LONG = measurement(length=4000, batch_size=64, repeats=10_000, model_fields={"num_hidden_layers": 6})
"""Takes hours, for what is to be stopped."""


@pytest.fixture(autouse=True)
def no_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PERMUTEFORMER_DATA", "PERMUTEFORMER_CACHE"):
        monkeypatch.delenv(name, raising=False)


class TestHere:
    @pytest.mark.parametrize("kind", ["training", "inference"])
    @pytest.mark.parametrize(
        ("task", "model", "length", "options"),
        [
            ("lra-text", "permuteformer-text", 40, {}),
            ("lra-text", "transformer-text", 40, {"task_options": {"protocol": "paper"}}),
            ("lra-text", "reformer-text", 100, {}),
            ("lra-text", "linformer-text", 40, {}),
            ("lra-text", "nystromformer-text", 100, {}),
            ("lra-text", "roformer-text", 40, {}),
            ("lra-text", "performer-t5-text", 40, {}),
            ("lra-listops", "performer-text", 40, {}),
            ("lra-retrieval", "permuteformer-retrieval", 40, {}),
            ("lra-image", "permuteformer-image", 1025, {"batch_size": 1}),
            ("lra-image", "permuteformer-1d-image", 1026, {"batch_size": 1, "task_options": {"protocol": "paper"}}),
            ("digits", "permuteformer-image", 66, {}),
            ("lm-bytes", "permuteformer-lm", 40, {}),
            ("wikitext-103", "permuteformer-lm", 40, {"model_fields": {"vocab_size": 500}}),
            ("wikitext-2", "transformer-lm", 40, {"task_options": {"unit": "bytes"}}),
        ],
    )
    def test_every_kind_of_task_and_model(self, kind, task, model, length, options):
        result = measure(measurement(task, model, length, kind, **options), "cpu")
        assert result.keys() >= BLANK.keys()
        assert result["status"] == "finished"
        assert 0 < result["seconds_best"] <= result["seconds_median"] <= result["seconds_spread"][1]
        assert result["seconds_spread"][0] == result["seconds_best"]
        assert result["peak_memory_bytes"] > 100 * MB  # torch is in it
        assert result["memory_is"] == "resident in the process"
        assert result["parameters"] > 1000
        assert (result["repeats"], result["device"], result["threads"]) == (2, "cpu", torch.get_num_threads())

    def test_an_epoch_is_estimated_from_the_best(self):
        result = measure(measurement(items=25))
        assert result["seconds_per_epoch"] == 13 * result["seconds_best"]
        assert result["estimated"]
        result = measure(measurement())
        assert result["seconds_per_epoch"] is None
        assert not result["estimated"]

    def test_one_step_goes_before_those_that_are_timed(self, monkeypatch):
        seen = []

        def slow_at_first(*given):
            step = training(*given)

            def slower():
                step()
                seen.append(len(seen))
                time.sleep(0.5 if len(seen) == 1 else 0)

            return slower

        training = steps._training
        monkeypatch.setattr(steps, "_training", slow_at_first)
        assert measure(measurement(repeats=3))["seconds_spread"][1] < 0.5
        assert len(seen) == 4

    def test_training_trains_and_inference_does_not(self, monkeypatch):
        models = {}
        for kind, make in (("training", steps._training), ("inference", steps._inference)):

            def keep(model, *given, kind=kind, make=make):
                models[kind] = model, [p.clone() for p in model.parameters()]
                return make(model, *given)

            monkeypatch.setattr(steps, f"_{kind}", keep)
            measure(measurement(kind=kind))
        (trained, before), (used, as_made) = models["training"], models["inference"]
        assert trained.training
        assert any(not torch.equal(p, old) for p, old in zip(trained.parameters(), before, strict=True))
        assert not used.training
        assert all(torch.equal(p, old) and p.grad is None for p, old in zip(used.parameters(), as_made, strict=True))
        assert all(p.grad is None for p in trained.parameters())

    def test_random_numbers_go_on_as_if_nothing_had_been(self):
        before = torch.get_rng_state()
        measure(measurement())
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_length_beyond_the_tasks_own(self):
        """Learned positions and Linformer are made for it."""
        for model in ("performer-text", "linformer-text"):
            assert measure(measurement(model=model, length=5000, kind="inference", batch_size=1))["status"] == "finished"

    def test_refusals_name_what_is_allowed(self, tmp_path):
        with pytest.raises(ValueError, match="length must be 66, the 8 x 8 pixels of 'digits' and the tokens around them; it is 64"):
            measure(measurement("digits", "permuteformer-image", 64))
        with pytest.raises(ValueError, match=r"unknown preset 'permuteformer-txt'.*did you mean 'permuteformer-text'"):
            measure(measurement(model="permuteformer-txt"))
        with pytest.raises(ValueError, match="unknown preset 'permuteformer'"):
            measure(measurement("lm-bytes", "permuteformer"))
        with pytest.raises(ValueError, match="unknown task 'lra-txt'"):
            measure(measurement("lra-txt"))
        with pytest.raises(ValueError, match="does not fit task 'lra-text'"):
            measure(measurement("lra-text", "permuteformer-lm"))
        with pytest.raises(ValueError, match="max_length must be above 1"):
            measure(measurement(length=1))
        with pytest.raises(ValueError, match="classify is of your own data"):
            measure(measurement("classify"))


class TestItems:
    def test_images_are_as_the_task_makes_them(self):
        task = build_task("digits", {})
        batch, real = random_items(measurement("digits", "permuteformer-image", 66)).batch(2), task.collate(task.dataset("test")[:2])
        assert torch.equal(batch.positions, real.positions)
        assert torch.equal(batch.key_mask, real.key_mask)
        assert batch.input_ids[:, [0, -1]].tolist() == [[1, 2], [1, 2]]
        assert batch.input_ids[:, 1:-1].amin() >= 3

    def test_texts_have_their_length_and_special_tokens(self):
        items = random_items(measurement(length=5000, task_options={"protocol": "paper"}))
        batch = items.batch(3)
        assert items.vocab_size == 259
        assert batch.input_ids.shape == (3, 5000)
        assert batch.key_mask.all()
        assert batch.input_ids[:, [0, -1]].tolist() == [[1, 2]] * 3
        assert torch.equal(items.batch(3).input_ids, batch.input_ids)

    def test_pairs_are_two(self):
        batch = random_items(measurement("lra-retrieval", "permuteformer-retrieval")).batch(2)
        assert batch.second_input_ids.shape == batch.input_ids.shape == (2, 40)
        assert not torch.equal(batch.second_input_ids, batch.input_ids)

    def test_words_are_as_many_as_the_preset_has(self):
        assert random_items(measurement("wikitext-103", "permuteformer-lm")).vocab_size == 267_744
        assert random_items(measurement("wikitext-103", "permuteformer-lm", model_fields={"vocab_size": 99})).vocab_size == 99
        batch = random_items(measurement("lm-bytes", "permuteformer-lm")).batch(2)
        assert batch.labels.shape == batch.input_ids.shape == (2, 40)
        assert batch.input_ids.amax() < 259

    def test_every_task_that_needs_no_path(self):
        for name in TASKS:
            if "path" not in TASKS.options(name):
                model = "permuteformer-lm" if TASKS[name].kind == "lm" else "permuteformer-text"
                grid = None if TASKS[name].kind == "lm" else build_task(name, {}).grid
                items = random_items(measurement(name, model, 40 if grid is None else build_task(name, {}).max_length))
                assert len(items.batch(2)) == 2


class TestMeasurement:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("kind", "trainig", "unknown kind of measurement 'trainig': did you mean 'training'\\? There is 'inference', 'training'"),
            ("length", 0, "length must be 1 or more; it is 0"),
            ("length", None, "length must be a whole number; it is None"),
            ("length", 1.5, "length must be a whole number; it is 1.5"),
            ("repeats", 0, "repeats must be 1 or more; it is 0"),
            ("batch_size", True, "batch_size must be a whole number; it is True"),
            ("items", 0, "items must be 1 or more; it is 0"),
            ("model", None, "model must be a name; it is None"),
        ],
    )
    def test_bad_fields_are_refused(self, field, value, message):
        with pytest.raises((ValueError, TypeError), match=message):
            Measurement(**{"kind": "training", "task": "lra-text", "model": "permuteformer-text", "length": 40, field: value})

    def test_json_there_and_back(self):
        given = measurement(items=3, task_options={"protocol": "paper"})
        assert Measurement.from_json(given.to_json()) == given
        with pytest.raises(ValueError, match=r"unknown field of a measurement 'lenght'.*did you mean 'length'"):
            Measurement.from_json({**given.to_json(), "lenght": 3})


class TestApart:
    def test_it_finishes(self, monkeypatch):
        """And knows nothing of how large this process is, which Linux would tell it as its own peak."""
        monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
        ballast = b"\1" * (700 * MB)
        result = measure_apart(measurement(items=10), threads=1)
        assert len(ballast) == 700 * MB
        assert result["status"] == "finished"
        assert result["threads"] == 1
        assert result["malloc"]["MALLOC_ARENA_MAX"] == "1"
        assert result["idle_memory_bytes"] < result["peak_memory_bytes"] < 800 * MB
        assert result["memory_limit_bytes"] <= available_memory()
        assert result["seconds_per_epoch"] == 5 * result["seconds_best"]

    def test_out_of_memory_is_a_result(self):
        greedy = measurement(model="transformer-text", length=4000, batch_size=16, model_fields={"num_hidden_layers": 2})
        result = measure_apart(greedy, threads=1, memory_bytes=600 * MB)
        assert result.keys() >= BLANK.keys()
        assert result["status"] == "out of memory"
        assert "allocate" in result["message"]
        assert result["seconds_best"] is None
        assert (result["threads"], result["memory_limit_bytes"]) == (1, 600 * MB)

    def test_a_failure_says_why(self):
        result = measure_apart(measurement("digits", "permuteformer-image", 64), threads=1)
        assert result["status"] == "failed"
        assert result["message"] == "ValueError: length must be 66, the 8 x 8 pixels of 'digits' and the tokens around them; it is 64"

    def test_arguments_are_checked(self):
        for arguments, message in (
            ({"threads": 0}, "threads must be .* it is 0"),
            ({"memory_bytes": 1.5}, "memory_bytes must be .* it is 1.5"),
        ):
            with pytest.raises(ValueError, match=message):
                measure_apart(measurement(), **arguments)

    def test_a_timeout_ends_the_process(self, started):
        result = measure_apart(LONG, threads=1, timeout=1)
        assert (result["status"], result["message"]) == ("failed", "it took more than 1 seconds")
        assert started[0].returncode == -signal.SIGKILL

    def test_killed_is_out_of_memory(self):
        with Apart(Case.of(measurement()), threads=1) as process:
            assert process.turn() > 0
            os.kill(process.process.pid, signal.SIGKILL)
            assert process.turn() is None
            result = process.end()
        assert (result["status"], result["seconds_best"]) == ("out of memory", None)

    def test_without_a_result(self):
        """What a process ended with, and what it said."""
        assert apart._failure(-11, "\n") == {"status": "failed", "message": "it ended with -11 and said nothing"}
        assert apart._failure(-6, "terminate called\n  what():  std::bad_alloc\n")["status"] == "out of memory"
        assert apart._failure(1, "MemoryError of old\nValueError: no\n") == {"status": "failed", "message": "ValueError: no"}

    def test_in_turns_one_that_fails_leaves_the_others(self, started):
        """Also where it prints: what is printed is no reply."""
        steps = []
        cases = [
            Case("op", {"method": "permuteformer", "length": 64}),
            Case("op", {"method": "permutformer"}),
            Case("op", {"method": "sdpa", "length": 64}),
        ]
        results = measure_in_turns(cases, 3, turn_seconds=0.01, threads=1, progress=lambda: steps.append(len(started)))
        assert [result["status"] for result in results] == ["finished", "failed", "finished"]
        assert "did you mean 'permuteformer'" in results[1]["message"]
        assert results[0]["repeats"] > 3  # turns are of several calls
        assert steps == [1, 2, 3, *[3] * 9]  # all are made before the first turn
        assert all(process.returncode is not None for process in started)

    def test_a_turn_is_one_call_at_least(self):
        timed = Timed(Case("op", {"method": "sdpa", "length": 8}), "cpu")
        timed.turn()
        assert len(timed.seconds) == 1
        timed.turn(0.05)
        assert len(timed.seconds) > 2
        assert timed.result()["ready_memory_bytes"] >= timed.result()["idle_memory_bytes"]

    @linux
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
    def test_it_does_not_outlive_who_started_it(self, how):
        """And who starts it needs no torch."""
        program = f"""
            import sys
            from permuteformer.bench.apart import measure_apart
            from permuteformer.experiments.base import Measurement
            assert "torch" not in sys.modules
            measure_apart(Measurement.from_json({LONG.to_json()!r}), threads=1)
            """
        parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stderr=subprocess.DEVNULL)
        try:
            child = wait_for(lambda: Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())[0]
            if how != signal.SIGINT:
                wait_for(lambda: len(list(Path(f"/proc/{child}/task").iterdir())) > 1)  # it watches
            parent.send_signal(how)
            assert parent.wait(timeout=20) != 0
            wait_for(lambda: not is_running(child))
        finally:
            parent.kill()
            parent.wait()


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


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"it did not happen within {seconds} seconds")
