"""Generated text equals that of full forward passes, sampled as asked for, from a state of constant size."""

import gc
import itertools
import re
import signal
import sys
from functools import partial

import pytest
import torch
from commands import refused, run
from processes import Command, signal_at
from train.runs import terminal_output

from permuteformer.tasks.tokenization import ByteTokens
from permuteformer.train import generate as module
from permuteformer.train.generate import Generation
from permuteformer.train.trained_model import load

LINEAR = {"name": "linear", "feature_multiplier": 4}
BYTES = {"corpus": "topics", "length": 64, "context": 32}


@pytest.fixture
def trained(bytes_run):
    return load(bytes_run)


def prompt_ids(prompt):
    return [1, *(byte + 3 for byte in prompt.encode())]


@torch.no_grad()
def by_hand(trained, ids, tokens, allowed=(2, 259), after=None, sample=torch.argmax):
    """Return tokens, each from a forward pass over all before it, without a state; ``after`` maps tokens to the ids read after them."""
    ids, made = list(ids), []
    for _ in range(tokens):
        logits = trained.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        made.append(int(sample(logits[slice(*allowed)].double())) + allowed[0])
        ids.append((after or {}).get(made[-1], made[-1]))
    return made


def sampler(trained, **options):
    """Return the function that samples a token from logits."""
    return Generation(trained, "", 1, **options)._sample


def as_text(tokens):
    """Return the text of bytes; a line ends with a document."""
    documents = [[]]
    for token in tokens:
        if token == 2:
            documents.append([])
        else:
            documents[-1].append(token - 3)
    return "\n".join(bytes(document).decode("utf-8", "replace") for document in documents)


def scale(trained, tokens, factor):
    """Make tokens very likely here and very unlikely there, or neither."""
    with torch.no_grad():
        trained.model.lm_head.weight[tokens] *= factor


@pytest.mark.parametrize("preset", ["permuteformer-lm", "performer-lm", "transformer-lm", "permuteformer-lm-no-decay"])
def test_most_likely_text_is_that_of_transformers(make_run, preset):
    linear = {} if preset == "transformer-lm" else {"attention": LINEAR}
    trained = load(make_run("lm-bytes", preset, BYTES, tie_word_embeddings=preset == "performer-lm", **linear))
    scale(trained, [2], 0.1)
    for prompt in ("", "a", "The quick brown fox; Größe"):
        ids = torch.tensor([prompt_ids(prompt)])
        expected = trained.model.generate(ids, max_new_tokens=50, do_sample=False, suppress_tokens=[0, 1], eos_token_id=2)
        made = [token for token in expected[0, ids.shape[1] :].tolist() if token != 2]
        generation = Generation(trained, prompt, 50, temperature=0, stop=True)
        assert "".join(generation) == as_text(made)
        assert generation.tokens in (len(made), len(made) + 1)
    assert len(made) > 20
    made = by_hand(trained, prompt_ids("a"), 60, after={2: 1}, sample=sampler(trained, seed=7))
    assert len(set(made)) > 10, "a sampled text does not repeat itself"
    assert "".join(Generation(trained, "a", 60, seed=7)) == as_text(made)


def test_documents_end_and_start_as_in_training(trained):
    scale(trained, [2], -3)
    made = by_hand(trained, prompt_ids("once"), 80, after={2: 1}, sample=sampler(trained))
    assert made.count(2) > 3
    assert len(set(made)) > 10
    end = made.index(2)
    for stop, tokens, text in ((False, 80, made), (True, end + 1, made[:end])):
        generation = Generation(trained, "once", 80, stop=stop)
        assert "".join(generation) == as_text(text)
        assert generation.tokens == tokens


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("", [2]), ("the cat\n", [2, 3, 4, 2]), ("the  cat", [2, 3, 4]), ("the cat ", [2, 3, 4]), ("the\n\ncat", [2, 3, 2, 2, 4])],
)
def test_words_are_separated_by_blanks_and_lines(prompt, ids, words_run):
    trained = load(words_run)
    words = trained.input.tokenizer.words
    numbers = {word: n for n, word in enumerate(words)}
    known = sum(not word.startswith("<unused") for word in words)
    made = by_hand(trained, ids, 40, allowed=(1, known))
    text = prompt + "".join(Generation(trained, prompt, 40, temperature=0))
    assert [n for line in text.split("\n") for n in [2, *map(numbers.__getitem__, line.split())]] == ids + made
    assert "  " not in text.removeprefix("the  cat")


def test_unknown_words_are_reported_and_unused_ones_not_generated(words_run):
    trained = load(words_run)
    words = trained.input.tokenizer.words
    assert Generation(trained, "the cat", 9).notes == []
    (note,) = Generation(trained, "the dog and the dog \x1b[1m", 5).notes
    assert note.endswith(": dog, \\x1b[1m")
    unused = [n for n, word in enumerate(words) if word.startswith("<unused") or n == 0]
    assert len(unused) > 1
    scale(trained, unused, 50)
    text = "".join(Generation(trained, "the cat", 300, temperature=5.0))
    assert "<unused" not in text
    assert "<pad>" not in text
    assert "\n" not in "".join(Generation(trained, "the", 300, temperature=5.0, stop=True))


