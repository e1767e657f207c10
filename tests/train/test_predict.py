"""Predictions for new items equal the model's own, from every kind of source; output is complete or unchanged."""

import csv
import io
import itertools
import json
import os
import re
import tracemalloc
import zipfile
from functools import partial

import pytest
import torch
from commands import refused, run
from PIL import Image
from processes import Command
from small_data import ROWS, acl_imdb, listops, picture, write
from train.runs import redirect, terminal_output

from permuteformer.tasks.readers import text as reader
from permuteformer.tasks.readers.errors import Errors
from permuteformer.tasks.readers.images import gray_image
from permuteformer.train.build import model_inputs
from permuteformer.train.predict import predict
from permuteformer.train.trained_model import load

TEXTS = [row["text"] for row in ROWS[:13]] + ["x", "much longer than the others, but not too long", "ÿ€😀"]


@torch.no_grad()
def by_hand(trained, *texts):
    """Return the probabilities of one item, without padding and without the library's batches."""
    ids = [torch.tensor([[1, *(byte + 3 for byte in text.encode()[: trained.input.max_length - 2]), 2]]) for text in texts]
    return trained.model(*ids).logits[0].double().softmax(-1).tolist()


@torch.no_grad()
def of_batch(trained, items):
    """Return the probabilities of items of the task."""
    batch = trained.input.collate(items)
    return trained.model(**model_inputs(batch, trained.model.config)).logits.double().softmax(-1).tolist()


def assert_close(predictions, expected):
    for prediction, probabilities in zip(predictions, expected, strict=True):
        assert prediction.probabilities == pytest.approx(probabilities, abs=1e-5)


def table(path, texts=TEXTS):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    return path


@pytest.mark.parametrize("batch_size", [1, 3, 16, 1000])
def test_predictions_are_the_models_in_the_order_of_the_items(trained_text, tmp_path, batch_size):
    expected = [by_hand(trained_text, text) for text in TEXTS]
    predictions = list(predict(trained_text, table(tmp_path / "new.csv"), batch_size=batch_size))
    assert_close(predictions, expected)
    for prediction in predictions:
        assert prediction.probability == max(prediction.probabilities)
        assert prediction.label == trained_text.labels[prediction.probabilities.index(prediction.probability)]
        assert sum(prediction.probabilities) == pytest.approx(1)
    assert len({round(p.probabilities[0], 4) for p in predictions}) == len(TEXTS), "different texts have different answers"
    assert [p.line for p in predictions] == list(range(2, len(TEXTS) + 2))


def test_every_kind_of_file_gives_the_same(trained_text, tmp_path):
    texts = [text for text in TEXTS if '"' not in text]
    rows = [{"text": text, "label": "?"} for text in texts]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    files = [write(tmp_path / name, rows) for name in ("a.csv", "a.tsv", "a.jsonl.gz", "a.parquet")]
    for source in (*files, tmp_path / "a.txt", io.BytesIO(("\ufeff" + "\r\n".join(texts) + "\r\n").encode())):
        assert_close(predict(trained_text, source), [by_hand(trained_text, text) for text in texts])


def test_pairs(pair_run, tmp_path):
    trained, path = load(pair_run), tmp_path / "new.csv"
    pairs = [("one text", "another, longer"), ("", "b"), ("c", ""), ("same", "same")]
    path.write_text("\n".join(["other,one,text1,text2", *(f'"{second}","{first}",1,2' for first, second in pairs)]))
    assert_close(predict(trained, path, batch_size=3), [by_hand(trained, *pair) for pair in pairs])
    swapped = predict(trained, path, columns={"text": "other", "second_text": "one"})
    assert_close(swapped, [by_hand(trained, *reversed(pair)) for pair in pairs])


def test_images_come_from_folders_archives_files_and_tables(image_run, tmp_path):
    trained, folder = load(image_run), tmp_path / "new"
    (folder / "below").mkdir(parents=True)
    shades = {"a.png": 10, "b.PNG": 100, "below/c.png": 250}
    for name, shade in shades.items():
        (folder / name).write_bytes(picture(shade))
    (folder / "notes.txt").write_text("no image")
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
        for name in shades:
            archive.write(folder / name, name)
    (folder / "table.csv").write_text("n,filename,id\n" + "".join(f"1,{name},{shade}\n" for name, shade in shades.items()))
    pixels = [gray_image(picture(shade), (6, 6)).tobytes() for shade in shades.values()]
    expected = of_batch(trained, [{"id": n, "value": value} for n, value in enumerate(pixels)])
    for source in (folder, tmp_path / "new.zip", folder / "table.csv"):
        assert_close(predict(trained, source, batch_size=2), expected)
    assert_close(predict(trained, folder / "a.png"), expected[:1])
    assert [(p.line, p.id) for p in predict(trained, folder)] == [(None, name) for name in shades]
    assert [(p.line, p.id) for p in predict(trained, folder / "table.csv")] == [(2, "10"), (3, "100"), (4, "250")]


