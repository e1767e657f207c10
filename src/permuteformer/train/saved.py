"""A trained model out of its run folder, with what is needed to use it; the data it was trained on is not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import permuteformer
from permuteformer.experiments.base import Experiment
from permuteformer.experiments.layout import EXPERIMENT, FORMAT, RESULT
from permuteformer.folders import content_of, json_of, read_json
from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.models.loading import silence_transformers
from permuteformer.registry import unknown
from permuteformer.tasks import SPLITS, Task
from permuteformer.tasks.base import Classification
from permuteformer.tasks.classify import Classify
from permuteformer.tasks.inputs import Input, Pixels, Values
from permuteformer.tasks.language import LanguageModelling
from permuteformer.tasks.lra_listops import SYMBOLS, LraListops
from permuteformer.tasks.match import Match
from permuteformer.tasks.own import OwnTable
from permuteformer.texts import printable
from permuteformer.tokens import PAPER, Alphabet
from permuteformer.train.build import HEADS, build_task
from permuteformer.train.feed import chosen

MODEL = "model"
"""The trained model in a run folder, as transformers saves it; of word language models the tokenizer too."""


MOST_TOKENS = 2**26
"""Of one sequence; what is written of a longer one is damaged."""


@dataclass(frozen=True)
class Trained:
    """A model of a run folder, and what was noted of its task when it was trained."""

    folder: Path
    experiment: Experiment
    model: PermuteFormerPreTrainedModel
    """In evaluation mode."""
    kind: str
    """``"classify"``, ``"match"`` or ``"lm"``."""
    labels: tuple[str, ...]
    """Names of the labels, in the order of their numbers."""
    about: Mapping[str, Any]
    """What ``describe`` said of the task."""
    data: str | None = None
    """The data folder, for ``task``."""

    @cached_property
    def task(self) -> Task:
        """The task itself, for evaluation: its data must be where it was."""
        return build_task(self.experiment.task, self.experiment.task_options, self.data)

    @cached_property
    def same_task(self) -> Task:
        """The task, whose labels or words must still be those that the model was trained on: numbers would mean others."""
        task = self.task
        if self.kind != "lm" and list(task.labels) != list(self.labels):
            wrong = f"labels {', '.join(map(printable, task.labels[:5]))}, and the model {', '.join(map(printable, self.labels[:5]))}"
            raise ValueError(f"the data of {self.folder} has changed: it has the {wrong}; bring back the data, or train anew")
        if self.kind == "lm" and self.unit == "words" and getattr(task, "vocabulary", self.words) != self.words:
            raise ValueError(f"the data of {self.folder} has changed: its words are not the model's; bring back the data, or train anew")
        return task

    @cached_property
    def input(self) -> Input:
        """How values become tokens."""
        described = self.about.get("input")
        if described is None:  # a task from outside, with an input of its own
            if not isinstance(self.task, Classification):
                raise ValueError(f"task {self.experiment.task!r} does not say how one item becomes tokens: it has no input")
            return self.task.input
        try:
            alphabet = Alphabet(**described["alphabet"])
            height, width = described.get("grid") or (1, described["max_length"])
            whole = [height, width, *(number for number in asdict(alphabet).values() if number is not None)]
            if not all(type(number) is int and 0 <= number <= MOST_TOKENS for number in whole) or height * width > MOST_TOKENS:
                raise ValueError(f"numbers must be whole, from 0 to {MOST_TOKENS:,}")
            if alphabet.size > self.model.config.vocab_size:
                raise ValueError(f"its {alphabet.size:,} tokens are more than the model's {self.model.config.vocab_size:,}")
            return Pixels(alphabet, (height, width)) if "grid" in described else Values(alphabet, width)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.folder / EXPERIMENT}: the task's input cannot be used ({printable(repr(error), 500)}); copy the folder again"
            ) from None

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns of the tables that it was trained on: what an item is made of, and its id."""
        columns = self.about.get("columns") or {}
        if not isinstance(columns, dict) or not all(isinstance(column, str) for column in columns.values()):
            raise ValueError(f"{self.folder / EXPERIMENT}: the task's columns cannot be used ({columns!r:.200}); copy the folder again")
        return columns

    @property
    def unit(self) -> str:
        """What the tokens of a language model are: ``"bytes"`` or ``"words"``."""
        return str(self.about.get("unit") or "bytes")

    @cached_property
    def words(self) -> list[str]:
        """The vocabulary of a language model of words, from the tokenizer beside the model."""
        return vocabulary(self.folder / MODEL / "tokenizer.json", self.model.config.vocab_size)


