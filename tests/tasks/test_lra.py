"""The tasks of Long-Range Arena, on small files of the official layouts."""

import gzip
import json
import pickle
import tarfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from small_data import SHARED, acl_imdb, cifar_arrays, listops, pathfinder

from permuteformer.tasks.base import NotReady
from permuteformer.tasks.batches import BatchSampler, loader
from permuteformer.tasks.lra_image import LABELS, LraImage
from permuteformer.tasks.lra_listops import LraListops
from permuteformer.tasks.lra_pathfinder import LraPathfinder
from permuteformer.tasks.lra_retrieval import LraRetrieval
from permuteformer.tasks.lra_text import LraText


def stored(task, split, column="value"):
    return [(item[column], item["label"]) for item in task.items(split)]


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
    else:
        (data / "imdb").mkdir()
        for split in ("train", "test"):
            rows = [{"text": t.decode(), "label": int(label == "pos")} for (s, label, _), t in texts.items() if s == split]
            (data / "imdb" / f"{split}.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    expected = {split: sorted((t, int(label == "pos")) for (s, label, _), t in texts.items() if s == split) for split in ("train", "test")}
    paper = LraText("paper", data=str(data))
    assert sorted(stored(paper, "train")) == expected["train"]
    assert sorted(stored(paper, "validation")) == sorted(stored(paper, "test")) == expected["test"]
    assert any("validated on the test split" in note for note in paper.notes())
    lra = LraText(data=str(data))
    assert Counter(label for _, label in stored(lra, "validation")) == {0: 1, 1: 1}
    assert sorted(stored(lra, "train") + stored(lra, "validation")) == expected["train"]
    assert sorted(stored(lra, "test")) == expected["test"]
    assert lra.notes() == ["40 items, where the official data has 50,000"]
    fair = LraText("paper", validate_on="train", data=str(data))
    assert stored(fair, "validation") == stored(lra, "validation")
    assert fair.notes() == lra.notes()
    short = LraText("paper", validate_on="train", max_length=64, data=str(data))
    assert short.notes() == [*lra.notes(), "texts are cut to 64 tokens, where the protocol has 4,000"]


def test_tokens_of_both_protocols(tmp_path):
    acl_imdb(tmp_path)
    text = b"A" * 5000
    (tmp_path / "aclImdb" / "test" / "neg" / "0_1.txt").write_bytes(text)
    paper = LraText("paper", data=str(tmp_path))
    lra = LraText("lra", data=str(tmp_path))
    with pytest.raises(ValueError, match="max_length must be above 2"):
        LraText("paper", max_length=0)
    for task, length, row in ((paper, 4000, [1, *[68] * 3998, 2]), (lra, 4001, [257, *[66] * 4000])):
        (batch,) = loader(task, "test", 100)
        longest = next(n for n in range(len(batch)) if batch.key_mask[n].all())
        assert batch.input_ids.shape == (20, length)
        assert task.max_length == length == task.lengths("test").max()
        assert batch.input_ids[longest].tolist() == row
        assert int(batch.input_ids.max()) < task.vocab_size
        assert (batch.input_ids[~batch.key_mask] == 0).all()
    assert (paper.vocab_size, lra.vocab_size) == (259, 258)
    with pytest.raises(ValueError, match="protocol must be one of 'lra', 'paper'; it is 'papers'"):
        LraText("papers")
    with pytest.raises(ValueError, match="validate_on must be one of 'train', 'test'; it is 'given'"):
        LraText(validate_on="given")


PAIRS = [("1.0", "A00", "B00", b"first \xc3\xa4 'text' \\ \n", b'second "text"'), ("0.0", "A01", "B01", b"", b"\x00\xff")]


@pytest.mark.parametrize("place", ["lra_release/lra_release/tsv_data", "tsv_data", "."])
def test_retrieval(tmp_path, place):
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for split in ("train", "eval", "test"):
        text = "".join("\t".join([label, a, b, repr(x), repr(y)]) + "\n" for label, a, b, x, y in PAIRS)
        (tmp_path / place / f"new_aan_pairs.{split}.tsv").write_text(text)
    task = LraRetrieval(data=str(tmp_path))
    for split in ("train", "validation", "test"):
        assert [(i["first"], i["second"], i["label"]) for i in task.items(split)] == [(p[3], p[4], int(float(p[0]))) for p in PAIRS]
    batch = next(iter(loader(task, "test", 2)))
    assert bytes((batch.input_ids[0][batch.key_mask[0]][1:] - 1).tolist()) == PAIRS[0][3]
    assert bytes((batch.second_input_ids[1][batch.second_key_mask[1]][1:] - 1).tolist()) == PAIRS[1][4]
    assert task.notes() == ["6 items, where the official data has 182,613"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2.0\ta\tb\tb'x'\tb'y'", "label must be 0.0 or 1.0; it is '2.0'"),
        ("1.0\ta\tb\tb'x'", ""),
        ("1.0\ta\tb\tb'x'\tb'y' + exit()", ""),
        ("1.0\ta\tb\tb'\\xg0'\tb'y'", ""),
    ],
)
def test_bad_pairs(tmp_path, line, message):
    good = "1.0\ta\tb\tb'x'\tb'y'\n"
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(good + line + "\n" + good)
    with pytest.raises(ValueError, match=f"new_aan_pairs.train.tsv, line 2: .*{message}"):
        LraRetrieval(data=str(tmp_path)).prepare()
    skipping = LraRetrieval(data=str(tmp_path), skip_bad=True)
    assert skipping.prepare().info["splits"] == {"train": 2, "validation": 2, "test": 2}
    assert skipping.prepare().info["problems"]["count"] == 3