def test_bad_images_are_named_or_skipped(image_run, tmp_path):
    trained, folder = load(image_run), tmp_path / "new"
    folder.mkdir()
    with pytest.raises(ValueError, match="nothing to predict"):
        list(predict(trained, folder))
    (folder / "a.png").write_bytes(picture(1))
    (folder / "b.png").write_bytes(b"no image")
    (folder / "table.csv").write_text("image\nb.png\nnone.png\n../pictures/cat/00.png\n\na.png\n")
    for source, place in ((folder, "b.png"), (folder / "b.png", "b.png"), (folder / "table.csv", "table.csv, line 2")):
        with pytest.raises(ValueError, match=f"{place}: .*image"):
            list(predict(trained, source))
    errors = Errors(skip=True)
    assert [p.line for p in predict(trained, folder / "table.csv", errors=errors)] == [6]
    assert errors.count == 4
    assert "none.png" in errors.shown[1]
    assert "../pictures/cat/00.png" in errors.shown[2]
    with pytest.raises(ValueError, match=r"nothing to predict: all 1 .*b\.png"):
        list(predict(trained, folder / "b.png", errors=Errors(skip=True)))


def test_items_are_encoded_as_their_task_does(make_run, tmp_path):
    digits = load(make_run("digits", "permuteformer-image"))
    items = digits.task.items("test")[:12]
    (tmp_path / "digits").mkdir()
    for n, item in enumerate(items):
        Image.frombytes("L", (8, 8), item["value"]).save(tmp_path / "digits" / f"{n:02}.png")
    assert_close(predict(digits, tmp_path / "digits", batch_size=5), of_batch(digits, items))

    listops(tmp_path, [("( ( [MAX 1 ) 2 ) ]", "2"), ("[MIN 3 4 ]", "3")] * 3)
    expressions = load(make_run("lra-listops", "permuteformer-text", {"data": str(tmp_path)}))
    path = tmp_path / "listops-1000" / "basic_test.tsv"
    assert_close(itertools.islice(predict(expressions, path), 2), of_batch(expressions, expressions.task.items("test")[:2]))
    (tmp_path / "new.txt").write_text("[MAX 1 2 ]\n[SUM 1 2 ]\n( )\n")
    errors = Errors(skip=True)
    assert [p.line for p in predict(expressions, tmp_path / "new.txt", errors=errors)] == [1]
    assert "'[SUM'" in errors.shown[0]
    assert "empty" in errors.shown[1]

    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("".join(f"{n}.0\t1\t2\tb'caf\\xc3\\xa9'\tplain\n" for n in (0, 1)))
    articles = load(make_run("lra-retrieval", "permuteformer-retrieval", {"data": str(tmp_path), "protocol": "paper"}))
    (tmp_path / "pairs.tsv").write_text("text1\ttext2\nb'caf\\xc3\\xa9'\tplain\n")
    assert_close(predict(articles, tmp_path / "pairs.tsv"), [by_hand(articles, "café", "plain")])


@pytest.mark.parametrize("batch_size", [1, 2])
def test_empty_text_is_one_token(batch_size, make_run, tmp_path):
    acl_imdb(tmp_path)
    trained = load(make_run("lra-text", "permuteformer-text", {"data": str(tmp_path), "protocol": "lra"}))
    (tmp_path / "new.txt").write_text("\nx\n")
    with torch.no_grad():
        expected = [trained.model(torch.tensor([ids])).logits[0].double().softmax(-1).tolist() for ids in ([257], [257, ord("x") + 1])]
    assert_close(predict(trained, tmp_path / "new.txt", batch_size=batch_size), expected)


def test_long_texts_are_cut_as_in_training(trained_text, tmp_path):
    predictions = list(predict(trained_text, table(tmp_path / "new.csv", ["a" * 62, "a" * 63, "a" * 100_000])))
    assert_close(predictions, [by_hand(trained_text, "a" * 62)] * 3)
    assert [p.cut for p in predictions] == [False, True, True]


def test_column_of_training_comes_before_a_guess(make_run, tmp_path, trained_text):
    named, path = tmp_path / "named.csv", tmp_path / "new.csv"
    write(named, ROWS)
    named.write_text(named.read_text().replace("text,label", "opinion,label"))
    trained = load(make_run("classify", "permuteformer-text", {"path": str(named), "text": "opinion"}))
    path.write_text("text,opinion,id,Body\nfirst,second,7,third\n")
    for model, columns, text, id in (
        (trained, {}, "second", "7"),
        (trained, {"text": "Body", "id": "Body"}, "third", "third"),
        (trained_text, {}, "first", "7"),
    ):
        (prediction,) = predict(model, path, columns=columns)
        assert_close([prediction], [by_hand(model, text)])
        assert prediction.id == id
    path.write_text("Body,other\nthird,fourth\n")
    (prediction,) = predict(trained, path)
    assert_close([prediction], [by_hand(trained, "third")])
    assert prediction.id is None


