import tarfile
import zipfile
from collections import Counter

import numpy as np
import pytest
from small_data import ROWS, picture, write

from permuteformer.tasks.base import NotReady
from permuteformer.tasks.batches import loader
from permuteformer.tasks.classify import Classify
from permuteformer.tasks.images import Images
from permuteformer.tasks.match import Match


def contents(task):
    return sorted(
        (item["value"].decode(), task.labels[int(task.collate([item]).labels)])
        for split in ("train", "validation", "test")
        for item in task.items(split)
    )


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl.gz", ".parquet"])
def test_a_table_of_any_kind(tmp_path, ending):
    task = Classify(write(tmp_path / f"mine{ending}", ROWS))
    assert task.labels == ["bad", "good", "ugly"]
    assert contents(task) == sorted((row["text"], row["label"]) for row in ROWS)
    assert {split: len(task.items(split)) for split in ("train", "validation", "test")} == {"train": 72, "validation": 9, "test": 9}
    for split in ("train", "validation", "test"):
        assert len(set(Counter(batch.labels.tolist()[0] for batch in loader(task, split, 1)).values())) == 1, "shares of labels are kept"


def test_numbers_as_labels_are_in_their_order(tmp_path):
    rows = [{"text": f"{n}", "label": n} for n in (10, 9, 2, 10, 9, 2)]
    task = Classify(write(tmp_path / "a.parquet", rows))
    assert task.labels == ["2", "9", "10"]
    assert task.num_labels == 3
    for names in (["nan", "b", "a"], ["b", "a", "nan"]):
        table = write(tmp_path / "b.csv", [{"text": f"{n}", "label": name} for n, name in enumerate(names * 4)])
        assert Classify(table).labels == ["a", "b", "nan"]
    floats = [{"text": f"{n}", "label": float(n % 2)} for n in range(20)]
    assert Classify(write(tmp_path / "c.parquet", floats)).labels == ["0", "1"]


def test_columns_are_guessed_and_can_be_told(tmp_path):
    path = tmp_path / "a.csv"
    lines = (f"fine {n},pos,5,other\nawful {n},neg,1,other\n" for n in range(10))
    path.write_text("Review Text,Sentiment,stars,Body\n" + "".join(lines))
    assert Classify(str(path)).text == "Body"
    task = Classify(str(path), text="Review Text", label="stars")
    assert contents(task)[0] == ("awful 0", "1")
    with pytest.raises(ValueError, match=r"text: unknown column of a\.csv 'review': there is 'Body', 'Review Text', 'Sentiment', 'stars'"):
        Classify(str(path), text="review")
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"which column of .*a\.csv is the label\? There is 'a', 'b'; say label=NAME"):
        Classify(str(path))
    with pytest.raises(ValueError, match="cannot both be given"):
        Classify(str(path), text="a", image="b")


def test_splits_that_are_given(tmp_path):
    parts = {"train": ROWS[:60], "dev": ROWS[60:75], "test": ROWS[75:]}
    for name, rows in parts.items():
        write(tmp_path / f"{name}.csv", rows)
    by_folder = Classify(str(tmp_path))
    by_files = Classify(str(tmp_path / "train.csv"), validation=str(tmp_path / "dev.csv"), test=str(tmp_path / "test.csv"))
    rows = [{**row, "split": name} for name, part in reversed(parts.items()) for row in part]
    (tmp_path / "column").mkdir()
    by_column = Classify(write(tmp_path / "column" / "all.jsonl.gz", rows))
    for task in (by_folder, by_files, by_column):
        for split, name in (("train", "train"), ("validation", "dev"), ("test", "test")):
            assert [item["value"].decode() for item in task.items(split)] == [row["text"] for row in parts[name]]
    only_test = Classify(str(tmp_path / "train.csv"), test=str(tmp_path / "test.csv"))
    assert [len(only_test.items(split)) for split in ("train", "validation", "test")] == [54, 6, 15]
    without = [row for row in rows if row["split"] != "dev"]
    by_column = Classify(write(tmp_path / "column" / "without.jsonl.gz", without))
    assert [len(by_column.items(split)) for split in ("train", "validation", "test")] == [54, 6, 15]
    folds = write(tmp_path / "column" / "folds.jsonl.gz", [{**row, "split": n % 5} for n, row in enumerate(ROWS)])
    with pytest.raises(ValueError, match=r"folds\.jsonl\.gz, line 1: column 'split' must be one of train.*it is '0'"):
        Classify(folds).prepare()
    assert len(Classify(folds, split="").items("train")) == 72
    bad = [*rows, {"text": "x", "label": "bad", "split": "later"}, {"text": "x", "label": "", "split": "train"}]
    by_column = Classify(write(tmp_path / "column" / "bad.jsonl.gz", bad), skip_bad=True)
    assert by_column.prepare().info["problems"]["count"] == 2
    assert len(by_column.items("train")) == 60
    (tmp_path / "only").mkdir()
    write(tmp_path / "only" / "test.csv", ROWS)
    with pytest.raises(NotReady, match="no table to train on"):
        Classify(str(tmp_path / "only"))
    (tmp_path / "other.csv").write_text("body,label\nx,bad\n")
    with pytest.raises(ValueError, match=r"other\.csv unknown column 'text'"):
        Classify(str(tmp_path / "train.csv"), test=str(tmp_path / "other.csv"))
    (tmp_path / "other.csv").unlink()
    write(tmp_path / "notes.csv", ROWS)
    with pytest.raises(ValueError, match=r"notes\.csv has none"):
        Classify(str(tmp_path))


