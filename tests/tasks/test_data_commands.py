"""The commands on data as a user types them, and what ``train`` says about data that it cannot use."""

import json

import numpy as np
import pytest
from commands import run
from PIL import Image
from small_data import ROWS, acl_imdb, csv, picture, tar_bytes, write

from permuteformer.tasks import SPLITS, TASKS
from permuteformer.tasks.classify import Classify
from permuteformer.tasks.inspect import check, contact_sheet

LINES = [f"text {n},{'ab'[n % 2]}" for n in range(30)]
PICTURES = [(f"im/{'ab'[n % 2]}/{n}.png", picture(9 * n)) for n in range(20)]

UNUSABLE = {
    "one class": ("a.csv", ["text,label", *(f"{n},good" for n in range(30))], [], r"a\.csv.*'good'"),
    "unknown column": ("a.csv", ["text,label", *LINES], ["--label", "lable"], r"label: .*a\.csv 'lable'.*did you mean 'label'"),
    "no such column": ("a.csv", ["review,stars2", *LINES], [], r"a\.csv .*label.*'review', 'stars2'.*--label"),
    "missing file": ("a.csv", None, [], r"file not found: .*a\.csv"),
    "Latin-1": ("a.csv", "\n".join(["text,label", *LINES, "café,a"]).encode("latin-1"), [], r"a\.csv, line 32: byte 0xe9 at offset 3"),
    "truncated archive": ("a.tar", tar_bytes(PICTURES)[:9000], [], r"a\.tar: reading stopped at im/\w/\d+\.png: .*truncated"),
    "unreadable image": ("a.tar", tar_bytes([*PICTURES, ("im/a/bad.png", picture(1)[:50])]), [], r"a\.tar/im/a/bad\.png: .*truncated"),
    "one folder": ("a.tar", tar_bytes([("im/cat/1.png", picture(1)), ("im/cat/2.png", picture(2))]), [], r"a\.tar.*'cat'"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_training_on_unusable_data_names_the_place_and_writes_nothing(name, tmp_path):
    file, content, options, message = UNUSABLE[name]
    path = tmp_path / file
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else "".join(f"{line}\n" for line in content).encode())
    task = "images" if file.endswith(".tar") else "classify"
    output = run("train", task, path, *options, "--output", tmp_path / "run", code=1)
    with pytest.raises(ValueError, match=message):
        raise ValueError(output.stderr)
    assert output.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_skip_bad_trains_on_the_rest_and_counts(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["text,label", *LINES, "a,b,c", "text,"]) + "\n")
    tiny = ["--model.hidden-size", 16, "--model.num-hidden-layers", 1, "--model.num-attention-heads", 2, "--steps", 1, "--track", "none"]
    run("train", "classify", path, "--skip-bad", "--output", tmp_path / "run", *tiny)
    notes = json.loads((tmp_path / "run" / "experiment.json").read_text())["task"]["notes"]
    assert any("2 items" in note for note in notes)
    assert sum(Classify(str(path), skip_bad=True).store.splits.values()) == 30


def test_list_names_every_task(tmp_path):
    text = run("data", "list", "--data", tmp_path)
    for name in [*TASKS, str(tmp_path), "found: digits", "generate or fetch"]:
        assert name in text


def test_check_counts_labels_lengths_and_repetitions(tmp_path):
    rows = [*ROWS, *ROWS[:10]]
    path = write(tmp_path / "mine.csv", rows)
    text = run("data", "check", "classify", path)
    for shown in ("label ugly", "text: column text", "splits: made", "all items can be read"):
        assert shown in text
    report = check(Classify(path))
    splits = report.splits.values()
    assert (sum(split.items for split in splits), sum(split.repeated for split in splits)) == (100, 10)
    assert sum(report.shared.values()) == 0, "repeated items are in one split"
    assert {label: sum(split.labels[label] for split in splits) for label in report.splits["train"].labels} == {
        "bad": 34,
        "good": 33,
        "ugly": 33,
    }
    lengths = sorted(len(row["text"].encode()) + 2 for row in rows)
    assert (min(split.lengths[0] for split in splits), max(split.lengths[100] for split in splits)) == (lengths[0], lengths[-1])
    cut = check(Classify(path, max_length=lengths[-1] - 1)).splits.values()
    assert sum(split.cut for split in cut) == lengths.count(lengths[-1])


def test_labels_are_counted_under_their_own_names(tmp_path):
    """Stored numbers are in the order of the file."""
    path = write(tmp_path / "a.csv", [{"text": f"{n}", "label": label} for n, label in enumerate(["b"] * 20 + ["a"] * 10)])
    assert check(Classify(path)).splits["train"].labels == {"a": 8, "b": 16}


