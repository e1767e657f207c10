"""Command-line options, made from the signatures of commands and the fields of dataclasses.

A command is a function: its parameters are the arguments of the command line, keyword-only ones are options, and its docstring is the help.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from permuteformer.formatting import printable
from permuteformer.registry import unknown
from permuteformer.storage import parse_json

FLAT_TASK_OPTIONS = ("text", "second_text", "image", "label", "id", "skip_bad")
"""Options of tasks that need no prefix: the columns of a user's own data."""

SHARED_HELP = {
    "task": "a task; `permuteformer data list` shows them",
    "path": "your file or folder, for classify, match, images and lm",
    "data": "data folder; default: PERMUTEFORMER_DATA, else the user's cache",
    "device": "cpu, cuda, …; default: a GPU if there is one",
    "batch_size": "items at a time",
}
"""Descriptions of arguments that several commands have; a command's own docstring comes first."""

MAX_MESSAGE = 1000


class TrainingOptions(dict[str, Any]):
    """Fields of an experiment that were given: ``--steps 500``."""


class TaskOptions(dict[str, Any]):
    """Options of a task that were given: ``--text NAME``, ``--task.max-length 1024``."""


class ModelOptions(dict[str, Any]):
    """Fields of a configuration that were given: ``--model.hidden-size 128``."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command."""

    name: str
    """As on the command line, with underscores for dashes."""
    hint: Any
    """Type of its value."""
    help: str
    default: Any