def vocabulary(path: Path, size: int) -> list[str]:
    """The words of a tokenizer's file, in the order of their numbers; there may be ``size`` of them."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}, which has the words of this model: copy the folder again, whole")
    try:
        ids: dict[str, int] = Tokenizer.from_buffer(content_of(path)).get_vocab()
    except BaseException as error:  # it raises plain exceptions, and where it panics one that is none
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise ValueError(f"{path} cannot be read ({printable(str(error))}); copy it again") from None
    if len(ids) > size or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path} has {len(ids):,} words, and the model {size:,} tokens: they are of two runs; copy the folder again")
    return sorted(ids, key=ids.__getitem__)


def load(folder: str | os.PathLike[str], data: str | None = None, device: str | torch.device | None = None) -> Trained:
    """The trained model of a run folder.

    Args:
        folder: what ``permuteformer train`` made.
        data: the data folder; only ``Trained.task`` looks into it.
        device: where the model goes; a GPU if there is one, unless told.
    """
    path = Path(folder)
    content = _read(path)
    about = content.get("task")
    kind = about.get("kind") if isinstance(about, dict) else None
    if not isinstance(about, dict) or kind not in HEADS:
        raise ValueError(f"{path / EXPERIMENT} does not say what its task is: {unknown('kind', kind, HEADS)}; copy the folder again")
    try:
        experiment = Experiment.from_json(content["experiment"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path / EXPERIMENT} has no experiment that can be used ({printable(str(error), 500)}); copy the folder again"
        ) from None
    labels = tuple(map(str, about.get("labels") or ()))
    model = _model_of_run(path, str(kind)).to(_device(device))
    if kind != "lm" and len(labels) != model.config.num_labels:
        raise ValueError(
            f"{path / EXPERIMENT} names {len(labels):,} labels, and the model has {model.config.num_labels:,}: copy the folder again"
        )
    return Trained(path, experiment, model, str(kind), labels, about, data)


def load_any(folder: str | os.PathLike[str], data: str | None = None, device: str | torch.device | None = None) -> Trained:
    """The same, also of a model by itself, as ``save_pretrained`` makes it, if it reads bytes as ``ByteTokenizer`` has them."""
    path = Path(folder)
    if path.name == MODEL and (path.parent / EXPERIMENT).is_file():
        path = path.parent
    if (path / EXPERIMENT).is_file() or not (path / "config.json").is_file():
        return load(path, data, device)
    config = read_json(path / "config.json")
    kinds = {head.__name__: kind for kind, head in HEADS.items()}
    (name,) = (config.get("architectures") or ["none"])[:1]
    if name not in kinds:
        raise ValueError(f"{path} holds a model that is none of {', '.join(kinds)}: {name!r:.60}")
    model, kind = _model(path, kinds[name]).to(_device(device)), kinds[name]
    if model.config.vocab_size != PAPER.size or model.config.axes != 1:
        raise ValueError(
            f"{path} holds a model of {model.config.vocab_size:,} tokens, and nothing that says what they are; by itself a model must "
            f"read bytes ({PAPER.size} tokens, one axis): give the run folder that it is of"
        )
    labels = () if kind == "lm" else tuple(str(model.config.id2label.get(n, n)) for n in range(model.config.num_labels))
    longest = int(next((entry["max_length"] for entry in model.config.position if "max_length" in entry), MOST_TOKENS))
    about = {"kind": kind, "unit": "bytes", "input": {"alphabet": asdict(PAPER), "max_length": longest}}
    nothing = Experiment(task=kind, model=str(path), steps=1)  # how it was trained is not known
    return Trained(path, nothing, model, kind, labels, about, data)


def describe(task: Task, test_items: int | None = None) -> dict[str, Any]:
    """What a run folder keeps of its task, as plain data: enough for reports, and to use the model without the data.

    Baselines are those of the test split, of so many items as models are tested on; or of validation where there is none.
    """
    there = task.prepare().info["splits"]
    judged = next((split for split in reversed(SPLITS) if split in there), None)
    return {
        "name": task.name,
        "title": task.title,
        "kind": task.kind,
        "metric": task.metric,
        "greater_is_better": task.greater_is_better,
        "notes": task.notes(),
        "labels": list(task.labels),
        "baselines": task.baselines(judged, chosen(there[judged], test_items)) if judged and "train" in there else {},
        "grid": None if task.grid is None else list(task.grid),
        "max_length": task.max_length,
        "unit": task.unit if isinstance(task, LanguageModelling) else None,
        "input": _described_input(task),
        "columns": _columns(task),
    }


def _described_input(task: Task) -> dict[str, Any] | None:
    found = task.input if isinstance(task, Classification) else None
    if isinstance(found, Pixels):
        return {"alphabet": asdict(found.alphabet), "grid": list(found.grid)}
    if isinstance(found, Values):
        symbols = {"symbols": SYMBOLS} if isinstance(task, LraListops) else {}
        return {"alphabet": asdict(found.alphabet), "max_length": found.max_length, **symbols}
    return None


def _columns(task: Task) -> dict[str, str]:
    columns: dict[str, str | None] = {}
    if isinstance(task, Classify):
        columns = {"text": task.text, "image": task.image}
    elif isinstance(task, Match):
        columns = {**task.texts}
    elif isinstance(task, LraListops):
        columns = {"text": "Source"}
    if isinstance(task, OwnTable):
        columns["id"] = task.id
    return {option: column for option, column in columns.items() if column is not None}


def _read(folder: Path) -> dict[str, Any]:
    """``experiment.json`` of a run folder of this format."""
    file = folder / EXPERIMENT
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {printable(str(folder))}: give one that permuteformer train made")
    if not file.is_file():
        raise FileNotFoundError(f"{printable(str(folder))} is no run folder, there is no {EXPERIMENT} in it: give one that train made")
    try:
        content = json_of(file)
    except ValueError as error:
        raise ValueError(f"{printable(str(file))} is damaged ({error}); copy the folder again") from None
    if not isinstance(content, dict) or "format" not in content:
        raise ValueError(f"{file} is not that of a run folder: it must be an object with a format; copy the folder again")
    if content["format"] != FORMAT:
        made, here = printable(str(content.get("version"))), permuteformer.__version__
        raise ValueError(
            f"{folder} was made by permuteformer {made} (format {content['format']!r:.50}), and this is permuteformer {here}, "
            f"which reads format {FORMAT}: install permuteformer {made}, or train it anew"
        )
    return content


def _model_of_run(folder: Path, kind: str) -> PermuteFormerPreTrainedModel:
    path = folder / MODEL
    if not path.is_dir():
        result = read_json(folder / RESULT)
        if result.get("status") not in (None, "finished"):
            raise FileNotFoundError(
                f"{folder} has no model, as its training ended with {result['status']!r} ({result.get('message')}): train it with other "
                "options"
            )
        raise FileNotFoundError(
            f"{folder} is not finished, there is no {MODEL} in it: train it to the end; if interrupted, permuteformer resume {folder}"
        )
    return _model(path, kind)


def _model(path: Path, kind: str) -> PermuteFormerPreTrainedModel:
    try:
        with silence_transformers():
            model, info = HEADS[kind].from_pretrained(path, local_files_only=True, output_loading_info=True)
    except OSError as error:
        raise ValueError(str(error)) from None
    wrong = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[name]}
    if wrong:
        words = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys[:3])}" for name, keys in wrong.items())
        raise ValueError(f"the weights in {path} are not those of its configuration ({words}); copy the folder again")
    loaded: PermuteFormerPreTrainedModel = model.eval()
    return loaded


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must be one that torch has here, as 'cpu' or 'cuda'; it is {str(device)!r}: {error}") from None
    if found.type == "meta":
        raise ValueError("device must be one that can compute; it is 'meta'")
    return found
