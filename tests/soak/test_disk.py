"""A full or read-only disk stops a command with one message; nothing is lost, and with room it continues to the same bytes.

They are skipped where a disk cannot be mounted. ``tests/train/test_failures.py`` limits the size of files instead (``ulimit -f``).
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess

import pytest
from processes import DIGITS, EVERY_STEP, TINY, UPDATE, Command, differences, files, signal_at, steps, unfinished
from soak.scale import cases

from permuteformer.train.checkpoint import load

DISK_BYTES, PAGE = 4 * 2**20, 4096


def mount(*words):
    return subprocess.run(["mount", *map(str, words)], capture_output=True)


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if not shutil.which("mount") or mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder).returncode:
        pytest.skip("a disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def filled(disk, free):
    """Leave about ``free`` bytes of the disk."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(PAGE)) == PAGE:
            pass
    os.truncate(filler, max(filler.stat().st_size // PAGE * PAGE - free, 0))
    yield
    filler.unlink()


@contextlib.contextmanager
def read_only(disk):
    mount("-o", "remount,ro", disk).check_returncode()
    yield
    mount("-o", "remount,rw", disk).check_returncode()


def begin(run, **options):
    """Start a run and stop it in step 6."""
    before = functools.partial(signal_at, name=UPDATE, number=6, sent=signal.SIGTERM)
    Command(*DIGITS, "--output", run, before=before, **options).end(128 + signal.SIGTERM)
    shutil.rmtree(run / "tensorboard")


def assert_resumes(run, undisturbed, **options):
    Command("resume", run, **options).end()
    assert not [name for name in differences(run, undisturbed) if not name.startswith("checkpoints/")]  # of which there are other steps
    assert not unfinished(run)


@pytest.mark.parametrize("pages", cases([12, 0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]))
def test_training_on_a_full_disk(pages, disk, whole, counts):
    run = disk / "run"
    begin(run)
    with filled(disk, pages * PAGE):
        command = Command("resume", run, *EVERY_STEP)
        (code,) = command.wait()
        last, text = steps(run)[-1], " ".join(command.text.split())
        assert load(run / "checkpoints", last).step >= 6
        assert "Traceback" not in text
        assert code == 1 or (code, last) == (0, 13)
        if code:
            assert all(part in text for part in ("the disk is full", f"step {last:,}", f"permuteformer resume {run}"))
    counts["stopped" if code else "had enough room"] = 1
    assert_resumes(run, whole(*DIGITS))


@pytest.mark.soak
@pytest.mark.parametrize("free", [0, PAGE, 100_000])
@pytest.mark.parametrize("command", ["train", "report"])
def test_data_preparation_and_reports_on_a_full_disk(command, free, disk, whole, tmp_path, counts):
    table, cache, report = tmp_path / "table.csv", disk / "cache", disk / "report"
    table.write_text("text,label\n" + "".join(f"the {n * n % 1009} cats of {n},{'abc'[n % 3]}\n" for n in range(20_000)))
    words, place, advice = ["report", whole(*DIGITS), "--output", report], report, "--output"
    if command == "train":
        words, place, advice = ["train", "classify", table, *TINY, "--steps", 1, "--output", tmp_path / "run"], cache, "PERMUTEFORMER_CACHE"
    else:
        Command(*words).end()
        (report / "report.md").write_text("an old one")
    before = files(place)
    with filled(disk, free):
        text = Command(*words, environment={"PERMUTEFORMER_CACHE": cache}).end(1)
        assert f"the disk is full: {disk}" in text
        assert advice in text
        assert files(place) == before
    Command(*words, environment={"PERMUTEFORMER_CACHE": cache}).end()
    assert files(place) != before
    assert not unfinished(disk)
    counts["stopped"] = 1


@pytest.mark.soak
def test_a_read_only_disk(disk, whole, tmp_path, counts):
    run, report, cache = disk / "run", disk / "report", {"PERMUTEFORMER_CACHE": disk / "cache"}
    with read_only(disk):
        assert f"{run} cannot be written" in Command(*DIGITS, "--output", run).end(1)
        assert "PERMUTEFORMER_CACHE" in Command(*DIGITS, "--output", tmp_path / "run", environment=cache).end(1)
        assert f"{report} cannot be written" in Command("report", whole(*DIGITS), "--output", report).end(1)
    begin(run, environment=cache)
    before = files(run)
    with read_only(disk):
        assert f"{run} cannot be written" in Command("resume", run, environment=cache).end(1)
        assert files(run) == before
        Command(*DIGITS, "--output", tmp_path / "elsewhere", environment=cache).end()  # reads the cache
        assert not differences(tmp_path / "elsewhere", whole(*DIGITS))
    assert_resumes(run, whole(*DIGITS), environment=cache)
    counts["refused"] = 4
