import gzip
import lzma
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_data import SHARED

from permuteformer.tasks.base import NotReady
from permuteformer.tasks.batches import loader
from permuteformer.tasks.language import Windows
from permuteformer.tasks.lm import Lm
from permuteformer.tasks.lm_bytes import LmBytes
from permuteformer.tasks.wikitext import WikiEn, WikiText2, WikiText103
from permuteformer.tokens import EOS, PAPER


class Row:
    """A row of tokens that needs no file."""

    def __init__(self, tokens):
        self.tokens = np.array(tokens, dtype=np.uint8)

    def __len__(self):
        return len(self.tokens)

    def column(self, name, start, stop):
        return self.tokens[start:stop]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=60), st.integers(1, 12), st.data())
def test_every_token_is_scored_once_after_its_context(tokens, length, data):
    context = data.draw(st.integers(0, length - 1))
    windows = Windows(Row(tokens), length, context)
    scored = []
    for n, window in enumerate(windows):
        first, targets = window["first_scored"], window["targets"].tolist()
        begin = len(scored) - first
        assert targets == tokens[begin : begin + len(targets)]
        assert window["before"] == (tokens[begin - 1] if begin else None)
        assert first == min(context, len(scored)), "context is as much as there is"
        assert len(targets) == windows.lengths()[n] <= length
        scored += targets[first:]
    assert scored == tokens


def wiki(folder, name, **texts):
    (folder / name).mkdir()
    for split, text in texts.items():
        (folder / name / f"wiki.{split}.tokens").write_text(text)


TRAIN = " = Cat = \n \n the cat sat on the mat . \n the cat <unk> \n"


def test_wikitext_as_words(tmp_path):
    wiki(tmp_path, "wikitext-103", train=TRAIN, valid=" the dog sat \n", test=" \n the mat\n")
    task = WikiText103(length=4, context=2, data=str(tmp_path))
    assert task.vocabulary[:5] == ["<pad>", "<unk>", "</s>", "the", "="]  # by frequency, then as they come
    assert len(task.vocabulary) % 8 == 0
    assert [task.vocabulary[n] for n in task.items("test").column("token")] == [EOS, "the", "mat", EOS]
    assert [task.vocabulary[n] for n in task.items("validation").column("token")] == ["the", "<unk>", "sat", EOS]
    (batch,) = loader(task, "test", 2)
    words = [[task.vocabulary[n] for n in row] for row in batch.input_ids.tolist()]
    assert words == [[EOS, EOS, "<pad>", "<pad>"], [EOS, EOS, "the", "mat"]]
    assert batch.key_mask.tolist() == [[True, True, False, False], [True] * 4]
    assert [[task.vocabulary[n] if n >= 0 else "" for n in row] for row in batch.labels.tolist()] == [
        [EOS, "the", "", ""],
        ["", "", "mat", EOS],
    ]
    assert task.dataset("train")[0]["first_scored"] == 0


def uniform(task, split, batch_size):
    sums: dict[str, float] = {}
    for batch in loader(task, split, batch_size):
        torch.manual_seed(int(batch.ids[0]))
        logits = torch.zeros(*batch.input_ids.shape, task.vocab_size)
        for name, value in task.score(logits, batch).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums, task.summarize(sums, split)


@pytest.mark.parametrize("unit", ["words", "bytes"])
def test_sums_and_what_they_mean(tmp_path, unit):
    text = " = A cat = \n \n über the mat \n"
    wiki(tmp_path, "wikitext-103", train=text, test=text)
    task = WikiText103(unit, length=6, context=3, data=str(tmp_path))
    sums, found = uniform(task, "test", 3)
    words = sum(len(line.split()) + 1 for line in text.split("\n")[:-1])
    size = task.vocab_size
    assert sums["words"] == words
    size_in_bytes = len(text.encode())
    assert sums["tokens"] == (words if unit == "words" else size_in_bytes + 1)  # and the end of the document
    assert found["perplexity"] == pytest.approx(size)
    assert found["loss"] == pytest.approx(math.log(size))
    assert found["bits_per_byte"] == pytest.approx(math.log2(size) * sums["tokens"] / size_in_bytes)
    assert found["word_perplexity"] == pytest.approx(size ** (sums["tokens"] / words))


