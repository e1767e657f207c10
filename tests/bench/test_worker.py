"""Every kind of task and model can be timed, on random inputs."""

import pytest
import torch

from permuteformer.bench import subjects
from permuteformer.bench.inputs import inference_step, measured_input, prepare, training_step
from permuteformer.bench.runner import BLANK
from permuteformer.bench.sweeps import Case
from permuteformer.bench.worker import Timer
from permuteformer.tasks import TASKS
from permuteformer.train.build import build_task

pytestmark = pytest.mark.filterwarnings("ignore:positions on axis")  # heads this small repeat early

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
MB = 2**20


def case(task="lra-text", model="permuteformer-text", length=40, kind="training", **fields):
    sizes = {**SMALL, **fields.pop("model_fields", {})}
    return Case("model", {"task": task, "model": model, "length": length, "kind": kind, "batch_size": 2, **fields, "model_fields": sizes})


def measure(measured, turns=2):
    timer = Timer(measured, "cpu")
    for _ in range(turns):
        timer.turn()
    return timer.result()


class TestTimer:
    @pytest.mark.parametrize("kind", ["training", "inference"])
    @pytest.mark.parametrize(
        ("task", "model", "length", "fields"),
        [
            ("lra-text", "permuteformer-text", 40, {}),
            ("lra-text", "transformer-text", 40, {"task_options": {"protocol": "lra"}}),
            ("lra-text", "reformer-text", 100, {}),
            ("lra-text", "linformer-text", 40, {}),
            ("lra-text", "nystromformer-text", 100, {}),
            ("lra-text", "roformer-text", 40, {}),
            ("lra-text", "performer-t5-text", 40, {}),
            ("lra-listops", "performer-text", 40, {}),
            ("lra-retrieval", "permuteformer-retrieval", 40, {}),
            ("lra-image", "permuteformer-image", 1025, {"batch_size": 1, "task_options": {"protocol": "lra"}}),
            ("lra-image", "permuteformer-1d-image", 1026, {"batch_size": 1}),
            ("digits", "permuteformer-image", 66, {}),
            ("lm-bytes", "permuteformer-lm", 40, {}),
            ("wikitext-103", "permuteformer-lm", 40, {"model_fields": {"vocab_size": 500}}),
            ("wikitext-2", "transformer-lm", 40, {"task_options": {"unit": "bytes"}}),
        ],
    )
    def test_every_kind_of_task_and_model(self, kind, task, model, length, fields):
        result = measure(case(task, model, length, kind, **fields))
        assert result.keys() <= BLANK.keys()
        assert result["status"] == "finished"
        assert 0 < result["seconds_best"] <= result["seconds_median"] <= result["seconds_spread"][1]
        assert result["seconds_spread"][0] == result["seconds_best"]
        assert result["peak_memory_bytes"] > 100 * MB  # torch alone takes more
        assert min(result["ready_memory_bytes"], result["idle_memory_bytes"]) > 0
        assert result["memory_is"] == "resident in the process"
        assert result["parameters"] > 1000
        assert (result["repeats"], result["device"], result["threads"]) == (2, "cpu", torch.get_num_threads())

    def test_the_time_of_an_epoch_is_estimated_from_the_best_step(self):
        result = measure(case(items=25))
        assert result["seconds_per_epoch"] == 13 * result["seconds_best"]
        assert result["estimated"]
        result = measure(case())
        assert (result["seconds_per_epoch"], result["estimated"]) == (None, False)

    def test_the_first_call_is_not_timed_and_a_turn_is_one_call_at_least(self, monkeypatch):
        calls = []
        monkeypatch.setitem(subjects.SUBJECTS, "op", lambda device: subjects.Subject(lambda: calls.append(device)))
        timer = Timer(Case("op"), "cpu")
        assert (calls, timer.seconds) == (["cpu"], [])
        timer.turn()
        assert (len(calls), len(timer.seconds)) == (2, 1)
        timer.turn(0.02)
        assert len(calls) == len(timer.seconds) + 1 > 3

    def test_models_are_built_for_lengths_beyond_the_tasks_own(self):
        """Learned positions and Linformer depend on the length."""
        for model in ("performer-text", "linformer-text"):
            assert measure(case(model=model, length=5000, kind="inference", batch_size=1), 1)["status"] == "finished"

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"task": "digits", "model": "permuteformer-image", "length": 64}, "length.*66.*8 x 8.*64"),
            ({"model": "permuteformer-txt"}, "'permuteformer-txt'.*'permuteformer-text'"),
            ({"task": "lm-bytes", "model": "permuteformer"}, "'permuteformer'"),
            ({"task": "lra-txt"}, "'lra-txt'.*'lra-text'"),
            ({"model": "permuteformer-lm"}, "'permuteformer-lm'"),
            ({"length": 1}, "max_length.*1"),
            ({"task": "classify"}, "classify"),
        ],
    )
    def test_wrong_measurements_are_refused(self, fields, message):
        with pytest.raises(ValueError, match=message):
            Timer(case(**fields), "cpu")