def test_ids_that_training_does_not_have_are_not_generated(trained):
    scale(trained, [0, 1], 100)
    assert {0, 1} & set(by_hand(trained, prompt_ids("a"), 30, allowed=(0, 259))), "else this test shows nothing"
    generation = Generation(trained, "a", 300, temperature=3.0)
    assert len("".join(generation)) > 100
    assert generation.tokens == 300


@pytest.mark.parametrize("block", [1, 5, 7, 1000])
def test_long_prompt_is_read_in_blocks(block, trained, monkeypatch):
    prompt = "A long prompt, of several blocks. " * 5
    monkeypatch.setattr(module, "PREFILL", block)
    made = by_hand(trained, prompt_ids(prompt), 20, after={2: 1})
    assert "".join(Generation(trained, prompt, 20, temperature=0)) == as_text(made)


def test_prompt_may_have_bytes_that_are_not_utf_8(trained):
    """As a command line gives them."""
    made = by_hand(trained, [1, 0xE9 + 3], 10, after={2: 1})
    assert "".join(Generation(trained, b"\xe9".decode("utf-8", "surrogateescape"), 10, temperature=0)) == as_text(made)


def test_characters_are_complete(trained):
    decoder = ByteTokens().decoder()
    assert [decoder.push(byte + 3) for byte in "aé€😀".encode()] == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    half = [byte + 3 for byte in "€".encode()[:2]]
    assert [decoder.push(id) for id in [*half, ord("b") + 3]] == ["", "", "\ufffdb"]
    assert [decoder.push(id) for id in [*half, 2]] == ["", "", "\ufffd\n"], "a document ends within a character"
    assert [decoder.push(id) for id in [*half, 0xAC + 3]] == ["", "", "€"], "nothing is left of it"
    assert (decoder.push(half[0]), decoder.flush(), decoder.flush()) == ("", "\ufffd", "")
    pieces = list(Generation(trained, "", 400, temperature=2.0, seed=3))
    assert all(pieces)
    assert "\ufffd" in "".join(pieces)


def test_seed_decides_and_narrow_sampling_is_greedy(trained):
    def text(**options):
        return "".join(Generation(trained, "x", 40, **options))

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    greedy = text(temperature=0)
    narrow = ({"temperature": 0, "seed": 5}, {"top_k": 1, "temperature": 3.0}, {"top_p": 1e-9, "temperature": 3.0}, {"temperature": 1e-300})
    assert {text(**options) for options in narrow} == {greedy}
    assert text(top_k=10**9, top_p=1.0) == text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        ({"top_k": 2}, [0.5 / 0.8, 0.3 / 0.8, 0, 0]),
        ({"top_p": 0.79}, [0.5 / 0.8, 0.3 / 0.8, 0, 0]),
        ({"top_p": 0.81}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),  # of the two kept, the first has 0.625
    ],
)
def test_tokens_are_sampled_with_their_probabilities(options, expected, trained):
    sample, order, count = sampler(trained, **options), torch.tensor([2, 0, 3, 1]), 4000
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()[order] + 7
    found = torch.bincount(torch.tensor([sample(logits) for _ in range(count)]), minlength=4) / count
    for place, share in zip(order.tolist(), found.tolist(), strict=True):
        error = (expected[place] * (1 - expected[place]) / count) ** 0.5
        assert share == pytest.approx(expected[place], abs=5 * error + 1e-12)


def test_memory_does_not_grow_with_the_text(make_run):
    trained = load(make_run("lm-bytes", "permuteformer-lm", BYTES, attention=LINEAR, num_hidden_layers=1))
    generation = Generation(trained, "The", 10_000)

    def used(tokens):
        while generation.tokens < tokens:
            next(generation)
        gc.collect()
        return generation.cache.nbytes, sum(type(x) is torch.Tensor for x in gc.get_objects()), sys.getallocatedblocks()

    (size, tensors, blocks), (later_size, later_tensors, later_blocks) = used(300), used(1_300)
    assert later_size == size
    assert later_tensors <= tensors + 5
    assert later_blocks < blocks + 500, "less than one object for every second token"
    assert generation.notes == []


