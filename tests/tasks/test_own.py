"""Your own data: columns, labels and splits are found in tables and folders, and what is wrong names its file and line."""

import tarfile
from collections import Counter

import numpy as np
import pytest
from small_data import ROWS, picture, write, zip_bytes

from permuteformer.tasks import SPLITS, NotReady
from permuteformer.tasks.classify import Classify
from permuteformer.tasks.images import Images
from permuteformer.tasks.match import Match


def contents(task):
    labels = task.input.labels
    return sorted((item["value"].decode(), labels[item["label"]]) for split in task.store.splits for item in task.items(split))


def sizes(task):
    return [len(task.items(split)) for split in SPLITS]


def batch_of(task, split="train", count=None):
    return task.input.collate(task.items(split)[:count])


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl.gz", ".parquet"])
def test_tables_of_every_format(tmp_path, ending):
    task = Classify(write(tmp_path / f"mine{ending}", ROWS))
    assert task.input.labels == ("bad", "good", "ugly")
    assert contents(task) == sorted((row["text"], row["label"]) for row in ROWS)
    assert sizes(task) == [72, 9, 9]
    for split in SPLITS:
        assert len(set(Counter(batch_of(task, split).labels.tolist()).values())) == 1, "every label has its share"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_of_csv(tmp_path, delimiter):
    lines = [["text", "label"], *([f'"a {delimiter} b\n{n}"', "x"] for n in range(10))]
    (tmp_path / "a.csv").write_text("".join(delimiter.join(line) + "\r\n" for line in lines), newline="")
    task = Classify(str(tmp_path / "a.csv"))
    assert contents(task) == [(f"a {delimiter} b\n{n}", "x") for n in range(10)]
    assert task.guessed_options() == {"text": "column text", "label": "column label", "splits": "made"}


@pytest.mark.parametrize(
    ("labels", "expected"), [([10, 9, 2], ("2", "9", "10")), (["nan", "b", "a"], ("a", "b", "nan")), ([1.0, 0.0], ("0", "1"))]
)
def test_labels_are_numbered_in_their_order(tmp_path, labels, expected):
    rows = [{"text": f"{n}", "label": label} for n, label in enumerate(labels * 4)]
    task = Classify(write(tmp_path / "a.parquet", rows))
    assert task.input.labels == expected
    if isinstance(labels[0], int):
        assert contents(task) == sorted((row["text"], str(row["label"])) for row in rows)


def test_columns_are_guessed_or_given(tmp_path):
    path = tmp_path / "a.csv"
    lines = (f"fine {n},pos,5,other\nawful {n},neg,1,other\n" for n in range(10))
    path.write_text("Review Text,Sentiment,stars,Body\n" + "".join(lines))
    assert Classify(str(path)).text == "Body"
    assert contents(Classify(str(path), text="Review Text", label="stars"))[0] == ("awful 0", "1")
    with pytest.raises(ValueError, match=r"text: .*a\.csv 'review': .*'Body', 'Review Text', 'Sentiment', 'stars'"):
        Classify(str(path), text="review")
    with pytest.raises(ValueError, match="text and image .*'Body' and 'stars'"):
        Classify(str(path), text="Body", image="stars")
    path.write_text("question1,question2,label\n" + "a,b longer,1\n" * 9)
    pairs = Match(str(path))
    assert pairs.column_names() == {"text": "question1", "second_text": "question2"}
    assert pairs.lengths("train").max() == len("b longer") + 2
    with pytest.raises(ValueError, match="text: .*'left'"):
        Match(str(path), text="left")


