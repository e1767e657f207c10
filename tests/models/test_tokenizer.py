import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from permuteformer import PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.tokenizer import ByteTokenizer, encode_lines, word_tokenizer

TEXTS = [
    "",
    "a",
    " white  space \t\r\n kept\n",
    "no clean-up : do n't , please .",
    "Grüße, 世界 👩‍🚀 e\u0301",
    "\x00\x7f\x80\xff\u2028",
    "[CLS] [PAD][SEP] <unk></s>",
    "\U0010ffff",
]
LINES = [" = Title = ", "", "the cat saw the dog", "the bird <unk> a cat"]
VALID = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2" / "valid.txt"  # beside the checkout, never in it
wikitext = pytest.mark.skipif(not VALID.exists(), reason=f"{VALID} is not on this machine")


def bytes_of(text):
    return [byte + 3 for byte in text.encode()]


# Bytes


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_its_bytes_between_cls_and_sep_and_comes_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer(text)["input_ids"] == [1, *bytes_of(text), 2]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == bytes_of(text)
    assert tokenizer.encode(text) == tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.decode(bytes_of(text)) == text
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


def test_special_tokens_written_in_a_text_are_text():
    tokenizer = ByteTokenizer()
    for name in ("[PAD]", "[CLS]", "[SEP]"):
        assert tokenizer(f"a{name}", add_special_tokens=False)["input_ids"] == bytes_of(f"a{name}")
        assert tokenizer.encode(name, add_special_tokens=False) == bytes_of(name)
        assert tokenizer([name], [name])["input_ids"] == [[1, *bytes_of(name), 2, *bytes_of(name), 2]]
    assert tokenizer("a[SEP]b", add_special_tokens=False, split_special_tokens=False)["input_ids"] == [100, 2, 101]


def test_pairs():
    tokenizer = ByteTokenizer()
    encoded = tokenizer("ab", "c", return_special_tokens_mask=True)
    assert encoded["input_ids"] == [1, 100, 101, 2, 102, 2]
    assert encoded["special_tokens_mask"] == [1, 0, 0, 1, 0, 1]
    assert set(encoded) == {"input_ids", "attention_mask", "special_tokens_mask"}  # models take no token_type_ids
    batch = tokenizer(["ab", ""], ["c", "d"])["input_ids"]
    assert batch == [[1, 100, 101, 2, 102, 2], [1, 2, 103, 2]]
    assert tokenizer([("ab", "c"), ("", "d")])["input_ids"] == batch
    assert tokenizer("abcd", "efgh", truncation="only_second", max_length=9)["input_ids"] == [1, 100, 101, 102, 103, 2, 104, 105, 2]


def test_padding_and_truncation():
    tokenizer = ByteTokenizer()
    right = tokenizer(["abc", ""], padding=True, return_tensors="pt")
    assert right["input_ids"].tolist() == [[1, 100, 101, 102, 2], [1, 2, 0, 0, 0]]
    assert right["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert right["input_ids"].dtype == torch.int64
    left = ByteTokenizer(padding_side="left")(["abc", ""], padding="max_length", max_length=4, truncation=True)
    assert left["input_ids"] == [[1, 100, 101, 2], [0, 0, 1, 2]]
    assert left["attention_mask"] == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert tokenizer("abc", max_length=8, padding="max_length")["input_ids"] == [1, 100, 101, 102, 2, 0, 0, 0]
    assert tokenizer("", add_special_tokens=False, return_tensors="pt")["input_ids"].shape == (1, 0)


def test_bytes_that_are_no_text_decode_all_the_same():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([100, 0xFF + 3, 101]) == "a\ufffdb"
    assert tokenizer.decode([0xC3 + 3]) == "\ufffd"
    assert ByteTokenizer(errors="ignore").decode([100, 0xFF + 3, 101]) == "ab"
    assert tokenizer.batch_decode(torch.tensor([[1, 100, 2], [1, 2, 0]]), skip_special_tokens=True) == ["a", ""]
    draw = random.Random(0)
    escaping = ByteTokenizer(errors="surrogateescape")
    for _ in range(200):
        ids = [draw.randrange(3, 259) for _ in range(draw.randrange(20))]
        assert tokenizer.decode(ids) == bytes(n - 3 for n in ids).decode("utf-8", "replace")
        assert escaping.encode(escaping.decode(ids), add_special_tokens=False) == ids


def test_half_characters_are_taken():
    tokenizer = ByteTokenizer(errors="surrogateescape")
    assert tokenizer.encode(b"a\xff".decode("utf-8", "surrogateescape"), add_special_tokens=False) == [100, 258]
    ids = tokenizer.encode("\udcff\ud83dé", add_special_tokens=False)
    assert ids == [n + 3 for n in b"\xff\xed\xa0\xbd\xc3\xa9"]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


def test_saved_and_loaded_it_is_the_same(tmp_path):
    tokenizer = ByteTokenizer(errors="surrogateescape", padding_side="left", model_max_length=6, mask_token="[MASK]", pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path)
    loaded = ByteTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (len(loaded), loaded.mask_token_id, loaded.pad_token, loaded.pad_token_id) == (260, 259, "<pad>", 0)
    for text in [*TEXTS, "[MASK]", "<pad>"]:
        assert loaded(text)["input_ids"] == [1, *bytes_of(text), 2]
    batch = ["abcdefg", "a"]
    assert loaded(batch, padding=True, truncation=True)["input_ids"] == [[1, 100, 101, 102, 103, 2], [0, 0, 0, 1, 100, 2]]
    assert loaded.decode([258, 259]) == "\udcff[MASK]"


def test_in_a_models_folder_auto_tokenizer_finds_it_from_a_fresh_process(tmp_path):
    config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, causal=True)
    PermuteFormerForCausalLM(config).save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    assert type(ByteTokenizer.from_pretrained(tmp_path)) is ByteTokenizer
    assert PermuteFormerForCausalLM.from_pretrained(tmp_path).config.vocab_size == 259
    code = (
        "import sys, permuteformer.models.tokenizer; from transformers import AutoTokenizer; "
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "sys.stdout.write(f'{type(tokenizer).__name__} {tokenizer(\"[SEP]\").input_ids}')"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout == "ByteTokenizer [1, 94, 86, 72, 83, 96, 2]"


@pytest.mark.filterwarnings("ignore:positions on axis")
def test_a_left_padded_batch_generates_what_each_prompt_does():
    torch.manual_seed(0)
    config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, causal=True)
    model = PermuteFormerForCausalLM(config).eval()
    tokenizer = ByteTokenizer(padding_side="left")
    arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    prompts = ["a long prompt", "b"]
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    together = model.generate(**batch, **arguments)[:, -5:]
    for prompt, new in zip(prompts, together, strict=True):
        alone = model.generate(**tokenizer(prompt, add_special_tokens=False, return_tensors="pt"), **arguments)[0, -5:]
        assert new.tolist() == alone.tolist()


