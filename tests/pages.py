"""The blocks of the pages: Python is executed in order, in one namespace a page; commands are run on small data, with settings made small.

What cannot be run is marked by the block's title, ``title="not run by the tests: WHY"``; its commands are parsed all the same, and every
option in them has to be there. The page of what was not run lists these blocks.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import small_data
from typer.main import get_command
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r'^( *)```(\w*)(?: title="([^"]*)")?\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)
MARK = "not run by the tests: "
SHOWN = ("text", "")
"""Languages of what is looked at and not run: output, and the map of the house."""

SMALL = {
    "train": {
        "--hidden-size": "64",
        "--num-hidden-layers": "1",
        "--num-attention-heads": "2",
        "--intermediate-size": "16",
        "--steps": "2",
        "--batch-size": "4",
        "--warmup-steps": "1",
        "--validation-items": "4",
        "--test-items": "4",
        "--track": "none",
    },
    "train lm-bytes": {"--corpus": "topics"},
    "generate": {"--tokens": "20"},
    "data generate": {"--train": "8", "--validation": "4", "--test": "4", "--processes": "1"},
    "eval": {"--items": "4"},
}
"""What is put in place of a command's own settings, so that it takes a second."""
INSTEAD = {"--steps": "--epochs"}
"""Settings that exclude each other."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def reason(self) -> str:
        """Why it is not run; empty where it is."""
        return self.title.removeprefix(MARK) if self.title.startswith(MARK) else ""

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Its command lines, as words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], found[3] or "", re.sub(rf"(?m)^{found[1]}", "", found[4]))
        for found in FENCE.finditer(text)
    ]


def documented() -> list[tuple[Path, str]]:
    """Pages of the reference, and the names on them."""
    return [(page, name) for page in PAGES for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]


def run(page: Path) -> dict:
    """Everything on a page, in order, in the current folder; what its Python defined."""
    space: dict = {"__name__": "page"}
    for block in blocks(page):
        if block.language in SHOWN:
            continue
        assert block.language in ("python", "sh"), f"{block.place}: {block.language!r} is neither run nor output; say python, sh or text"
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")
            if not block.reason:
                exec(code, space)
        for words in block.commands if block.language == "sh" else ():
            try:
                parse(words) if block.reason else execute(words)
            except (SystemExit, Exception) as error:
                raise AssertionError(f"{block.place}: {shlex.join(words)}\n{error}") from error
    return space


def execute(words: list[str]) -> str:
    """Run a command, made small, and give what it said."""
    assert words[0] == "permuteformer", f"only permuteformer's own commands are run here; mark the block: title={MARK + 'WHY'!r}"
    from permuteformer.cli import app

    result = CliRunner().invoke(app, small(words[1:]), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def small(words: list[str]) -> list[str]:
    """The command with the settings of ``SMALL`` in place of its own.

    >>> small(["generate", "RUN", "--tokens", "100000"])
    ['generate', 'RUN', '--tokens', '20']
    """
    settings = {**SMALL.get(words[0], {}), **SMALL.get(" ".join(words[:2]), {})}
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word in settings or word in (INSTEAD.get(name) for name in settings):
            if rest and not rest[0].startswith("--"):
                rest.pop(0)
        else:
            kept.append(word)
    return kept + [word for pair in settings.items() for word in pair]


def parse(words: list[str]) -> None:
    """Raise where a command, or a word of it, is not known to the program it is for."""
    program, rest = words[0], words[1:]
    if program == "srun":
        parse(rest)
    elif program == "permuteformer":
        parse_own(rest)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        found = get_args_parser().parse_args(["4" if word == "$SLURM_NNODES" else word for word in rest])
        assert (found.module, found.training_script) == (True, "permuteformer")
        parse_own(found.training_script_args)
    elif program == "pip":
        from pip._internal.commands import create_command

        _, named = create_command(rest[0]).parse_args(rest[1:])
        assert all(name == "." or name.startswith("permuteformer") for name in named)
    elif program == "make":
        subprocess.run(["make", "--dry-run", *rest], cwd=ROOT, check=True, capture_output=True)
    elif program in ("python", "python3"):
        options = {word for word in rest[1:] if word.startswith("--")}
        place = ROOT / rest[1] / "__main__.py" if rest[0] == "-m" else ROOT / rest[0]
        source = place.read_text() if place.exists() else ""
        assert place.exists() or not rest[0].endswith(".py"), f"{rest[0]} is not there"
        assert all(f'"{option}"' in source for option in options), f"{rest[0]} does not know all of {sorted(options)}"
    else:
        assert program in (".", "export"), f"{program} is no command that is known here"


def parse_own(words: list[str]) -> None:
    """Every option of a command of ours, and for training every field, its name and its value."""
    from permuteformer.cli import app

    command, words, context = get_command(app), list(words), None
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name or "permuteformer", words[:1], parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
        assert command is not None, f"there is no command {name!r}"
    given = command.make_context(name, words, parent=context).params
    if name == "train":
        from permuteformer.train.fields import experiment_from_words

        rest = list(given["rest"] or [])
        path = {"path": rest.pop(0)} if rest and not rest[0].startswith("--") else {}
        experiment_from_words(given["task"], given["model"], rest, path, None)


def write_data(folder: Path) -> None:
    """A little of everything that pages name, in the current folder and in the data folder."""
    reviews = [{"text": f"{'good' if n % 2 else 'bad'} film number {n}", "label": "up" if n % 2 else "down"} for n in range(60)]
    (folder / "reviews.csv").write_text(small_data.csv(reviews))
    (folder / "new.csv").write_text("text\na good film\na bad one\n")
    letters = [{"message": row["text"], "topic": row["label"]} for row in reviews]
    (folder / "letters.csv").write_text(small_data.csv(letters, ("message", "topic")))
    pairs = [{"first": f"one {n}", "second": f"two {n % 7}", "label": n % 2} for n in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for n in range(40):
        place = folder / "photos" / ("cat", "dog")[n % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{n}.png").write_bytes(small_data.picture(6 * n))
    (folder / "notes").mkdir()
    for n in range(3):
        (folder / "notes" / f"{n}.txt").write_text(f"All work and no play, says note {n}.\n" * 200)
    data = folder / "FOLDER"
    data.mkdir()
    small_data.acl_imdb(data)
    small_data.cifar(data)
