"""Labels for new items: what the model says, whatever way the items come."""

import csv
import io
import itertools
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from small_data import ROWS, acl_imdb, listops, picture, write
from typer.testing import CliRunner

from permuteformer.cli import use
from permuteformer.tasks.readers import lines as reader
from permuteformer.tasks.readers.images import gray_image
from permuteformer.tasks.readers.problems import Problems
from permuteformer.train.predict import predict
from permuteformer.train.saved import load

TEXTS = [row["text"] for row in ROWS[:13]] + ["x", "much longer than the others, but not too long", "ÿ€😀"]


@torch.no_grad()
def by_hand(trained, *texts):
    """The probabilities of one item by itself, without padding and without our batches."""
    ids = [torch.tensor([[1, *(byte + 3 for byte in text.encode()[: trained.input.max_length - 2]), 2]]) for text in texts]
    return trained.model(*ids).logits[0].double().softmax(-1).tolist()


def close(predictions, expected):
    assert len(predictions) == len(expected)
    for prediction, probabilities in zip(predictions, expected, strict=True):
        assert prediction.probabilities == pytest.approx(probabilities, abs=1e-5)


def table(path, texts=TEXTS, column="text"):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([[column], *([text] for text in texts)])
    return path


@pytest.mark.parametrize("batch_size", [1, 3, 16, 1000])
def test_predictions_are_the_model_s_own_in_their_order(trained_text, tmp_path, batch_size):
    expected = [by_hand(trained_text, text) for text in TEXTS]
    predictions = list(predict(trained_text, table(tmp_path / "new.csv"), batch_size=batch_size))
    close(predictions, expected)
    for prediction, probabilities in zip(predictions, expected, strict=True):
        assert prediction.label == trained_text.labels[int(np.argmax(probabilities))]
        assert prediction.probability == max(prediction.probabilities)
        assert sum(prediction.probabilities) == pytest.approx(1)
    assert len({round(p.probabilities[0], 4) for p in predictions}) == len(TEXTS), "different texts have different answers"
    assert [p.line for p in predictions] == list(range(2, len(TEXTS) + 2))


def test_every_kind_of_file_gives_the_same(trained_text, tmp_path):
    texts = [text for text in TEXTS if '"' not in text]
    expected = [by_hand(trained_text, text) for text in texts]
    rows = [{"text": text, "label": "?"} for text in texts]
    for name in ("a.csv", "a.tsv", "a.jsonl.gz", "a.parquet"):
        close(list(predict(trained_text, write(tmp_path / name, rows))), expected)
    (tmp_path / "a.txt").write_text("\n".join(texts))
    close(list(predict(trained_text, tmp_path / "a.txt")), expected)
    close(list(predict(trained_text, io.BytesIO(("\ufeff" + "\r\n".join(texts) + "\r\n").encode()))), expected)


def test_pairs(pair_run, tmp_path):
    trained = load(pair_run)
    pairs = [("one text", "another, longer"), ("", "b"), ("c", ""), ("same", "same")]
    path = tmp_path / "new.csv"
    path.write_text("\n".join(["other,one,text1,text2", *(f'"{second}","{first}",1,2' for first, second in pairs)]))
    close(list(predict(trained, path, batch_size=3)), [by_hand(trained, *pair) for pair in pairs])
    swapped = list(predict(trained, path, columns={"first": "other", "second": "one"}))
    close(swapped, [by_hand(trained, *reversed(pair)) for pair in pairs])
    with pytest.raises(ValueError, match="standard input has lines of texts and no columns; the model reads pairs of texts"):
        predict(trained, "-")
    (tmp_path / "new.txt").write_text("one")
    with pytest.raises(ValueError, match=r"new\.txt cannot be read; the model reads pairs of texts: give a table"):
        predict(trained, tmp_path / "new.txt")


def test_digits_are_what_the_task_makes_of_them(make_run, tmp_path):
    trained = load(make_run("digits", "permuteformer-image"))
    items = [trained.task.dataset("test")[n] for n in range(12)]
    for n, item in enumerate(items):
        Image.fromarray(np.frombuffer(item["value"], dtype=np.uint8).reshape(8, 8)).save(tmp_path / f"{n:02}.png")
    batch = trained.task.collate(items)
    with torch.no_grad():
        logits = trained.model(batch.input_ids, batch.key_mask, batch.positions).logits
    predictions = list(predict(trained, tmp_path, batch_size=5))
    close(predictions, logits.double().softmax(-1).tolist())
    assert [p.id for p in predictions[:2]] == ["00.png", "01.png"]
    assert predictions[0].line is None