def gray(rgb):
    """0.299 R + 0.587 G + 0.114 B, rounded."""
    image = rgb.reshape(3, 32, 32).astype(np.float64)
    return 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]


@pytest.mark.parametrize("form", ["batches", "tar of batches", "folders", "tar of folders"])
def test_image(tmp_path, form):
    arrays = cifar_arrays()
    labels = [n % 10 for n in range(20)]
    made = tmp_path / "made"
    if "batches" in form:
        place = made / "cifar-10-batches-py"
        place.mkdir(parents=True)
        for name, array in arrays.items():
            (place / name).write_bytes(
                pickle.dumps({b"data": array, b"labels": labels, b"batch_label": b"x", b"filenames": [b"f"] * 20}, 2)
            )
        (place / "readme.html").write_text("not a batch")
    else:
        place = made / "cifar10"
        for name, array in arrays.items():
            split = "test" if name == "test_batch" else "train"
            for n, (row, label) in enumerate(zip(array, labels, strict=True)):
                folder = place / split / LABELS[label]
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(row.reshape(3, 32, 32).transpose(1, 2, 0)).save(folder / f"{name}_{n}.png")
    data = tmp_path / "data"
    if form.startswith("tar"):
        data.mkdir()
        target = data / "cifar-10-python.tar.gz" if "batches" in form else data / "cifar10" / "cifar10.tar.xz"
        target.parent.mkdir(exist_ok=True)
        with tarfile.open(target, "w:" + target.suffix[1:]) as archive:
            archive.add(place, "." if "folders" in form else place.name)
    else:
        made.rename(data)
    paper = LraImage("paper", data=str(data))
    assert paper.prepare().info["splits"] == {"train": 100, "test": 20}
    found = {}
    for value, label in stored(paper, "test"):
        found.setdefault(label, []).append(np.frombuffer(value, np.uint8).reshape(32, 32))
    for label in range(10):
        wanted = [gray(row) for row, of in zip(arrays["test_batch"], labels, strict=True) if of == label]
        assert len(found[label]) == 2
        for image in found[label]:
            assert min(np.abs(image - w).max() for w in wanted) <= 0.51
    lra = LraImage(data=str(data))
    assert lra.prepare().info["splits"]["validation"] == 10
    assert (lra.vocab_size, lra.max_length, lra.grid) == (257, 1025, (32, 32))
    assert (paper.vocab_size, paper.max_length) == (259, 1026)
    batch = next(iter(loader(paper, "test", 3)))
    assert batch.positions[0, [0, 1, 2, 33, -1]].tolist() == [[0, 0], [0, 0], [1, 0], [0, 1], [31, 31]]
    assert paper.notes()[-1].startswith("validated on the test split")


def test_what_is_not_complete_is_not_taken(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"")
    with pytest.raises(NotReady, match="data fetch lra-image"):
        LraImage(data=str(tmp_path)).prepare()
    acl_imdb(tmp_path)
    (tmp_path / "aclImdb" / "test").rename(tmp_path / "elsewhere")
    with pytest.raises(NotReady, match="data fetch lra-text"):
        LraText(data=str(tmp_path)).prepare()


def test_a_file_that_changes_in_its_folder_is_read_anew(tmp_path):
    acl_imdb(tmp_path)
    before = stored(LraText("paper", data=str(tmp_path)), "test")
    path = tmp_path / "aclImdb" / "test" / "neg" / "3_1.txt"
    path.write_bytes(b"other")
    after = stored(LraText("paper", data=str(tmp_path)), "test")
    assert sorted(set(after) - set(before)) == [(b"other", 0)]
    place = pathfinder(tmp_path)
    image = stored(LraPathfinder(data=str(tmp_path)), "train")[0]
    (place / "imgs" / "0" / "sample_0.png").write_bytes((place / "imgs" / "0" / "sample_7.png").read_bytes())
    assert stored(LraPathfinder(data=str(tmp_path)), "train")[0] != image


def test_a_pickle_of_a_stranger_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (print, ("executed",))

    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    for name in cifar_arrays():
        (place / name).write_bytes(pickle.dumps({b"data": Bomb(), b"labels": []}))
    with pytest.raises(ValueError, match="data_batch_1"):
        LraImage(data=str(tmp_path)).prepare()


