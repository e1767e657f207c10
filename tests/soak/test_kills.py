"""Killed at any moment, a run resumes to the same bytes, and every file with its final name is complete."""

import datetime
import functools
import itertools
import json
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest
from processes import DIGITS, EVERY_STEP, TINY, UPDATE, Command, differences, files, read_trace, steps, unfinished
from soak.scale import SEED, sizes

from permuteformer.train import checkpoint

ROWS = 20_000


@dataclass
class Undisturbed:
    """A command that was not killed: its words, the folder below which it wrote, and what it did when."""

    words: list
    folder: Path

    def __post_init__(self):
        self.folder.mkdir()
        self.start(self.folder).end()
        moments, self.phases = zip(*read_trace(self.folder / "trace"), strict=True)
        self.seconds = moments[-1] - moments[0]

    def start(self, case, words=None, **signals):
        """Start the command below another folder, traced."""
        (case / "trace").unlink(missing_ok=True)
        words = [str(word).replace(str(self.folder), str(case)) for word in words or self.words]
        before = functools.partial(processes.trace, path=str(case / "trace"), folder=str(case), **signals)
        return Command(*words, before=before, environment={"PERMUTEFORMER_CACHE": case / "cache"})

    def kill(self, case, words, way, number, rng):
        """Start the command and kill it; return the signal and what it was doing, or nothing if it ended first."""
        sent = rng.choice((signal.SIGKILL, signal.SIGTERM))
        if way == "at any time":
            command = self.start(case, words)
            command.processes[0].join(rng.uniform(0, self.seconds))
            command.processes[0].kill() if sent == signal.SIGKILL else command.processes[0].terminate()
        else:  # before an event of each phase in turn
            phase = sorted(set(self.phases))[number % len(set(self.phases))]
            event = rng.choice([event for event, name in enumerate(self.phases) if name == phase])
            command = self.start(case, words, number=event, sent=sent)
        (code,) = command.wait()
        assert code in (0, -sent, 128 + sent), command.text
        assert "Traceback" not in command.text, command.text
        doing = [phase for _, phase in read_trace(case / "trace")] or ["start"]
        return f"{sent.name}, {doing[-1]}" if code else None


@pytest.fixture(scope="session")
def training(tmp_path_factory):
    """A classifier of a table of 20,000 rows, from data preparation to the model, with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp("kills")
    rows = "".join(f"the {n * n % 1009} cats of {n},{'abc'[n % 3]}\n" for n in range(ROWS))
    (folder / "table.csv").write_text(f"text,label\n{rows}")
    options = [*TINY, "--steps", 13, "--evaluate-every", 4, "--task.max-length", 64, *EVERY_STEP]
    return Undisturbed(["train", "classify", folder / "table.csv", *options, "--output", folder / "a" / "run"], folder / "a")


@pytest.fixture(scope="session")
def report(training):
    folder = training.folder.with_name("b")
    return Undisturbed(["report", training.folder / "run", "--output", folder / "report"], folder)


@pytest.mark.parametrize("kills", sizes(45))
@pytest.mark.parametrize("way", ["at any time", "in each phase"])
def test_a_killed_run_resumes_to_the_same_bytes(way, kills, training, tmp_path, counts):
    rng, done = random.Random(f"{SEED} {way}"), 0
    while done < kills:
        case = tmp_path / str(done)
        case.mkdir()
        words, chosen = None, way
        while found := training.kill(case, words, chosen, done, rng):
            done, counts[found] = done + 1, counts.get(found, 0) + 1
            assert not incomplete(case, training.folder), found
            if (case / "run" / "experiment.json").exists() and rng.random() < 0.5:  # the same command resumes too
                words = ["resume", case / "run", *EVERY_STEP]
            if rng.random() < 0.75:
                training.start(case, words).end()
                break
            chosen = "at any time"  # the run that resumes is killed as well
        assert not differences(case / "run", training.folder / "run"), found
        assert files(case / "cache") == files(training.folder / "cache"), found
        assert not unfinished(case), found
        shutil.rmtree(case)


@pytest.mark.parametrize("kills", sizes(24)[1:])
def test_a_killed_report_leaves_the_old_one_or_the_new_one(kills, report, counts):
    rng, new, case = random.Random(SEED), files(report.folder / "report"), report.folder.with_name("c")  # whose paths are as long
    output = case / "report"
    while sum(counts.values()) < kills:
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir()
        if rng.random() < 0.5:
            shutil.copytree(report.folder / "report", output)
            (output / "report.md").write_text("an old one")
        old, way = files(output), rng.choice(["at any time", "in each phase"])
        if found := report.kill(case, None, way, sum(counts.values()), rng):
            counts[found] = counts.get(found, 0) + 1
        assert files(output) in ({}, old, new), found
        report.start(case).end()
        assert files(output) == new, found
        assert not unfinished(case), found


def incomplete(case, whole):
    """Return what has its final name, but not all of its content."""
    run, wrong = case / "run", []
    for step in steps(run):
        try:
            checkpoint.load(run / "checkpoints", step)
        except checkpoint.Damaged as error:
            wrong.append(str(error))
    is_complete = not differences(run / "model", whole / "run" / "model")
    if (run / "model").exists() and not is_complete:
        wrong.append("model")
    if (run / "result.json").exists():
        content = [processes.timeless("result.json", (folder / "result.json").read_bytes()) for folder in (run, whole / "run")]
        if content[0] != content[1] or not is_complete:
            wrong.append("result.json")
    entries = [path for path in (case / "cache").glob("*") if not path.name.startswith(".")]
    return wrong + [entry.name for entry in entries if files(entry) != files(whole / "cache" / entry.name)]


def test_a_clock_that_goes_backwards_changes_nothing(whole, tmp_path):
    run = tmp_path / "run"
    killed = Command(*DIGITS, *EVERY_STEP, "--output", run, before=functools.partial(backward_clock, number=9))
    assert killed.wait() == [-signal.SIGKILL], killed.text
    for number, path in enumerate(sorted(run.glob("checkpoints/step-*"), reverse=True)):
        for file in (*path.iterdir(), path):  # older checkpoints get newer times
            os.utime(file, (time.time() + 1000 * number,) * 2)
    text = Command("resume", run, *EVERY_STEP, before=backward_clock).end()
    assert "resuming from step 8 of 13" in text
    assert not differences(run, whole(*DIGITS, *EVERY_STEP))
    seconds = [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= sooner <= later for sooner, later in itertools.pairwise(seconds))


def backward_clock(rank, number=None):
    """Have each look at the clock be an hour before the last one, and the process killed at an update."""
    true_time, looks = time.time, itertools.count()

    def now():
        return true_time() - 3600 * next(looks)

    class Backward(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.fromtimestamp(now(), tz)

    time.time, time.time_ns, datetime.datetime = now, lambda: int(now() * 1e9), Backward
    if number is not None:
        processes.signal_at(rank, UPDATE, number)
