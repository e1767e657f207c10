"""Killed at any moment, a run that goes on ends with the bytes of an undisturbed one, and nothing half made is believed.

Moments are drawn in three ways: over the whole time of the process; within one phase of it (a training step, a checkpoint write, …); and
before one of its changes of files, which the process does to itself. Signals are SIGKILL and SIGTERM.
"""

from __future__ import annotations

import functools
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from soak.moments import PHASES, Board, watch
from soak.processes import KILL, TERM, TINY, Command, training
from soak.whole import different_run, files, left_over, wrongly_believed

KILLS = 100
"""At scale 1."""

WAYS = ("time", "phase", "change", "time", "phase", "change", "time", "phase", "change", "time")
"""How moments are drawn, in turns."""

ROWS = 20_000
FIELDS = {**TINY, "batch_size": 8, "steps": 13, "evaluate_every": 4, "train_items": 40, "validation_items": 60, "test_items": 60}
FIELDS |= {"max_length": 64, "checkpoint_minutes": 0, "task.seed": 3}
OF_REPORTS = ("report building", "report writing")


@dataclass(frozen=True)
class Undisturbed:
    """What a command leaves when nobody kills it, and how it spends its time."""

    folder: Path
    seconds: float
    board: Board


def run(scale: float, folder: Path, seed: int) -> Iterator[dict[str, object]]:
    """A line a case: what was going on at every kill, and what was wrong afterwards."""
    table = folder / "table.csv"
    table.write_text("text,label\n" + "".join(f"the {n * n % 1009} cats of {n},{'abc'[n % 3]}\n" for n in range(ROWS)))
    soak = _Kills(folder, table, random.Random(seed))
    yield from soak.prepare(twice=scale > 0.1)
    wanted, killed, number = max(round(KILLS * scale), 1), Counter[str](), 0
    while killed.total() < wanted:
        line, phases = soak.case(number, WAYS[number % len(WAYS)])
        killed.update(phases)
        number += 1
        if phases or not line["ok"]:  # else it had ended before
            yield line
    missing = [phase for phase in PHASES if not killed[phase]]
    yield {"what": "kills by what was going on", "ok": not missing or scale < 0.5, "kills": dict(killed.most_common()), "missing": missing}


