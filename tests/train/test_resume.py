"""Killed or interrupted, a run that goes on ends with the bytes of one that nobody disturbed; soak/kills.py draws further moments."""

import json
import shutil

import pytest
from train_processes import INTERRUPT, KILL, TERM, UPDATE, At, Command, digits, fail, record, steps, text, weights

SHORT = {"steps": 13, "evaluate_every": 4}
DIGITS, TEXT, BYTES = digits(**SHORT), text(**SHORT), text("lm-bytes", corpus="topics", **SHORT)
EVERY_STEP = ["--checkpoint-minutes", "0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nobody disturbed, by task and number of processes; each is made once."""
    runs = {}

    def run(words, processes=1):
        key = (words[1], processes)
        if key not in runs:
            folder = tmp_path_factory.mktemp("whole") / "run"
            Command(*words, output=folder, processes=processes).succeed()
            runs[key] = folder
        return runs[key]

    return run


def assert_same(folder, undisturbed):
    assert weights(folder) == weights(undisturbed)
    assert record(folder) == record(undisturbed)
    results = [json.loads((path / "result.json").read_text()) for path in (folder, undisturbed)]
    for result in results:
        del result["seconds"], result["peak_memory_bytes"]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (DIGITS, At(UPDATE, 3, KILL)),  # in the middle of an epoch
        (DIGITS, At(UPDATE, 6, KILL)),  # at the beginning of one
        (BYTES, At(UPDATE, 11, KILL)),
        (TEXT, At("permuteformer.train.loop.evaluate", 6, KILL)),  # in the test at another length
        (DIGITS, At("permuteformer.train.finish.look", 1, KILL)),
    ],
    ids=["middle", "epoch", "bytes", "length", "finish"],
)
def test_killed(words, at, whole, tmp_path):
    folder = tmp_path / "run"
    killed = Command(*words, *EVERY_STEP, output=folder, at=at)
    assert killed.wait() == [-KILL], killed.text
    assert not (folder / "result.json").exists()
    (folder / "checkpoints" / ".step-000000001.removed").mkdir()  # killed while old ones were deleted
    Command("resume", folder, *EVERY_STEP).succeed()
    assert_same(folder, whole(words))
    assert not [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]


def test_killed_twice_between_checkpoints_with_workers(whole, tmp_path):
    folder = tmp_path / "run"
    workers = ["--workers", "2"]
    assert Command(*DIGITS, *workers, output=folder, at=At(UPDATE, 3, KILL)).wait() == [-KILL]  # there is no checkpoint yet
    assert steps(folder) == []
    killed = Command(*DIGITS, *workers, output=folder, at=At(UPDATE, 8, KILL))
    assert killed.wait() == [-KILL], killed.text  # at step 8: the last checkpoint is of step 4
    assert steps(folder) == [4]
    resumed = Command("resume", folder, *workers).succeed()
    assert "going on from step 4 of 13" in resumed.text
    assert_same(folder, whole(DIGITS))


@pytest.mark.parametrize(
    ("sent", "at", "step"),
    [
        (TERM, UPDATE, 7),
        (INTERRUPT, UPDATE, 7),
        (TERM, "permuteformer.tasks.base.Classification.score", 2),  # in the middle of the first validation
    ],
    ids=["term", "ctrl-c", "validation"],
)
def test_interrupted(sent, at, step, whole, tmp_path):
    folder = tmp_path / "run"
    interrupted = Command(*DIGITS, output=folder, at=At(at, step, sent))
    said = fail(interrupted, 128 + sent)
    stopped = 7 if at == UPDATE else 4
    assert f"stopped after step {stopped}; go on with: permuteformer resume {folder}" in said
    assert steps(folder)[-1] == stopped
    assert len([line for line in record(folder) if line["event"] == "evaluation"]) == (stopped == 7)
    Command("resume", folder).succeed()
    assert_same(folder, whole(DIGITS))


def test_a_signal_to_workers_too(whole, tmp_path):
    folder = tmp_path / "run"
    fail(Command(*DIGITS, "--workers", 2, output=folder, at=At(UPDATE, 7, TERM, group=True)), 128 + TERM)
    assert steps(folder)[-1] == 7
    Command("resume", folder).succeed()
    assert_same(folder, whole(DIGITS))


def test_interrupted_in_the_final_test(whole, tmp_path):
    folder = tmp_path / "run"
    fail(Command(*TEXT, output=folder, at=At("permuteformer.tasks.language.LanguageModelling.score", 9, TERM)), 128 + TERM)
    assert steps(folder)[-1] == 13
    assert not (folder / "result.json").exists()
    Command("resume", folder).succeed()
    assert_same(folder, whole(TEXT))


def test_two_processes_of_which_one_is_told_to_stop(whole, tmp_path):
    folder = tmp_path / "run"
    interrupted = Command(*DIGITS, output=folder, processes=2, at=At(UPDATE, 6, TERM, rank=1))
    assert interrupted.wait() == [128 + TERM, 0], interrupted.text
    assert "stopped after step 6" in interrupted.text
    assert "was begun on 2 processes, and this is 1: go on with as many" in fail(Command("resume", folder))
    Command("resume", folder, processes=2).succeed()
    assert_same(folder, whole(DIGITS, processes=2))


@pytest.fixture(scope="module")
def under_way(tmp_path_factory):
    """A run with checkpoints of steps 4 (the best), 9 and 10."""
    folder = tmp_path_factory.mktemp("under way") / "run"
    assert Command(*DIGITS, *EVERY_STEP, output=folder, at=At(UPDATE, 11, KILL)).wait() == [-KILL]
    assert steps(folder)[-2:] == [9, 10]
    return folder


@pytest.fixture
def damage(under_way, tmp_path):
    """Copies that run, with checkpoints damaged from the last one back."""
    folder = tmp_path / "damaged"
    shutil.copytree(under_way, folder)

    def damage(*numbers, how):
        for number in numbers:
            file = folder / "checkpoints" / f"step-{number:09d}" / "model.safetensors"
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content[: len(content) // 2] if how == "cut short" else content)
        return folder

    return damage


def test_all_checkpoints_damaged_begins_anew(damage, whole, under_way):
    folder = damage(*steps(under_way), how="bit flipped")
    said = " ".join(Command("resume", folder).succeed().text.split())
    assert "there is no good one before it" in said
    assert "going on" not in said
    assert_same(folder, whole(DIGITS))


def test_best_weights_that_are_damaged_are_not_tested(damage, whole):
    result = json.loads((whole(DIGITS) / "result.json").read_text())
    assert result["best_step"] == 4  # else this test is of something else
    folder = damage(4, how="bit flipped")
    said = fail(Command("resume", folder))
    assert "step-000000004 is damaged: model.safetensors. It has the best weights" in said
    assert not (folder / "result.json").exists()


def test_trackers_show_every_step_once_after_a_kill(whole, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    assert Command(*DIGITS, output=folder, at=At(UPDATE, 11, KILL)).wait() == [-KILL]  # logged to step 10, saved at 8
    Command("resume", folder).succeed()
    seen = EventAccumulator(str(folder / "tensorboard" / "permuteformer")).Reload()
    shown = [(event.step, event.value) for event in seen.Scalars("train/loss")]
    recorded = [(line["step"], line["loss"]) for line in record(whole(DIGITS)) if line["event"] == "train"]
    assert [step for step, _ in shown] == [step for step, _ in recorded]
    assert [loss for _, loss in shown] == pytest.approx([loss for _, loss in recorded])
    assert [event.step for event in seen.Scalars("validation/accuracy")] == [4, 8, 12, 13]