def test_images_come_from_folders_archives_files_and_tables(image_run, tmp_path):
    trained = load(image_run)
    folder = tmp_path / "new"
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
    ids, _, positions = trained.input.encode(pixels)
    with torch.no_grad():
        expected = trained.model(ids, position_ids=positions).logits.double().softmax(-1).tolist()
    for source in (folder, tmp_path / "new.zip", folder / "table.csv"):
        close(list(predict(trained, source, batch_size=2)), expected)
    close(list(predict(trained, folder / "a.png")), expected[:1])
    assert [p.id for p in predict(trained, folder)] == list(shades)
    assert [(p.line, p.id) for p in predict(trained, folder / "table.csv")] == [(2, "10"), (3, "100"), (4, "250")]
    with pytest.raises(ValueError, match=r"notes\.txt cannot be read; the model reads images"):
        predict(trained, folder / "notes.txt")
    with pytest.raises(ValueError, match="the model reads images"):
        predict(trained, "-")


def test_bad_images(image_run, tmp_path):
    trained = load(image_run)
    folder = tmp_path / "new"
    folder.mkdir()
    with pytest.raises(ValueError, match="there is nothing to predict"):
        list(predict(trained, folder))
    (folder / "a.png").write_bytes(picture(1))
    (folder / "b.png").write_bytes(b"no image")
    (folder / "table.csv").write_text("image\nb.png\nnone.png\n../pictures/cat/00.png\n\na.png\n")
    for source, place in ((folder, "b.png"), (folder / "b.png", "b.png"), (folder / "table.csv", "table.csv, line 2")):
        with pytest.raises(ValueError, match=f"{place}: this is no image"):
            list(predict(trained, source))
    problems = Problems(skip=True)
    assert [p.line for p in predict(trained, folder / "table.csv", problems=problems)] == [6]
    assert problems.count == 4
    assert "there is no image 'none.png'" in problems.shown[1]
    assert "leads out of the folder" in problems.shown[2]
    problems = Problems(skip=True)
    with pytest.raises(ValueError, match=r"nothing to predict: all 1 items were bad; the first is .*b\.png"):
        list(predict(trained, folder / "b.png", problems=problems))


def test_listops_and_retrieval_are_read_as_their_tasks_do(make_run, tmp_path):
    listops(tmp_path, [("( ( [MAX 1 ) 2 ) ]", "2"), ("[MIN 3 4 ]", "3")] * 3)
    trained = load(make_run("lra-listops", "permuteformer-text", {"data": str(tmp_path)}))
    batch = trained.task.collate([trained.task.dataset("test")[n] for n in range(2)])
    with torch.no_grad():
        logits = trained.model(batch.input_ids, batch.key_mask).logits
    close(list(predict(trained, tmp_path / "listops-1000" / "basic_test.tsv"))[:2], logits.double().softmax(-1).tolist())
    (tmp_path / "new.txt").write_text("[MAX 1 2 ]\n[SUM 1 2 ]\n( )\n")
    problems = Problems(skip=True)
    assert [p.line for p in predict(trained, tmp_path / "new.txt", problems=problems)] == [1]
    assert "there is '[SUM'" in problems.shown[0]
    assert "there is no expression" in problems.shown[1]

    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("".join(f"{n}.0\t1\t2\tb'caf\\xc3\\xa9'\tplain\n" for n in (0, 1)))
    trained = load(make_run("lra-retrieval", "permuteformer-retrieval", {"data": str(tmp_path), "protocol": "paper"}))
    (tmp_path / "pairs.tsv").write_text("text1\ttext2\nb'caf\\xc3\\xa9'\tplain\n")
    close(list(predict(trained, tmp_path / "pairs.tsv")), [by_hand(trained, "café", "plain")])


