"""Several processes: one is lost, many read data that is being prepared, two want the same run folder."""

import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import processes
import pytest
from processes import DIGITS, EVERY_STEP, UPDATE, Command, differences, steps
from soak.scale import SEED, cases, sizes

PLACES = {
    "in a step": (UPDATE, 8),
    "in its first step": (UPDATE, 1),
    "in an evaluation": (processes.EVALUATE, 2),
    "at a checkpoint": ("permuteformer.train.loop.Trainer._save", 5),
    "at the end": ("permuteformer.train.loop.Trainer._finish", 1),
    "in data preparation": ("permuteformer.tasks.store._write", 1),
}
LOST = [f"{rank} {place}" for place in PLACES for rank in (1, 0)]
LOST.remove("1 in data preparation")  # which process 0 does alone
LONG = [*DIGITS[:-4], "--steps", 500, "--evaluate-every", 100]
"""A run that is long enough to be killed while it trains."""
LOST_SECONDS = 60


@pytest.mark.parametrize("case", cases(LOST))
def test_a_lost_process_stops_the_other_and_the_run_resumes(case, whole, tmp_path, counts):
    rank, _, place = case.partition(" ")
    name, number = PLACES[place]
    before = functools.partial(processes.signal_at, name=name, number=number, of_rank=int(rank))
    words = [*DIGITS, *EVERY_STEP, "--output", tmp_path / "run"]
    killed = Command(*words, processes=2, before=before, environment={"XDG_CACHE_HOME": tmp_path / "cache"})
    lost, other = killed.processes[int(rank)], killed.processes[1 - int(rank)]
    lost.join()
    began = time.monotonic()
    other.join(LOST_SECONDS)
    counts["seconds until the other stopped"] = round(time.monotonic() - began, 1)
    assert (lost.exitcode, other.exitcode) == (-signal.SIGKILL, 1), killed.text
    text = " ".join(killed.text.split())
    assert "Traceback" not in text
    assert "one of the 2 processes" in text
    assert "torchrun --nproc-per-node 2 -m permuteformer resume" in text
    Command(*words, processes=2).end()
    assert not differences(tmp_path / "run", whole(*DIGITS, *EVERY_STEP, processes=2))


@pytest.mark.soak
@pytest.mark.parametrize("rank", [1, 0])
def test_a_lost_process_of_torchrun(rank, whole, tmp_path, counts):
    run, output = tmp_path / "run", tmp_path / "output"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "permuteformer", *LONG]
    with output.open("w") as file:
        torchrun = subprocess.Popen([*map(str, words), "--output", run], stdout=file, stderr=file, env={**os.environ, **processes.shared()})
    try:
        while not steps(run):
            with pytest.raises(subprocess.TimeoutExpired):  # it is still running
                torchrun.wait(0.05)
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[rank]), signal.SIGKILL)
        began = time.monotonic()
        assert torchrun.wait(2 * LOST_SECONDS) != 0
        counts["seconds until the other stopped"] = round(time.monotonic() - began, 1)
    finally:
        torchrun.kill()
    last = steps(run)[-1]
    assert f"resuming from step {last:,}" in Command("resume", run, processes=2).end()
    assert not differences(run, whole(*LONG, processes=2))


READERS, ROWS = 24, 10_000


@pytest.mark.parametrize("caches", sizes(6))
def test_data_that_many_processes_want_is_prepared_once(caches, tmp_path, counts):
    rng, (count, rows) = random.Random(SEED), (READERS, ROWS) if caches > 1 else (READERS // 4, ROWS // 10)
    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "".join(f"the {n * n % 1009} cats of {n},{'abc'[n % 3]}\n" for n in range(rows)))
    for number in range(caches):
        cache, answers, is_killed = tmp_path / f"cache-{number}", processes.SERVER.SimpleQueue(), number % 2 == 0
        kill_after = rng.uniform(0, 0.2) if is_killed else None
        readers = [processes.SERVER.Process(target=_read, args=(table, cache, kill_after, answers)) for _ in range(count)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(300)
        assert sorted(reader.exitcode for reader in readers) == [-signal.SIGKILL] * is_killed + [0] * (count - is_killed)
        found = [answers.get() for _ in range(count - is_killed)]
        assert set(found) == {(rows, found[0][1])}
        assert len([path for path in cache.iterdir() if not path.name.startswith(".")]) == 1
        assert len(list(tmp_path.glob(f"cache-{number}-builder-*"))) == 1 + is_killed
        assert not processes.unfinished(cache)
    counts["readers"] = caches * count


def _read(table, cache, kill_after, answers):
    """Read all rows in a process of its own; the first one that prepares them is killed after some seconds."""
    os.environ |= {**processes.shared(), "PERMUTEFORMER_CACHE": str(cache)}
    from permuteformer.tasks import store
    from permuteformer.tasks.classify import Classify

    write = store._write

    def counted(*arguments):
        builders = list(cache.parent.glob(f"{cache.name}-builder-*"))
        cache.with_name(f"{cache.name}-builder-{os.getpid()}").touch()
        killer = threading.Timer(kill_after or 0, os.kill, (os.getpid(), signal.SIGKILL))
        if kill_after is not None and not builders:
            killer.start()
        write(*arguments)
        if killer.is_alive():
            killer.join()

    store._write = counted
    task, digest, count = Classify(str(table)), hashlib.sha256(), 0
    for split in ("train", "validation", "test"):
        rows = task.store.rows(split)
        digest.update(repr(rows[:]).encode())
        count += len(rows)
    answers.put((count, digest.hexdigest()))


@pytest.mark.parametrize("pairs", sizes(10))
def test_two_runs_in_one_folder_do_not_mix(pairs, whole, tmp_path, counts):
    rng, words = random.Random(SEED), [*DIGITS[:-4], "--steps", 200 if pairs > 1 else 60, "--evaluate-every", 50]
    for number in range(pairs):
        run, path = tmp_path / f"run-{number}", tmp_path / f"trace-{number}"
        in_a_step = number % 2 == 0
        first = Command(*words, "--output", run, before=functools.partial(processes.trace, path=str(path), folder=str(run)))
        while in_a_step and not any(phase == "training step" for _, phase in processes.read_trace(path)):
            first.processes[0].join(0.001)
        first.processes[0].join(0 if in_a_step else rng.uniform(0, 1.5))
        can_resume = (run / "experiment.json").exists() and rng.random() < 0.5
        second = Command("resume", run) if can_resume else Command(*words, "--output", run)
        codes, text = sorted([*first.wait(), *second.wait()]), " ".join(f"{first.text} {second.text}".split())
        is_refused = f"{run} is in use by another process" in text
        assert codes == [0, int(is_refused)], text
        assert is_refused or not in_a_step
        assert "Traceback" not in text
        assert not differences(run, whole(*words))
        ended = "refused" if is_refused else "after the first"
        counts[ended] = counts.get(ended, 0) + 1
