"""Stored rows: written once, atomically, and again when the source changes; and the files and folders of ``storage``."""

import errno
import json
import os
import pickle
import struct
from pathlib import Path

import pyarrow as pa
import pytest
from small_data import picture

from permuteformer.storage import (
    WriteError,
    data_folder,
    new_folder,
    prepared_folder,
    read_bytes,
    read_json,
    read_own_json,
    readable_disk_errors,
)
from permuteformer.tasks import store
from permuteformer.tasks.classify import Classify
from permuteformer.tasks.store import Store


def write(path, count=200, last=""):
    path.write_text("text,label\n" + "".join(f"text {n},{'ab'[n % 2]}\n" for n in range(count)) + last)
    return str(path)


def entries(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_data_is_read_again_only_if_its_files_or_options_change(tmp_path):
    path = write(tmp_path / "a.csv")
    first = Classify(path).store
    assert Classify(path).store.folder == first.folder
    assert Classify(path, max_length=10).store.folder == first.folder, "texts are stored whole"
    assert Classify(path, seed=1).store.folder != first.folder
    write(tmp_path / "a.csv", 300)
    changed = Classify(path).store
    assert changed.folder != first.folder
    assert sum(changed.splits.values()) == 300
    assert len(entries(prepared_folder())) == 3


def test_the_digest_is_that_of_the_contents(tmp_path):
    digest = Classify(write(tmp_path / "a.csv")).store.digest
    (tmp_path / "a.csv").rename(tmp_path / "b.csv")
    os.utime(tmp_path / "b.csv", (0, 0))
    assert Classify(str(tmp_path / "b.csv")).store.digest == digest, "names and times do not matter"
    content = (tmp_path / "b.csv").read_text()
    for changed in (content.replace("text 7,", "Text 7,"), content.replace("text 7,b", "text 7,a"), content.replace(",a", ",c")):
        (tmp_path / "b.csv").write_text(changed)
        assert Classify(str(tmp_path / "b.csv")).store.digest != digest


def test_images_that_a_table_names_are_read_again_if_they_change(tmp_path):
    (tmp_path / "a.csv").write_text("image,label\n" + "".join(f"{n}.png,x\n" for n in range(10)))
    digests = set()
    for shade in (0, 100):
        for n in range(10):
            (tmp_path / f"{n}.png").write_bytes(picture(shade + n))
        digests.add(Classify(str(tmp_path / "a.csv")).store.digest)
    assert len(digests) == 2


def test_skipped_items_are_counted_and_remembered(tmp_path):
    path = write(tmp_path / "a.csv", 50, "bad\ngood,\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 52"):
        Classify(path).prepare()
    assert entries(prepared_folder()) == [], "an error leaves nothing"
    assert Classify(path, skip_bad=True).store.info["errors"]["count"] == 2
    with pytest.raises(ValueError, match=r"2 items of a\.csv (.*\n)*.*line 52"):
        Classify(path).prepare()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def fail(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store._Writer, "flush", fail)
    with pytest.raises(OSError, match=r"the disk is full: .*PERMUTEFORMER_CACHE"):
        Classify(write(tmp_path / "a.csv")).prepare()
    assert entries(prepared_folder()) == []


@pytest.mark.parametrize(("name", "damage"), [("info.json", b"nul"), ("info.json", None), ("train.arrow", b"")])
def test_an_incomplete_store_is_written_again(tmp_path, name, damage):
    path = write(tmp_path / "a.csv")
    file = Classify(path).store.folder / name
    file.unlink() if damage is None else file.write_bytes(damage)
    assert len(Classify(path).items("train")) == 160


def arrow_store(folder, kind=None, metadata=None):
    """Write a store of one column, with metadata of the field, and return it."""
    kind = kind or pa.binary()
    schema = pa.schema([pa.field("value", kind, metadata=metadata)])
    with (folder / "train.arrow").open("wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_batch(pa.record_batch([pa.array([b"ab", b"cd"]).cast(kind)], schema=schema))
    (folder / "info.json").write_text(json.dumps({"title": "", "splits": {"train": 2}}))
    return Store(folder)


def test_offsets_of_a_store_that_lead_elsewhere_are_refused(tmp_path):
    assert arrow_store(tmp_path).rows("train")[1]["value"] == b"cd"
    whole, offsets = (tmp_path / "train.arrow").read_bytes(), struct.pack("<iii", 0, 2, 4)
    assert whole.count(offsets) == 1
    (tmp_path / "train.arrow").write_bytes(whole.replace(offsets, struct.pack("<iii", 0, 2, 2**30)))
    with pytest.raises(ValueError, match=r"train\.arrow is damaged"):
        Store(tmp_path).rows("train")


def test_labels_of_a_store_without_a_name_are_refused(tmp_path):
    folder = Classify(write(tmp_path / "a.csv")).store.folder
    info = (folder / "info.json").read_text()
    (folder / "info.json").write_text(info.replace('["a", "b"]', '["a"]'))
    with pytest.raises(ValueError, match=r"train\.arrow is damaged"):
        Store(folder).rows("train")


def test_other_columns_of_a_store_are_refused(tmp_path):
    """Old versions of Arrow execute pickles of extension types."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "marker"),)

    with pytest.raises(ValueError, match=r"train\.arrow has other columns"):
        arrow_store(tmp_path, pa.string()).rows("train")
    extension = {"ARROW:extension:name": b"arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Bomb())}
    assert arrow_store(tmp_path, metadata=extension).rows("train")[0]["value"] == b"ab"
    assert not (tmp_path / "marker").exists()


# Files and folders


def test_folders_are_complete_or_missing(tmp_path):
    target = tmp_path / "deep" / "target"
    (tmp_path / "deep" / ".target.partial" / "of a killed process").mkdir(parents=True)
    with pytest.raises(FileNotFoundError), new_folder(target) as partial:
        (partial / "no folder" / "file").write_text("x")
    assert entries(target.parent) == []
    with new_folder(target) as partial:
        (partial / "file").write_text("x")
        assert not target.exists()
    with pytest.raises(FileExistsError, match="target already exists"), new_folder(target):
        pass
    assert (target / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (errno.EROFS, "cache/entry/info.json", "entry cannot be written.*read-only"),
        (errno.EACCES, "", "entry cannot be written.*permission"),  # a parent of the folder
        (errno.EDQUOT, None, "quota"),
        (errno.EFBIG, None, "ulimit"),
        (errno.EACCES, "source.csv", None),  # not a file of the folder
    ],
)
def test_disk_errors_name_the_folder_and_the_reason(tmp_path, code, name, message):
    raised = OSError(code, "reason", *([] if name is None else [str(tmp_path / name)]))
    with (
        pytest.raises(WriteError if message else PermissionError, match=message or "source"),
        readable_disk_errors(tmp_path / "cache" / "entry"),
    ):
        raise raised


def test_folders_of_data_and_cache(monkeypatch, tmp_path):
    assert data_folder() == Path(os.environ["XDG_CACHE_HOME"], "permuteformer", "data")
    monkeypatch.setenv("PERMUTEFORMER_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert data_folder("~/x") == Path.home() / "x"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert prepared_folder() == Path.home() / ".cache" / "permuteformer" / "prepared"


def test_json_is_read_from_regular_files_of_bounded_size_and_depth(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "large").write_bytes(b" " * 100)
    for name, message in (("pipe", "not a regular file"), ("deep", "nested too deeply")):
        with pytest.raises(ValueError, match=f"{name} is.*{message}"):
            read_json(tmp_path / name)
        assert read_own_json(tmp_path / name) == {}
    with pytest.raises(ValueError, match="large .* 10 bytes"):
        read_bytes(tmp_path / "large", 10)
