"""Run folders: whose they are, one process at a time, and what stands in them."""

import json
import platform
import re

import pytest
from train_processes import tiny

import permuteformer
from permuteformer.folders import read_json
from permuteformer.train.environment import environment, resumed, without_folders
from permuteformer.train.run import Run, check_folder, finished, read_run

ABOUT = {"cell": None, "task": {"name": "digits"}, "config": {}}


@pytest.fixture
def folder(tmp_path):
    """A run that was begun."""
    with Run(tmp_path / "run", tiny(steps=5), ABOUT):
        pass
    return tmp_path / "run"


def change(folder, **fields):
    content = read_json(folder / "experiment.json")
    (folder / "experiment.json").write_text(json.dumps({**content, **fields}))


def test_a_new_folder(folder):
    content = read_json(folder / "experiment.json")
    assert content["format"] == 1
    assert content["version"] == permuteformer.__version__
    assert content["experiment"] == json.loads(json.dumps(tiny(steps=5).to_json()))
    assert content["task"] == {"name": "digits"}
    assert read_run(folder) == content
    assert finished(folder, tiny(steps=5)) == {}


def test_what_it_says_is_not_written_anew(folder):
    before = (folder / "experiment.json").read_bytes()
    with Run(folder, tiny(steps=5), {**ABOUT, "cell": {"row": "other"}}):
        pass
    assert (folder / "experiment.json").read_bytes() == before


def test_another_experiment_is_refused_with_what_differs(folder):
    with pytest.raises(ValueError, match="is of another experiment: ") as error, Run(folder, tiny(steps=6, seed=2), ABOUT):
        pass
    assert "seed is 0 there and 2 here; steps is 5 there and 6 here. Choose another folder with --output" in str(error.value)
    with pytest.raises(ValueError, match=r"model_fields is .*'hidden_size': 16.* there and .*'hidden_size': 32.* here"):
        finished(folder, tiny(steps=5, hidden_size=32))


@pytest.mark.parametrize("field", [{"format": 2}, {"version": "9.9"}])
def test_another_version_is_refused(field, folder):
    change(folder, **field)
    for look in (lambda: read_run(folder), lambda: finished(folder, tiny(steps=5)), Run(folder, tiny(steps=5), ABOUT).__enter__):
        with pytest.raises(ValueError, match=f"was begun by version .*{next(iter(field.values()))}.* go on with that version"):
            look()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with (
        pytest.raises(FileExistsError, match="is there and is no run folder: choose another one with --output"),
        Run(tmp_path, tiny(steps=5), ABOUT),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    file = tmp_path / "notes.txt"
    with pytest.raises(FileExistsError), Run(file, tiny(steps=5), ABOUT):
        pass
    assert file.read_text() == "mine"
    with pytest.raises(FileNotFoundError, match=r"is no run folder: it has no experiment.json"):
        read_run(tmp_path)


def test_what_a_process_left_that_was_killed_at_once_is_no_obstacle(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "experiment.json.new").write_text('{"form')
    with Run(tmp_path, tiny(steps=5), ABOUT):
        assert read_run(tmp_path)["format"] == 1


def test_a_damaged_experiment(folder):
    (folder / "experiment.json").write_text('{"format": 1, ')
    for look in (lambda: read_run(folder), lambda: finished(folder, tiny(steps=5))):
        with pytest.raises(ValueError, match=r"experiment.json is damaged: begin anew in another folder"):
            look()


def test_one_process_at_a_time(folder):
    with Run(folder, tiny(steps=5), ABOUT):
        second = Run(folder, tiny(steps=5), ABOUT)
        with pytest.raises(BlockingIOError, match="is in use by another process: wait for it to end, or choose another folder"), second:
            pass
    with Run(folder, tiny(steps=5), ABOUT):
        pass


def test_the_lock_is_free_after_a_refusal(folder):
    with pytest.raises(ValueError, match="another experiment"), Run(folder, tiny(steps=6), ABOUT):
        pass
    with Run(folder, tiny(steps=5), ABOUT):
        pass


def test_records_are_rewound(folder):
    with Run(folder, tiny(steps=5), ABOUT) as run:
        assert run.recorded() == 0
        run.rewind(0)
        run.record("train", step=1, loss=0.5)
        size = run.recorded()
        run.record("train", step=2, loss=0.25)
        run.rewind(size)
        assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
            {"event": "train", "step": 1, "loss": 0.5}
        ]
        run.rewind(size + 100)  # shorter than it was: nothing is made up
        assert run.recorded() == size
        run.rewind(0)
        assert run.recorded() == 0


def test_log_and_result(folder):
    with Run(folder, tiny(steps=5), ABOUT) as run:
        run.log("one")
        run.log("two")
        run.write("result.json", {"status": "not finite"})
        assert finished(folder, tiny(steps=5)) == {}
        run.write("result.json", {"status": "finished", "value": 1.5})
    lines = (folder / "log.txt").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 \d+ ", "", line) for line in lines] == ["one", "two"]
    assert finished(folder, tiny(steps=5)) == {"status": "finished", "value": 1.5}


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("/home/somebody/data.csv", "data.csv"),
        ("--output=/home/somebody/runs/a", "--output=a"),
        ("--output=~/runs/a", "--output=a"),
        ("file:///home/somebody/a", "a"),
        ('{"path": "/home/somebody/a.txt", "n": 1}', '{"path": "a.txt", "n": 1}'),
        ("/home/somebody/", ""),
        ("runs/a", "runs/a"),
        ("../a/b", "../a/b"),
        ("--learning-rate", "--learning-rate"),
        ("1/3", "1/3"),
    ],
)
def test_commands_without_folders(word, kept):
    assert without_folders(word) == kept


def test_environment_names_nobody(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["/usr/bin/permuteformer", "train", "digits", "--output", str(tmp_path / "run"), f"--data={tmp_path}"])
    found = environment(2, "cpu")
    assert found["command"] == ["permuteformer", "train", "digits", "--output", "run", f"--data={tmp_path.name}"]
    assert found["processes"] == 2
    assert found["memory_bytes"] > 10**8
    assert set(found["versions"]) >= {"torch", "transformers", "accelerate", "permuteformer"}
    words = re.split(r"[^\w.-]+", json.dumps(found))
    assert platform.node() not in words
    assert str(tmp_path.parent) not in json.dumps(found)


def test_environment_of_a_run_that_went_on():
    first = {"started": "a", "cores": 2, "versions": {"torch": "1"}}
    once = resumed(first, {"started": "b", "cores": 4, "versions": {"torch": "1"}})
    assert once == {**first, "resumed": [{"started": "b", "cores": 4}]}
    assert resumed(once, {"started": "c", "cores": 2, "versions": {"torch": "2"}})["resumed"][1] == {
        "started": "c",
        "versions": {"torch": "2"},
    }


def test_how_much_is_computed_at_a_time_is_not_another_experiment(tmp_path):
    with Run(tmp_path / "run", tiny(steps=6), ABOUT):
        pass
    check_folder(tmp_path / "run", tiny(steps=6, micro_batch_size=2))
    with pytest.raises(ValueError, match="precision is 'float32' there and 'bfloat16' here"):
        check_folder(tmp_path / "run", tiny(steps=6, precision="bfloat16"))