def test_perplexity_does_not_depend_on_the_batch_size(tmp_path):
    wiki(tmp_path, "wikitext-103", train=TRAIN * 5, test=TRAIN * 7)
    task = WikiText103("bytes", length=20, context=8, data=str(tmp_path))
    table = torch.randn(task.vocab_size, task.vocab_size, generator=torch.Generator().manual_seed(0))
    found = []
    for size in (1, 3, 100):
        sums: dict[str, float] = {}
        for batch in loader(task, "test", size):
            for name, value in task.score(table[batch.input_ids], batch).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        found.append((task.summarize(sums, "test")["perplexity"], sums["tokens"]))
    assert found[0][1] == found[1][1] == found[2][1] == len(TRAIN) * 7 + 1
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-12)
    assert found[2][0] == pytest.approx(found[0][0], rel=1e-12)


def test_bytes_begin_with_cls_and_end_with_sep(tmp_path):
    (tmp_path / "a.train.txt").write_text("ab")
    (tmp_path / "b.train.txt").write_text("c\n")
    (tmp_path / "c.test.txt").write_text("x\n")
    (batch,) = loader(Lm(str(tmp_path), length=16, context=0), "train", 1, shuffle=False)
    a = [PAPER.first + byte for byte in b"ab\n"]
    c = [PAPER.first + byte for byte in b"c\n"]
    assert batch.labels.tolist() == [[*a, PAPER.sep, *c, PAPER.sep]]
    assert batch.input_ids.tolist() == [[PAPER.cls, *a, PAPER.cls, *c]]


def test_your_own_text_is_cut_in_order(tmp_path):
    path = tmp_path / "log.txt.xz"
    lines = [f"line {n:03}" for n in range(100)]
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    task = Lm(str(path))
    text = {
        split: task.items(split).column("token").tobytes().rstrip(b"\xff").decode().split("\n")[:-1]
        for split in ("train", "validation", "test")
    }
    assert text["train"] + text["validation"] + text["test"] == lines
    assert [len(part) for part in text.values()] == [90, 5, 5]


def test_a_folder_of_text(tmp_path):
    (tmp_path / "sub").mkdir()
    for n in range(40):
        (tmp_path / "sub" / f"{n:02}.txt").write_text(f"text number {n}\n" * 5)
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"image\.bin, line 1"):
        Lm(str(tmp_path)).prepare()
    skipping = Lm(str(tmp_path), skip_bad=True)
    assert skipping.prepare().info["problems"]["count"] == 1
    assert skipping.notes() == ["left out, as they could not be read: 1 items"]
    task = Lm(str(tmp_path), pattern="*.txt", unit="words")
    assert {"text", "number", "0", "35"} < set(task.vocabulary)
    assert "39" not in task.vocabulary, "words of the test split are not known"
    with pytest.raises(NotReady, match="no file of the pattern"):
        Lm(str(tmp_path), pattern="*.md").prepare()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "letters"}, "unit must be one of bytes, words; it is 'letters'"),
        ({"length": 4, "context": 4}, "context from 0 to length - 1; they are 4 and 4"),
        ({"length": 0, "context": 0}, "length must be 1 or more"),
        ({"min_frequency": 2}, "min_frequency is of words"),
        ({"path": "nowhere"}, "it is 'nowhere'"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises((ValueError, NotReady), match=message):
        Lm(**{"path": str(tmp_path / "a.txt"), **options})


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(NotReady, match=r"no data for wikitext-103 in .*\n(.*\n)*.*data fetch wikitext-103"):
        WikiText103(data=str(tmp_path)).dataset("train")
    wiki(tmp_path, "wikitext-103", train=TRAIN)
    with pytest.raises(ValueError, match="has no test split"):
        WikiText103(data=str(tmp_path)).dataset("test")
    wiki(tmp_path, "wikitext-2", test=TRAIN)
    with pytest.raises(NotReady, match="of which the vocabulary is made; as bytes"):
        WikiText2(data=str(tmp_path)).prepare()
    assert len(WikiText2("bytes", data=str(tmp_path)).items("test")) == len(TRAIN) + 1


def test_raw_and_compressed(tmp_path):
    (tmp_path / "wikitext-2-raw").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "wikitext-2-raw" / f"wiki.{split}.raw.gz").write_bytes(gzip.compress(TRAIN.encode()))
    with pytest.raises(NotReady):
        WikiText2(data=str(tmp_path)).prepare()
    task = WikiText2(raw=True, min_frequency=2, data=str(tmp_path))
    assert task.vocabulary[3:6] == ["the", "=", "cat"]
    assert "mat" not in task.vocabulary


