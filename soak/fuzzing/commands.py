"""Command lines: every command with its words changed; the work that takes long is cut off where it would begin."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shlex
from pathlib import Path
from random import Random
from typing import Any

import typer

from permuteformer.cli import app
from permuteformer.train import limits
from soak.fuzzing.judge import Cut, Target, Wrong, cut
from soak.fuzzing.mutation import NUMBERS, TEXTS

LINES = """
train classify table.csv --output run --steps 5 --learning-rate 1e-3 --hidden-size 8 --quiet
train classify table.csv --model performer-text --task.max-length 64 --model.hidden-dropout 0.1 --data . --track none
train lm-bytes --attention '{"name": "linear", "feature_multiplier": 4}' --epochs 0.5 --workers 1 --sequence-parallel 2
train digits --checkpoint-minutes 5 --shard --seed 3 --evaluate-every 10 --test-lengths 8,16
resume run --data . --quiet
eval run --split test --items 5 --batch-size 8
predict run table.csv --output labels.csv --text-column text --id-column id --batch-size 4 --skip-bad --device cpu
generate run --prompt text --tokens 5 --temperature 0.5 --top-k 3 --top-p 0.9 --seed 1 --stop
fields classify
fields lra-image
run-cell job.json --data .
reproduce --table 4 --rows performer,transformer --preset small --seeds 2 --tasks lm --jobs 1 --dry-run --output run
experiments --preset quick
report run results.jsonl --output report
bench scaling --lengths 512,1024 --against performer --turns 2 --limit-seconds 1 --threads 1 --device cpu --output run
bench ops --dtype bfloat16
inspect permuteformer-lm --length 100 --distance 10
inspect run
explain run --text words --answer a --output page.html
explain run --file table.csv --item 3 --split test
demo run --port 0 --no-browser
info
models lm --length 100
convert run output --field 'pooling="mean"' --field hidden_size=8
data list --data .
data options classify
data fetch lra-image --data .
data generate lra-listops --train 5 --validation 5 --test 5 --seed 1 --processes 1 --data .
data check classify table.csv --set max-length=64 --skip-bad
data show classify table.csv --count 2 --split train --seed 1 --output sheet.png
--help
""".strip().splitlines()

LONG = (
    ("permuteformer.train.loop", "train"),
    ("permuteformer.demo.server", "Server.__init__"),
    ("permuteformer.bench.run", "side_by_side"),
    ("permuteformer.bench.run", "by_length"),
    ("permuteformer.tasks.fetch", "fetch"),
    ("permuteformer.tasks.generate", "generate"),
    ("permuteformer.reproduce.run", "run"),
    ("permuteformer.reproduce.estimate", "estimate"),
    ("permuteformer.reproduce.estimate", "measured_rate"),
    ("permuteformer.models.inspection", "summarize"),
    ("permuteformer.models.inspection", "inspect"),
    ("permuteformer.models.convert", "convert_checkpoint"),
    ("permuteformer.report", "write_report"),
    ("permuteformer.tasks.check", "check"),
    ("permuteformer.tasks.base", "Task.prepare"),
)


class CommandLines:
    """Words, changed, given to the command line in this process."""

    def __init__(self, folder: Path) -> None:
        self.lines = [shlex.split(line) for line in LINES]
        self.words = sorted({word for line in self.lines for word in line})
        self.command: Any = typer.main.get_command(app)
        (folder / "table.csv").write_text("text,label,id\ngood words,a,1\nbad words,b,2\n")
        (folder / "results.jsonl").write_text(json.dumps({"format": 1, "kind": "training", "run": "a", "result": {"status": "finished"}}))
        (folder / "job.json").write_text("{}")
        (folder / "run").mkdir()
        limits.limit_memory = lambda memory_bytes: None
        limits.when_parent_ends = lambda *_: None  # else the end of standard input ends this process
        for module, name in LONG:
            owner: Any = importlib.import_module(module)
            *inside, last = name.split(".")
            for part in inside:
                owner = getattr(owner, part)
            setattr(owner, last, cut)

    def attempt(self, random: Random) -> bool:
        words = self._changed(random)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                self.command.main(list(words), prog_name="permuteformer")
                code: Any = 0
            except SystemExit as end:
                code = end.code
            except Cut:
                code = 0
            except BaseException as error:
                error.add_note(shlex.join(words)) if hasattr(error, "add_note") else None
                raise
        shown = said.getvalue()
        if code not in (0, 1, 2, None):
            raise Wrong(f"it ended with {code!r}: {words!r:.200}")
        if code in (1, 2) and not shown.strip():
            raise Wrong(f"it ended with {code} and said nothing: {words!r:.200}")
        if not all(line.isprintable() for line in shown.split("\n")):
            raise Wrong(f"it cannot be printed: {words!r:.200}")
        return code in (0, None) or "cut off here" in shown

    def _changed(self, random: Random) -> list[str]:
        words = list(random.choice(self.lines))
        for _ in range(random.randint(0, 3)):
            at, kind = random.randrange(len(words) + 1), random.randrange(8)
            if kind == 0 and words:
                words.pop(at % len(words))
            elif kind == 1:
                words.insert(at, random.choice(self.words))
            elif kind in (2, 3) and words:
                words[at % len(words)] = random.choice(TEXTS)
            elif kind == 4 and words:
                words[at % len(words)] = str(random.choice(NUMBERS))
            elif kind == 5 and words:
                words[at % len(words)] += random.choice(("=", ",", ".", " ")) + random.choice(TEXTS)
            elif kind == 6:
                words.insert(at, f"--{random.choice(TEXTS)}={random.choice(TEXTS)}")
            elif words:
                words[at % len(words)] = random.choice(self.words)
        return [word for word in words if "passwd" not in word and "../" not in word]  # whoever types it may write there


TARGETS: dict[str, type[Target]] = {"command line": CommandLines}
