"""Runs the blocks of README and docs: Python in order, in one namespace per page; commands on small data with small settings.

Blocks that cannot run are marked by their title, ``title="not run by the tests: WHY"``. Their commands are still parsed with all options.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import commands
import small_data

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r'^( *)```(\w*)(?: title="([^"]*)")?\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^::: (\S+)(?:\n    options: \{members: \[([^]]*)\], show_root_heading: false)?", re.MULTILINE)
MARK = "not run by the tests: "
SHOWN = ("text", "")
"""Languages of blocks that are not run."""

SMALL = {
    "train": {
        "--model.hidden-size": "64",
        "--model.num-hidden-layers": "1",
        "--model.num-attention-heads": "2",
        "--model.intermediate-size": "16",
        "--steps": "2",
        "--batch-size": "4",
        "--warmup-steps": "1",
        "--validation-items": "4",
        "--test-items": "4",
        "--track": "none",
    },
    "train lm-bytes": {"--task.corpus": "topics"},
    "generate": {"--max-new-tokens": "20"},
    "data generate": {"--train": "8", "--validation": "4", "--test": "4", "--processes": "1"},
    "eval": {"--items": "4"},
}
"""Options that replace those of a command, so that it takes a second."""
EXCLUDED = {"--steps": "--epochs"}
"""Options that cannot be given together."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def is_run(self) -> bool:
        return not self.title.startswith(MARK)

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Its commands, as words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], found[3] or "", re.sub(rf"(?m)^{found[1]}", "", found[4]))
        for found in FENCE.finditer(text)
    ]


def documented() -> list[str]:
    """Return the names on the page of the API."""
    found = DIRECTIVE.findall((ROOT / "docs" / "api.md").read_text())
    return [name for path, members in found for name in ([f"{path}.{member}" for member in members.split(", ")] if members else [path])]


def run(page: Path) -> dict:
    """Run the blocks of a page in the current folder, and return what its Python defined."""
    space: dict = {"__name__": "page"}
    for block in blocks(page):
        if block.language in SHOWN:
            continue
        assert block.language in ("python", "sh"), f"{block.place}: {block.language!r} is not run: use python, sh or text"
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)  # without the future imports of this file
            if block.title.endswith(".py"):
                space |= vars(_imported(block))
            elif block.is_run:
                exec(code, space)
        for words in block.commands if block.language == "sh" else ():
            try:
                execute(words) if block.is_run else parse(words)
            except (SystemExit, Exception) as error:
                raise AssertionError(f"{block.place}: {shlex.join(words)}\n{error}") from error
    return space


def _imported(block: Block) -> ModuleType:
    """Write a block to the file that its title names, and import that."""
    path = Path(block.title)
    path.write_text(block.text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def execute(words: list[str]) -> str:
    """Run a command with small settings, and return its output."""
    assert words[0] == "permuteformer", f"only commands of permuteformer are run; mark the block: title={MARK + 'WHY'!r}"
    return commands.run(*small(words[1:]), columns=200)


def small(words: list[str]) -> list[str]:
    """Replace options by those of ``SMALL``.

    >>> small(["generate", "RUN", "--max-new-tokens", "100000"])
    ['generate', 'RUN', '--max-new-tokens', '20']
    """
    settings = {**SMALL.get(words[0], {}), **SMALL.get(" ".join(words[:2]), {})}
    replaced = {*settings, *(EXCLUDED.get(name) for name in settings)}
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word not in replaced:
            kept.append(word)
        elif rest and not rest[0].startswith("--"):
            rest.pop(0)
    return kept + [word for setting in settings.items() for word in setting]


def parse(words: list[str]) -> None:
    """Raise if a command, or a word of it, is unknown to its program."""
    program, rest = words[0], words[1:]
    if program == "srun":
        parse(rest)
    elif program == "permuteformer":
        _parse_own(rest)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        found = get_args_parser().parse_args(["4" if word == "$SLURM_NNODES" else word for word in rest])
        assert (found.module, found.training_script) == (True, "permuteformer")
        _parse_own(found.training_script_args)
    elif program == "pip":
        from pip._internal.commands import create_command

        _, packages = create_command(rest[0]).parse_args(rest[1:])
        assert all(name.startswith((".", "permuteformer")) for name in packages)
    elif program == "make":
        subprocess.run(["make", "--dry-run", *rest], cwd=ROOT, check=True, capture_output=True)
    elif program == "python":
        source = (ROOT / rest[0]).read_text()
        assert all(f'"{word}"' in source for word in rest[1:] if word.startswith("--")), f"{rest[0]} has no such option"
    else:
        assert program in (".", "export") or words == ["python3", "-m", "venv", ".venv"], f"unknown command: {shlex.join(words)}"


def _parse_own(words: list[str]) -> None:
    from permuteformer.cli import COMMANDS
    from permuteformer.cli.options import parse as parse_options

    name = next(" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS)
    parse_options(COMMANDS[name], name, words[len(name.split()) :])


def write_data(folder: Path) -> None:
    """Write a little of all data that pages name, to the current folder and to the data folder."""
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