def test_text_that_cannot_be_cut(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100_000)
    with pytest.raises(ValueError, match="too few lines to be cut into splits"):
        Lm(str(tmp_path / "a.txt")).prepare()


def test_links_of_a_folder_do_not_lead_out(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("secret\n")
    for n in range(50):
        (tmp_path / "in" / f"{n}.txt").write_text(f"line {n}\n")
    (tmp_path / "in" / "empty.txt").write_text("")
    assert Lm(str(tmp_path / "in")).prepare().info["problems"]["count"] == 0
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "secret" / "key.txt")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "secret")
    (tmp_path / "in" / "dangling.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"in/(link|dangling|linked)"):
        Lm(str(tmp_path / "in")).prepare()
    task = Lm(str(tmp_path / "in"), skip_bad=True)
    assert task.prepare().info["problems"]["count"] == 3
    assert b"secret" not in task.items("train").column("token").tobytes()


def test_padding_is_no_word_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("the <pad> word\n" * 100)
    vocabulary = Lm(str(tmp_path / "a.txt"), unit="words").vocabulary
    assert vocabulary[0] == "<pad1>"
    assert "<pad>" in vocabulary


def test_the_text_of_python():
    task = LmBytes(corpus="topics", length=64, context=32)
    sizes = {split: len(task.items(split)) for split in ("train", "validation", "test")}
    assert 150_000 < sizes["train"] < 700_000
    assert min(sizes.values()) > 5_000
    text = task.items("train").column("token", 0, 2000).tobytes().replace(b"\xff", b"").decode()
    assert "statement" in task.items("train").column("token").tobytes().decode("utf-8", "replace")
    assert text.isprintable() or "\n" in text
    assert "Python" in task.notes()[0]
    # What is tested on was not trained on, but for short lines.
    training = set(task.items("train").column("token").tobytes().split(b"\n"))
    lines = [line for line in task.items("test").column("token").tobytes().split(b"\n") if len(line) >= 30]
    assert sum(len(line) for line in lines if line in training) < 0.03 * sum(map(len, lines))
    with pytest.raises(ValueError, match="corpus must be one of"):
        LmBytes(corpus="everything")


@pytest.mark.skipif(not (SHARED / "wikitext-2").exists(), reason="needs the shared data")
def test_the_official_counts_of_wikitext_2():
    task = WikiText2("bytes", data=str(SHARED))
    sums, _ = uniform(task, "test", 64)
    assert sums["words"] == 245_569, "as published, </s> of every line included"
    assert task.prepare().info["bytes"]["test"] == 1_256_449


@pytest.mark.skipif(not (SHARED / "wiki_en").exists(), reason="needs the shared data")
def test_wiki_en_as_words_is_as_its_description_says(tmp_path):
    """The validation text takes the place of the training text, which would take a minute."""
    (tmp_path / "wiki_en").mkdir()
    for name in ("train", "test"):
        (tmp_path / "wiki_en" / f"wiki.{name}.raw.xz").symlink_to(SHARED / "wiki_en" / "wiki.valid.raw.xz")
    task = WikiEn(data=str(tmp_path), min_frequency=1)
    lines = lzma.decompress((SHARED / "wiki_en" / "wiki.valid.raw.xz").read_bytes()).decode().split("\n")[:-1]
    assert len(task.items("train")) == sum(len(line.split()) + 1 for line in lines)
    assert "not those of WikiText-103" in task.notes()[0]