def test_check_lists_what_cannot_be_read(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "{broken\n" + '{"text": "\\u001b[31m"}\n')
    text = run("data", "check", "classify", path, code=1)
    for shown in ("2 items", "mine.jsonl, line 91: ", "mine.jsonl, line 92: the label"):
        assert shown in text
    assert "mine.jsonl, line 91" in run("data", "check", "classify", path, "--skip-bad")
    assert "mine.jsonl, line 91" in run("data", "show", "classify", path, code=1)
    assert "train" in run("data", "show", "classify", path, "--skip-bad")


def test_show_draws_texts_by_seed(tmp_path):
    path = write(tmp_path / "mine.csv", ROWS)
    shown, again, other = (run("data", "show", "classify", path, "--count", 2, "--seed", seed) for seed in (0, 0, 1))
    assert shown.count("Größe") == 2
    assert shown == again != other


def test_show_writes_images_as_a_sheet(tmp_path):
    for name, content in PICTURES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    words = ("--count", 7, "--output", tmp_path / "sheet.png", "--task.size", 16)
    assert "7 images of the train split" in run("data", "show", "images", tmp_path / "im", *words)
    pixels = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert pixels.shape[0] > 2 * 128
    assert pixels.shape[1] > 6 * 128
    assert set(range(0, 180, 9)) & set(np.unique(pixels).tolist())
    with pytest.raises(ValueError, match="classify"):
        contact_sheet(Classify(write(tmp_path / "a.csv", ROWS)), "train", 3, tmp_path / "other.png")


def test_generate_listops_and_pathfinder(tmp_path):
    sizes = ("--train", 20, "--validation", 7, "--test", 3, "--seed", 3, "--processes", 1, "--data", tmp_path)
    for name, folder in (("lra-listops", "listops-1000"), ("lra-pathfinder", "pathfinder32/curv_contour_length_14")):
        assert str(tmp_path / folder) in run("data", "generate", name, *sizes)
        assert TASKS[name](data=str(tmp_path)).store.splits == {"train": 20, "validation": 7, "test": 3}
        assert "already exists" in run("data", "generate", name, *sizes, code=1)
    assert "20" in run("data", "check", "lra-listops", "--data", tmp_path)
    assert " ]" in run("data", "show", "lra-listops", "--data", tmp_path)
    assert "20 images" in run("data", "show", "lra-pathfinder", "--data", tmp_path, "--output", tmp_path / "sheet.png")


@pytest.mark.parametrize("form", ["wiki", "folder", "table"])
def test_generate_pairs(tmp_path, form):
    words = np.random.default_rng(0).integers(0, 10_000, (24, 2000))
    articles = [(f"Article {n}", " ".join(f"w{word}" for word in row)) for n, row in enumerate(words)]
    source = tmp_path / "source"
    source.mkdir()
    if form == "wiki":
        for name, part in (("train", articles[:12]), ("valid", articles[12:18]), ("test", articles[18:])):
            (source / f"wiki.{name}.raw").write_text("".join(f" = {title} = \n \n {text} \n \n" for title, text in part))
    elif form == "folder":
        for title, text in articles:
            (source / f"{title}.txt").write_text(text)
    else:
        source = source / "articles.csv"
        source.write_text(csv([{"text": text} for _, text in articles], ["text"]))
    run("data", "generate", "lra-retrieval", "--documents", source, "--data", tmp_path / "data")
    task = TASKS["lra-retrieval"](data=str(tmp_path / "data"))
    assert "halves of one article" in task.notes()[0]
    assert sum(len(task.items(split)) for split in SPLITS) == 2 * len(articles), "every article is in two"
    assert task.rows("train").column("label").mean() == 0.5


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("check lra-texts", 1, "'lra-texts': did you mean 'lra-text'"),
        ("check classify", 1, "classify needs a file"),
        ("check lra-pathfinder --task.resolutoin 32", 2, "--task.resolutoin: did you mean --task.resolution"),
        ("check lra-text --data DATA", 1, "DATA(.*\n)*.*permuteformer data fetch lra-text"),
        ("generate digits", 1, "digits"),
        ("generate lra-retrieval --data DATA", 1, "--documents"),
        ("generate lra-listops --train 0 --data DATA", 1, "train .*0"),
        ("show digits --split dev", 1, "'dev'"),
        ("show digits --count 0", 1, "count .*0"),
        ("fetch imdb", 1, "'imdb'"),
        ("frobnicate", 2, "'frobnicate'"),
    ],
)
def test_mistakes_are_one_message(words, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run("data", *words.split(), code=code)
    with pytest.raises(ValueError, match=message):
        raise ValueError(output.stderr)
    assert not list(tmp_path.iterdir())


def test_downloads_and_protocols_are_shown(tmp_path):
    assert "aclImdb" in run("data", "fetch")
    acl_imdb(tmp_path)
    assert "validated on the test split" in run("data", "check", "lra-text", "--data", tmp_path, "--task.validate-on", "test")
    assert "validated on" not in run("data", "check", "lra-text", "--data", tmp_path)