def test_given_splits_are_kept(tmp_path):
    parts = {"train": ROWS[:60], "dev": ROWS[60:75], "test": ROWS[75:]}
    files = {name: write(tmp_path / f"{name}.csv", rows) for name, rows in parts.items()}
    (tmp_path / "column").mkdir()
    rows = [{**row, "split": name} for name, part in reversed(parts.items()) for row in part]
    for task in (
        Classify(str(tmp_path)),
        Classify(files["train"], validation=files["dev"], test=files["test"]),
        Classify(write(tmp_path / "column" / "all.jsonl.gz", rows)),
    ):
        for split, part in zip(SPLITS, parts.values(), strict=True):
            assert [item["value"].decode() for item in task.items(split)] == [row["text"] for row in part]
    without_dev = write(tmp_path / "column" / "without.jsonl.gz", [row for row in rows if row["split"] != "dev"])
    for task in (Classify(files["train"], test=files["test"]), Classify(without_dev)):
        assert sizes(task) == [54, 6, 15], "a missing split is made of the training items"
    bad = [*rows, {"text": "x", "label": "bad", "split": "later"}, {"text": "x", "label": "", "split": "train"}]
    task = Classify(write(tmp_path / "column" / "bad.jsonl.gz", bad), skip_bad=True)
    assert (task.store.info["errors"]["count"], sizes(task)) == (2, [60, 15, 15])
    other = write(tmp_path / "column" / "other.jsonl.gz", [{**row, "split": n % 5} for n, row in enumerate(ROWS)])
    with pytest.raises(ValueError, match=r"other\.jsonl\.gz, line 1: column 'split' .*train.*'0'"):
        Classify(other).prepare()
    assert sizes(Classify(other, split_column="")) == [72, 9, 9], "an empty name is for no column"


def test_files_that_do_not_fit_each_other(tmp_path):
    with pytest.raises(NotReady, match=r"no file that ends in \.csv"):
        Classify(str(tmp_path))
    with pytest.raises(ValueError, match="has no items"):
        Images(str(tmp_path)).prepare()
    train = write(tmp_path / "train.csv", ROWS)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "test.csv").write_text("body,label\nx,bad\n")
    with pytest.raises(ValueError, match=r"test\.csv: .* 'text'"):
        Classify(train, test=str(tmp_path / "elsewhere" / "test.csv"))
    with pytest.raises(NotReady, match=r"elsewhere has test\.csv, but no training"):
        Classify(str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere" / "link.csv").symlink_to(train)
    with pytest.raises(ValueError, match=r"link\.csv' is outside"):
        Classify(str(tmp_path / "elsewhere"))
    write(tmp_path / "notes.csv", ROWS)
    with pytest.raises(ValueError, match=r"notes\.csv has none"):
        Classify(str(tmp_path))


def test_the_splits_of_files_are_part_of_the_cache_key(tmp_path):
    """Otherwise a store could have test rows in its train split."""
    a, b = write(tmp_path / "a.csv", ROWS[:60]), write(tmp_path / "b.csv", ROWS[60:])
    tasks = [Classify(str(tmp_path)), Classify(a, test=b), Classify(a, validation=b)]
    assert len({task.store.folder for task in tasks}) == 3
    assert {item["value"] for item in tasks[1].items("test")} == {row["text"].encode() for row in ROWS[60:]}


def test_a_label_that_training_does_not_have_is_an_error(tmp_path):
    train = write(tmp_path / "train.csv", ROWS[:60])
    test = write(tmp_path / "test.csv", [*ROWS[60:], {"text": "x", "label": "new"}])
    with pytest.raises(ValueError, match=r"test\.csv, line 32: the label 'new' .*bad, good, ugly"):
        Classify(train, test=test).prepare()
    assert Classify(train, test=test, skip_bad=True).store.info["errors"]["count"] == 1


def test_too_many_labels_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("permuteformer.tasks.own.MAX_LABELS", 20)
    path = write(tmp_path / "a.csv", [{"text": "x", "label": n} for n in range(30)])
    with pytest.raises(ValueError, match=r"a\.csv has more than 20 labels"):
        Classify(path, skip_bad=True).prepare()


@pytest.mark.parametrize("ids", [{}, {"id": "id"}])
def test_ids_must_be_distinct_if_a_column_is_given(tmp_path, ids):
    path = write(tmp_path / "a.parquet", [{"id": n % 19, "text": "x", "text2": "y", "label": n % 2} for n in range(20)])
    for task in (Classify, lambda *arguments, **options: Match(*arguments, text="text", **options)):
        if ids:
            with pytest.raises(ValueError, match=r"a\.parquet, line 20: the id '0' occurs twice"):
                task(path, **ids).prepare()
        assert sum(task(path, skip_bad=True, **ids).store.splits.values()) == (19 if ids else 20)


def test_empty_long_and_half_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "", "label": 1}\n{"text": "\\ud83d", "label": 2}\n{"text": "' + "x" * 10_000_000 + '", "label": 3}\n'
    )
    task = Classify(str(tmp_path / "a.jsonl"), max_length=100)
    assert task.items("train")[1]["value"] == b"\xed\xa0\xbd", "half a character is encoded as any other"
    assert batch_of(task).mask.sum(1).tolist() == [2, 5, 100]
    assert np.array_equal(task.lengths("train"), [2, 5, 100])
    with pytest.raises(ValueError, match=r"no test split .*a\.jsonl has train"):
        task.items("test")