def test_a_text_of_nothing_is_one_token(make_run, tmp_path):
    acl_imdb(tmp_path)
    trained = load(make_run("lra-text", "permuteformer-text", {"data": str(tmp_path), "protocol": "lra"}))
    (tmp_path / "new.txt").write_text("\nx\n")
    with torch.no_grad():
        nothing = trained.model(torch.tensor([[257]])).logits[0].double().softmax(-1).tolist()
        letter = trained.model(torch.tensor([[257, ord("x") + 1]])).logits[0].double().softmax(-1).tolist()
    close(list(predict(trained, tmp_path / "new.txt")), [nothing, letter])
    close(list(predict(trained, tmp_path / "new.txt", batch_size=1)), [nothing, letter])


def test_what_is_too_long_is_cut_and_said(trained_text, tmp_path):
    texts = ["a" * 62, "a" * 63, "a" * 100_000]
    predictions = list(predict(trained_text, table(tmp_path / "new.csv", texts)))
    close(predictions, [by_hand(trained_text, "a" * 62)] * 3)
    assert [p.cut for p in predictions] == [False, True, True]


def test_the_column_of_training_comes_first_then_a_guess(make_run, tmp_path, trained_text):
    write(tmp_path / "training.csv", ROWS)
    named = tmp_path / "named.csv"
    named.write_text((tmp_path / "training.csv").read_text().replace("text,label", "opinion,label"))
    trained = load(make_run("classify", "permuteformer-text", {"path": str(named), "text": "opinion"}))
    path = tmp_path / "new.csv"
    path.write_text("text,opinion,id,Body\nfirst,second,7,third\n")
    close(list(predict(trained, path)), [by_hand(trained, "second")])
    close(list(predict(trained, path, columns={"text": "Body"})), [by_hand(trained, "third")])
    close(list(predict(trained_text, path)), [by_hand(trained_text, "first")])
    assert next(predict(trained, path)).id == "7"
    assert next(predict(trained, path, columns={"id": "Body"})).id == "third"
    path.write_text("Body,other\nthird,fourth\n")
    close(list(predict(trained, path)), [by_hand(trained, "third")])
    assert next(predict(trained, path)).id is None


def test_columns_that_are_not_there(trained_text, tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("one,two\na,b\n")
    with pytest.raises(ValueError, match=r"which column of .*new\.csv is the text\? There is 'one', 'two'; say .*--text-column NAME"):
        predict(trained_text, path)
    with pytest.raises(ValueError, match=r"text: unknown column of new\.csv 'three': there is 'one', 'two'"):
        predict(trained_text, path, columns={"text": "three"})
    with pytest.raises(ValueError, match="unknown column 'image': there is 'id', 'text'; the model reads texts"):
        predict(trained_text, path, columns={"image": "one"})
    (tmp_path / "new.txt").write_text("a")
    with pytest.raises(ValueError, match=r"columns are of tables, and .*new\.txt is none"):
        predict(trained_text, tmp_path / "new.txt", columns={"text": "one"})
    with pytest.raises(ValueError, match="standard input has lines of texts and no columns"):
        predict(trained_text, "-", columns={"text": "one"})


@pytest.mark.parametrize("batch_size", [0, -1, True, 2.5])
def test_batch_sizes_that_make_no_sense(trained_text, batch_size):
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on"):
        predict(trained_text, "-", batch_size=batch_size)


def test_bad_rows_are_refused_with_their_line_or_counted(trained_text, tmp_path):
    path = tmp_path / "new.jsonl"
    rows = [json.dumps({"text": f"text {n}"}) for n in range(5)]
    rows[1], rows[3] = '{"text": 5}', "{"
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"new\.jsonl, line 2: column 'text' must be text; it is int"):
        list(predict(trained_text, path))
    problems = Problems(skip=True)
    predictions = list(predict(trained_text, path, problems=problems, batch_size=2))
    close(predictions, [by_hand(trained_text, f"text {n}") for n in (0, 2, 4)])
    assert [p.line for p in predictions] == [1, 3, 5]
    assert problems.count == 2
    (tmp_path / "new.csv").write_text("text,n\na,1\nb\n")
    with pytest.raises(ValueError, match=r"new\.csv, line 3: the number of fields must be 2"):
        list(predict(trained_text, tmp_path / "new.csv"))
    stream = io.BytesIO(b"good\n\xff\xfe\nlast")
    with pytest.raises(ValueError, match=r"standard input, line 2: .*can't decode"):
        list(predict(trained_text, stream))
    stream.seek(0)
    assert [p.line for p in predict(trained_text, stream, problems=Problems(skip=True))] == [1, 3]


