"""Run folders: one experiment, one process at a time; the record of the machine names no user."""

import json
import platform
import re

import pytest
from train.runs import record, tiny

import permuteformer
from permuteformer.experiments.layout import RUN_FORMAT
from permuteformer.machine import environment, without_folders
from permuteformer.train.run_folder import RunFolder, check_folder, finished_result, read_run

ABOUT = {"cell": None, "task": {"name": "digits", "digest": "d1"}, "config": {}}


def enter(path, about=ABOUT, **fields):
    with RunFolder(path, tiny(**{"steps": 5, **fields}), about):
        pass


@pytest.fixture
def folder(tmp_path):
    enter(tmp_path / "run")
    return tmp_path / "run"


def test_experiment_is_written_once(folder):
    content = json.loads((folder / "experiment.json").read_text())
    assert content == {**ABOUT, "format": RUN_FORMAT, "version": permuteformer.__version__, "experiment": tiny(steps=5).to_json()}
    assert read_run(folder) == content
    assert finished_result(folder, tiny(steps=5)) == {}
    enter(folder, {**ABOUT, "cell": {"row": "other"}})
    assert read_run(folder) == content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 6, "seed": 2}, "seed was 0, now 2; steps was 5, now 6.*--output"),
        ({"hidden_size": 32}, "model_fields was .*'hidden_size': 16.*now .*'hidden_size': 32"),
        ({"precision": "bfloat16"}, "precision was 'float32', now 'bfloat16'"),
    ],
)
def test_another_experiment_is_refused_and_the_lock_released(fields, message, folder):
    for use in (lambda: enter(folder, **fields), lambda: finished_result(folder, tiny(**{"steps": 5, **fields}))):
        with pytest.raises(ValueError, match=message):
            use()
    enter(folder, micro_batch_size=2)  # does not change the result


def test_other_data_is_refused(folder):
    with pytest.raises(ValueError, match=f"the data of {folder} has changed.*--output"):
        enter(folder, {**ABOUT, "task": {"digest": "d2"}})
    check_folder(folder, tiny(steps=5))  # where the digest is not known yet


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 7, "version": "9.9"}', rf"'9\.9' \(format 7\).*{re.escape(permuteformer.__version__)} \(format {RUN_FORMAT}\)"),
        ('{"format": 1, ', r"experiment\.json is damaged"),
        ("[]", r"experiment\.json is damaged"),
    ],
)
def test_another_format_and_damage_are_refused(content, message, folder):
    (folder / "experiment.json").write_text(content)
    for use in (lambda: read_run(folder), lambda: finished_result(folder, tiny(steps=5)), lambda: enter(folder)):
        with pytest.raises(ValueError, match=message):
            use()


def test_folder_or_file_of_something_else_is_not_changed(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for path in (tmp_path, file):
        with pytest.raises(FileExistsError, match=r"is not a run folder.*--output"):
            enter(path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert file.read_text() == "mine"
    for path, message in ((tmp_path, r"no experiment\.json"), (file, "notes.txt"), (tmp_path / "nowhere", "nowhere")):
        with pytest.raises(FileNotFoundError, match=message):
            read_run(path)


def test_leftovers_of_a_killed_process_are_no_obstacle(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "experiment.json.new").write_text('{"form')
    enter(tmp_path)
    assert read_run(tmp_path)["format"] == RUN_FORMAT


def test_one_process_at_a_time(folder):
    with RunFolder(folder, tiny(steps=5), ABOUT), pytest.raises(BlockingIOError, match=r"in use by another process.*--output"):
        enter(folder)
    enter(folder)


def test_metrics_after_a_checkpoint_are_dropped(folder):
    with RunFolder(folder, tiny(steps=5), ABOUT) as run:
        assert run.metrics_bytes() == 0
        run.truncate_metrics(0)
        run.record("train", step=1, loss=0.5)
        size = run.metrics_bytes()
        run.record("train", step=2, loss=0.25)
        for kept in (size, size + 100):  # the file may be shorter than it was
            run.truncate_metrics(kept)
            assert record(folder) == [{"event": "train", "step": 1, "loss": 0.5}]


def test_log_and_result(folder):
    with RunFolder(folder, tiny(steps=5), ABOUT) as run:
        run.log("one")
        run.log("two \x1b[31m")
        run.write("result.json", {"status": "not finite"})
        assert finished_result(folder, tiny(steps=5)) == {}
        run.write("result.json", {"status": "finished", "value": 1.5})
    lines = (folder / "log.txt").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 \d+ ", "", line) for line in lines] == ["one", r"two \x1b[31m"]
    assert finished_result(folder, tiny(steps=5)) == {"status": "finished", "value": 1.5}


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("--output=~/runs/a", "--output=a"),
        ("file:///home/me/a", "a"),
        ('{"path": "/home/me/a.txt", "n": 1}', '{"path": "a.txt", "n": 1}'),
        ("/home/me/", ""),
        ("../a/b", "../a/b"),
    ],
)
def test_absolute_folders_are_removed_from_the_command(word, kept):
    assert without_folders(word) == kept


def test_environment_has_versions_and_names_no_user_or_host(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["/usr/bin/permuteformer", "train", "digits", "--output", str(tmp_path / "run"), f"--data={tmp_path}"])
    found = environment(2, "cpu")
    assert found["command"] == ["permuteformer", "train", "digits", "--output", "run", f"--data={tmp_path.name}"]
    assert (found["processes"], found["threads"]) == (2, 1)
    assert found["memory_bytes"] > 10**8
    assert set(found["versions"]) >= {"torch", "transformers", "accelerate", "permuteformer"}
    assert platform.node() not in re.split(r"[^\w.-]+", json.dumps(found))
    assert str(tmp_path.parent) not in json.dumps(found)