@pytest.mark.parametrize("text", [5, b"a", 1.5, ["a", 5], [5, "a"], [b"a"], ["a", None], {"a": "b"}])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(TypeError, match=r"text must be a str, or a list of them; .*(int|bytes|float|NoneType|dict)"):
        ByteTokenizer()(text)
    with pytest.raises(TypeError, match="text_pair must be a str"):
        ByteTokenizer().encode("a", text)


def test_bad_arguments_are_refused():
    tokenizer = ByteTokenizer()
    with pytest.raises(TypeError, match="text must be a str"):
        tokenizer.encode(None)
    with pytest.raises(ValueError, match="empty list"):
        tokenizer([])
    assert tokenizer([100, 258])["input_ids"] == [1, 100, 258, 2]
    for ids in ([100, 259], [-1]):
        with pytest.raises(ValueError, match="from 0 to 258"):
            tokenizer(ids)
        with pytest.raises(ValueError, match=f"from 0 to 258.* there is {ids[-1]}"):
            tokenizer.decode(ids)
    with pytest.raises(ValueError, match="errors must be"):
        ByteTokenizer(errors="strict")
    for names in ({"pad_token": "a"}, {"pad_token": "[SEP]"}):
        with pytest.raises(ValueError, match="three different strings"):
            ByteTokenizer(**names)


# Words


def test_words_are_sorted_by_frequency_then_by_first_appearance():
    tokenizer = word_tokenizer(LINES)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    words = ["<pad>", "<unk>", "</s>", "the", "=", "cat", "Title", "saw", "dog", "bird", "a"]
    assert tokenizer.convert_ids_to_tokens(list(range(11))) == words
    assert len(tokenizer) == tokenizer.vocab_size == 16
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert word_tokenizer(iter(LINES)).get_vocab() == tokenizer.get_vocab()
    assert len(word_tokenizer(LINES, pad_to_multiple_of=1)) == 11
    exact = [*LINES, "1 2 3 4 5"]
    assert len(word_tokenizer(exact)) == 16
    assert len(word_tokenizer([*exact, "<unused0>"])) == 24


def test_lines_end_with_the_end_token():
    tokenizer = word_tokenizer(LINES)
    assert tokenizer(LINES)["input_ids"] == [[4, 6, 4, 2], [2], [3, 5, 7, 3, 8, 2], [3, 9, 1, 10, 5, 2]]
    assert set(tokenizer("the", "cat")) == {"input_ids", "attention_mask"}
    assert tokenizer("the", "cat")["input_ids"] == [3, 2, 5, 2]
    assert tokenizer("the unseen", add_special_tokens=False)["input_ids"] == [3, 1]
    assert tokenizer("the<unk> </s> </s>cat", add_special_tokens=False)["input_ids"] == [1, 2, 1]  # words, whole
    ids = encode_lines(tokenizer, LINES)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [n for line in tokenizer(LINES)["input_ids"] for n in line]
    assert encode_lines(tokenizer, []).tolist() == []
    assert encode_lines(ByteTokenizer(), ["ab", ""]).tolist() == [100, 101, 2, 2]
    assert len(encode_lines(tokenizer, ["the cat"] * 2500)) == 7500