def test_growing_state_is_reported(make_run, monkeypatch):
    monkeypatch.setattr(module, "MANY_TOKENS", 200)
    folder = make_run("lm-bytes", "transformer-lm", BYTES)
    trained = load(folder)
    assert Generation(trained, "a", 190).notes == []
    generation = Generation(trained, "a", 100_000)
    sizes = [(generation.cache.nbytes, generation.tokens) for _ in itertools.islice(generation, 60)]
    growth = (sizes[-1][0] - sizes[1][0]) / (sizes[-1][1] - sizes[1][1])
    assert re.search(f"grows by {growth:.0f} bytes per token, .* MB in all", generation.notes[0])
    assert "note: the state" in run("generate", folder, "--prompt", "a" * 200, "--max-new-tokens", 3).stderr


def test_learned_positions_limit_the_text(make_run):
    trained = load(make_run("lm-bytes", "performer-lm", BYTES, position=[{"name": "learned", "max_length": 40}]))
    generation = Generation(trained, "four", 36)
    assert "".join(generation)
    assert generation.tokens == 36
    with pytest.raises(ValueError, match="40 learned positions.*max_new_tokens=37 need 41: .*36"):
        Generation(trained, "four", 37)
    with pytest.raises(ValueError, match="shorter prompt"):
        Generation(trained, "x" * 50, 1)


def test_attention_without_a_state_is_refused(make_run):
    reformer = load(make_run("lm-bytes", "performer-lm", BYTES, attention={"name": "reformer", "chunk_size": 8}))
    with pytest.raises(ValueError, match="'reformer' cannot generate"):
        Generation(reformer, "a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_new_tokens", value) for value in (0, True, 2.5)),
        ("seed", -1),
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"))),
        ("top_k", 0),
        *(("top_p", value) for value in (0, 1.1, float("nan"))),
    ],
)
def test_options_without_meaning_are_refused(name, value, trained):
    with pytest.raises((ValueError, TypeError), match=f"{name} must be .*{value}"):
        Generation(trained, **{name: value})


def test_output_that_is_not_finite_ends_the_text(trained):
    with torch.no_grad():
        trained.model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="token 1 .*not finite"):
        next(Generation(trained, "a"))


def test_command_prints_or_writes_the_text(bytes_run, trained, tmp_path):
    options = ["--max-new-tokens", 50, "--seed", 4, "--temperature", 0.5, "--top-k", 9, "--top-p", 0.9]
    shown = run("generate", bytes_run, "--prompt", "The text", *options)
    assert shown.stdout == "".join(Generation(trained, "The text", 50, seed=4, temperature=0.5, top_k=9, top_p=0.9))
    assert re.search(r"50 tokens in .* per second", shown.stderr)
    (tmp_path / "prompt.txt").write_bytes("\ufeffThe\r\nGröße".encode())
    run("generate", bytes_run, "--prompt-file", tmp_path / "prompt.txt", "--output", tmp_path / "out.txt", "--max-new-tokens", 30)
    assert (tmp_path / "out.txt").read_bytes().decode() == "".join(Generation(trained, "The\nGröße", 30))
    assert run("generate", bytes_run, "--max-new-tokens", 5).stdout == "".join(Generation(trained, "", 5))
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize(
    ("run_folder", "words", "message"),
    [
        ("bytes_run", ["--prompt", "a", "--prompt-file", "b"], "--prompt or --prompt-file"),
        ("bytes_run", ["--prompt-file", "missing"], "file not found: missing"),
        ("bytes_run", ["--prompt-file", "latin"], "latin is not UTF-8"),
        ("bytes_run", ["--prompt", "a\ud800b"], r"prompt.*'\\ud800' at 1"),
        ("bytes_run", ["--output", "missing/out.txt"], "folder not found: missing"),
        ("text_run", [], "'classify'.*permuteformer predict"),
    ],
)
def test_command_refuses_in_one_line(run_folder, words, message, request, tmp_path, monkeypatch):
    folder = request.getfixturevalue(run_folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes(b"caf\xe9 noir")
    assert re.search(message, refused("generate", folder, *words))


@pytest.mark.parametrize("to_file", [False, True])
def test_ctrl_c_keeps_the_text_so_far(to_file, bytes_run, tmp_path):
    expected = "".join(Generation(load(bytes_run), "", 98))
    before = partial(signal_at, name="permuteformer.train.generate.Generation._read", number=100, sent=signal.SIGINT)
    output = ["--output", tmp_path / "out.txt"] if to_file else []
    command = Command("generate", bytes_run, "--max-new-tokens", 100_000_000, *output, before=before)
    command.end(130)
    shown = command.text
    assert shown.endswith("interrupted\n")
    assert "99 tokens in " in shown
    assert ((tmp_path / "out.txt").read_bytes().decode() if to_file else shown).startswith(expected[:-1])
    assert not list(tmp_path.glob(".*partial"))


def test_terminal_interprets_no_generated_text(bytes_run):
    shown, _ = terminal_output("generate", bytes_run, "--max-new-tokens", 300, "--temperature", 2)
    assert not set(shown) & {*range(32), 127} - set(b"\r\n\t")
    assert re.search(rb"\\x[01][0-9a-f]", shown)
    shown.decode()
