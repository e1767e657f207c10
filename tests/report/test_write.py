"""The folder of a report, and the command."""

import json
import os
import re
import shutil

import pytest
from commands import run as command
from report.sample import run_folder

from permuteformer.report import build_report, write, write_report
from permuteformer.report.write import write_folder


@pytest.fixture
def run(tmp_path):
    return run_folder(tmp_path / "runs" / "mine", epochs=2)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_report_has_its_files_and_nothing_is_left_beside_it(run, tmp_path):
    made = write_report([run], tmp_path / "out" / "deep")
    folder = tmp_path / "out" / "deep"
    names = set(contents(folder))
    assert {"index.html", "report.md", "tables.tex", "report.json", "tables/table-1-small.csv"} <= names
    assert {f"figures/{figure.name}.{kind}" for figure in made.figures for kind in ("svg", "png")} <= names
    assert set(json.loads((folder / "report.json").read_text())["files"]) == names - {"report.json"}
    assert {path.name for path in folder.parent.iterdir()} == {"deep", ".deep.lock"}


def test_a_report_is_replaced_whole(run, tmp_path):
    folder = tmp_path / "report"
    write_report([run], folder)
    before = contents(folder)
    run_folder(tmp_path / "runs" / "other", "image", epochs=2)
    write_report([run.parent], folder)
    after = contents(folder)
    assert set(after) > set(before)
    write_report([run], folder)
    assert contents(folder) == before  # and the files of the other run are gone


def test_an_empty_folder_is_taken_and_anything_else_refused(run, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    write_report([run], folder)
    (folder / "my notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other" / "empty").mkdir(parents=True)
    (tmp_path / "forged").mkdir()
    (tmp_path / "forged" / "report.json").write_text('{"made_by": "another program"}')
    before = contents(tmp_path)
    refused = {"out": r"my notes\.txt.*", "runs/mine": "", "file": "", "other": "", "forged": ""}
    for name, message in refused.items():
        with pytest.raises(FileExistsError, match=f"{name}.*{message}--output"):
            write_report([tmp_path / "nowhere"], tmp_path / name)  # before the missing run is noticed
    with pytest.raises(FileExistsError, match="out"):
        write_folder(build_report([run]), folder)
    assert contents(tmp_path) == before
    assert (tmp_path / "other" / "empty").is_dir()


@pytest.mark.parametrize("where", ["filling", "naming"])
def test_what_was_there_stays_if_writing_fails(run, tmp_path, monkeypatch, where):
    folder = tmp_path / "report"
    made = write_report([run], folder)
    before = contents(folder)
    if where == "filling":
        monkeypatch.setattr(write, "markdown_page", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_folder(made, folder)
    else:
        rename = type(folder).rename

        def fails(self, target):
            if self.name == ".report.new":
                raise OSError("no")
            return rename(self, target)

        monkeypatch.setattr(type(folder), "rename", fails)
        with pytest.raises(OSError, match="no"):
            write_folder(made, folder)
    monkeypatch.undo()
    assert contents(folder) == before
    write_folder(made, folder)
    assert contents(folder) == before
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "report", ".report.lock"}


def test_a_first_report_that_fails_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "latex_tables", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report([run], tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_process_that_was_killed_between_two_names_is_recovered_from(run, tmp_path):
    folder = tmp_path / "report"
    made = write_report([run], folder)
    before = contents(folder)
    folder.rename(tmp_path / ".report.old")  # where a kill between the two renames leaves it
    write_folder(made, folder)
    assert contents(folder) == before
    shutil.copytree(folder, tmp_path / ".report.old")  # and after both
    write_folder(made, folder)
    assert not (tmp_path / ".report.old").exists()


def test_a_link_to_a_report_is_followed(run, tmp_path):
    write_report([run], tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    write_report([run], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "index.html").is_file()


def test_a_name_that_is_no_text_can_be_reported(tmp_path):
    try:
        os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    except OSError:
        pytest.skip("this file system has names that are texts only")
    run_folder(tmp_path / os.fsdecode(b"\xff") / "run", epochs=2)
    write_report([tmp_path / os.fsdecode(b"\xff")], tmp_path / "out")
    assert "%FF/run" in (tmp_path / "out" / "index.html").read_text()


def test_the_command(run, tmp_path):
    bad = run_folder(tmp_path / "runs" / "bad", seed=1)
    (bad / "experiment.json").write_text("{")
    output = command("report", tmp_path / "runs", "--output", tmp_path / "out")
    assert "Table 1" in output
    assert "2026-03-01" in output
    assert str(tmp_path / "out" / "index.html") in output
    for text in (output, (tmp_path / "out" / "index.html").read_text()):
        assert re.search("bad.*JSON", text)  # the run that was skipped


@pytest.mark.parametrize(("given", "output"), [("empty", "out"), ("nowhere", "out"), ("runs/mine", "runs/mine")])
def test_errors_of_the_command_are_one_line(run, tmp_path, given, output):
    (tmp_path / "empty").mkdir()
    text = command("report", tmp_path / given, "--output", tmp_path / output, code=1)
    assert str(tmp_path / given) in text
    assert text.count("\n") == 1
    assert not (tmp_path / "out").exists()
