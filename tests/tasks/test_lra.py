"""The tasks of Long-Range Arena, on small files in the official layouts."""

import gzip
import json
import pickle
import tarfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from small_data import SHARED, acl_imdb, cifar_arrays, listops, pathfinder

from permuteformer.tasks import SPLITS, NotReady
from permuteformer.tasks.lra_image import LABELS, LraImage
from permuteformer.tasks.lra_listops import LraListops
from permuteformer.tasks.lra_pathfinder import LraPathfinder
from permuteformer.tasks.lra_retrieval import LraRetrieval
from permuteformer.tasks.lra_text import LraText


def stored(task, split):
    return [(item["value"], item["label"]) for item in task.items(split)]


def batch_of(task, split, count=None):
    return task.input.collate(task.items(split)[:count])


@pytest.mark.parametrize("form", ["folder", "tar", "jsonl.gz"])
def test_text(tmp_path, form):
    texts = acl_imdb(tmp_path / "made")
    data = tmp_path / "data"
    data.mkdir()
    if form == "folder":
        (tmp_path / "made" / "aclImdb").rename(data / "aclImdb")
    elif form == "tar":
        with tarfile.open(data / "aclImdb_v1.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "made" / "aclImdb", "aclImdb")
    expected = {
        split: sorted((text, int(label == "pos")) for (s, label, _), text in texts.items() if s == split) for split in ("train", "test")
    }
    if form == "jsonl.gz":
        (data / "imdb").mkdir()
        for split, items in expected.items():
            lines = "".join(json.dumps({"text": text.decode(), "label": label}) + "\n" for text, label in items)
            (data / "imdb" / f"{split}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    task = LraText(data=str(data))
    assert Counter(label for _, label in stored(task, "validation")) == {0: 1, 1: 1}, "a tenth is held out"
    assert sorted(stored(task, "train") + stored(task, "validation")) == expected["train"]
    assert sorted(stored(task, "test")) == expected["test"]
    as_authors = LraText(validate_on="test", data=str(data))
    assert sorted(stored(as_authors, "train")) == expected["train"]
    assert stored(as_authors, "validation") == stored(as_authors, "test")


def test_notes_tell_what_makes_numbers_incomparable(tmp_path):
    acl_imdb(tmp_path)
    (count,) = LraText(data=str(tmp_path)).notes()
    assert "40 items" in count
    assert "50,000" in count
    assert "validated on the test split" in LraText(validate_on="test", data=str(tmp_path)).notes()[-1]
    short = LraText(max_length=64, data=str(tmp_path)).notes()[-1]
    assert "64 tokens" in short
    assert "4,000" in short


def test_tokens_of_both_protocols(tmp_path):
    acl_imdb(tmp_path)
    (tmp_path / "aclImdb" / "test" / "neg" / "0_1.txt").write_bytes(b"A" * 5000)
    for protocol, size, row in (("paper", 259, [1, *[68] * 3998, 2]), ("lra", 258, [257, *[66] * 4000])):
        task = LraText(protocol=protocol, data=str(tmp_path))
        batch = batch_of(task, "test")
        assert task.input.vocab_size == size
        assert batch.input_ids.shape == (20, len(row))
        assert task.input.max_length == len(row) == task.lengths("test").max()
        assert row in batch.input_ids.tolist()
        assert int(batch.input_ids.max()) < size
        assert (batch.input_ids[~batch.mask] == 0).all()


PAIRS = [("1.0", "A00", "B00", b"first \xc3\xa4 'text' \\ \n", b'second "text"'), ("0.0", "A01", "B01", b"", b"\x00\xff")]


@pytest.mark.parametrize("place", ["lra_release/lra_release/tsv_data", "tsv_data", "."])
def test_retrieval(tmp_path, place):
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for split in ("train", "eval", "test"):
        text = "".join("\t".join([label, a, b, repr(x), repr(y)]) + "\n" for label, a, b, x, y in PAIRS)
        (tmp_path / place / f"new_aan_pairs.{split}.tsv").write_text(text)
    task = LraRetrieval(protocol="lra", data=str(tmp_path))
    for split in SPLITS:
        assert [(item["first"], item["second"], item["label"]) for item in task.items(split)] == [
            (p[3], p[4], int(float(p[0]))) for p in PAIRS
        ]
    batch = batch_of(task, "test")
    assert bytes((batch.input_ids[0][batch.mask[0]][1:] - 1).tolist()) == PAIRS[0][3]
    assert bytes((batch.second_input_ids[1][batch.second_mask[1]][1:] - 1).tolist()) == PAIRS[1][4]
    assert "6 items" in task.notes()[0]


@pytest.mark.parametrize("form", ["batches", "tar of batches", "folders", "tar of folders"])
def test_image(tmp_path, form):
    arrays, labels, made, data = cifar_arrays(), [n % 10 for n in range(20)], tmp_path / "made", tmp_path / "data"
    place = made / ("cifar-10-batches-py" if "batches" in form else "cifar10")
    place.mkdir(parents=True)
    for name, array in arrays.items():
        if "batches" in form:
            batch = {b"data": array, b"labels": labels, b"batch_label": b"x", b"filenames": [b"f"] * 20}
            (place / name).write_bytes(pickle.dumps(batch, 2))
            continue
        for n, (row, label) in enumerate(zip(array, labels, strict=True)):
            folder = place / ("test" if name == "test_batch" else "train") / LABELS[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(row.reshape(3, 32, 32).transpose(1, 2, 0)).save(folder / f"{name}_{n}.png")
    (place / "readme.html").write_text("no image")
    if form.startswith("tar"):
        target = data / ("cifar-10-python.tar.gz" if "batches" in form else "cifar10/cifar10.tar.xz")
        target.parent.mkdir(parents=True)
        with tarfile.open(target, f"w:{target.suffix[1:]}") as archive:
            archive.add(place, "." if "folders" in form else place.name)
    else:
        made.rename(data)
    task = LraImage(validate_on="test", data=str(data))
    assert task.store.splits == {"train": 100, "test": 20}
    expected = (arrays["test_batch"].reshape(20, 3, 32, 32).transpose(0, 2, 3, 1) * [0.299, 0.587, 0.114]).sum(-1)
    found = {
        label: [np.frombuffer(value, np.uint8).reshape(32, 32) for value, of in stored(task, "test") if of == label] for label in range(10)
    }
    for label, images in found.items():
        assert len(images) == 2
        for image in images:
            assert min(np.abs(image - expected[n]).max() for n in (label, label + 10)) <= 0.51
    batch = batch_of(task, "test", 3)
    assert batch.positions[0, [0, 1, 2, 33, -1]].tolist() == [[0, 0], [0, 0], [1, 0], [0, 1], [31, 31]]
    assert (task.input.vocab_size, task.input.max_length) == (259, 1026)
    other = LraImage(protocol="lra", data=str(data))
    assert other.store.splits["validation"] == 10
    assert (other.input.vocab_size, other.input.max_length, other.input.grid) == (257, 1025, (32, 32))


def test_incomplete_data_is_not_used(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"")
    acl_imdb(tmp_path)
    (tmp_path / "aclImdb" / "test").rename(tmp_path / "elsewhere")
    for task, name in ((LraImage, "lra-image"), (LraText, "lra-text")):
        with pytest.raises(NotReady, match=f"data fetch {name}"):
            task(data=str(tmp_path)).prepare()


def test_a_file_that_changes_in_its_folder_is_read_again(tmp_path):
    acl_imdb(tmp_path)
    place = pathfinder(tmp_path)
    before = stored(LraText(data=str(tmp_path)), "test"), stored(LraPathfinder(data=str(tmp_path)), "train")
    (tmp_path / "aclImdb" / "test" / "neg" / "3_1.txt").write_bytes(b"other")
    (place / "imgs" / "0" / "sample_0.png").write_bytes((place / "imgs" / "0" / "sample_7.png").read_bytes())
    after = stored(LraText(data=str(tmp_path)), "test"), stored(LraPathfinder(data=str(tmp_path)), "train")
    assert set(after[0]) - set(before[0]) == {(b"other", 0)}
    assert after[1][0] != before[1][0]


@pytest.mark.parametrize(("resolution", "level"), [(32, "hard"), (64, "intermediate"), (128, "easy")])
def test_pathfinder(tmp_path, resolution, level):
    folder = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}[level]
    pathfinder(tmp_path / "lra_release" / "lra_release", resolution, folder, folders=12, images=5)
    task = LraPathfinder(resolution=resolution, level=level, data=str(tmp_path))
    found = [item for split in SPLITS for item in stored(task, split)]
    assert [value[0] for value, _ in found] == list(range(60)), "folders in the order of their numbers: 2 before 10"
    assert all(label == value[0] % 2 for value, label in found)
    assert task.store.splits == {"train": 48, "validation": 6, "test": 6}
    assert task.input.max_length == resolution**2 + 2
    assert any("the paper has 14" in note for note in task.notes()) == (level != "hard")
    assert not any("generator" in note for note in task.notes())
    with pytest.raises(NotReady, match="data generate lra-pathfinder"):
        LraPathfinder(resolution=resolution, level="hard" if level != "hard" else "easy", data=str(tmp_path)).prepare()


def test_the_empty_image_of_the_official_data_is_left_out(tmp_path):
    place = pathfinder(tmp_path, level="curv_baseline", folders=1, images=200)
    (place / "imgs" / "0" / "sample_172.png").write_bytes(b"")
    store = LraPathfinder(level="easy", data=str(tmp_path)).store
    assert (store.splits, store.info["errors"]["count"]) == ({"train": 160, "validation": 19, "test": 20}, 0)
    (place / "imgs" / "0" / "sample_5.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"0\.npy, line 6: imgs/0/sample_5\.png"):
        LraPathfinder(level="easy", data=str(tmp_path)).prepare()


def test_listops(tmp_path):
    lines = [("( ( ( [MAX 2 ) ( ( ( [MIN 4 ) 7 ) ] ) ) ] )", 4), ("( ( ( [MIN 0 ) 9 ) ] )", 0), ("( ( ( [SM 5 ) 9 ) ] )", 4), ("3", 3)]
    listops(tmp_path, lines)
    task = LraListops(protocol="lra", data=str(tmp_path))
    assert task.input.texts(task.items("test")[0]) == ["[MAX 2 [MIN 4 7 ] ]"]
    assert [label for _, label in stored(task, "validation")] == [4, 0, 4, 3]
    assert (task.input.vocab_size, LraListops(data=str(tmp_path)).input.vocab_size) == (17, 18)
    assert task.baselines("test") == {"most frequent label": 0.5, "from the first token alone": 0.5}
    assert batch_of(task, "test").input_ids.shape == (4, 7 + 1)


@pytest.mark.skipif(not (SHARED / "imdb").exists(), reason="needs the shared data")
def test_all_of_imdb():
    task = LraText(validate_on="test", data=str(SHARED))
    sizes = {split: task.rows(split).byte_lengths("value") for split in ("train", "test")}
    assert {split: (len(found), int(found.sum())) for split, found in sizes.items()} == {
        "train": (25_000, 33_132_823),
        "test": (25_000, 32_350_685),
    }
    assert np.median(sizes["train"]) == 979
