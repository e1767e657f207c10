"""Whatever a file, a request or a command line holds, it is accepted or refused with one message: no other error, no hang, no effect.

A target is a function that reads one file, with good files for it. Hypothesis damages a file: JSON as data, everything else as bytes.
"""

import base64
import contextlib
import copy
import faulthandler
import functools
import gc
import hashlib
import io
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pages
import pyarrow.parquet
import pytest
import small_data
import torch
from hypothesis import strategies as st
from PIL import Image
from processes import opens_to_write
from soak.scale import SEED, sizes
from train.runs import QUIET, SIZES, tiny

from permuteformer import models
from permuteformer.cli import main
from permuteformer.demo.api import Api
from permuteformer.experiments import Experiment
from permuteformer.machine import environment, resident_memory
from permuteformer.models import PermuteFormerForSequenceClassification as Classifier
from permuteformer.presets import PRESETS
from permuteformer.report import build_report, render
from permuteformer.storage import parse_json
from permuteformer.tasks.readers import archives, cifar, images, tables, text
from permuteformer.tasks.readers.errors import BadItem, Errors
from permuteformer.tasks.store import Store, is_complete
from permuteformer.train import checkpoint, generate, loop, predict, trained_model

INPUTS, ROUND = 10_000, 1_000
SLOW = {"reports with figures": 100, "checkpoints": 10, "run folders": 5}
"""Targets that get fewer inputs, and how many times fewer."""
SECONDS, MEMORY, GROWTH = 20, 3 << 29, 48
"""Seconds and bytes of one input, and MiB by which memory may grow over all of them."""
ERRORS = (ValueError, TypeError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
PROGRAMS = "os.system os.exec os.posix_spawn os.fork subprocess.Popen pickle.find_class socket.connect".split(" ")
CHANGES = "os.remove os.rename os.rmdir os.mkdir os.symlink os.link os.truncate os.chmod shutil.rmtree".split(" ")


# Damage

TEXTS = [
    *("", " ", "\0", "\r", "\n", "\t", "\x07", "\x1b[31m", "\x1b]8;;http://a\x07b", "\x9b31m", "\u202e", "\u2066", "\ud800", "\ufeff"),
    *"a é 日本 [red] [/] </script><script> &amp; ' \" ` | \\input{a} $\\x$ %s%n {0} =1+1 -1 @a -- -".split(" "),
    *"../../a /etc/hosts a/../b C:\\a . nan inf true null none 1e999 0x10 1_000 ٣ owner/kernel".split(" "),
    *("\u0301" * 30, "x" * 300, "é" * 5000),
]
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 256, 65_536, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, -(10**30)]
FRACTIONS = [-0.0, 0.5, 1.5, 1e-320, 1e308, 1e15, float("inf"), float("-inf"), float("nan")]
OTHERS = [None, True, False, [], {}, [None], [[]], {"": None}, {"name": "linear"}, {"a": {"b": []}}, ["a", 1]]
VALUES = st.one_of(st.sampled_from([*TEXTS, *NUMBERS, *FRACTIONS, *OTHERS]), st.integers(), st.floats(), st.text(max_size=9))


@st.composite
def damaged_data(draw, content):
    """JSON data with one or two values replaced, removed, moved to another name or repeated."""
    whole = {"": copy.deepcopy(content)}
    for _ in range(draw(st.integers(1, 2))):
        holder, key = draw(st.sampled_from([*_places(whole)]))
        action = draw(st.sampled_from(["replace", "replace", "remove", "move"]))
        if action == "replace" or holder is whole:
            holder[key] = copy.deepcopy(draw(VALUES))
        elif action == "remove":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from([*TEXTS, *map(str, holder)]))] = holder.pop(key)
        else:
            holder.insert(key, copy.deepcopy(holder[key]))
    return whole[""]


def _places(holder):
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        yield holder, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


