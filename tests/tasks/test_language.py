"""Language modelling: windows, units, metrics, and the files that text is read from."""

import gzip
import lzma
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_data import SHARED
from task_checks import batches_of

from permuteformer.tasks import SPLITS, NotReady
from permuteformer.tasks.language import WindowItems
from permuteformer.tasks.lm import Lm
from permuteformer.tasks.lm_bytes import LmBytes
from permuteformer.tasks.wikitext import WikiText2, WikiText103
from permuteformer.tokens import EOS, PAPER

TRAIN = " = Cat = \n \n the cat sat on the mat . \n the cat <unk> \n"


def wiki(folder, name, **texts):
    (folder / name).mkdir()
    for split, text in texts.items():
        (folder / name / f"wiki.{split}.tokens").write_text(text)


def stored(task, split):
    """Return the stored tokens of a split: words, or the text of bytes."""
    tokens = task.rows(split).column("token")
    return [task.input.tokenizer.words[n] for n in tokens] if task.unit == "words" else tokens.tobytes()


def sums_of(task, split, size, logits):
    sums = {}
    for batch in batches_of(task, split, size):
        for name, value in task.input.score(logits(batch), batch).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


class Tokens:
    """Stored tokens without a file."""

    def __init__(self, tokens):
        self.tokens = np.array(tokens, dtype=np.uint8)

    def __len__(self):
        return len(self.tokens)

    def column(self, name, start, stop):
        return self.tokens[start:stop]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=60), st.integers(1, 12), st.data())
def test_every_token_is_scored_once_after_its_context(tokens, length, data):
    context = data.draw(st.integers(0, length - 1))
    windows = WindowItems(Tokens(tokens), length, context)
    scored = []
    for n, window in enumerate(windows):
        first, targets = window["first_scored"], window["targets"].tolist()
        begin = len(scored) - first
        assert targets == tokens[begin : begin + len(targets)]
        assert window["before"] == (tokens[begin - 1] if begin else None)
        assert first == min(context, len(scored)), "the context is as long as there is text"
        assert len(targets) == windows.lengths()[n] <= length
        scored += targets[first:]
    assert scored == tokens


def test_words_of_wikitext(tmp_path):
    wiki(tmp_path, "wikitext-103", train=TRAIN, valid=" the dog sat \n", test=" \n the mat\n")
    task = WikiText103(length=4, context=2, data=str(tmp_path))
    words = task.input.tokenizer.words
    assert words[:5] == ["<pad>", "<unk>", "</s>", "the", "="], "by frequency, then in the order of the text"
    assert len(words) % 8 == 0
    assert stored(task, "test") == [EOS, "the", "mat", EOS]
    assert stored(task, "validation") == ["the", "<unk>", "sat", EOS]
    (batch,) = batches_of(task, "test", 2)
    assert [[words[n] for n in row] for row in batch.input_ids.tolist()] == [[EOS, EOS, "<pad>", "<pad>"], [EOS, EOS, "the", "mat"]]
    assert batch.mask.tolist() == [[True, True, False, False], [True] * 4]
    labels = [[words[n] if n >= 0 else "" for n in row] for row in batch.labels.tolist()]
    assert labels == [[EOS, "the", "", ""], ["", "", "mat", EOS]]
    assert {window["first_scored"] for window in task.items("train")} == {0}


@pytest.mark.parametrize("unit", ["words", "bytes"])
def test_metrics_of_equally_likely_tokens(tmp_path, unit):
    text = " = A cat = \n \n über the mat \n"
    wiki(tmp_path, "wikitext-103", train=text, test=text)
    task = WikiText103(unit=unit, length=6, context=3, data=str(tmp_path))
    size, text_bytes = task.input.vocab_size, len(text.encode())
    sums = sums_of(task, "test", 3, lambda batch: torch.zeros(*batch.input_ids.shape, size))
    words = sum(len(line.split()) + 1 for line in text.split("\n")[:-1])
    tokens = words if unit == "words" else text_bytes + 1  # and the end of the document
    assert (sums["words"], sums["tokens"]) == (words, tokens)
    assert task.input.summarize(sums, "test") == pytest.approx(
        {
            "perplexity": size,
            "loss": math.log(size),
            "bits_per_byte": math.log2(size) * tokens / text_bytes,
            "word_perplexity": size ** (tokens / words),
        }
    )


def test_documents_of_bytes_start_with_cls_and_end_with_sep(tmp_path):
    for name, text in {"a.train.txt": "ab", "b.train.txt": "c\n", "c.test.txt": "x\n"}.items():
        (tmp_path / name).write_text(text)
    (batch,) = batches_of(Lm(str(tmp_path), length=16, context=0), "train", 1)
    a, c = ([PAPER.first + byte for byte in text] for text in (b"ab\n", b"c\n"))
    assert batch.labels.tolist() == [[*a, PAPER.sep, *c, PAPER.sep]]
    assert batch.input_ids.tolist() == [[PAPER.cls, *a, PAPER.cls, *c]]