class _Kills:
    """Cases, each in a folder of its own with a cache of its own."""

    def __init__(self, folder: Path, table: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.train = training("classify", str(table), fields=FIELDS)
        self.turns = Counter[str]()

    def prepare(self, twice: bool) -> Iterator[dict[str, object]]:
        """Carry out everything undisturbed, and once more: what is compared must not differ by chance."""
        self.whole = self._undisturbed("once", self.train, "run")
        self.report_words: list[object] = ["report", self.whole.folder / "run"]
        self.new = self._undisturbed("new", self.report_words, "report")
        if not twice:
            return
        again = self._undisturbed("again", self.train, "run")
        wrong = different_run(again.folder / "run", self.whole.folder / "run")
        wrong += [] if files(again.folder / "cache") == files(self.whole.folder / "cache") else ["cache"]
        yield {"what": "undisturbed run, twice", "ok": not wrong, "wrong": wrong, **_spent(self.whole)}
        anew = self._undisturbed("anew", self.report_words, "report")
        wrong = [] if files(self.new.folder / "report") == files(anew.folder / "report") else ["report"]
        yield {"what": "undisturbed report, twice", "ok": not wrong, "wrong": wrong, **_spent(self.new)}
        self.whole = replace(self.whole, seconds=min(self.whole.seconds, again.seconds))  # the first waits for what is imported

    def _undisturbed(self, name: str, words: list[Any], output: str) -> Undisturbed:
        case = self.folder / name
        case.mkdir()
        board = Board(case / "board")
        begun = time.monotonic()
        self._command(case, words, output, poison=functools.partial(watch, board=str(board.path), folder=str(case))).succeed()
        return Undisturbed(case, time.monotonic() - begun, board)

    def _command(self, case: Path, words: list[Any], output: str | None, **how: Any) -> Command:
        return Command(*words, output=case / output if output else None, environment={"PERMUTEFORMER_CACHE": case / "cache"}, **how)

    def case(self, number: int, way: str) -> tuple[dict[str, object], list[str]]:
        """Kill one command, and see what it leaves. Returns a line about it, and what was going on at the kills."""
        case = self.folder / f"case-{number}"
        case.mkdir()
        phase = self._turn(list(PHASES)) if way == "phase" else None
        of_report = phase in OF_REPORTS or (phase is None and self.rng.random() < 0.2)
        kills: list[dict[str, object]] = []
        wrong = self._report(case, way, phase, kills) if of_report else self._training(case, way, phase, kills)
        wrong += [f"left: {name}" for name in left_over(case)]
        if not wrong:
            shutil.rmtree(case)
        what = f"{'report' if of_report else 'train'}, killed at a {way}"
        return {"what": what, "ok": not wrong, "kills": kills, "wrong": wrong}, [str(kill["phase"]) for kill in kills]

    def _turn(self, choices: list[str]) -> str:
        least = min(self.turns[name] for name in choices)
        chosen = self.rng.choice([name for name in choices if self.turns[name] == least])
        self.turns[chosen] += 1
        return chosen

    def _training(self, case: Path, way: str, phase: str | None, kills: list[dict[str, object]]) -> list[str]:
        words, output, wrong = self.train, "run", list[str]()
        whole, run, cache = self.whole.folder, case / "run", case / "cache"
        while kill := self._kill(case, words, output, self.whole, way, phase):
            kills.append(kill)
            wrong += wrongly_believed(run, cache, whole / "run", whole / "cache")
            if self.rng.random() < 0.5 and (run / "experiment.json").exists():  # two ways of going on
                words, output = ["resume", str(run), "--checkpoint-minutes", "0"], ""
            way, phase = "time", None
            if self.rng.random() < 0.75:  # else what goes on is killed too
                self._command(case, words, output or None).succeed()
                break
        wrong += different_run(run, whole / "run")
        return wrong + ([] if files(cache) == files(whole / "cache") else ["cache"])

    def _report(self, case: Path, way: str, phase: str | None, kills: list[dict[str, object]]) -> list[str]:
        output = case / "report"
        new = files(self.new.folder / "report")
        if self.rng.random() < 0.5:  # there is an old one
            shutil.copytree(self.new.folder / "report", output)
            (output / "report.md").write_text("the old one")
        before = files(output)
        if kill := self._kill(case, self.report_words, "report", self.new, way, phase):
            kills.append(kill)
        wrong = [] if files(output) in ({}, before, new) else ["report: neither old nor new"]
        self._command(case, self.report_words, "report").succeed()
        return wrong + ([] if files(output) == new else ["report"])

    def _kill(self, case: Path, words: list[Any], output: str, like: Undisturbed, way: str, phase: str | None) -> dict[str, object] | None:
        """Start a command and kill it; nothing where it had ended before."""
        sent = self.rng.choice((KILL, TERM))
        board = Board(case / f"board-{self.rng.getrandbits(32):x}")
        change = self.rng.randint(1, like.board.changes) if way == "change" else None
        poison = functools.partial(watch, board=str(board.path), folder=str(case), change=change, sent=int(sent))
        command = self._command(case, words, output or None, poison=poison)
        begun = time.monotonic()
        (process,) = command.processes
        if phase is not None:
            number = self.rng.randint(1, max(like.board.began(phase), 1))
            while board.began(phase) < number and process.is_alive():
                time.sleep(0.0002)
            delay = self.rng.random() * like.board.seconds(phase)
        else:
            delay = self.rng.random() * like.seconds
        if way != "change":
            process.join(delay)
        going_on = board.phase
        if way != "change" and process.is_alive():
            process.kill() if sent == KILL else process.terminate()
        (code,) = command.wait()
        if way == "change" or sent == KILL:
            going_on = _read(Path(f"{board.path}.killed")) or board.phase
        board.path.unlink()
        if code == 0:
            return None
        assert code in (-sent, 128 + sent), command.text
        return {"signal": sent.name, "phase": going_on, "code": code, "seconds": round(time.monotonic() - begun, 3)}


def _read(path: Path) -> str:
    """What a file says that was there, and is not any more."""
    said = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    return said


def _spent(one: Undisturbed) -> dict[str, object]:
    phases = {phase: {"times": one.board.began(phase), "seconds": round(one.board.seconds(phase), 4)} for phase in PHASES}
    return {
        "seconds": round(one.seconds, 2),
        "changes": one.board.changes,
        "phases": {phase: spent for phase, spent in phases.items() if spent["times"]},
    }