@st.composite
def damaged_bytes(draw, content):
    """Bytes with up to three places replaced, removed or inserted, or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        start, length = draw(st.integers(0, len(data))), draw(st.sampled_from([0, 0, 1, 1, 1, 2, 4, 8, 64, len(data)]))
        size, order = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from(["little", "big"]))
        pieces = [
            st.binary(max_size=2),
            st.sampled_from(NUMBERS).map(lambda number, size=size, order=order: (number % (1 << 8 * size)).to_bytes(size, order)),
            st.sampled_from(TEXTS).map(lambda text: text.encode("utf-8", "surrogatepass")[:40]),
            st.just(bytes(data[start : start + 16]) * size),
        ]
        data[start : start + length] = draw(st.one_of(pieces))
    return bytes(data)


@st.composite
def damaged_file(draw, name, content):
    """The content of a file, damaged by its format."""
    kind = draw(st.integers(0, 19))
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(content[:8], "little")
        header = draw(damaged_file("header.json", content[8:end]))
        size = 2**63 if kind == 0 else len(header)
        return size.to_bytes(8, "little") + header + draw(st.sampled_from([content[end:], content[end:-1], content[end:] * 2]))
    if not name.endswith((".json", ".jsonl")) or kind < 3:
        return draw(st.sampled_from([b"[" * 3000, b"1" * 5000, b"\xff\xfe", b""])) if kind == 0 else draw(damaged_bytes(content))
    if name.endswith(".json"):
        return json.dumps(draw(damaged_data(json.loads(content)))).encode()
    lines = draw(damaged_data([json.loads(line) for line in content.splitlines()]))
    return "\n".join(map(json.dumps, lines if isinstance(lines, list) else [lines])).encode()


# Targets


def collected(read, path):
    """Call ``read(path, errors)``; raise if items were skipped."""
    errors = Errors(skip=True)
    found = list(read(path, errors))
    for message in errors.shown:
        check_message(message)
    if errors.count:
        raise ValueError(errors.shown[0])
    return found


def read_rows(path):
    tables.column_names(path)
    collected(tables.rows, path)


def read_archive(path):
    unpacked = path.with_name("unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)
    with contextlib.suppress(BadItem):
        archives.extract(path, unpacked, lambda name: True)
    assert not [found for found in unpacked.rglob("*") if found.is_symlink()]
    for name, _ in collected(functools.partial(archives.members, wanted=lambda name: True), path):
        assert (unpacked / name).resolve().is_relative_to(unpacked.resolve())


def read_report(path):
    made = build_report([path.parent])
    written = [render.html_page(made, path.parent), render.markdown_page(made, path.parent), render.latex_tables(made.tables)]
    for page in (*written, *map(render.csv_table, made.tables)):
        assert not {"\x1b", "\x9b", "\u202e"} & set(page)
    assert "</script><script>" not in written[0]


def use_run(path):
    folder = next(folder for folder in path.parents if (folder / "experiment.json").exists())
    trained = trained_model.load(folder, device="cpu")
    if trained.kind == "lm":
        assert len(list(generate.Generation(trained, "the", 3))) <= 3
    else:
        new = folder.with_name("new.png" if trained.input.grid else "pairs.jsonl")
        assert {found.label for found in predict.predict(trained, new)} <= set(trained.labels)


def resume_run(path):
    if path.name != checkpoint.CHECKSUMS:  # else only the checksums would be tested
        sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.parent.iterdir()}
        (path.parent / checkpoint.CHECKSUMS).write_text(json.dumps({name: sums[name] for name in sums if name != checkpoint.CHECKSUMS}))
    loop.train(tiny("match", steps=2), path.parents[2], QUIET)


def read_store(path):
    if path.name != "info.json":  # else only the sizes would be tested
        info = json.loads((path.parent / "info.json").read_text())
        info["sizes"][path.name] = path.stat().st_size
        (path.parent / "info.json").write_text(json.dumps(info))
    if not is_complete(path.parent):
        raise ValueError("it would be prepared again")
    store = Store(path.parent)
    for split in store.splits:
        for row in itertools.islice(store.rows(split), 50):
            assert isinstance(row["id"], int)


@functools.cache
def language_model(attention):
    torch.manual_seed(0)
    config = models.PermuteFormerConfig(**SIZES, vocab_size=11, causal=True, attention={"name": attention}, position=[])
    return models.PermuteFormerForCausalLM(config).eval()


@torch.no_grad()
def resume_state(path):
    language_model(path.stem)(torch.tensor([[4]]), past_key_values=models.PermuteFormerCache.load(path))


@functools.cache
def demo(run):
    return Api(trained_model.load(run, device="cpu"))


def answer(path):
    request, (name, run) = parse_json(path.read_bytes(), "request"), path.stem.split("-")
    if not isinstance(request, dict):
        raise ValueError("the server refuses it")
    json.dumps(next(demo(path.parents[1] / run).routes[f"/api/{name}"](request)))


def parse(path):
    data = parse_json(path.read_bytes(), path.name)
    build = Experiment.from_json if path.stem == "experiment" else models.PermuteFormerConfig.from_dict
    build(data if isinstance(data, dict) else {"attention": data})


def run_command(path):
    words = parse_json(path.read_bytes(), path.name)
    words = [str(word) for word in (words if isinstance(words, list) else [words])]
    output, code = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main([word for word in words if "../" not in word and "/etc" not in word])  # where a user writes on purpose
        except SystemExit as end:
            code = end.code or 0
    printed = output.buffer.getvalue().decode()
    assert code in (0, 1, 2)
    assert all(line.isprintable() for line in printed.split("\n"))
    if code:
        raise ValueError(printed)


def cut_off(*arguments, **options):
    raise ValueError("cut off")


LONG = (
    "train.loop.train tasks.base.prepare tasks.fetch.fetch tasks.inspect.check report.write_report "
    "tasks.lra_listops.LraListops.generate tasks.lra_pathfinder.LraPathfinder.generate tasks.lra_retrieval.LraRetrieval.generate "
    "reproduce.run.run reproduce.estimate.estimate reproduce.estimate.matmul_peak bench.runner.run_groups bench.runner.run_curves "
    "demo.server.Server.__init__ machine.limit_memory machine.when_parent_ends "
    "models.inspection.summarize models.inspection.inspect models.convert.convert_checkpoint"
).split(" ")
"""Functions behind commands that take long."""
FIGURES = ("report.maps.map_figures", "report.curves.length_figures", "report.curves.training_figures")
FIT = ("train.loop.finished_result", *(f"train.loop.Trainer.{name}" for name in ("_fit", "_finish", "_remove_old_checkpoints")))
RUNS = "match/*.json match/*.jsonl results/*.jsonl"

TARGETS = {
    "text": ("*.txt*", functools.partial(collected, text.lines)),
    "csv": ("*.csv*", read_rows),
    "tsv": ("*.tsv", read_rows),
    "JSON lines": ("*.jsonl", read_rows),
    "Parquet": ("*.parquet", read_rows),
    "tar": ("*.tar*", read_archive),
    "zip": ("*.zip", read_archive),
    "images": ("*.image", lambda path: images.gray_image(path.read_bytes(), (4, 4))),
    "pickles of CIFAR": ("*.pickle", lambda path: cifar.cifar_batch(path.read_bytes())),
    "literals": ("*.literal", lambda path: text.bytes_literal(path.read_bytes().decode("utf-8", "surrogateescape"))),
    "reports": (RUNS, read_report),
    "reports with figures": (RUNS, read_report),
    "run folders": ("*/experiment.json */model/*.json */model/*.safetensors", use_run),
    "checkpoints": ("resumed/checkpoints/*/*", resume_run),
    "prepared data": ("store/*", read_store),
    "from_pretrained": ("sharded/*", lambda path: Classifier.from_pretrained(path.parent, local_files_only=True)),
    "tokenizers": ("tokenizer/*.json", lambda path: models.ByteTokenizer.from_pretrained(path.parent, local_files_only=True)("a")),
    "states of the cache": ("*.safetensors", resume_state),
    "requests of the demo": ("requests/*.json", answer),
    "configurations": ("parsed/*.json", parse),
    "command line": ("lines/*.json", run_command),
}
"""Patterns of good files, and the function that reads one of them."""
REPLACED = {
    "reports": dict.fromkeys(FIGURES, lambda *arguments: ()),
    "checkpoints": dict.fromkeys(FIT, lambda *arguments: {}),
    "requests of the demo": {"demo.api.explain": cut_off},
    "command line": dict.fromkeys(LONG, cut_off),
}
"""Functions that are replaced, because they take long."""

REQUESTS = {
    "positions-lm": {"features": 16, "permutation": "random", "seed": 1, "head": 0, "r": 0.9, "axes": 1, "causal": True, "alike": False},
    "predict-match": {"text": "some words", "second": "other words"},
    "predict-digits": {"image": base64.b64encode(small_data.picture(9)).decode()},
    "generate-lm": {"prompt": "some", "tokens": 5, "temperature": 0.5, "seed": 1},
    "explain-match": {"text": "some words", "second": "others"},
}
"""Requests of the demo, by route and run."""


@pytest.fixture(scope="session")
def good():
    """Return a folder of good files, in memory if possible; the commands are those of the documentation."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        _write_models(Path(name))
        _write_data(Path(name))
        yield Path(name)