def test_a_table_of_images(tmp_path):
    (tmp_path / "pictures").mkdir()
    lines = ["file,class"]
    for n in range(20):
        (tmp_path / "pictures" / f"{n}.png").write_bytes(picture(10 * n))
        lines.append(f"pictures/{n}.png,{'dark' if n < 10 else 'light'}")
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines))
    task = Classify(str(path), size=16)
    assert (task.input.grid, task.input.labels) == ((16, 16), ("dark", "light"))
    batch = batch_of(task)
    assert batch.input_ids.shape == (16, 16 * 16 + 2)
    assert batch.positions.shape == (16, 16 * 16 + 2, 2)
    assert {int(row[1]) - 3 for row in batch.input_ids} <= {10 * n for n in range(20)}
    for name, message in (("../outside.png", "outside"), ("none.png", "none.png"), ("", "path of an image")):
        path.write_text("\n".join([*lines, f"{name},dark"]))
        with pytest.raises(ValueError, match=rf"a\.csv, line 22: .*{message}"):
            Classify(str(path), size=16).prepare()


def image_folder(folder, splits=False):
    for label, shade in (("dark", 10), ("light", 200)):
        for n in range(10):
            place = folder / (("test" if n < 3 else "train") if splits else "") / label
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{n}.png").write_bytes(picture(shade + n))
    (folder / "readme.txt").write_text("not an image")
    return folder


@pytest.mark.parametrize("form", ["folder", "tar", "zip", "with splits"])
def test_images_in_folders_of_classes(tmp_path, form):
    path = image_folder(tmp_path / "mine", splits=form == "with splits")
    if form == "tar":
        with tarfile.open(tmp_path / "mine.tar.gz", "w:gz") as archive:
            archive.add(path, "mine")
        path = tmp_path / "mine.tar.gz"
    elif form == "zip":
        files = [(str(file.relative_to(path)), file.read_bytes()) for file in sorted(path.rglob("*.png"))]
        hidden = [(f"__MACOSX/{name.replace('/', '/._')}", b"hidden files of a Mac") for name, _ in files]
        path = tmp_path / "mine.zip"
        path.write_bytes(zip_bytes(files + hidden))
    task = Images(str(path), size=8)
    assert task.input.labels == ("dark", "light")
    assert sizes(task) == ([12, 2, 6] if form == "with splits" else [16, 2, 2])
    assert {(item["value"][0] > 100, task.input.labels[item["label"]]) for item in task.items("train")} == {
        (False, "dark"),
        (True, "light"),
    }


def test_images_that_cannot_be_used(tmp_path):
    folder = image_folder(tmp_path / "mine")
    (folder / "dark" / "broken.png").write_bytes(picture(1)[:50])
    (folder / "empty.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"mine/empty\.png: "):
        Images(str(folder)).prepare()
    errors = Images(str(folder), skip_bad=True).store.info["errors"]
    assert errors["count"] == 2
    assert "folder named after its class" in errors["shown"][0]
    for split in ("train", "test"):
        (tmp_path / "splits" / split).mkdir(parents=True)
        (tmp_path / "splits" / split / "1.png").write_bytes(picture(1))
    with pytest.raises(ValueError, match=r"splits has folders of splits \(test, train\)"):
        Images(str(tmp_path / "splits")).prepare()
