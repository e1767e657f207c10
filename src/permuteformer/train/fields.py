"""Fields as words of a command line: of the experiment, of the model's configuration, and options of the task."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from permuteformer.experiments.base import Experiment
from permuteformer.experiments.own import defaults, task_options
from permuteformer.models import PRESETS, PermuteFormerConfig
from permuteformer.options import argument_docs, attribute_docs, parse_value
from permuteformer.registry import unknown
from permuteformer.tasks import TASKS
from permuteformer.train.build import build_task

SETTINGS = [field.name for field in dataclasses.fields(Experiment) if field.name not in ("task", "model", "task_options", "model_fields")]
"""Fields of an experiment that a word may set."""

DECIDED = ("vocab_size", "causal", "pad_token_id", "bos_token_id", "eos_token_id")
"""Fields of a configuration that follow from the task."""


def experiment_from_words(task: str, model: str | None, words: Iterable[str], given: Mapping[str, Any], data: str | None) -> Experiment:
    """The experiment that a command line describes.

    Args:
        task: a task's name.
        model: a preset; one that suits the task if ``None``.
        words: ``--name value`` or ``--name=value``. A name is a setting of the experiment, else a field of the configuration, else an
            option of the task; ``--task.name`` and ``--model.name`` say which, where several have it.
        given: options of the task that are known otherwise.
        data: the data folder.
    """
    options: dict[str, Any] = dict(given)
    fields: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in _pairs(words):
        place, short = _place(task, name)
        target = {"task": options, "model": fields, "experiment": settings}[place]
        if short in target:
            raise ValueError(f"{name} is given twice")
        target[short] = _parse(task, place, short, value)
    if task in TASKS and "path" in options and "path" not in TASKS.options(task):
        own = [name for name in TASKS if "path" in TASKS.options(name)]
        raise ValueError(f"{task} has data of its own, and takes no file; {options['path']!r} is for one of {', '.join(own)}")
    options = task_options(task, options)
    made = build_task(task, options, data)
    preset, changed, usual = defaults(task, made.kind, made.grid is not None)
    if {"steps", "epochs"} & set(settings):
        usual.pop("steps", None)
        usual.pop("epochs", None)
    return Experiment(task=task, model=model or preset, task_options=options, model_fields={**changed, **fields}, **{**usual, **settings})


def listing(task: str) -> list[tuple[str, str, str, str]]:
    """Every field for a task: its name, whose it is, its value unless told, and what it is."""
    made = TASKS[task]
    has_grid = task == "images" if "path" in TASKS.options(task) else build_task(task, {}).grid is not None
    preset, changed, usual = defaults(task, made.kind, has_grid)
    changed = {**PRESETS[preset], **changed}
    told, described, of_task = attribute_docs(Experiment), argument_docs(PermuteFormerConfig), argument_docs(made)
    rows = [
        (_word(field.name), "training", _shown(usual.get(field.name, field.default)), told[field.name])
        for field in dataclasses.fields(Experiment)
        if field.name in SETTINGS
    ]
    rows += [
        (_word(name), "model", _shown(changed.get(name, getattr(PermuteFormerConfig, name, ""))), described.get(name, ""))
        for name in _config_fields()
    ]
    options = task_options(task, {})
    rows += [
        (_word(name), "task", _shown(options.get(name, "" if option.default is option.empty else option.default)), of_task.get(name, ""))
        for name, option in TASKS.options(task).items()
        if name not in ("data", "path")
    ]
    return rows


def _pairs(words: Iterable[str]) -> Iterable[tuple[str, str]]:
    waiting: str | None = None
    for word in words:
        if waiting is not None and not (word.startswith("--") and not _is_number(word)):
            yield waiting, word
            waiting = None
            continue
        if waiting is not None:
            yield waiting, "true"
            waiting = None
        if not word.startswith("--"):
            raise ValueError(f"{word!r} follows no field: fields are given as --name value")
        name, sign, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if sign:
            yield name, value
        else:
            waiting = name
    if waiting is not None:
        yield waiting, "true"


def _is_number(word: str) -> bool:
    return word[1:2].isdigit()


def _place(task: str, name: str) -> tuple[str, str]:
    prefix, dot, short = name.partition(".")
    known = {"experiment": SETTINGS, "model": _config_fields(), "task": [n for n in TASKS.options(task) if n not in ("data", "path")]}
    if dot and prefix in ("task", "model"):
        if short not in known[prefix]:
            raise ValueError(unknown(f"field of the {prefix}:", short, known[prefix]))
        return prefix, short
    for place, names in known.items():
        if name in names:
            return place, name
    raise ValueError(unknown("field", name, [*known["experiment"], *known["model"], *known["task"]]))


def _config_fields() -> list[str]:
    return [name for name in PermuteFormerConfig.__annotations__ if name not in DECIDED]


def _parse(task: str, place: str, name: str, value: str) -> Any:
    hint = typing.get_type_hints({"experiment": Experiment, "model": _Config, "task": TASKS[task].__init__}[place])[name]
    if name == "test_lengths":
        return tuple(parse_value(name, part, int) for part in value.split(",") if part)
    if typing.get_origin(hint) is typing.Literal:
        return value
    if typing.get_origin(hint) in (dict, list):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f'{name} must be JSON, such as {{"name": "linear"}}: {error}') from None
    return parse_value(name, value, hint)


class _Config:
    """The fields of the configuration itself: those of transformers have types that are not there when they are asked for."""

    __annotations__ = dict(PermuteFormerConfig.__annotations__)
    __module__ = PermuteFormerConfig.__module__


def _word(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(value: Any) -> str:
    """As it would be given."""
    return "" if value is None or value == () else json.dumps(value) if isinstance(value, (dict, list)) else str(value)
