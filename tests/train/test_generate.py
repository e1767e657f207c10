"""Texts that go on: the model's own, from a state that does not grow."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import typer
from typer.testing import CliRunner

from permuteformer.cli import use
from permuteformer.train import generate as module
from permuteformer.train.generate import generate
from permuteformer.train.saved import load

SPEAKS = {"hidden_size": 32, "num_attention_heads": 4, "attention": {"name": "linear", "feature_multiplier": 4}}
BYTES = {"corpus": "topics", "length": 64, "context": 32}


@pytest.fixture
def trained(bytes_run):
    return load(bytes_run)


def prompt_ids(prompt):
    return [1, *(byte + 3 for byte in prompt.encode())]


@torch.no_grad()
def by_hand(model, inputs, tokens, allowed=(2, 259), after=None, choice=torch.argmax):
    """Tokens, each by a whole forward pass over all that came before, without a state; ``after`` says what is read in place of one."""
    inputs, made = list(inputs), []
    for _ in range(tokens):
        logits = model(torch.tensor([inputs]), use_cache=False).logits[0, -1]
        made.append(int(choice(logits[slice(*allowed)].double())) + allowed[0])
        inputs.append((after or {}).get(made[-1], made[-1]))
    return made


def as_text(tokens):
    documents = [bytes(token - 3 for token in part) for end, part in itertools.groupby(tokens, key=lambda token: token == 2) if not end]
    ends = [len(list(part)) for end, part in itertools.groupby(tokens, key=lambda token: token == 2) if end]
    texts = [document.decode("utf-8", "replace") for document in documents]
    if tokens and tokens[0] == 2:
        texts.insert(0, "")
    return "".join(text + "\n" * count for text, count in itertools.zip_longest(texts, ends, fillvalue=0))


def favour(trained, tokens, factor):
    """Make the tokens very likely here and very unlikely there, or neither."""
    with torch.no_grad():
        trained.model.lm_head.weight[tokens] *= factor


@pytest.mark.parametrize("preset", ["permuteformer-lm", "performer-lm", "transformer-lm", "permuteformer-lm-no-decay"])
def test_the_likeliest_text_is_that_of_transformers(make_run, preset):
    linear = {} if preset == "transformer-lm" else {"attention": {"name": "linear", "feature_multiplier": 4}}
    trained = load(make_run("lm-bytes", preset, BYTES, tie_word_embeddings=preset == "performer-lm", **linear))
    favour(trained, [2], 0.1)
    for prompt in ("", "a", "The quick brown fox; Größe"):
        ids = torch.tensor([prompt_ids(prompt)])
        whole = trained.model.generate(ids, max_new_tokens=50, do_sample=False, suppress_tokens=[0, 1], eos_token_id=2)
        made = [token for token in whole[0, ids.shape[1] :].tolist() if token != 2]
        generation = generate(trained, prompt, 50, temperature=0, stop=True)
        assert "".join(generation) == bytes(token - 3 for token in made).decode("utf-8", "replace")
        assert generation.tokens in (len(made), len(made) + 1)
    assert len(made) > 20
    # The likeliest text repeats itself; one by chance does not.
    made = by_hand(trained.model, prompt_ids("a"), 60, after={2: 1}, choice=module._Choice(1.0, None, None, seed=7))
    assert len(set(made)) > 10
    assert "".join(generate(trained, "a", 60, seed=7)) == as_text(made)


def test_documents_end_and_begin_as_in_training(trained):
    favour(trained, [2], -3)
    made = by_hand(trained.model, prompt_ids("once"), 80, after={2: 1}, choice=module._Choice(1.0, None, None, seed=0))
    assert made.count(2) > 3
    assert len(set(made)) > 10
    generation = generate(trained, "once", 80)
    assert "".join(generation) == as_text(made)
    assert generation.tokens == 80
    first = made.index(2)
    generation = generate(trained, "once", 80, stop=True)
    assert "".join(generation) == as_text(made[:first])
    assert generation.tokens == first + 1


def test_words(words_run):
    trained = load(words_run)
    words = trained.words
    assert words[-1].startswith("<unused")
    known = len([word for word in words if not word.startswith("<unused")])
    numbers = {word: n for n, word in enumerate(words)}
    prompts = {"": [2], "the cat\n": [2, 3, 4, 2], "the  cat": [2, 3, 4], "the cat ": [2, 3, 4], "the\n\ncat": [2, 3, 2, 2, 4]}
    for prompt, begun in prompts.items():
        made = by_hand(trained.model, begun, 40, allowed=(1, known))
        text = "".join(generate(trained, prompt, 40, temperature=0))
        lines = (prompt + text).split("\n")
        assert [n for line in lines for n in [2, *map(numbers.__getitem__, line.split())]] == begun + made
        assert "  " not in (prompt + text).removeprefix("the  cat")
    assert generate(trained, "the cat", 9, temperature=0).notes == []
    generation = generate(trained, "the dog and the dog \x1b[1m", 5)
    assert generation.notes == ["words of the prompt that are none of the model's are read as <unk>: dog, \\x1b[1m"]
    with torch.no_grad():
        trained.model.lm_head.weight[[0, *range(known, len(words))]] *= 50
    text = "".join(generate(trained, "the cat", 300, temperature=5.0))
    assert "<unused" not in text
    assert "<pad>" not in text
    assert "".join(generate(trained, "the", 300, temperature=5.0, stop=True)).count("\n") == 0


def test_what_training_never_had_is_never_chosen(trained):
    favour(trained, [0, 1], 100)
    best = by_hand(trained.model, prompt_ids("a"), 30, allowed=(0, 259))
    assert {0, 1} & set(best), "it would be chosen"
    generation = generate(trained, "a", 300, temperature=3.0)
    assert len("".join(generation)) > 100
    assert generation.tokens == 300


@pytest.mark.parametrize("block", [1, 5, 7, 1000])
def test_a_long_prompt_is_read_in_blocks(trained, monkeypatch, block):
    prompt = "A long prompt, of several blocks. " * 5
    expected = "".join(generate(trained, prompt, 20, temperature=0))
    monkeypatch.setattr(module, "PREFILL", block)
    assert "".join(generate(trained, prompt, 20, temperature=0)) == expected
    assert expected == as_text(by_hand(trained.model, prompt_ids(prompt), 20, after={2: 1}))


def test_characters_are_whole_before_they_are_given():
    text = module._Bytes()
    tokens = [byte + 3 for byte in "aé€😀".encode()]
    assert [text.piece(token) for token in tokens] == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    half = [byte + 3 for byte in "€".encode()[:2]]
    assert [text.piece(token) for token in half] == ["", ""]
    assert text.piece(ord("b") + 3) == "\ufffdb"
    assert [text.piece(token) for token in half] == ["", ""]
    assert text.piece(2) == "\ufffd\n", "a document ends within a character"
    assert [text.piece(token) for token in [*half, 0xAC + 3]] == ["", "", "€"], "and leaves nothing behind"
    assert (text.piece(half[0]), text.rest(), text.rest()) == ("", "\ufffd", "")


def test_pieces_are_the_text_whatever_bytes_come(trained):
    pieces = list(generate(trained, "", 400, temperature=2.0, seed=3))
    again = "".join(generate(trained, "", 400, temperature=2.0, seed=3))
    assert "".join(pieces) == again
    assert "\ufffd" in again
    assert all(pieces)
    again.encode()


def test_seeds_and_likelihoods(trained):
    def text(**options):
        return "".join(generate(trained, "x", 40, **options))

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    greedy = text(temperature=0)
    assert text(temperature=0, seed=5) == greedy
    assert text(top_k=1, temperature=3.0) == greedy
    assert text(top_p=1e-9, temperature=3.0) == greedy
    assert text(temperature=1e-300) == greedy
    assert text(top_k=10**9, top_p=1.0) == text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((1.0, None, None), [0.5, 0.3, 0.15, 0.05]),
        ((0.5, None, None), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        ((1.0, 2, None), [0.5 / 0.8, 0.3 / 0.8, 0, 0]),
        ((1.0, None, 0.79), [0.5 / 0.8, 0.3 / 0.8, 0, 0]),
        ((1.0, None, 0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ((1.0, 2, 0.6), [1, 0, 0, 0]),  # of the two kept, the first comes to 0.625
    ],
)
def test_tokens_are_chosen_as_often_as_they_should(options, expected):
    choice = module._Choice(*options, seed=0)
    order = torch.tensor([2, 0, 3, 1])
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()[order] + 7
    count = 4000
    found = torch.bincount(torch.tensor([choice(logits) for _ in range(count)]), minlength=4) / count
    for place, share in zip(order.tolist(), found.tolist(), strict=True):
        error = (expected[place] * (1 - expected[place]) / count) ** 0.5
        assert share == pytest.approx(expected[place], abs=5 * error + 1e-12)


def test_memory_does_not_grow_with_the_text(make_run):
    trained = load(make_run("lm-bytes", "permuteformer-lm", BYTES, **SPEAKS, num_hidden_layers=1))

    def used():
        gc.collect()
        return generation.cache.nbytes, sum(type(x) is torch.Tensor for x in gc.get_objects()), sys.getallocatedblocks()

    generation = generate(trained, "The", 10_000)
    for piece in generation:
        assert len(piece) < 10
        if generation.tokens >= 500:
            break
    size, tensors, blocks = used()
    for _ in generation:
        if generation.tokens >= 2_500:
            break
    assert used()[0] == size
    assert used()[1] <= tensors + 5
    assert used()[2] < blocks + 1_000, "less than one thing for every other token"
    assert generation.notes == []


def test_a_state_that_grows_is_said(make_run):
    trained = load(make_run("lm-bytes", "transformer-lm", BYTES))
    assert generate(trained, "a", 9_000).notes == []
    note = generate(trained, "a", 100_000).notes[0]
    generation = generate(trained, "a", 100_000)
    list(itertools.islice(generation, 30))
    before, tokens = generation.cache.nbytes, generation.tokens
    list(itertools.islice(generation, 30))
    growth = (generation.cache.nbytes - before) / (generation.tokens - tokens)
    assert f"grows with the text, {growth:.0f} bytes a token" in note
    assert "MB in all" in note


def test_positions_that_were_learned_are_all_there_are(make_run):
    learned = load(make_run("lm-bytes", "performer-lm", BYTES, position=[{"name": "learned", "max_length": 40}]))
    generation = generate(learned, "four", 36)
    assert len("".join(generation)) > 0
    assert generation.tokens == 36
    with pytest.raises(ValueError, match=r"has learned 40 positions, .* tokens=37 need 41: tokens may be 36 at most"):
        generate(learned, "four", 37)
    with pytest.raises(ValueError, match="the prompt must be shorter"):
        generate(learned, "x" * 50, 1)


def test_runs_that_do_not_generate(text_run, make_run):
    with pytest.raises(ValueError, match="is no language model, but of kind 'classify': permuteformer predict gives its labels"):
        generate(load(text_run), "a")
    reformer = load(make_run("lm-bytes", "performer-lm", BYTES, attention={"name": "reformer", "chunk_size": 8}))
    with pytest.raises(ValueError, match="attention 'reformer' has no state to go on from"):
        generate(reformer, "a")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tokens": 0}, "tokens must be a whole number from 1 on; it is 0"),
        ({"tokens": True}, "tokens must be a whole number"),
        ({"tokens": 2.5}, "tokens must be a whole number"),
        ({"seed": -1}, "seed must be a whole number from 0 on"),
        ({"temperature": -0.1}, "temperature must be 0 or a number above it"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"top_k": 0}, "top_k must be a whole number from 1 on"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"top_p": float("nan")}, "top_p must be"),
        ({"prompt": "a\ud800b"}, "prompt holds half a character"),
    ],
)
def test_options_that_make_no_sense(trained, options, told):
    with pytest.raises(ValueError, match=told):
        generate(trained, **options)


def test_a_prompt_may_hold_bytes_that_are_no_text(trained):
    """As a command line gives them."""
    made = by_hand(trained.model, [1, 0xE9 + 3], 10, after={2: 1})
    assert "".join(generate(trained, b"\xe9".decode("utf-8", "surrogateescape"), 10, temperature=0)) == as_text(made)


def test_an_answer_that_is_no_number_ends_the_text(trained):
    with torch.no_grad():
        trained.model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="token 1 cannot be chosen, as the model's answer is not a number"):
        next(generate(trained, "a"))


app = typer.Typer()
app.command()(use.predict)
app.command()(use.generate)


def run(*words, code=0):
    result = CliRunner().invoke(app, ["generate", *map(str, words)], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_the_command(bytes_run, trained, tmp_path):
    expected = "".join(generate(trained, "The text", 50, seed=4, temperature=0.5, top_k=9, top_p=0.9))
    options = ["--tokens", 50, "--seed", 4, "--temperature", 0.5, "--top-k", 9, "--top-p", 0.9]
    result = run(bytes_run, "--prompt", "The text", *options)
    assert result.stdout_bytes.decode() == expected
    assert "50 tokens in " in result.stderr
    assert " a second" in result.stderr
    (tmp_path / "prompt.txt").write_bytes("\ufeffThe\r\nGröße".encode())
    run(bytes_run, "--prompt-file", tmp_path / "prompt.txt", "--output", tmp_path / "out.txt", "--tokens", 30)
    assert (tmp_path / "out.txt").read_bytes().decode() == "".join(generate(trained, "The\nGröße", 30))
    assert run(bytes_run, "--tokens", 5).stdout_bytes.decode() == "".join(generate(trained, "", 5))
    assert not list(tmp_path.glob(".*partial"))


def test_the_command_refuses_in_words(bytes_run, text_run, tmp_path):
    assert "give --prompt or --prompt-file" in run(bytes_run, "--prompt", "a", "--prompt-file", tmp_path / "b", code=1).stderr
    assert "there is no file" in run(bytes_run, "--prompt-file", tmp_path / "none", code=1).stderr
    (tmp_path / "latin").write_bytes(b"caf\xe9 noir")
    assert "is not UTF-8" in run(bytes_run, "--prompt-file", tmp_path / "latin", code=1).stderr
    assert "permuteformer predict gives its labels" in run(text_run, code=1).stderr
    assert "is no run folder" in run(tmp_path, code=1).stderr
    assert "top_p must be above 0" in run(bytes_run, "--top-p", 0, code=1).stderr
    assert "there is no folder" in run(bytes_run, "--output", tmp_path / "none" / "out.txt", code=1).stderr


def test_the_command_says_what_grows(make_run):
    folder = make_run("lm-bytes", "transformer-lm", BYTES)
    assert "note: the state of this model grows" in run(folder, "--prompt", "a" * 10_000, "--tokens", 3).stderr


PROGRAM = """
import typer
from permuteformer.cli import use
app = typer.Typer()
app.command()(use.predict)
app.command()(use.generate)
app()
"""


def test_ctrl_c_ends_it(bytes_run):
    words = ["generate", str(bytes_run), "--tokens", "100000000"]
    command = [sys.executable, "-c", PROGRAM, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        shown = process.stdout.read(200)
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"a second" in errors
    assert errors.endswith(b"interrupted\n")
    (shown + rest).decode()


def test_ctrl_c_keeps_what_there_is_in_a_file(bytes_run, tmp_path):
    output = tmp_path / "out.txt"

    def interrupt():
        while not list(tmp_path.glob(".out.txt.*.partial")):
            time.sleep(0.05)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    result = run(bytes_run, "--tokens", 100_000_000, "--output", output, code=130)
    assert "interrupted" in result.stderr
    written = output.read_bytes().decode()
    assert written
    assert written.startswith("".join(generate(load(bytes_run), "", 10))[:-1])
    assert not list(tmp_path.glob(".*partial"))


def test_a_terminal_is_not_told_what_to_do_by_the_model(bytes_run):
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, "generate", str(bytes_run), "--tokens", "3000", "--temperature", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # how Linux says that the other side has gone
                break
        process.stderr.read()
    os.close(ours)
    assert process.returncode == 0
    assert not set(shown) & {*range(32), 127} - set(b"\r\n\t")
    assert b"\\x1b" in shown
    shown.decode()