def test_a_label_that_training_does_not_have(tmp_path):
    train = write(tmp_path / "train.csv", ROWS[:60])
    test = write(tmp_path / "test.csv", [*ROWS[60:], {"text": "x", "label": "new"}])
    with pytest.raises(ValueError, match=r"test\.csv, line 32: the label 'new' is none of the training split's 3: bad, good, ugly"):
        Classify(train, test=test).prepare()
    assert Classify(train, test=test, skip_bad=True).prepare().info["problems"]["count"] == 1


def test_too_many_labels(tmp_path, monkeypatch):
    monkeypatch.setattr("permuteformer.tasks.own.MAX_LABELS", 20)
    path = write(tmp_path / "a.csv", [{"text": "x", "label": n} for n in range(30)])
    with pytest.raises(ValueError, match=r"more than 20 labels .*is this the column of labels"):
        Classify(path, skip_bad=True).prepare()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 3, "label": 1}', "column 'text' must be text; it is int"),
        ('{"text": null, "label": 1}', "column 'text' must be text; it is empty"),
        ('{"text": "a"}', "there is no label"),
        ('{"text": "a", "label": [1]}', "a label must be a text or a number; it is list"),
        ('{"text": "a", "label": " "}', "there is no label"),
        ("[1, 2]", ""),
        ("{", ""),
    ],
)
def test_bad_rows_are_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{n}", "label": 1}}\n' for n in range(20)) + line + "\n")
    with pytest.raises(ValueError, match=f"a.jsonl, line 21: .*{message}"):
        Classify(str(path)).prepare()
    assert sum(Classify(str(path), skip_bad=True).prepare().info["splits"].values()) == 20


def test_half_characters_are_bytes_as_all_others(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d", "label": 1}\n' * 10)
    task = Classify(str(path))
    assert task.items("train")[0]["value"] == "\ud83d".encode("utf-8", "surrogatepass")


def test_a_table_of_images(tmp_path):
    (tmp_path / "pictures").mkdir()
    lines = ["file,class"]
    for n in range(20):
        (tmp_path / "pictures" / f"{n}.png").write_bytes(picture(10 * n))
        lines.append(f"pictures/{n}.png,{'dark' if n < 10 else 'light'}")
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines))
    task = Classify(str(path), size=16)
    assert task.grid == (16, 16)
    assert task.labels == ["dark", "light"]
    (batch,) = loader(task, "train", 100)
    assert batch.input_ids.shape == (16, 16 * 16 + 2)
    assert batch.positions.shape == (16, 16 * 16 + 2, 2)
    assert {int(row[1]) - 3 for row in batch.input_ids} <= {10 * n for n in range(20)}
    for name, message in [("../outside.png", "leads out of the folder"), ("none.png", "there is no image"), ("", "path of an image")]:
        path.write_text("\n".join([*lines, f"{name},dark"]))
        with pytest.raises(ValueError, match=f"line 22: .*{message}"):
            Classify(str(path), size=16).prepare()