@pytest.mark.parametrize(
    ("run_folder", "words", "message"),
    [
        ("text_run", ["new.csv"], r"new\.csv.*text.*'one', 'two'.*--text NAME"),
        ("text_run", ["new.csv", "--text", "three"], r"text: .*new\.csv.*'three'"),
        ("text_run", ["new.csv", "--image", "one"], "'image'.*the model reads texts"),
        ("text_run", ["new.txt", "--text", "one"], r"columns.*new\.txt"),
        ("text_run", ["-", "--text", "one"], "standard input.*no columns"),
        ("text_run", ["missing.csv"], r"file not found: missing\.csv"),
        ("text_run", ["folder.csv"], "folder.csv cannot be read; the model reads texts"),
        ("text_run", ["new.docx"], r"new\.docx cannot be read; the model reads texts"),
        ("text_run", ["new.csv", "--output", "new.csv"], "output.*new.csv"),
        ("text_run", ["new.csv", "--output", "out.xlsx"], r"\.csv or \.jsonl.*out.xlsx"),
        ("text_run", ["new.csv", "--text", "one", "--output", "missing/out.csv"], "folder not found: missing"),
        ("text_run", ["new.csv", "--text", "one", "--output", "folder.csv"], "folder.csv is a folder"),
        ("pair_run", ["-"], "standard input.*pairs of texts"),
        ("pair_run", ["new.txt"], r"new\.txt.*pairs of texts"),
        ("image_run", ["-"], "standard input.*the model reads images"),
        ("image_run", ["new.txt"], r"new\.txt.*the model reads images"),
        ("bytes_run", ["-"], "language model.*permuteformer generate"),
    ],
)
def test_source_or_output_that_does_not_fit_is_refused_in_one_line(run_folder, words, message, request, tmp_path, monkeypatch):
    folder = request.getfixturevalue(run_folder)
    monkeypatch.chdir(tmp_path)
    for name in ("new.csv", "new.txt", "new.docx"):
        (tmp_path / name).write_text("one,two\na,b\n")
    (tmp_path / "folder.csv").mkdir()
    assert re.search(message, refused("predict", folder, *words))
    assert (tmp_path / "new.csv").read_text() == "one,two\na,b\n"


@pytest.mark.parametrize("batch_size", [0, -1, True, 2.5])
def test_batch_size_must_be_a_positive_integer(batch_size, trained_text):
    with pytest.raises((ValueError, TypeError), match=f"batch_size.*{batch_size}"):
        predict(trained_text, "-", batch_size=batch_size)


@pytest.mark.parametrize(
    ("name", "content", "message", "kept"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n{"text": "b"}\n', r"a\.jsonl, line 2: .*'text'.*int", [1, 3]),
        ("a.csv", b"text,n\na,1\nb\nc,3\n", r"a\.csv, line 3: .*2", [2, 4]),
        ("-", b"good\n\xff\xfe\nlast", "standard input, line 2: .*UTF-8", [1, 3]),
        ("-", b"short\n" + b"x" * 195 + b"\nlast", "standard input, line 2: .*100", [1, 3]),
    ],
)
def test_bad_row_is_named_with_its_line_or_skipped(name, content, message, kept, trained_text, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 100)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(predict(trained_text, io.BytesIO(content) if name == "-" else path))
    errors = Errors(skip=True)
    predictions = predict(trained_text, io.BytesIO(content) if name == "-" else path, errors=errors, batch_size=2)
    assert [p.line for p in predictions] == kept
    assert errors.count == 1


@pytest.mark.parametrize(("name", "content"), [("a.csv", ""), ("a.csv", "text\n"), ("a.txt", ""), ("a.jsonl", ""), ("a.tsv", "text\n")])
@pytest.mark.parametrize("skip", [False, True])
def test_source_without_items_is_refused(name, content, skip, trained_text, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}|nothing to predict"):
        list(predict(trained_text, tmp_path / name, errors=Errors(skip=skip)))
    with pytest.raises(ValueError, match="standard input"):
        list(predict(trained_text, io.BytesIO(), errors=Errors(skip=skip)))


