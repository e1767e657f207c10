"""``permuteformer data``, as a person types it."""

import json

import numpy as np
import pytest
from PIL import Image
from small_data import ROWS, acl_imdb, picture, write
from typer.testing import CliRunner

from permuteformer.cli import app
from permuteformer.tasks import TASKS
from permuteformer.tasks.check import check
from permuteformer.tasks.classify import Classify
from permuteformer.tasks.show import contact_sheet


def run(*words, code=0):
    result = CliRunner().invoke(app, ["data", *map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert code == 0 or "Traceback" not in result.output
    return result.output


def test_list_names_every_task(tmp_path):
    text = run("list", "--data", tmp_path)
    for name in TASKS:
        assert name in text
    assert "ready: digits" in text
    assert "generate or fetch" in text
    assert str(tmp_path) in text


def test_options_are_those_of_the_task():
    text = run("options", "lra-pathfinder")
    for option in TASKS.options("lra-pathfinder"):
        assert option in text
    assert "pixels of a side" in text
    assert "tokens of a window" in run("options", "wikitext-103")


def test_check_counts_and_finds_what_is_twice(tmp_path):
    rows = [*ROWS, *ROWS[:10]]
    path = write(tmp_path / "mine.csv", rows)
    text = run("check", "classify", path)
    assert "label ugly" in text
    assert "text: column text" in text
    assert "splits: made" in text
    assert "path is given twice" in run("check", "classify", path, "--set", "path=other.csv", code=1)
    report = check(Classify(path))
    assert sum(split.items for split in report.splits.values()) == 100
    assert sum(split.repeated for split in report.splits.values()) == 10
    assert sum(report.shared.values()) == 0, "what is there twice is in one split"
    assert {label: sum(split.labels[label] for split in report.splits.values()) for label in ("bad", "good", "ugly")} == {
        "bad": 34,
        "good": 33,
        "ugly": 33,
    }
    lengths = sorted(len(row["text"].encode()) + 2 for row in rows)
    assert min(split.lengths[0] for split in report.splits.values()) == lengths[0]
    assert max(split.lengths[100] for split in report.splits.values()) == lengths[-1]
    cut = check(Classify(path, max_length=lengths[-1] - 1))
    assert sum(split.cut for split in cut.splits.values()) == lengths.count(lengths[-1])


def test_labels_are_counted_under_their_own_names(tmp_path):
    """Stored numbers are in the order of the file; names are shown in their order."""
    path = write(tmp_path / "a.csv", [{"text": f"{n}", "label": label} for n, label in enumerate(["b"] * 20 + ["a"] * 10)])
    assert check(Classify(path)).splits["train"].labels == {"a": 8, "b": 16}


def test_check_names_what_cannot_be_read(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "{broken\n" + '{"text": "\\u001b[31m"}\n')
    text = run("check", "classify", path, code=1)
    assert "2 items cannot be read" in text
    assert "mine.jsonl, line 91" in text
    assert "mine.jsonl, line 92: there is no label" in text
    assert "mine.jsonl, line 91" in run("check", "classify", path, "--skip-bad")
    assert "mine.jsonl, line 91" in run("show", "classify", path, code=1)
    assert "train" in run("show", "classify", path, "--skip-bad")


def test_show_texts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"text": f"\x1b[31mred [bold] {n}", "label": "[/x]\x1b[31m"}) + "\n" for n in range(20)))
    text = run("show", "classify", path, "--count", 2)
    assert "\x1b[31m" not in text, "a terminal is not controlled by data"
    assert "\\x1b[31mred [bold]" in text
    assert "[/x]" in text
    assert run("show", "classify", path, "--count", 2) == text
    assert run("show", "classify", path, "--count", 2, "--seed", 1) != text


def test_show_images(tmp_path):
    for n in range(20):
        (tmp_path / "in" / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / "ab"[n % 2] / f"{n}.png").write_bytes(picture(10 * n))
    sheet = tmp_path / "sheet.png"
    assert "7 images of the train split" in run("show", "images", tmp_path / "in", "--count", 7, "--output", sheet, "--set", "size=16")
    pixels = np.asarray(Image.open(sheet))
    assert pixels.shape[0] > 2 * 128
    assert pixels.shape[1] > 6 * 128
    assert set(range(0, 200, 10)) & set(np.unique(pixels).tolist())
    with pytest.raises(ValueError, match="classify has no images to show"):
        contact_sheet(Classify(write(tmp_path / "a.csv", ROWS)), "train", 3, sheet)


def test_generate_listops(tmp_path):
    text = run("generate", "lra-listops", "--train", 30, "--validation", 5, "--test", 5, "--seed", 3, "--processes", 1, "--data", tmp_path)
    assert f"written to {tmp_path / 'listops-1000'}" in text
    assert "30" in run("check", "lra-listops", "--data", tmp_path)
    assert " ]" in run("show", "lra-listops", "--data", tmp_path)
    assert "is there already" in run("generate", "lra-listops", "--train", 30, "--data", tmp_path, code=1)


def test_generate_pathfinder(tmp_path):
    sizes = ("--train", 20, "--validation", 7, "--test", 3)
    run("generate", "lra-pathfinder", *sizes, "--processes", 1, "--data", tmp_path)
    task = TASKS["lra-pathfinder"](data=str(tmp_path))
    assert task.prepare().info["splits"] == {"train": 20, "validation": 7, "test": 3}
    assert "20 images of the train split" in run("show", "lra-pathfinder", "--data", tmp_path, "--output", tmp_path / "sheet.png")
    assert "level" in run("generate", "lra-pathfinder", "--level", "harder", "--data", tmp_path, code=1)


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
        source = source / "articles.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in articles))
    run("generate", "lra-retrieval", "--from", source, "--data", tmp_path / "data")
    task = TASKS["lra-retrieval"](data=str(tmp_path / "data"))
    assert "halves of articles" in task.notes()[0]
    pairs = sum(len(task.items(split)) for split in ("train", "validation", "test"))
    assert pairs == 2 * len(articles), "every article is in two"
    assert task.items("train").column("label").mean() == 0.5


def test_mistakes_are_said_in_words(tmp_path):
    assert "did you mean 'lra-text'?" in run("check", "lra-texts", code=1)
    assert "say where it is" in run("check", "classify", code=1)
    assert "unknown argument of task 'digits': 'data'" in run("check", "digits", "--data", tmp_path, code=1)
    assert "resolution must be of type int; it is 'x'" in run("check", "lra-pathfinder", "--set", "resolution=x", code=1)
    assert "NAME=VALUE" in run("check", "digits", "--set", "protocol", code=1)
    assert "protocol must be one of 'lra', 'paper'" in run("check", "digits", "--protocol", "mine", code=1)
    assert "permuteformer data fetch" in run("check", "lra-text", "--data", tmp_path, code=1)
    assert "unknown task to generate 'digits'" in run("generate", "digits", code=1)
    assert "--from" in run("generate", "lra-retrieval", "--data", tmp_path, code=1)
    assert "resolution is for lra-pathfinder alone" in run("generate", "lra-listops", "--resolution", 64, "--data", tmp_path, code=1)
    assert "it is 'dev'" in run("show", "digits", "--split", "dev", code=1)
    assert "aclImdb" in run("fetch")
    assert "unknown download 'imdb'" in run("fetch", "imdb", code=1)


def test_the_protocol_is_said(tmp_path):
    acl_imdb(tmp_path)
    assert "validated on the test split" in run("check", "lra-text", "--data", tmp_path, "--protocol", "paper")
    assert "validated on" not in run("check", "lra-text", "--data", tmp_path)