def test_folders_of_splits_are_no_classes(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(picture(1))
    with pytest.raises(ValueError, match="but no folders of classes"):
        Images(str(tmp_path)).prepare()
    with pytest.raises(ValueError, match="a side of 1 pixel or more; it is 0 x 0"):
        Images(str(tmp_path), size=0)
    with pytest.raises(ValueError, match="seed must be a whole number from 0 on; it is -1"):
        Classify(write(tmp_path / "a.csv", ROWS), seed=-1).prepare()


@pytest.mark.parametrize("form", ["folder", "tar", "with splits"])
def test_a_folder_a_class(tmp_path, form):
    folder = tmp_path / "mine"
    for label, shade in (("dark", 10), ("light", 200)):
        for n in range(10):
            split = ("test" if n < 3 else "train") if form == "with splits" else ""
            (folder / split / label).mkdir(parents=True, exist_ok=True)
            (folder / split / label / f"{n}.png").write_bytes(picture(shade + n))
    (folder / "readme.txt").write_text("not an image")
    path = folder
    if form == "tar":
        path = tmp_path / "mine.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            archive.add(folder, "mine")
    task = Images(str(path), size=8)
    assert task.labels == ["dark", "light"]
    counts = {split: len(task.items(split)) for split in ("train", "validation", "test")}
    assert counts == ({"train": 12, "validation": 2, "test": 6} if form == "with splits" else {"train": 16, "validation": 2, "test": 2})
    shades = {(item["value"][0] > 100, task.labels[int(task.collate([item]).labels)]) for item in task.items("train")}
    assert shades == {(False, "dark"), (True, "light")}


def test_an_image_that_is_none(tmp_path):
    (tmp_path / "a").mkdir()
    for n in range(5):
        (tmp_path / "a" / f"{n}.png").write_bytes(picture(n))
    (tmp_path / "a" / "broken.png").write_bytes(picture(1)[:50])
    with pytest.raises(ValueError, match=r"broken\.png"):
        Images(str(tmp_path)).prepare()
    (tmp_path / "empty.png").write_bytes(b"")
    info = Images(str(tmp_path), skip_bad=True).prepare().info
    assert info["problems"]["count"] == 2
    assert "an image must be in a folder, whose name is its class" in " ".join(info["problems"]["shown"])


def test_pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("question1\tquestion2\tlabel\n" + "".join(f"a{n}\tb{n} longer\t{n % 2}\n" for n in range(40)))
    task = Match(str(path))
    assert task.kind == "match"
    assert task.texts == {"first": "question1", "second": "question2"}
    batch = next(iter(loader(task, "train", 4, shuffle=False)))
    assert batch.input_ids.shape[0] == batch.second_input_ids.shape[0] == 4
    assert bytes((batch.second_input_ids[0][batch.second_key_mask[0]][1:-1] - 3).tolist()).endswith(b" longer")
    assert task.lengths("train").max() == len("b39 longer") + 2
    with pytest.raises(ValueError, match="first: unknown column"):
        Match(str(path), first="left")
    path.write_text("a\tb\tlabel\tsplit\n" + "x\ty\t1\ttrain\n" * 30 + "x\ty\t1\ttest\n" * 10)
    assert len(Match(str(path)).items("test")) == 10


def test_what_is_there_twice_is_in_one_split(tmp_path):
    rows = [{"text": f"text {n % 50}", "label": n % 3} for n in range(400)]
    task = Classify(write(tmp_path / "a.csv", rows))
    found = [{item["value"] for item in task.items(split)} for split in ("train", "validation", "test")]
    assert sum(map(len, found)) == 50
    assert sum(len(task.items(split)) for split in ("train", "validation", "test")) == 400


def test_images_of_a_table_that_change(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("image,label\n" + "".join(f"{n}.png,x\n" for n in range(10)))
    for n in range(10):
        (tmp_path / f"{n}.png").write_bytes(picture(n))
    before = [item["value"] for item in Classify(str(path)).items("train")]
    for n in range(10):
        (tmp_path / f"{n}.png").write_bytes(picture(100 + n))
    after = [item["value"] for item in Classify(str(path)).items("train")]
    assert before != after


def test_ids_that_come_twice(tmp_path):
    rows = [{"id": n % 19, "text": "x", "text2": "y", "label": n % 2} for n in range(20)]
    path = write(tmp_path / "a.parquet", rows)
    assert sum(Classify(path).prepare().info["splits"].values()) == 20, "a column named id is nothing special"
    for build in (Classify, lambda *a, **k: Match(*a, first="text", **k)):
        with pytest.raises(ValueError, match=r"a\.parquet, line 20: the id '0' was there before"):
            build(path, id="id").prepare()
        assert sum(build(path, id="id", skip_bad=True).prepare().info["splits"].values()) == 19


def test_links_do_not_lead_out(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "secret.csv", ROWS)
    (tmp_path / "in" / "link.csv").symlink_to(tmp_path / "secret.csv")
    with pytest.raises(ValueError, match=r"'link\.csv' leads out of the folder"):
        Classify(str(tmp_path / "in"))
    (tmp_path / "in" / "a.png").symlink_to(tmp_path / "secret.csv")
    (tmp_path / "in" / "table.jsonl").write_text('{"image": "a.png", "label": 1}\n')
    with pytest.raises(ValueError, match=r"line 1: 'a\.png' leads out of the folder"):
        Classify(str(tmp_path / "in" / "table.jsonl")).prepare()


def test_what_is_not_there(tmp_path):
    for build in (Classify, Match, Images):
        with pytest.raises(NotReady, match="it is 'nowhere"):
            build("nowhere.csv")
    with pytest.raises(NotReady, match="no file that ends in"):
        Classify(str(tmp_path))
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(ValueError, match=r"a\.csv"):
        Classify(str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text("text,label\n")
    with pytest.raises(ValueError, match=r"a\.csv"):
        Classify(str(tmp_path / "a.csv")).prepare()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no items"):
        Images(str(tmp_path / "empty")).prepare()


def test_one_row(tmp_path):
    task = Classify(write(tmp_path / "a.csv", ROWS[:1]))
    assert len(task.items("train")) == 1
    with pytest.raises(ValueError, match="has no test split"):
        task.dataset("test")


def test_empty_and_long_texts(tmp_path):
    path = write(tmp_path / "a.csv", [{"text": "", "label": "a"}, {"text": "x" * 10_000_000, "label": "b"}])
    task = Classify(path, max_length=100)
    (batch,) = loader(task, "train", 2, shuffle=False)
    assert batch.input_ids.shape == (2, 100)
    assert batch.key_mask.sum(1).tolist() == [2, 100]
    assert np.array_equal(task.lengths("train"), [2, 100])


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_csv_of_other_countries(tmp_path, sign):
    path = tmp_path / "a.csv"
    path.write_text(
        "".join(sign.join(row) + "\r\n" for row in [["text", "label"], *([f'"a {sign} b\n{n}"', "x"] for n in range(10))]), newline=""
    )
    task = Classify(str(path))
    assert contents(task) == [(f"a {sign} b\n{n}", "x") for n in range(10)]
    assert task.choices() == {"text": "column text", "label": "column label", "splits": "made"}


def test_tsv_has_no_quotes(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('text\tlabel\n"Hello," he said\tx\n"a\tb"\tx\n')
    with pytest.raises(ValueError, match=r"line 3: .*in TSV a quote is a letter: if fields are quoted, name the file \.csv"):
        Classify(str(path)).prepare()
    assert Classify(str(path), skip_bad=True).items("train")[0]["value"] == b'"Hello," he said'


def test_which_file_is_which_split_is_another_entry_of_the_cache(tmp_path):
    """Else rows of a test would be trained on by who has looked at the folder before."""
    write(tmp_path / "a.csv", ROWS[:60])
    write(tmp_path / "b.csv", ROWS[60:])
    ways = [
        {"path": str(tmp_path)},
        *({"path": str(tmp_path / "a.csv"), split: str(tmp_path / "b.csv")} for split in ("test", "validation")),
    ]
    tasks = [Classify(**way) for way in ways]
    assert len({task.prepare().folder for task in tasks}) == 3
    tested = {bytes(item["value"]) for item in tasks[1].dataset("test")}
    assert tested == {row["text"].encode() for row in ROWS[60:]}


def test_what_a_mac_puts_into_an_archive_is_no_image(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for n in range(20):
            archive.writestr(f"{'cat' if n % 2 else 'dog'}/{n}.png", picture(n))
            archive.writestr(f"__MACOSX/{'cat' if n % 2 else 'dog'}/._{n}.png", b"of a Mac")
    task = Images(str(tmp_path / "a.zip"), size=4)
    assert sum(len(task.dataset(split)) for split in ("train", "validation", "test")) == 20
    assert sorted(task.labels) == ["cat", "dog"]
