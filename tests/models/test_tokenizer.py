"""Tokenizers of bytes and of words: ids, round trips, saving, and refusals."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from permuteformer import PermuteFormerConfig
from permuteformer.models.tokenizer import ByteTokenizer, encode_lines, word_tokenizer

TEXTS = [
    *("", "a", " white  space \t\r\n kept\n", "no clean-up : do n't , please .", "Grüße, 世界 👩‍🚀 e\u0301"),
    *("\x00\x7f\x80\xff\u2028", "[CLS] [PAD][SEP] <unk></s>", "\U0010ffff"),
]
VALID = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2" / "valid.txt"  # beside the checkout, never in it
LINES = [" = Title = ", "", "the cat saw the dog", "the bird <unk> a cat"]


def bytes_of(text):
    return [byte + 3 for byte in text.encode()]


# Bytes


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_its_bytes_and_is_decoded_again(text):
    tokenizer = ByteTokenizer()
    assert tokenizer(text)["input_ids"] == tokenizer.encode(text) == [1, *bytes_of(text), 2]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == bytes_of(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == tokenizer.decode(bytes_of(text)) == text
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == bytes_of(text)


def test_it_agrees_with_the_configuration_of_models():
    tokenizer, config = ByteTokenizer(), PermuteFormerConfig()
    assert len(tokenizer) == tokenizer.vocab_size == config.vocab_size == 259
    assert tokenizer.pad_token_id == config.pad_token_id == 0
    assert tokenizer.cls_token_id == tokenizer.bos_token_id == config.bos_token_id == 1
    assert tokenizer.sep_token_id == tokenizer.eos_token_id == config.eos_token_id == 2
    assert sorted(tokenizer.get_vocab().values()) == list(range(259))
    assert tokenizer.convert_ids_to_tokens(list(range(259))) == sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    assert tokenizer.unk_token is None
    assert tokenizer.convert_tokens_to_ids("no token") is None


def test_pairs_special_tokens_and_padding():
    tokenizer = ByteTokenizer()
    encoded = tokenizer("ab", "[SEP]", return_special_tokens_mask=True)
    assert encoded["input_ids"] == [1, 100, 101, 2, *bytes_of("[SEP]"), 2]  # special tokens within a text are text
    assert encoded["special_tokens_mask"] == [1, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert set(encoded) == {"input_ids", "attention_mask", "special_tokens_mask"}  # models have no token_type_ids
    assert tokenizer("a[SEP]b", add_special_tokens=False, split_special_tokens=False)["input_ids"] == [100, 2, 101]
    assert tokenizer([("ab", "c"), ("", "d")])["input_ids"] == [[1, 100, 101, 2, 102, 2], [1, 2, 103, 2]]
    right = tokenizer(["abc", ""], padding=True, return_tensors="pt")
    assert right["input_ids"].tolist() == [[1, 100, 101, 102, 2], [1, 2, 0, 0, 0]]
    assert right["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    prompts = ByteTokenizer(prompts=True, padding_side="left")(["abc", "d"], padding=True)
    assert prompts["input_ids"] == [[1, 100, 101, 102], [0, 0, 1, 103]]
    assert tokenizer("", add_special_tokens=False, return_tensors="pt")["input_ids"].shape == (1, 0)


def test_bytes_that_are_not_utf_8_and_lone_surrogates():
    tokenizer, escaping = ByteTokenizer(), ByteTokenizer(errors="surrogateescape")
    assert ByteTokenizer(errors="ignore").decode([100, 0xFF + 3, 101]) == "ab"
    assert tokenizer.batch_decode(torch.tensor([[1, 100, 2], [1, 2, 0]]), skip_special_tokens=True) == ["a", ""]
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(3, 259) for _ in range(draw.randrange(20))]
        assert tokenizer.decode(ids) == bytes(n - 3 for n in ids).decode("utf-8", "replace")
        assert escaping.encode(escaping.decode(ids), add_special_tokens=False) == ids
    ids = escaping.encode("\udcff\ud83dé", add_special_tokens=False)  # a byte, half a character, a character
    assert ids == [n + 3 for n in b"\xff\xed\xa0\xbd\xc3\xa9"]
    assert escaping.encode(escaping.decode(ids), add_special_tokens=False) == ids


def test_saved_and_loaded_it_is_the_same(tmp_path):
    tokenizer = ByteTokenizer(errors="surrogateescape", padding_side="left", model_max_length=6, mask_token="[MASK]", pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path)
    loaded = ByteTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (len(loaded), loaded.mask_token_id, loaded.pad_token, loaded.pad_token_id) == (260, 259, "<pad>", 0)
    for text in [*TEXTS, "[MASK]", "<pad>"]:
        assert loaded(text)["input_ids"] == [1, *bytes_of(text), 2]
    batch = loaded(["abcdefg", "a"], padding=True, truncation=True)
    assert batch["input_ids"] == [[1, 100, 101, 102, 103, 2], [0, 0, 0, 1, 100, 2]]
    assert loaded.decode([258, 259]) == "\udcff[MASK]"


def test_auto_tokenizer_finds_it_in_a_models_folder_from_a_new_process(tmp_path):
    PermuteFormerConfig().save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    code = (
        "import sys, permuteformer.models.tokenizer; from transformers import AutoTokenizer; "
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "sys.stdout.write(f'{type(tokenizer).__name__} {tokenizer(\"[SEP]\").input_ids}')"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout == "ByteTokenizer [1, 94, 86, 72, 83, 96, 2]"


@pytest.mark.parametrize("text", [5, b"a", 1.5, ["a", 5], [5, "a"], [b"a"], ["a", None], {"a": "b"}])
def test_other_types_are_refused(text):
    with pytest.raises(TypeError, match=r"text .*str.*(int|bytes|float|NoneType|dict)"):
        ByteTokenizer()(text)
    with pytest.raises(TypeError, match="text_pair"):
        ByteTokenizer().encode("a", text)


def test_bad_arguments_are_refused():
    tokenizer = ByteTokenizer()
    with pytest.raises(TypeError, match="NoneType"):
        tokenizer.encode(None)
    with pytest.raises(ValueError, match="empty list"):
        tokenizer([])
    assert tokenizer([100, 258])["input_ids"] == [1, 100, 258, 2]
    for ids in ([100, 259], [-1]):
        for call in (tokenizer, tokenizer.decode):
            with pytest.raises(ValueError, match=rf"258.*{ids[-1]}"):
                call(ids)
    with pytest.raises(ValueError, match=r"errors.*'strict'"):
        ByteTokenizer(errors="strict")
    for name in ("a", "[SEP]"):
        with pytest.raises(ValueError, match=r"pad_token.*\[SEP\]"):
            ByteTokenizer(pad_token=name)


# Words


def test_words_are_sorted_by_frequency_then_by_first_appearance():
    tokenizer = word_tokenizer(LINES)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    words = ["<pad>", "<unk>", "</s>", "the", "=", "cat", "Title", "saw", "dog", "bird", "a"]
    assert tokenizer.convert_ids_to_tokens(list(range(11))) == words
    assert len(tokenizer) == tokenizer.vocab_size == 16
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert word_tokenizer(iter(LINES)).get_vocab() == tokenizer.get_vocab()
    for lines, options, size in (
        (LINES, {"pad_to_multiple_of": 1}, 11),
        ([*LINES, "1 2 3 4 5"], {}, 16),
        ([*LINES, "1 2 3 4 5", "<unused0>"], {}, 24),
        (LINES, {"min_frequency": 2}, 8),
    ):
        assert len(word_tokenizer(lines, **options)) == size
    assert "saw" not in word_tokenizer(LINES, min_frequency=2).get_vocab()
    assert word_tokenizer(["the <pad>"], pad_token="[PAD]")("<pad>")["input_ids"] == [4, 2]


def test_lines_end_with_the_end_token():
    tokenizer = word_tokenizer(LINES)
    assert tokenizer(LINES)["input_ids"] == [[4, 6, 4, 2], [2], [3, 5, 7, 3, 8, 2], [3, 9, 1, 10, 5, 2]]
    assert tokenizer("the", "cat").data == {"input_ids": [3, 2, 5, 2], "attention_mask": [1, 1, 1, 1]}
    assert tokenizer("the unseen", add_special_tokens=False)["input_ids"] == [3, 1]
    assert tokenizer("the<unk> </s> </s>cat", add_special_tokens=False)["input_ids"] == [1, 2, 1]  # three words
    ids = encode_lines(tokenizer, LINES)
    assert len(ids) == sum(len(line.split()) + 1 for line in LINES)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [n for line in tokenizer(LINES)["input_ids"] for n in line]
    assert encode_lines(tokenizer, []).tolist() == []
    assert encode_lines(ByteTokenizer(), ["ab", ""]).tolist() == [100, 101, 2, 2]
    assert len(encode_lines(tokenizer, ["the cat"] * 2500)) == 7500
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token"):
        encode_lines(tokenizer, LINES)


def test_white_space_is_that_of_python():
    tokenizer = word_tokenizer(["a b"])
    for code in range(0x110000):
        if chr(code).isspace():
            assert tokenizer(f"a{chr(code)}b", add_special_tokens=False)["input_ids"] == [3, 4], hex(code)
    for glue in "_-.\u200b\ufeff\u180e":  # not white space, though some are invisible
        assert tokenizer(f"a{glue}b", add_special_tokens=False)["input_ids"] == [1]


def test_files_and_lines_give_the_same(tmp_path):
    lines = [*LINES, "x\u2028y\x85z\rx"]  # these characters end no line
    files = {"all": "\n".join(lines) + "\n", "first": "\n".join(lines[:2]) + "\n", "second": "\n".join(lines[2:])}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    every, first, second = (tmp_path / name for name in files)
    tokenizer = word_tokenizer(lines)
    for source in (every, [first, second], [first, *lines[2:]], [f"{line}\n" for line in lines]):
        assert word_tokenizer(source).get_vocab() == tokenizer.get_vocab()
        assert encode_lines(tokenizer, source).tolist() == encode_lines(tokenizer, lines).tolist()
    assert encode_lines(tokenizer, lines).tolist().count(2) == 5


def test_words_saved_next_to_a_model_are_loaded_as_words(tmp_path):
    """Not as bytes, the default of a model's folder."""
    tokenizer = word_tokenizer(LINES)
    PermuteFormerConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = "the<unk> cat , </s>  bird"
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded(text).data == tokenizer(text).data
        assert loaded.decode(loaded("cat <unk> bird")["input_ids"]) == "cat <unk> bird </s>"
        assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        *((empty, {}, ValueError, "empty") for empty in ([], ["", "  "], ["<unk> </s>"])),
        (LINES, {"min_frequency": 4}, ValueError, "3 times.*min_frequency=4"),
        ("the cat", {}, TypeError, "source.*str"),
        (5, {}, TypeError, "source.*int"),
        *(([entry], {}, TypeError, f"source.*{type(entry).__name__}") for entry in (b"the", None, 5)),
        (["the\ncat"], {}, ValueError, "line breaks"),
        (Path("no such file"), {}, FileNotFoundError, "no such file"),
        *((LINES, {"min_frequency": n}, ValueError, f"min_frequency.*{n!r}") for n in (0, 1.5, "2")),
        (["the <pad>"], {}, ValueError, "pad_token.*'<pad>'"),
    ],
)
def test_bad_sources_are_refused(source, options, error, message):
    with pytest.raises(error, match=message):
        word_tokenizer(source, **options)
    if not options and error is TypeError:
        with pytest.raises(error, match=message):
            encode_lines(word_tokenizer(LINES), source)


@pytest.mark.skipif(not VALID.exists(), reason=f"{VALID} is not on this machine")
def test_wikitext_has_the_published_counts():
    text = VALID.read_text(encoding="utf-8").removesuffix("\n")
    ids = encode_lines(tokenizer := word_tokenizer(VALID), VALID)
    assert len(ids) == 217_646
    assert int((ids == tokenizer.eos_token_id).sum()) == 3760
    assert tokenizer.decode(ids.tolist()) == " ".join(" ".join([*line.split(), "</s>"]) for line in text.split("\n"))