def test_lines_without_end_do_not_fill_the_memory(trained_text, monkeypatch):
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 10)
    stream = io.BytesIO(b"short\n" + b"x" * 95 + b"\nten bytes.\nlast")
    problems = Problems(skip=True)
    assert [p.line for p in predict(trained_text, stream, problems=problems)] == [1, 4]
    assert problems.count == 2, "with its end the third line is 11 bytes, and told"


def test_files_with_nothing_in_them(trained_text, tmp_path):
    cases = {"a.csv": b"", "b.csv": b"text\n", "c.txt": b"", "d.jsonl": b"", "e.tsv": b"text\n"}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: .*(empty|no rows)"):
            list(predict(trained_text, tmp_path / name))
    with pytest.raises(ValueError, match="standard input: there are no lines"):
        list(predict(trained_text, io.BytesIO()))
    with pytest.raises(ValueError, match="there is nothing to predict: all 1 items were bad"):
        list(predict(trained_text, io.BytesIO(), problems=Problems(skip=True)))


def test_files_that_are_none(trained_text, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.csv"):
        predict(trained_text, tmp_path / "none.csv")
    with pytest.raises(ValueError, match="cannot be read; the model reads texts: give a table"):
        predict(trained_text, tmp_path)
    (tmp_path / "a.docx").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"a\.docx cannot be read; the model reads texts"):
        predict(trained_text, tmp_path / "a.docx")


def test_a_language_model_has_no_labels(bytes_run):
    with pytest.raises(ValueError, match="is a language model, which has no labels: go on with a text by permuteformer generate"):
        predict(load(bytes_run), "-")


def test_an_answer_that_is_no_number_names_its_row(trained_text, tmp_path):
    with torch.no_grad():
        trained_text.model.model.embed_tokens.weight[3 + ord("#")] = torch.nan
    path = table(tmp_path / "new.csv", ["fine", "fine too", "not # fine"])
    predictions = predict(trained_text, path, batch_size=1)
    assert [next(predictions).line, next(predictions).line] == [2, 3]
    with pytest.raises(ValueError, match=r"new\.csv, line 4: the model's answer is not a number, but \[nan, nan, nan\]"):
        next(predictions)
    with pytest.raises(ValueError, match="line 4: the model's answer"):
        list(predict(trained_text, path, problems=Problems(skip=True)))


def test_a_stream_without_end_is_answered_at_once(trained_text):
    class Endless:
        asked = 0

        def readline(self, size):
            self.asked += 1
            return b"line after line\n"

    stream = Endless()
    assert [p.line for p in itertools.islice(predict(trained_text, stream, batch_size=4), 10)] == list(range(1, 11))
    assert stream.asked == 12


def test_memory_does_not_grow_with_the_file(trained_text, tmp_path):
    def peak(rows):
        path = tmp_path / f"{rows}.csv"
        with path.open("w") as file:
            file.write("text\n")
            file.writelines("x" * 5_000 + "\n" for _ in range(rows))
        tracemalloc.start()
        count = sum(1 for _ in predict(trained_text, path, batch_size=64))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == rows
        return used

    peak(100)
    # Readers hold a megabyte or two of the file; the larger one has 15 MB.
    assert peak(3_000) < peak(600) + 1_000_000


app = typer.Typer()
app.command()(use.predict)
app.command()(use.generate)