class TestSteps:
    def test_training_changes_weights_and_inference_does_not(self):
        for kind, step in (("training", training_step), ("inference", inference_step)):
            torch.manual_seed(0)
            prepared = prepare(case(kind=kind).options, "cpu")
            model = subjects.build_model(prepared.config, prepared.kind)
            before = [weight.clone() for weight in model.parameters()]
            step(model, prepared.arguments)()
            equal = [torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True)]
            assert model.training is (kind == "training")
            assert all(equal) is (kind == "inference")
            assert all(weight.grad is None for weight in model.parameters())

    def test_random_inputs_do_not_change_the_random_state(self):
        before = torch.get_rng_state()
        prepare(case().options, "cpu")
        assert torch.equal(torch.get_rng_state(), before)


class TestInputs:
    def test_random_images_look_like_those_of_the_task(self):
        task = build_task("digits", {})
        batch, real = task.input.random_batch(2, 66), task.input.collate(task.items("test")[:2])
        assert torch.equal(batch.positions, real.positions)
        assert torch.equal(batch.mask, real.mask)
        assert batch.input_ids[:, [0, -1]].tolist() == [[1, 2], [1, 2]]
        assert batch.input_ids[:, 1:-1].amin() >= 3

    def test_random_texts_and_pairs_have_no_padding_and_are_the_same_every_time(self):
        input = measured_input(build_task("lra-text", {}), "permuteformer-text", 5000)
        batch = input.random_batch(3, 5000)
        assert batch.mask.all()
        assert torch.equal(input.random_batch(3, 5000).input_ids, batch.input_ids)
        pair = build_task("lra-retrieval", {}).input.random_batch(2, 40)
        assert not torch.equal(pair.second_input_ids, pair.input_ids)

    @pytest.mark.parametrize(
        ("task", "fields", "size"), [("wikitext-103", {}, 267_744), ("wikitext-103", {"vocab_size": 99}, 99), ("lm-bytes", {}, 259)]
    )
    def test_the_vocabulary_is_that_of_the_preset_or_the_unit(self, task, fields, size):
        prepared = prepare(case(task, "permuteformer-lm", model_fields=fields).options, "cpu")
        assert prepared.config.vocab_size == size
        assert prepared.arguments["labels"].shape == prepared.arguments["input_ids"].shape == (2, 40)

    @pytest.mark.parametrize("name", [name for name in TASKS if "path" not in TASKS.options(name)])
    def test_no_task_needs_its_data_to_be_measured(self, name):
        task = build_task(name, {})
        input = measured_input(task, "permuteformer-lm", vocab_size=300)
        length = 40 if input.grid is None else input.max_length
        assert measured_input(task, "permuteformer-lm", length, 300).random_batch(2, length).input_ids.shape == (2, length)
