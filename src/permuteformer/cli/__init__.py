"""The command line: it parses arguments, calls the library and prints the results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from permuteformer.cli import bench, data, demo, info, models, reproduce, train, use
from permuteformer.cli.console import note, readable_errors, say
from permuteformer.cli.options import parse, suggest

COMMANDS: dict[str, Callable[..., Any]] = {
    "train": train.train,
    "resume": train.resume,
    "eval": train.evaluate,
    "predict": use.predict,
    "generate": use.generate,
    "explain": use.explain,
    "demo": demo.demo,
    "data list": data.list_tasks,
    "data fetch": data.fetch,
    "data generate": data.generate,
    "data check": data.check,
    "data show": data.show,
    "reproduce": reproduce.reproduce,
    "experiments": reproduce.experiments,
    "report": reproduce.report,
    "bench": bench.bench,
    "models": models.models,
    "inspect": models.inspect,
    "convert": models.convert,
    "info": info.info,
}
HIDDEN: dict[str, Callable[..., Any]] = {"run-cell": train.run_cell}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {**COMMANDS, **HIDDEN}
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in commands), "")
    if not name:
        _no_command(words)
    with readable_errors():
        arguments = parse(commands[name], f"permuteformer {name}", words[len(name.split()) :])
        commands[name](**arguments)


def _no_command(words: Sequence[str]) -> None:
    """Print the commands, or say which one is unknown, and exit."""
    known = [name for name in COMMANDS if name.startswith("data ")] if words[:1] == ["data"] else list(COMMANDS)
    given = words[1:] if words[:1] == ["data"] else words
    if given and not given[0].startswith("-"):
        near = suggest(given[0], [name.split()[-1] for name in known])
        hint = f": did you mean {near}?" if near else ""
        note(f"permuteformer: unknown command {given[0]!r:.100}{hint} (see permuteformer --help)")
        raise SystemExit(2)
    say("usage: permuteformer COMMAND …\n\nPermuteFormer: linear attention with relative positions.\n\ncommands:")
    for name in known:
        say(f"  {name:<15} {(COMMANDS[name].__doc__ or '').splitlines()[0]}")
    say("\npermuteformer COMMAND --help shows the options of a command.")
    raise SystemExit(0 if given else 2)
