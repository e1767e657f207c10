"""Explanations of every kind of model: contributions add up, in the terminal and in files."""

import io
import json

import pytest
from commands import refused, run
from PIL import Image
from small_data import picture

from permuteformer.models import PermuteFormerConfig, PermuteFormerForSequenceClassification
from permuteformer.train.explain import WORK, explain, summary
from permuteformer.train.predict import new_item
from permuteformer.train.trained_model import load


def explained(trained, item, **options):
    """Return an explanation, after checking that it adds up and that every token is in one span."""
    found = explain(trained, item if isinstance(item, str) else new_item(trained, item), **options)
    spans = [span for part in found.parts for span in part.spans]
    values = [value for part in found.parts for value in part.values]
    assert sum(values) == pytest.approx(found.log_odds - found.without, abs=found.missing + 1e-6)
    assert sum(span.value for span in spans) == pytest.approx(sum(values), abs=1e-9)
    for part in found.parts:
        assert sorted(n for span in part.spans for n in span.places) == list(range(len(part.tokens)))
    assert any(span.measured is not None for span in spans)
    assert json.loads(json.dumps(found.to_json()))["answer"] == found.answer
    assert f"{found.missing:.3f}" in summary(found)
    return found


def test_text(trained_text):
    steps, text = [], "Größe 7,\n good \x1b[31m film"
    found = explained(trained_text, [text], progress=steps.append)
    assert "".join(found.parts[0].tokens) == text
    assert found.answer == max(found.answers, key=found.answers.get)
    assert sum(found.answers.values()) == pytest.approx(1)
    assert 0 < sum(steps) <= WORK
    other = next(label for label in trained_text.labels if label != found.answer)
    assert explained(trained_text, [text], answer=other).probability == pytest.approx(found.answers[other])
    with pytest.raises(ValueError, match="'goood'.*'good'"):
        explain(trained_text, new_item(trained_text, [text]), answer="goood")
    with pytest.raises(ValueError, match="empty"):
        explain(trained_text, new_item(trained_text, [""]))


def test_long_text_is_cut_as_in_training(trained_text):
    found = explained(trained_text, ["word " * 100])
    assert found.cut
    assert "was cut" in summary(found)


def test_pair(pair_run):
    found = explained(load(pair_run), ["first text", "second one"])
    assert [part.name for part in found.parts] == ["text", "second_text"]
    assert all(any(part.values) for part in found.parts)


def test_image(image_run):
    trained = load(image_run)
    found = explain(trained, new_item(trained, [picture(90)]))
    assert found.grid == (6, 6)
    assert set(found.parts[0].values) == {0.0}, "an image of one shade is its own blank"
    file = io.BytesIO()
    Image.frombytes("L", (6, 6), bytes(range(0, 252, 7))).save(file, "PNG")
    explained(trained, [file.getvalue()])


def test_language_models(bytes_run, words_run):
    trained, prompt = load(bytes_run), "The cat sat on the ma"
    assert "".join(explained(trained, prompt).parts[0].tokens) == prompt
    assert explained(trained, "The cat", answer="x").answer == "x"
    found = explained(load(words_run), "the cat slept\nxyzzy")
    assert found.parts[0].tokens == ("the", "cat", "slept", "\n", "<unk>")
    assert found.parts[0].values[-1] == 0, "an unknown word is its own blank"


def test_command_fits_a_terminal_of_80_columns(text_run):
    shown = run("explain", text_run, "--text", "a \x1b[31mred\x07 film " + "日本 " * 10 + "and so on, " * 3, columns=80)
    assert not {"\x1b", "\x07"} & set(shown)
    assert r"\x1b" in shown
    assert "add up to the difference" in shown
    marked = shown[shown.index("text: #") :].splitlines()
    assert all(len(line) <= 80 for line in marked)
    assert any(set(line.strip()) <= set("#+-= ") and line.strip() for line in marked)


def test_command_writes_files(text_run, image_run, tmp_path):
    for name in ("page.html", "picture.png", "numbers.json"):
        run("explain", text_run, "--text", "a <script>1</script> film", "--output", tmp_path / name)
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;1&lt;/script&gt;" in page
    assert "default-src 'none'" in page
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "numbers.json").read_text())["unit"] == "bytes"
    shown = run("explain", image_run, "--item", 3, "--split", "validation", "--output", tmp_path / "image.png", columns=80)
    assert "+------------+" in shown
    assert (tmp_path / "image.png").stat().st_size > 5_000


def test_command_reads_files_and_items(text_run, image_run, bytes_run, pair_run, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"a film\r\nof two lines")
    (tmp_path / "cat.png").write_bytes(picture(200))
    assert "↵" in run("explain", text_run, "--file", tmp_path / "text.txt")
    assert "pixels" in run("explain", image_run, "--image", tmp_path / "cat.png")
    assert "next byte" in run("explain", bytes_run, "--item", 0)
    assert "second_text: #" in run("explain", pair_run, "--text", "one text", "--second-text", "another")


def test_model_without_a_run_folder_must_read_bytes(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for vocab_size in (259, 100):
        config = PermuteFormerConfig.preset("permuteformer-text", **sizes, vocab_size=vocab_size, num_labels=3)
        PermuteFormerForSequenceClassification(config).save_pretrained(tmp_path / str(vocab_size))
    assert "LABEL_" in run("explain", tmp_path / "259", "--text", "some text")
    assert "must read bytes" in run("explain", tmp_path / "100", "--text", "x", code=1)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "'BertModel'" in run("explain", tmp_path, "--text", "x", code=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got none"),
        (["--text", "a", "--item", "1"], "got --text and --item"),
        (["--text", "a", "--second-text", "b"], "1 texts per item, got 2"),
        (["--file", "nowhere.txt"], "file not found: nowhere.txt"),
        (["--image", "nowhere.png"], "file not found: nowhere.png"),
        (["--text", "a", "--output", "x.pdf"], ".html, .png, .json, got 'x.pdf'"),
        (["--text", "a", "--output", "nowhere/x.png"], "folder not found: nowhere"),
        (["--text", "a", "--answer", "zzz"], "'zzz'"),
    ],
)
def test_command_refuses_in_one_line(words, message, text_run):
    assert message in refused("explain", text_run, *words)