def test_rare_words_are_left_out():
    tokenizer = word_tokenizer(LINES, min_frequency=2)
    assert tokenizer.convert_ids_to_tokens(list(range(6))) == ["<pad>", "<unk>", "</s>", "the", "=", "cat"]
    assert "saw" not in tokenizer.get_vocab()
    assert len(tokenizer) == 8


def test_white_space_is_what_python_splits_on():
    tokenizer = word_tokenizer(["a b"])
    for code in range(0x110000):
        if chr(code).isspace():
            assert tokenizer(f"a{chr(code)}b", add_special_tokens=False)["input_ids"] == [3, 4], hex(code)
    for glue in "_-.\u200b\ufeff\u180e":  # no white space, though some print none
        assert tokenizer(f"a{glue}b", add_special_tokens=False)["input_ids"] == [1]


def test_files_and_lines_give_the_same(tmp_path):
    whole, first, second = tmp_path / "whole", tmp_path / "first", tmp_path / "second"
    lines = [*LINES, "x\u2028y\x85z\rx"]  # these end no line
    whole.write_text("\n".join(lines) + "\n", encoding="utf-8")
    first.write_text("\n".join(lines[:2]) + "\n", encoding="utf-8")
    second.write_text("\n".join(lines[2:]), encoding="utf-8")
    tokenizer = word_tokenizer(lines)
    for source in (whole, [first, second], [first, *lines[2:]], [f"{line}\n" for line in lines]):
        assert word_tokenizer(source).get_vocab() == tokenizer.get_vocab()
        assert encode_lines(tokenizer, source).tolist() == encode_lines(tokenizer, lines).tolist()
    assert encode_lines(tokenizer, lines).tolist().count(2) == 5


def test_words_saved_next_to_a_model_are_loaded_as_words(tmp_path):
    """Not as bytes, which a model's folder means without a tokenizer's own file."""
    tokenizer = word_tokenizer(LINES)
    PermuteFormerConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = "the<unk> cat , </s>  bird"
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded(text).data == tokenizer(text).data
        assert loaded.decode(loaded("cat <unk> bird")["input_ids"]) == "cat <unk> bird </s>"
        assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)


def test_bad_sources_are_refused():
    for empty in ([], ["", "  "], ["<unk> </s>"]):
        with pytest.raises(ValueError, match="the vocabulary would be empty"):
            word_tokenizer(empty)
    with pytest.raises(ValueError, match="the most frequent 3 times, and min_frequency is 4"):
        word_tokenizer(LINES, min_frequency=4)
    with pytest.raises(TypeError, match="it is a str: split a text into lines"):
        word_tokenizer("the cat")
    for entry in (b"the", None, 5):
        with pytest.raises(TypeError, match=f"there is a {type(entry).__name__}"):
            word_tokenizer([entry])
    with pytest.raises(TypeError, match="it is a int"):
        encode_lines(word_tokenizer(LINES), 5)
    with pytest.raises(ValueError, match="must not hold line breaks"):
        encode_lines(word_tokenizer(LINES), ["the\ncat"])
    with pytest.raises(FileNotFoundError):
        word_tokenizer(Path("no such file"))
    for number in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="min_frequency must be a whole number"):
            word_tokenizer(LINES, min_frequency=number)
    with pytest.raises(ValueError, match="pad_token must be a word that is not in the text"):
        word_tokenizer(["the <pad>"])
    assert word_tokenizer(["the <pad>"], pad_token="[PAD]")("<pad>")["input_ids"] == [4, 2]
    endless = word_tokenizer(LINES)
    endless.eos_token = None
    with pytest.raises(ValueError, match="must have an eos_token"):
        encode_lines(endless, LINES)


@wikitext
def test_wikitext_is_counted_as_published_and_comes_back():
    lines = VALID.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    tokenizer = word_tokenizer(VALID)
    ids = encode_lines(tokenizer, VALID)
    assert len(ids) == sum(len(line.split()) + 1 for line in lines) == 217_646
    assert int((ids == tokenizer.eos_token_id).sum()) == len(lines) == 3760
    counts = Counter(word for line in lines for word in line.split())
    assert int((ids == tokenizer.unk_token_id).sum()) == counts["<unk>"]
    words = len(counts) - 1  # <unk> is no word
    assert len(tokenizer) % 8 == 0
    assert words + 3 <= len(tokenizer) < words + 3 + 8
    assert torch.bincount(ids)[3:].tolist() == sorted((counts[word] for word in counts if word != "<unk>"), reverse=True)
    assert tokenizer.decode(ids.tolist()) == " ".join(" ".join([*line.split(), "</s>"]) for line in lines)


@wikitext
def test_wikitext_as_bytes_comes_back():
    text = VALID.read_text(encoding="utf-8")
    tokenizer = ByteTokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == VALID.stat().st_size + 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