def parse(command: Callable[..., Any], prog: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command from the words of a command line. ``prog`` is what the command is called.

    A parameter whose type is a dataclass or one of the classes above is a group of options, and gets those that were given.
    """
    parser = _Parser(prog, (inspect.getdoc(command) or "").partition("Args:")[0].strip())
    docs, parameters = SHARED_HELP | argument_docs(command), inspect.signature(command, eval_str=True).parameters
    groups = {name: parameter.annotation for name, parameter in parameters.items() if _is_group(parameter.annotation)}
    task = None
    if TaskOptions in groups.values() and (task := _named_task(words)) is None:
        parser.epilog = f"tasks: {', '.join(_tasks())}\nTASK --help lists the options of a task."
    for name, parameter in parameters.items():
        if name in groups:
            title, options = _group(groups[name], task)
            group = parser.add_argument_group(title)
            for option in options:
                parser.add_option(group, option, dest=f"{name}:{option.name.rpartition('.')[2]}")
        elif parameter.kind is parameter.KEYWORD_ONLY:
            parser.add_option(parser.options, Option(name, parameter.annotation, docs.get(name, ""), parameter.default), dest=name)
        else:
            parser.add_positional(parameter, docs.get(name, ""))
    given: dict[str, Any] = {name: {} for name in groups}
    for dest, value in vars(parser.parse(words)).items():
        name, _, key = dest.partition(":")
        if key:
            given[name][key] = value
        else:
            given[name] = value
    return {name: groups[name](**value) if name in groups else value for name, value in given.items()}


def _is_group(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or hint in (TrainingOptions, TaskOptions, ModelOptions)


def _named_task(words: Sequence[str]) -> Any:
    """Return the task that the command line names, or ``None``."""
    tasks = _tasks()
    if words and not words[0].startswith("-") and words[0] not in tasks:
        raise ValueError(unknown("task", words[0], tasks))
    return next((tasks[word] for word in words if word in tasks), None)


def _tasks() -> Any:
    from permuteformer.tasks import TASKS

    return TASKS


def _group(kind: Any, task: Any) -> tuple[str, list[Option]]:
    """Return the title of a group and its options. Most of them are those of a task, or have its defaults."""
    from permuteformer.experiments.experiment import Experiment

    if dataclasses.is_dataclass(kind):
        return "run options", _field_options(kind)
    if kind is ModelOptions:
        return "model (fields of the configuration)", _model_options(task)
    if task is None:
        return "", []
    if kind is TrainingOptions:
        found = [option for option in _field_options(Experiment) if option.name not in ("task", "model", "task_options", "model_fields")]
        return "training", [dataclasses.replace(o, default=task.recipe.settings.get(o.name, o.default)) for o in found]
    found = [option for option in _field_options(task) if option.name not in ("data", "path")]
    return "task", [o if o.name in FLAT_TASK_OPTIONS else dataclasses.replace(o, name=f"task.{o.name}") for o in found]


def _field_options(kind: Any) -> list[Option]:
    hints, docs = typing.get_type_hints(kind), field_docs(kind)
    return [Option(entry.name, hints[entry.name], docs.get(entry.name, ""), entry.default) for entry in dataclasses.fields(kind)]


def _model_options(task: Any) -> list[Option]:
    from permuteformer.models import PermuteFormerConfig
    from permuteformer.presets import PRESETS

    preset = {} if task is None else {**PRESETS[f"permuteformer-{task.recipe.preset}"], **task.recipe.model}
    hints, docs = inspect.get_annotations(PermuteFormerConfig, eval_str=True), argument_docs(PermuteFormerConfig)
    decided_by_the_task = ("vocab_size", "causal", "pad_token_id", "bos_token_id", "eos_token_id")
    return [
        Option(f"model.{name}", hint, docs.get(name, ""), preset.get(name, getattr(PermuteFormerConfig, name, None)))
        for name, hint in hints.items()
        if name not in decided_by_the_task
    ]


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, and suggests the nearest option for an unknown one."""

    def __init__(self, prog: str, description: str) -> None:
        width = min(shutil.get_terminal_size().columns, 120)

        def formatter(prog: str) -> argparse.HelpFormatter:
            return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=width)

        super().__init__(
            prog=prog,
            usage=f"{prog} [options]",
            description=description,
            allow_abbrev=False,
            formatter_class=formatter,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )
        self._positionals.title = "arguments"
        self.options: Any = self.add_argument_group("options")
        self.options.add_argument("-h", "--help", action="help", help="show this help and exit")

    def add_positional(self, parameter: inspect.Parameter, help: str) -> None:
        """Add a parameter without a flag."""
        kind = _Type(parameter.annotation)
        is_optional = parameter.default is not parameter.empty
        shown = f"{parameter.name.upper()}{' …' if kind.is_list else ''}"
        self.usage = str(self.usage).replace("[options]", f"[{shown}] [options]" if is_optional else f"{shown} [options]")
        self.add_argument(
            parameter.name,
            type=kind.value,
            nargs="+" if kind.is_list else "?" if is_optional else None,
            default=parameter.default if is_optional else argparse.SUPPRESS,
            metavar=parameter.name.upper(),
            help=_escaped(help),
        )

    def add_option(self, group: Any, option: Option, dest: str) -> None:
        """Add ``--name``, whose value is stored as ``dest``."""
        kind, default = _Type(option.hint), _shown(option.default)
        help = f"{option.help.rstrip('.')} (default: {default})" if default and "default" not in option.help.lower() else option.help
        named: dict[str, Any] = {"dest": dest, "help": _escaped(help)}
        flag = "--" + option.name.replace("_", "-")
        if kind.kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction if option.default else "store_true", **named)
        elif kind.is_pair:
            group.add_argument(flag, nargs=2, type=kind.value, metavar=kind.metavar, **named)
        elif kind.is_list:
            group.add_argument(flag, action="extend", type=kind.values, metavar=f"{kind.metavar},…", **named)
        else:
            group.add_argument(flag, type=kind.value, metavar=kind.metavar, **named)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all words."""
        values, rest = self.parse_known_intermixed_args(list(words))
        if rest:
            self.error(self._unknown(rest[0]))
        return values

    def _unknown(self, word: str) -> str:
        flag = word.partition("=")[0]
        if not flag.startswith("--"):
            return f"unexpected argument {word!r}"
        known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        near = suggest(flag, known)
        return f"unknown option {flag}" + (f": did you mean {near}?" if near else "")

    def error(self, message: str) -> NoReturn:
        """Print a line and exit."""
        sys.stderr.write(f"{self.prog}: {printable(message, MAX_MESSAGE)} (see {self.prog} --help)\n")
        raise SystemExit(2)


class _Type:
    """A type hint on the command line: a value, or several of them."""

    def __init__(self, hint: Any) -> None:
        is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        kinds = list(typing.get_args(hint)) if is_union else [hint]
        of_items = typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) in (list, tuple) else ()
        self.is_pair = of_items == (int, int)
        self.is_list = not self.is_pair and of_items[:1] in ((int,), (str,), (Path,))  # else it is JSON
        self.can_be_none = type(None) in kinds and not self.is_list
        kind = of_items[0] if self.is_list or self.is_pair else kinds[0]
        self.kind: Any = {typing.Literal: str, dict: _json, list: _json}.get(typing.get_origin(kind), kind)
        """Converts a word. Of a union it is the first type: ``float | int`` is a float."""
        self.metavar = {int: "N", float: "NUMBER", Path: "PATH", _json: "JSON"}.get(self.kind, "NAME")

    def value(self, word: str) -> Any:
        """Return a word as a value."""
        if self.can_be_none and word.lower() == "none":
            return None
        try:
            return self.kind(word)
        except ValueError:
            wanted = {int: "an integer", float: "a number"}.get(self.kind, self.metavar)
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {word!r:.100}") from None

    def values(self, words: str) -> list[Any]:
        """Return values that are separated by commas."""
        return [self.value(word) for word in words.split(",") if word]


def _shown(default: Any) -> str:
    """Return a default for the help; nothing for a flag that is off, and for an option that must be given."""
    if default is False or default is inspect.Parameter.empty or default is dataclasses.MISSING:
        return ""
    if default is None or default in ("", ()):
        return "none"
    if isinstance(default, (dict, list)):
        return json.dumps(default)
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _json(word: str) -> Any:
    return parse_json(word.encode(), "")


def _escaped(help: str) -> str:
    """Return a text for argparse, which formats it with ``%``."""
    return help.rstrip(".").replace("%", "%%")


def suggest(flag: str, known: Iterable[str]) -> str | None:
    """Return the option that a user probably meant.

    >>> known = ["--learning-rate", "--model.hidden-size", "--task.max-length", "--steps"]
    >>> [suggest(flag, known) for flag in ("--lr", "--hidden-size", "--max-lenght", "--step", "--zzz")]
    ['--learning-rate', '--model.hidden-size', '--task.max-length', '--steps', None]
    """
    short = {option: option.lstrip("-").rpartition(".")[2] for option in known}
    word = flag.lstrip("-").rpartition(".")[2].replace("_", "-")
    for option, name in short.items():
        if word == name or word == "".join(part[:1] for part in name.split("-")):
            return option
    near = difflib.get_close_matches(word, short.values(), n=1)
    return next(option for option, name in short.items() if name == near[0]) if near else None


def argument_docs(documented: Any) -> dict[str, str]:
    """Return the descriptions of arguments under ``Args:`` in a docstring."""
    text = (inspect.getdoc(documented) or "").partition("Args:")[2]
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: _plain(description) for name, description in found}


def field_docs(kind: Any) -> dict[str, str]:
    """Return the docstrings after the fields of a dataclass and its parents."""
    docs: dict[str, str] = {}
    for parent in reversed(kind.__mro__[:-1]):
        if not dataclasses.is_dataclass(parent):
            continue
        definition: Any = ast.parse(textwrap.dedent(inspect.getsource(typing.cast(type, parent)))).body[0]
        for statement, text in pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[ast.unparse(statement.target)] = _plain(str(text.value.value))
    return docs


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "")