def _write_models(folder):
    pages.write_data(folder)
    for name in ("requests", "parsed", "lines", "results"):
        (folder / name).mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PERMUTEFORMER_CACHE", str(folder / "cache"))
        for task in ("digits", "match", "lm"):
            loop.train(tiny(task, steps=2), folder / task, QUIET)
    shutil.copytree(folder / "match", folder / "resumed")
    shutil.copytree(next(folder.glob("cache/match-*")), folder / "store")
    models.ByteTokenizer().save_pretrained(folder / "tokenizer")
    Classifier(models.PermuteFormerConfig(**SIZES, vocab_size=11)).save_pretrained(folder / "sharded", max_shard_size="2KB")
    for attention in ("linear", "softmax"):
        language_model(attention)(torch.tensor([[1, 2, 3]])).past_key_values.save(folder / f"{attention}.safetensors")
    configurations = {name: models.PermuteFormerConfig.preset(name, hidden_size=16, num_attention_heads=2).to_dict() for name in PRESETS}
    lines = [words[1:] for page in pages.PAGES for block in pages.blocks(page) if block.language == "sh" for words in block.commands]
    lines += [["resume", "run", "--data", "."], ["convert", "run", "output", "--model.pooling", "mean"], ["run-cell", "job.json"]]
    for name, contents in {
        "requests": REQUESTS,
        "parsed": {**configurations, "experiment": tiny("match", steps=2).to_json()},
        "lines": {str(number): words for number, words in enumerate(lines)},
        "results": {"all": build_report([folder / "match"]).runs[0].to_json()},
    }.items():
        for title, content in contents.items():
            (folder / name / f"{title}.{'jsonl' if name == 'results' else 'json'}").write_text(json.dumps(content))