@pytest.mark.parametrize(("resolution", "level"), [(32, "hard"), (64, "intermediate"), (128, "easy")])
def test_pathfinder(tmp_path, resolution, level):
    folder = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}[level]
    pathfinder(tmp_path / "lra_release" / "lra_release", resolution, folder, folders=12, images=5)
    task = LraPathfinder(resolution, level, data=str(tmp_path))
    shades = [value[0] for split in ("train", "validation", "test") for value, _ in stored(task, split)]
    assert shades == list(range(60)), "folders in the order of their numbers: 2 before 10"
    assert task.prepare().info["splits"] == {"train": 48, "validation": 6, "test": 6}
    assert all(label == value[0] % 2 for value, label in stored(task, "train"))
    assert task.max_length == resolution**2 + 1
    assert any("where the paper has 14" in note for note in task.notes()) == (level != "hard")
    assert not any("generator" in note for note in task.notes())
    with pytest.raises(NotReady, match="data generate lra-pathfinder"):
        LraPathfinder(resolution, "hard" if level != "hard" else "easy", data=str(tmp_path)).prepare()


def test_the_empty_image_of_the_official_set(tmp_path):
    place = pathfinder(tmp_path, level="curv_baseline", folders=1, images=200)
    (place / "imgs" / "0" / "sample_172.png").write_bytes(b"")
    task = LraPathfinder(level="easy", data=str(tmp_path))
    assert task.prepare().info["splits"] == {"train": 160, "validation": 19, "test": 20}
    assert task.prepare().info["problems"]["count"] == 0
    (place / "imgs" / "0" / "sample_5.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"0\.npy, line 6: imgs/0/sample_5\.png"):
        LraPathfinder(level="easy", data=str(tmp_path)).prepare()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("imgs/0 x.png 0", "a line must be: folder, file, index, label"),
        ("imgs/0 x.png 0 2", "a line must be"),
        ("../../.. secret.png 0 1", "leads out of the folder"),
        ("/etc hostname 0 1", "leads out of the folder"),
        ("imgs/0 none.png 0 1", "there is no image imgs/0/none.png"),
        ("imgs/0 sample_0.png 0 1", "the image imgs/0/sample_0.png was there before"),
    ],
)
def test_bad_metadata(tmp_path, line, message):
    place = pathfinder(tmp_path)
    with (place / "metadata" / "1.npy").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"1\.npy, line 11: .*{message}"):
        LraPathfinder(data=str(tmp_path)).prepare()
    assert LraPathfinder(data=str(tmp_path), skip_bad=True).prepare().info["problems"]["count"] == 1


def test_pathfinder_options():
    with pytest.raises(ValueError, match="resolution must be one of 32, 64, 128, 256; it is 48"):
        LraPathfinder(48)
    with pytest.raises(ValueError, match="level must be one of 'easy', 'intermediate', 'hard'; it is 'harder'"):
        LraPathfinder(level="harder")


def test_listops(tmp_path):
    lines = [("( ( ( [MAX 2 ) ( ( ( [MIN 4 ) 7 ) ] ) ) ] )", 4), ("( ( ( [MIN 0 ) 9 ) ] )", 0), ("( ( ( [SM 5 ) 9 ) ] )", 4), ("3", 3)]
    listops(tmp_path, lines)
    task = LraListops(data=str(tmp_path))
    assert task.words(task.items("test")[0]) == ["[MAX 2 [MIN 4 7 ] ]"]
    assert [label for _, label in stored(task, "validation")] == [4, 0, 4, 3]
    assert task.vocab_size == 17
    assert LraListops("paper", data=str(tmp_path)).vocab_size == 18
    assert task.baselines("test") == {"always the label most frequent in training": 0.5, "from the first token alone": 0.5}
    batch = next(iter(loader(task, "test", 4)))
    assert batch.input_ids.shape == (4, 7 + 1)


@pytest.mark.parametrize("line", [("( [MAX 2 )", 10), ("( [MAX 2 )", "x"), ("", 1), ("[AVG 2 3 ]", 2), ("__import__('os')", 1)])
def test_bad_listops(tmp_path, line):
    listops(tmp_path, [("3", 3), line])
    with pytest.raises(ValueError, match=r"basic_train\.tsv, line 3: "):
        LraListops(data=str(tmp_path)).prepare()


@pytest.mark.skipif(not (SHARED / "imdb").exists(), reason="needs the shared data")
def test_all_of_imdb():
    task = LraText("paper", data=str(SHARED))
    sizes = {split: task.items(split).byte_lengths("value") for split in ("train", "test")}
    assert {split: len(found) for split, found in sizes.items()} == {"train": 25_000, "test": 25_000}
    assert {split: int(found.sum()) for split, found in sizes.items()} == {"train": 33_132_823, "test": 32_350_685}
    assert np.median(sizes["train"]) == 979
    lengths = task.lengths("train")
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in BatchSampler(len(lengths), 32, lengths=lengths))
    assert 1 - lengths.sum() / padded < 0.10


@pytest.mark.skipif(not (SHARED / "acl_pairs").exists(), reason="needs the shared data")
def test_all_of_the_acl_pairs():
    task = LraRetrieval(data=str(SHARED))
    assert task.prepare().info["splits"] == {"train": 16_000, "validation": 2_000, "test": 2_000}
    assert task.items("train").column("label").mean() == 0.5
    assert "share an author" in task.notes()[0]