def run(*words, code=0, **options):
    result = CliRunner().invoke(app, ["predict", *map(str, words)], env={"COLUMNS": "200"}, **options)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_the_command_writes_csv_and_json(text_run, trained_text, tmp_path):
    path = table(tmp_path / "new.csv")
    predictions = list(predict(trained_text, path))
    result = run(text_run, path)
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert list(rows[0]) == ["line", "id", "label", "probability", "p_bad", "p_good", "p_ugly"]
    assert [row["label"] for row in rows] == [p.label for p in predictions]
    assert [float(row["p_good"]) for row in rows] == pytest.approx([p.probabilities[1] for p in predictions], rel=1e-4)
    assert [int(row["line"]) for row in rows] == [p.line for p in predictions]
    assert f"predicted: {len(TEXTS)}" in result.stderr
    written = run(text_run, path, "--output", tmp_path / "out.csv", "--batch-size", 3)
    assert written.stdout == ""
    assert [row["label"] for row in csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text()))] == [p.label for p in predictions]
    run(text_run, path, "--output", tmp_path / "out.jsonl")
    objects = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [entry["label"] for entry in objects] == [p.label for p in predictions]
    assert objects[0]["probabilities"] == pytest.approx(dict(zip(trained_text.labels, predictions[0].probabilities, strict=True)), rel=1e-4)
    assert not list(tmp_path.glob(".*partial"))


def test_the_command_reads_standard_input(text_run, trained_text):
    result = run(text_run, "-", input="one\ntwo\n")
    expected = [max(by_hand(trained_text, text)) for text in ("one", "two")]
    assert [float(row["probability"]) for row in csv.DictReader(io.StringIO(result.stdout))] == pytest.approx(expected, rel=1e-4)


def test_the_command_says_what_was_left_out_and_cut(text_run, tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("text,n\na,1\nb\n" + "c" * 100 + ",2\n")
    assert "new.csv, line 3: the number of fields" in run(text_run, path, code=1).stderr
    result = run(text_run, path, "--skip-bad")
    assert "left out, as they could not be read: 1; the first are" in result.stderr
    assert "new.csv, line 3" in result.stderr
    assert "longer than 64 tokens: 1" in result.stderr


def test_the_command_s_output_is_whole_or_as_it_was(text_run, tmp_path):
    path, output = tmp_path / "new.csv", tmp_path / "out.csv"
    path.write_text("text,n\n" + "a,1\n" * 50 + "b\n")
    output.write_text("from before")
    run(text_run, path, "--output", output, "--batch-size", 4, code=1)
    assert output.read_text() == "from before"
    assert not list(tmp_path.glob(".*partial"))
    run(text_run, path, "--output", output, "--skip-bad")
    assert len(output.read_text().splitlines()) == 51


def test_the_command_refuses_outputs_in_words(text_run, tmp_path):
    path = table(tmp_path / "new.csv")
    before = path.read_text()
    assert "output must be another file than the one that is read" in run(text_run, path, "--output", path, code=1).stderr
    assert path.read_text() == before
    assert "output must end in .csv or .jsonl" in run(text_run, path, "--output", tmp_path / "out.xlsx", code=1).stderr
    assert "there is no folder" in run(text_run, path, "--output", tmp_path / "none" / "out.csv", code=1).stderr
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in run(text_run, path, "--output", tmp_path / "folder.csv", code=1).stderr
    assert "there is no folder" in run(tmp_path / "no-run", path, code=1).stderr
    assert "there is no file" in run(text_run, tmp_path / "none.csv", code=1).stderr
    assert "unknown column of new.csv 'body'" in run(text_run, path, "--text-column", "body", code=1).stderr


PROGRAM = """
import typer
from permuteformer.cli import use
app = typer.Typer()
app.command()(use.predict)
app.command()(use.generate)
app()
"""


def on_a_terminal(*words):
    """What a terminal gets from the command, as bytes."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how Linux says that the other side has gone
                break
            if not piece:
                break
            shown += piece
        errors = process.stderr.read()
    os.close(ours)
    assert process.returncode == 0, errors
    return shown


def test_a_terminal_is_not_told_what_to_do_by_the_data(text_run, tmp_path):
    path = tmp_path / "new.csv"
    path.write_text('text,id\na,"\x1b]0;title\x07é"\n')
    shown = on_a_terminal("predict", text_run, path)
    assert b"\x1b" not in shown
    assert b"\\x1b]0;title\\x07\xc3\xa9" in shown
    assert "\x1b]0;title\x07é" in run(text_run, path).stdout, "a file or a pipe gets what there is"


def test_a_reader_that_leaves_ends_the_command_quietly(text_run, tmp_path):
    path = table(tmp_path / "new.csv", ["text"] * 3_000)
    command = [sys.executable, "-c", PROGRAM, "predict", str(text_run), str(path), "--batch-size", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"line,")
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 1
    assert errors == b""