def test_one_text_is_cut_in_its_order(tmp_path):
    lines = [f"line {n:03}" for n in range(100)]
    (tmp_path / "log.txt.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    task = Lm(str(tmp_path / "log.txt.xz"))
    parts = [stored(task, split).rstrip(b"\xff").decode().split("\n")[:-1] for split in SPLITS]
    assert [line for part in parts for line in part] == lines
    assert [len(part) for part in parts] == [90, 5, 5]
    (tmp_path / "a.txt").write_text("x" * 100_000)
    with pytest.raises(ValueError, match=r"a\.txt has too few lines"):
        Lm(str(tmp_path / "a.txt")).prepare()


def test_a_folder_of_text_files(tmp_path):
    (tmp_path / "sub").mkdir()
    for n in range(40):
        (tmp_path / "sub" / f"{n:02}.txt").write_text(f"text number {n}\n" * 5)
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "link.txt").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"link\.txt.* outside"):
        Lm(str(tmp_path), pattern="*.txt").prepare()
    skipping = Lm(str(tmp_path), skip_bad=True)
    assert [error.split(": ")[0] for error in skipping.store.info["errors"]["shown"]] == [
        str(tmp_path / "link.txt"),
        f"{tmp_path / 'image.bin'}, line 1",
    ]
    assert "2 items were skipped" in skipping.notes()[0]
    (tmp_path / "link.txt").unlink()
    words = Lm(str(tmp_path), pattern="*.txt", unit="words").input.tokenizer.words
    assert {"text", "number", "0", "35"} < set(words)
    assert "39" not in words, "the vocabulary is that of the train split"
    with pytest.raises(NotReady, match=r"'\*\.md'"):
        Lm(str(tmp_path), pattern="*.md").prepare()
    (tmp_path / "sub" / "a.train.txt").write_text("x\n")
    with pytest.raises(ValueError, match=r"00\.txt.* has none"):
        Lm(str(tmp_path), pattern="*.txt").prepare()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(NotReady, match=r"wikitext-103 in .*\n(.*\n)*.*data fetch wikitext-103"):
        WikiText103(data=str(tmp_path)).items("train")
    wiki(tmp_path, "wikitext-103", train=TRAIN)
    with pytest.raises(ValueError, match="no test split"):
        WikiText103(data=str(tmp_path)).items("test")
    wiki(tmp_path, "wikitext-2", test=TRAIN)
    with pytest.raises(NotReady, match=r"wiki\.train\.tokens .*unit='bytes'"):
        WikiText2(data=str(tmp_path)).prepare()
    assert len(stored(WikiText2(unit="bytes", data=str(tmp_path)), "test")) == len(TRAIN) + 1


def test_raw_and_compressed_files(tmp_path):
    (tmp_path / "wikitext-2-raw").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "wikitext-2-raw" / f"wiki.{split}.raw.gz").write_bytes(gzip.compress(TRAIN.encode()))
    with pytest.raises(NotReady, match="wikitext-2"):
        WikiText2(data=str(tmp_path)).prepare()
    words = WikiText2(raw=True, min_frequency=2, data=str(tmp_path)).input.tokenizer.words
    assert words[3:6] == ["the", "=", "cat"]
    assert "mat" not in words


def test_padding_is_no_word_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("the <pad> word\n" * 100)
    words = Lm(str(tmp_path / "a.txt"), unit="words").input.tokenizer.words
    assert words[0] == "<pad1>"
    assert "<pad>" in words


def test_the_text_of_python():
    task = LmBytes(corpus="topics", length=64, context=32)
    texts = {split: stored(task, split) for split in SPLITS}
    assert 150_000 < len(texts["train"]) < 700_000
    assert min(map(len, texts.values())) > 5_000
    assert b"statement" in texts["train"]
    assert "Python" in task.notes()[0]
    # The test split repeats short lines of the train split only.
    training = set(texts["train"].split(b"\n"))
    lines = [line for line in texts["test"].split(b"\n") if len(line) >= 30]
    assert sum(len(line) for line in lines if line in training) < 0.03 * sum(map(len, lines))


@pytest.mark.skipif(not (SHARED / "wikitext-2").exists(), reason="needs the shared data")
def test_the_published_counts_of_wikitext_2():
    task = WikiText2(unit="bytes", data=str(SHARED))
    sums = sums_of(task, "test", 64, lambda batch: torch.zeros(*batch.input_ids.shape, task.input.vocab_size))
    assert sums["words"] == 245_569, "with </s> of every line"
    assert task.store.info["bytes"]["test"] == 1_256_449
