import errno
import json
import os
from pathlib import Path

import pytest

from permuteformer.folders import NotWritten, data_folder, disk_errors_in_words, new_folder, prepared_folder
from permuteformer.tasks.classify import Classify


def write(path: Path, count: int = 200) -> Path:
    path.write_text("text,label\n" + "".join(f"text {n},{'ab'[n % 2]}\n" for n in range(count)))
    return path


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_prepared_once_and_anew_when_something_changes(tmp_path):
    path = write(tmp_path / "a.csv")
    first = Classify(str(path)).prepare()
    assert Classify(str(path)).prepare().folder == first.folder
    assert Classify(str(path), seed=1).prepare().folder != first.folder
    assert Classify(str(path), max_length=10).prepare().folder == first.folder, "what is cut is stored whole"
    write(path, 300)
    changed = Classify(str(path)).prepare()
    assert changed.folder != first.folder
    assert sum(changed.info["splits"].values()) == 300
    assert len(entries(prepared_folder())) == 3


def test_what_is_stored_is_all_there_is(tmp_path):
    task = Classify(str(write(tmp_path / "a.csv")))
    found = [bytes(item["value"]) for split in ("train", "validation", "test") for item in task.items(split)]
    assert sorted(found) == sorted(f"text {n}".encode() for n in range(200))
    items = task.items("train")
    assert items[-1] == items[len(items) - 1]
    assert [item["id"] for item in items[3:6]] == [3, 4, 5]
    with pytest.raises(IndexError):
        items[len(items)]


def test_an_error_leaves_nothing(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "good,1\n" * 50 + "bad\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 52"):
        Classify(str(path)).prepare()
    assert entries(prepared_folder()) == []


def test_skipped_items_are_counted_and_not_forgotten(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "good,1\n" * 50 + "bad\n" + "good,\n")
    skipping = Classify(str(path), skip_bad=True)
    assert skipping.prepare().info["problems"]["count"] == 2
    with pytest.raises(ValueError, match=r"2 items of a\.csv cannot be used(.*\n)*.*line 52"):
        Classify(str(path)).prepare()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    from permuteformer.tasks import prepare

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare._Writer, "flush", full)
    with pytest.raises(OSError, match=r"the disk is full, and nothing is kept of .*PERMUTEFORMER_CACHE"):
        Classify(str(write(tmp_path / "a.csv"))).prepare()
    assert entries(prepared_folder()) == []


def test_folders_are_whole_or_not_there(tmp_path):
    target = tmp_path / "deep" / "target"
    with pytest.raises(FileNotFoundError), new_folder(target) as partial:
        (partial / "no folder" / "file").write_text("x")
    assert entries(target.parent) == []
    with new_folder(target) as partial:
        (partial / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    with pytest.raises(FileExistsError, match="is there already"), new_folder(target):
        pass
    assert (target / "file").read_text() == "x"


def test_a_folder_that_may_not_be_written_is_said(tmp_path):
    target = tmp_path / "cache" / "entry"
    with pytest.raises(NotWritten, match=r"entry cannot be written, its disk is read-only: choose another"), disk_errors_in_words(target):
        raise OSError(errno.EROFS, "Read-only file system", str(target / "info.json"))
    with pytest.raises(NotWritten, match="permission denied: choose another"), disk_errors_in_words(target):
        raise OSError(errno.EACCES, "Permission denied", str(tmp_path))  # which it is in
    with pytest.raises(PermissionError, match="source"), disk_errors_in_words(target):
        raise OSError(errno.EACCES, "Permission denied", str(tmp_path / "source.csv"))  # of which nothing is to be written
    with pytest.raises(NotWritten, match="quota is used up, and nothing is kept of"), disk_errors_in_words(target):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_where_data_is(monkeypatch, tmp_path):
    home = os.environ["XDG_CACHE_HOME"]
    assert data_folder() == Path(home, "permuteformer", "data")
    assert prepared_folder() == Path(home, "permuteformer", "prepared")
    monkeypatch.setenv("PERMUTEFORMER_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert data_folder("~/x") == Path.home() / "x"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert prepared_folder() == Path.home() / ".cache" / "permuteformer" / "prepared"


def test_an_entry_that_lost_something_is_made_again(tmp_path):
    path = write(tmp_path / "a.csv")
    folder = Classify(str(path)).prepare().folder
    for name, damage in (("info.json", b"nul"), ("train.arrow", b""), ("info.json", None)):
        if damage is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(damage)
        assert len(Classify(str(path)).items("train")) == 160


def test_nothing_in_the_cache_is_executed(tmp_path):
    """It may be shared: Arrow and JSON, no pickles."""
    folder = Classify(str(write(tmp_path / "a.csv"))).prepare().folder
    assert {path.suffix for path in folder.iterdir()} == {".arrow", ".json"}
    assert json.loads((folder / "info.json").read_text())["labels"] == ["a", "b"]


def test_a_read_only_source_is_fine(tmp_path):
    path = write(tmp_path / "data.csv")
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert len(Classify(str(path)).items("train")) == 160
    finally:
        tmp_path.chmod(0o755)
