"""permuteformer explain: for every kind of model, in the terminal and as files, and what it says where something is wrong."""

import json

import pytest
import torch
from small_data import picture
from typer.testing import CliRunner

from permuteformer.cli import app
from permuteformer.models import PermuteFormerConfig, PermuteFormerForSequenceClassification
from permuteformer.train.explain import WORK, characters, explain, in_words, rank_correlation
from permuteformer.train.saved import load, load_any
from permuteformer.train.unlabelled import item_of_image, item_of_split, item_of_texts


def run(*words, code=0, columns="80"):
    result = CliRunner().invoke(app, ["explain", *map(str, words)], env={"COLUMNS": columns})
    assert result.exit_code == code, result.output + repr(result.exception)
    assert "Traceback" not in result.output
    return result.output


def check(found):
    """It adds up, every token is in one span, and what was blanked out is told."""
    spans = [span for part in found.parts for span in part.spans]
    values = [value for part in found.parts for value in part.values]
    difference = found.log_odds - found.without
    assert sum(values) == pytest.approx(difference, abs=found.missing + 1e-6)
    assert sum(span.value for span in spans) == pytest.approx(sum(values), abs=1e-9)
    for part in found.parts:
        assert sorted(n for span in part.spans for n in span.places) == list(range(len(part.tokens)))
    assert any(span.measured is not None for span in spans)
    assert json.loads(json.dumps(found.to_json()))["answer"] == found.answer
    assert f"{found.missing:.3f}" in in_words(found)


def test_a_text(trained_text):
    steps = []
    text = "Größe 7,\n good \x1b[31m film"
    found = explain(trained_text, item_of_texts(trained_text, [text]), progress=steps.append)
    check(found)
    assert "".join(found.parts[0].tokens) == text
    assert found.answer == max(found.answers, key=found.answers.get)
    assert sum(found.answers.values()) == pytest.approx(1)
    assert 0 < sum(steps) <= WORK
    other = next(label for label in trained_text.labels if label != found.answer)
    assert explain(trained_text, item_of_texts(trained_text, [text]), answer=other).probability == pytest.approx(found.answers[other])
    with pytest.raises(ValueError, match=r"unknown answer 'goood'.*did you mean 'good'"):
        explain(trained_text, item_of_texts(trained_text, [text]), answer="goood")
    with pytest.raises(ValueError, match="nothing to explain"):
        explain(trained_text, item_of_texts(trained_text, [""]))


def test_a_long_text_is_cut_as_in_training(trained_text):
    found = explain(trained_text, item_of_texts(trained_text, ["word " * 100]))
    check(found)
    assert found.cut
    assert "was cut" in in_words(found)


def test_bytes_that_are_no_characters():
    assert list(characters(b"a\xe2\x82\xac\xe2\x82")) == [("a", 1), ("€", 3), ("\\xe2", 1), ("\\x82", 1)]
    assert list(characters(b"\xf0\x9f\x98\x80\xc0\xaf")) == [("😀", 4), ("\\xc0", 1), ("\\xaf", 1)]


def test_ranks():
    assert rank_correlation([3, 1, 2], [30, 10, 20]) == 1
    assert rank_correlation([3, 1, 2], [-3, -1, -2]) == -1
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == 1
    assert rank_correlation([1, 2], [4, 4]) is None


def test_a_pair(pair_run):
    trained = load(pair_run)
    found = explain(trained, item_of_texts(trained, ["first text", "second one"]))
    check(found)
    assert [part.name for part in found.parts] == ["first", "second"]
    assert all(any(part.values) for part in found.parts)


def test_an_image(image_run, tmp_path):
    trained = load(image_run)
    found = explain(trained, item_of_image(trained, picture(90)))
    assert found.grid == (6, 6)
    assert set(found.parts[0].values) == {0.0}  # it is all of one shade: there is nothing to tell
    found = explain(trained, item_of_split(trained, "test", 0))
    check(found)


def test_language_models(bytes_run, words_run):
    trained = load(bytes_run)
    found = explain(trained, "The cat sat on the ma")
    check(found)
    assert "".join(found.parts[0].tokens) == "The cat sat on the ma"
    assert explain(trained, "The cat", answer="x").answer == "x"
    assert isinstance(item_of_split(trained, "test", 0), str)
    trained = load(words_run)
    found = explain(trained, "the cat slept\nxyzzy")
    check(found)
    assert found.parts[0].tokens == ("the", "cat", "slept", "\n", "<unk>")
    assert found.parts[0].values[-1] == 0  # an unknown word is its own blank


def test_the_command_in_a_terminal_of_80_columns(text_run):
    text = "a \x1b[31mred\x07 film " + "日本 " * 10 + "and so on, " * 3
    said = run(text_run, "--text", text)
    assert "\x1b" not in said
    assert "\x07" not in said
    assert r"\x1b" in said
    assert "add up to the difference" in said
    marked = said[said.index("text: #") :].splitlines()
    assert all(len(line) <= 80 for line in marked)
    assert any(set(line.strip()) <= set("#+-= ") and line.strip() for line in marked)
    assert "blanked out" in said


def test_files(text_run, image_run, tmp_path):
    for name in ("page.html", "picture.png", "numbers.json"):
        run(text_run, "--text", "a <script>1</script> film", "--output", tmp_path / name)
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;1&lt;/script&gt;" in page
    assert "default-src 'none'" in page
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "numbers.json").read_text())["unit"] == "bytes"
    said = run(image_run, "--item", 3, "--split", "validation", "--output", tmp_path / "image.png")
    assert "+------------+" in said
    assert (tmp_path / "image.png").stat().st_size > 5_000


def test_a_file_and_an_image(text_run, image_run, tmp_path):
    (tmp_path / "text.txt").write_text("a film\r\nof two lines")
    assert "↵" in run(text_run, "--file", tmp_path / "text.txt")
    (tmp_path / "cat.png").write_bytes(picture(200))
    assert "pixels are blank" in run(image_run, "--image", tmp_path / "cat.png")


def test_a_model_by_itself(tmp_path, text_run):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = PermuteFormerConfig.preset("permuteformer-text", **sizes, vocab_size=259, num_labels=3)
    PermuteFormerForSequenceClassification(config).save_pretrained(tmp_path / "one")
    assert "LABEL_" in run(tmp_path / "one", "--text", "some text")
    assert load_any(text_run / "model").folder == text_run
    config.vocab_size = 100
    PermuteFormerForSequenceClassification(config).save_pretrained(tmp_path / "other")
    assert "by itself a model must read bytes" in run(tmp_path / "other", "--text", "x", code=1)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "'BertModel'" in run(tmp_path, "--text", "x", code=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "none was given"),
        (["--text", "a", "--item", "1"], "--text and --item were given"),
        (["--text", "a", "--text", "b"], "the model reads one text; 2 were given"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["--image", "nowhere.png"], "there is no image"),
        (["--text", "a", "--output", "x.pdf"], "output must end in .html, .png, .json"),
        (["--text", "a", "--output", "nowhere/x.png"], "there is no folder nowhere"),
        (["--text", "a", "--answer", "none"], "unknown answer 'none'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(text_run, words, message):
    assert message in run(text_run, *words, code=1, columns="300")