def test_output_that_is_not_finite_names_its_row(trained_text, tmp_path):
    with torch.no_grad():
        trained_text.model.model.embed_tokens.weight[3 + ord("#")] = torch.nan
    path = table(tmp_path / "new.csv", ["fine", "fine too", "not # fine"])
    predictions = predict(trained_text, path, batch_size=1)
    assert [next(predictions).line, next(predictions).line] == [2, 3]
    for rest in (predictions, predict(trained_text, path, errors=Errors(skip=True))):
        with pytest.raises(ValueError, match=r"new\.csv, line 4: .*\[nan, nan, nan\]"):
            list(rest)


def test_endless_stream_is_answered_at_once(trained_text):
    class Endless:
        lines = 0

        def readline(self, size):
            self.lines += 1
            return b"line after line\n"

    stream = Endless()
    assert [p.line for p in itertools.islice(predict(trained_text, stream, batch_size=4), 10)] == list(range(1, 11))
    assert stream.lines == 12


def test_memory_does_not_grow_with_the_file(trained_text, tmp_path):
    def peak(rows):
        path = table(tmp_path / f"{rows}.csv", ["x" * 5_000] * rows)
        tracemalloc.start()
        assert sum(1 for _ in predict(trained_text, path, batch_size=64)) == rows
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(100)
    assert peak(3_000) < peak(600) + 1_000_000  # readers hold a megabyte or two of the file; the larger one has 15 MB


def test_command_writes_csv_and_json(text_run, trained_text, tmp_path):
    path, output = tmp_path / "new.csv", tmp_path / "out.csv"
    write(path, [{"text": text, "label": "?"} for text in TEXTS])
    path.write_text(path.read_text().replace("text,label", "text,id").replace('"?"', '"=1+1"'))
    predictions = list(predict(trained_text, path))
    shown = run("predict", text_run, path)
    rows = list(csv.DictReader(io.StringIO(shown.stdout)))
    assert list(rows[0]) == ["line", "id", "label", "probability", "p_bad", "p_good", "p_ugly"]
    assert [(int(row["line"]), row["id"], row["label"]) for row in rows] == [(p.line, "'=1+1", p.label) for p in predictions]
    assert [float(row["p_good"]) for row in rows] == pytest.approx([p.probabilities[1] for p in predictions], rel=1e-4)
    assert f"predicted: {len(TEXTS)}" in shown.stderr
    assert run("predict", text_run, path, "--output", output, "--batch-size", 3).stdout == ""
    assert [row["label"] for row in csv.DictReader(io.StringIO(output.read_text()))] == [p.label for p in predictions]
    run("predict", text_run, path, "--output", tmp_path / "out.jsonl")
    objects = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(entry["id"], entry["label"]) for entry in objects] == [("=1+1", p.label) for p in predictions]
    assert objects[0]["probabilities"] == pytest.approx(dict(zip(trained_text.labels, predictions[0].probabilities, strict=True)), rel=1e-4)
    rows = list(csv.DictReader(io.StringIO(run("predict", text_run, "-", stdin=b"one\ntwo\n").stdout)))
    assert [float(row["probability"]) for row in rows] == pytest.approx([max(by_hand(trained_text, t)) for t in ("one", "two")], rel=1e-4)


def test_output_of_the_command_is_complete_or_unchanged(text_run, tmp_path):
    path, output = tmp_path / "new.csv", tmp_path / "out.csv"
    path.write_text("text,n\n" + "a,1\n" * 50 + "b\n" + "c" * 100 + ",2\n")
    output.write_text("from before")
    command = ["predict", text_run, path, "--output", output]
    assert "new.csv, line 52" in run(*command, "--batch-size", 4, code=1)
    assert output.read_text() == "from before"
    notes = run(*command, "--skip-bad").stderr
    assert len(output.read_text().splitlines()) == 52
    assert "1 could not be read" in notes
    assert "new.csv, line 52" in notes
    assert "1 were longer than 64 tokens" in notes
    assert not list(tmp_path.glob(".*partial"))


def test_terminal_interprets_no_data_and_a_pipe_gets_it_unchanged(text_run, tmp_path):
    path = tmp_path / "new.csv"
    path.write_text('text,id\na,"\x1b]0;title\x07é"\n')
    shown, _ = terminal_output("predict", text_run, path)
    assert b"\x1b" not in shown
    assert b"\\x1b]0;title\\x07\xc3\xa9" in shown
    assert "\x1b]0;title\x07é" in run("predict", text_run, path).stdout


def test_command_ends_quietly_if_its_reader_ends(text_run, tmp_path):
    path, pipe = table(tmp_path / "new.csv", ["text"] * 3_000), tmp_path / "pipe"
    os.mkfifo(pipe)
    command = Command("predict", text_run, path, "--batch-size", 8, before=partial(redirect, path=pipe))
    with pipe.open() as reader:
        assert reader.readline().startswith("line,")
    assert command.end(1) == ""