def _write_data(folder):
    contents = {
        "a.txt": "first\nsecond \r\ndritte Zeile ä\n\nlast ".encode(),
        "a.csv": 'text,label,id\n"a, ""b""\nc",good,1\nplain,bad,2\n"ü",good,3\n'.encode(),
        "a.tar": small_data.tar_bytes([("a.txt", b"a" * 20), ("b/ü" + "x" * 110, b"b" * 20)]),
        "out.tar": small_data.tar_bytes([("../out.txt", b"out")]),
    }
    contents = {name + end: pack(content) for name, content in contents.items() for end, pack in small_data.COMPRESS.items()}
    contents |= {
        "a.tsv": b"Source\tTarget\r\n( [MAX 1 2 ) ]\t2\r\n3\t3\r\n",
        "a.jsonl": '{"text": "a\u202e", "label": 1, "more": [1.5, null, {"x": true}]}\n{"text": "b", "label": 2, "more": []}'.encode(),
        "a.zip": small_data.zip_bytes([("a.txt", b"content " * 4), ("b/ü.txt", b"")]),
        "out.zip": small_data.zip_bytes([("../out.txt", b"out")]),
        "a.literal": repr(bytes(range(256))).encode(),
        "new.png": small_data.picture(9),
    }
    batch = {"labels": [1, 2], "data": np.zeros((2, 3072), np.uint8), "more": ("x", b"y", None)}
    contents |= {f"{protocol}.pickle": pickle.dumps(batch, protocol) for protocol in (0, 2, 4, 5)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    table = pyarrow.table({"text": [f"text {n}" for n in range(12)], "label": [n % 2 for n in range(12)], "tags": [[n] for n in range(12)]})
    for codec in ("none", "snappy", "gzip", "zstd"):
        pyarrow.parquet.write_table(table, folder / f"{codec}.parquet", 5, compression=codec, write_page_checksum=codec == "none")
    picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    for format, mode in itertools.product(images.FORMATS, ("RGB", "L", "P", "RGBA", "1")):
        with contextlib.suppress(OSError, KeyError, ValueError):  # Pillow cannot write all of them
            picture.convert(mode).save(folder / f"{format}-{mode}.image", format)


# Limits


def check_message(message):
    """A refusal is text that can be printed, and not too long."""
    assert message.strip()
    assert len(message) <= 3_000
    assert all(line.isprintable() for line in message.split("\n"))


class Slow(BaseException):
    """An input takes too long. It is no ``Exception``, so that it is not caught."""


class Watch:
    """Limits the time of inputs; notes and prevents programs, connections, and changes of files outside a folder."""

    def __init__(self, folder):
        self.folder, self.active, self.effects = os.path.join(os.path.realpath(folder), ""), False, []
        sys.addaudithook(self._see)

    def _see(self, event, arguments):
        if not self.active or (event == "open" and not opens_to_write(*arguments[1:])):
            return
        path = arguments[0] if event in ("open", *CHANGES) and not isinstance(arguments[0], int) else os.devnull
        is_outside = not (os.path.abspath(os.fsdecode(path)) + os.sep).startswith((self.folder, os.devnull))
        if event in PROGRAMS or is_outside:
            self.effects.append(f"{event} {arguments[:2]!r:.200}")
            raise PermissionError(f"{event} must not happen")

    def __enter__(self):
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        faulthandler.dump_traceback_later(3 * SECONDS, exit=True)  # a hang in compiled code ends the process
        self.active = True

    def __exit__(self, kind, error, trace):
        self.active = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        assert not self.effects


@pytest.fixture
def watch(good, monkeypatch):
    """Return a ``Watch``, in a process that gets little more memory than it has."""

    def stop(number, frame):
        raise Slow

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PERMUTEFORMER_CACHE", str(good / "cache"))
    monkeypatch.chdir(good)
    environment()  # asks git once
    before, limits = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
    yield Watch(good)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inputs", sizes(INPUTS, short=10))
@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_accepted_or_refused(name, inputs, good, watch, monkeypatch, counts):
    (patterns, read), memory = TARGETS[name], []
    files = {str(path): path.read_bytes() for pattern in patterns.split() for path in sorted(good.glob(pattern)) if path.is_file()}
    for function, replacement in REPLACED.get(name, {}).items():
        monkeypatch.setattr(f"permuteformer.{function}", replacement)
    counts.update(accepted=0, refused=0)

    def give(given):
        path, content = Path(given[0]), given[1]
        path.write_bytes(content)
        try:
            with watch:
                read(path)
            counts["accepted"] += 1
        except Exception as error:
            error = error.__cause__ if type(error).__name__.startswith("StrictDataclass") else error  # which wraps the message
            if type(error) not in ERRORS and not type(error).__module__.startswith("permuteformer"):
                raise
            check_message(str(error))
            counts["refused"] += 1
        finally:
            path.write_bytes(files[given[0]])

    inputs = -(-inputs // SLOW.get(name, 1))
    given = st.sampled_from(sorted(files)).flatmap(lambda path: st.tuples(st.just(path), damaged_file(path, files[path])))
    options = {"database": None, "deadline": None, "derandomize": False, "suppress_health_check": list(hypothesis.HealthCheck)}
    for start in range(0, inputs, ROUND):  # hypothesis remembers the inputs of a round
        settings = hypothesis.settings(max_examples=min(ROUND, inputs - start), **options)
        hypothesis.seed(SEED * INPUTS + start)(settings(hypothesis.given(given)(give)))()
        gc.collect() if inputs > ROUND else None
        memory.append((resident_memory() or 0) / 2**20)
    counts["MiB"], counts["growth"] = round(memory[-1]), round(memory[-1] - memory[0])
    assert counts["growth"] < GROWTH


@pytest.mark.parametrize(
    "act",
    [
        lambda path: os.system("true"),
        lambda path: path.write_text("outside"),
        lambda path: path.mkdir(),
        lambda path: pickle.loads(b"cos\nsystem\n."),
        lambda path: any(number < 0 for number in itertools.count()),
    ],
    ids=["program", "file", "folder", "pickle", "hang"],
)
def test_the_limits_notice_what_an_input_must_not_do(act, watch, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SECONDS", 0.1)
    with pytest.raises((AssertionError, Slow)), watch:
        act(tmp_path / "new")
    assert not (tmp_path / "new").exists()
