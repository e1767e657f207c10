"""A trained model: written at the end of a run, and loaded from its folder. The data is not needed to use it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from permuteformer.experiments.experiment import Experiment
from permuteformer.experiments.layout import ATTENTION_MAPS, ENVIRONMENT, EXPERIMENT, RESULT
from permuteformer.formatting import printable
from permuteformer.models import PermuteFormerConfig
from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.models.card import NAME as CARD
from permuteformer.models.card import model_card
from permuteformer.models.loading import silence_transformers
from permuteformer.storage import atomic_folder, read_own_json, remove_folder
from permuteformer.tasks import Task
from permuteformer.tasks.inputs import Input, Pair, Text, classification_from_json
from permuteformer.tasks.language import Windows, windows_from_json
from permuteformer.tasks.tokenization import MAX_SIZE, ByteTokens, WordTokens
from permuteformer.tokens import PAPER
from permuteformer.train.attention_maps import attention_maps
from permuteformer.train.build import HEADS, build_model, build_task
from permuteformer.train.checkpoint import load_model
from permuteformer.train.run_folder import RunFolder, read_run

MODEL = "model"
"""Folder of the model in a run folder, for ``from_pretrained``."""

MAPPED_ITEMS = 4
"""Items whose attention is recorded."""


@dataclass(frozen=True)
class TrainedModel:
    """A model with its input."""

    folder: Path
    model: PermuteFormerPreTrainedModel
    """In evaluation mode."""
    input: Input
    experiment: Experiment | None = None
    """How it was trained, if that is known."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of the tables that it was trained on, by option."""
    data: str | None = None
    """Data folder, for ``task``."""

    @property
    def kind(self) -> str:
        """``"classify"``, ``"match"`` or ``"lm"``."""
        return self.input.kind

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels in the order of their numbers."""
        return self.input.labels

    @cached_property
    def task(self) -> Task:
        """The task it was trained on, for evaluation; raises if the data is missing, or has other labels or words now."""
        if self.experiment is None:
            raise ValueError(f"{self.folder} does not record its data: give the run folder")
        task = build_task(self.experiment.task, self.experiment.task_options, self.data)
        if task.input.labels != self.labels:
            new, old = (", ".join(map(printable, labels[:5])) for labels in (task.input.labels, self.labels))
            raise ValueError(f"the data of {self.folder} has changed: its labels are {new}, the model's {old}; restore it, or train again")
        old_tokens, new_tokens = (getattr(input, "tokenizer", None) for input in (self.input, task.input))
        if isinstance(old_tokens, WordTokens) and isinstance(new_tokens, WordTokens) and old_tokens.words != new_tokens.words:
            raise ValueError(f"the data of {self.folder} has changed: its words are not the model's; restore it, or train again")
        return task


def write_model(
    run: RunFolder, task: Task, config: PermuteFormerConfig, weights: Mapping[str, Tensor], result: Mapping[str, Any], device: torch.device
) -> None:
    """Write the model of a run with its card and tokenizer, and its attention maps."""
    import transformers

    from permuteformer.models.tokenizer import ByteTokenizer, tokenizer_of_words

    model = build_model(config, task.input.kind).eval()
    load_model(model, weights)
    transformers.logging.disable_progress_bar()
    command = read_own_json(run.path / ENVIRONMENT).get("command")
    tokens = getattr(task.input, "tokenizer", None)
    path = run.path / MODEL
    remove_folder(path)
    with atomic_folder(path) as partial:
        model.save_pretrained(partial)
        card = model_card(type(model).__name__, run.about["task"], run.experiment.to_json(), result, command)
        (partial / CARD).write_text(card, encoding="utf-8")
        if isinstance(tokens, WordTokens):
            tokenizer_of_words(tokens.words).save_pretrained(partial)
        elif isinstance(tokens, ByteTokens) and tokens.alphabet == PAPER:
            ByteTokenizer(prompts=task.input.kind == "lm").save_pretrained(partial)
    items = task.items("validation")
    batch = task.input.collate(items[:MAPPED_ITEMS])
    run.write(ATTENTION_MAPS, attention_maps(model.to(device), task.input, batch))


def load(folder: str | os.PathLike[str], data: str | None = None, device: str | torch.device | None = None) -> TrainedModel:
    """Load a trained model.

    Args:
        folder: a run folder, or a model saved by ``save_pretrained`` that reads bytes as ``ByteTokenizer`` numbers them.
        data: the data folder; only ``TrainedModel.task`` needs it.
        device: default: a GPU if there is one.
    """
    path = Path(folder)
    if path.name == MODEL and (path.parent / EXPERIMENT).is_file():
        path = path.parent
    if (path / "config.json").is_file() and not (path / EXPERIMENT).is_file():
        return _load_bare(path, _device(device))
    content = read_run(path)
    model_path = path / MODEL
    if not model_path.is_dir():
        result = read_own_json(path / RESULT)
        if result.get("status") not in (None, "finished"):
            reason = f"its training ended with {result['status']!r} ({result.get('message')}): train it with other options"
        else:
            reason = f"it is not finished: permuteformer resume {path}"
        raise FileNotFoundError(f"{path} has no model, {reason}")
    try:
        about, experiment = content["task"], Experiment.from_json(content["experiment"])
        labels = tuple(map(str, about["labels"]))
        columns = {str(option): str(column) for option, column in about["columns"].items()}
        kind = about["kind"]
        if about["input"]["input"] == "Windows":
            input: Input = windows_from_json(about["input"], model_path)
        elif about["input"]["input"] in ("Text", "Pair", "Image"):
            input = classification_from_json(about["input"], labels, model_path)
        else:  # of a task outside this package
            input = build_task(experiment.task, experiment.task_options, data).input
        model = _load_weights(model_path, HEADS[kind]).to(_device(device))
        if input.kind != kind or input.vocab_size > model.config.vocab_size or (kind != "lm" and len(labels) != model.config.num_labels):
            found = f"{input.kind} with {input.vocab_size:,} tokens and {len(labels):,} labels"
            raise ValueError(f"its input is {found}, its model has {model.config.vocab_size:,} and {model.config.num_labels:,}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = printable(f"{type(error).__name__}: {error}", 500)
        raise ValueError(f"{path} cannot be loaded ({reason}): copy the folder again, or train again") from None
    return TrainedModel(path, model, input, experiment, columns, data)


def _load_bare(path: Path, device: torch.device) -> TrainedModel:
    """Load a model without a run folder."""
    architectures = read_own_json(path / "config.json").get("architectures") or ["none"]
    kinds = {head.__name__: kind for kind, head in HEADS.items()}
    if (kind := kinds.get(architectures[0])) is None:
        raise ValueError(f"{path} has a model of class {architectures[0]!r:.60}: it must be one of {', '.join(kinds)}")
    model = _load_weights(path, HEADS[kind]).to(device)
    config = model.config
    if config.vocab_size != PAPER.size or config.axes != 1:
        raise ValueError(
            f"{path} has a model of {config.vocab_size:,} tokens and {config.axes} axes, and no record of what they are; without a run "
            f"folder a model must read bytes ({PAPER.size} tokens, 1 axis): give the run folder"
        )
    labels = tuple(str(config.id2label.get(n, n)) for n in range(config.num_labels))
    length = int(next((entry["max_length"] for entry in config.position if "max_length" in entry), MAX_SIZE))
    input = Windows(length, 0) if kind == "lm" else (Pair if kind == "match" else Text)(labels, length)
    return TrainedModel(path, model, input)


def _load_weights(path: Path, head: type[PermuteFormerPreTrainedModel]) -> PermuteFormerPreTrainedModel:
    try:
        with silence_transformers():
            model, info = head.from_pretrained(path, local_files_only=True, output_loading_info=True)
    except OSError as error:
        raise ValueError(str(error)) from None
    wrong = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[name]}
    if wrong:
        shown = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys[:3])}" for name, keys in wrong.items())
        raise ValueError(f"the weights in {path} do not fit its configuration ({shown})")
    loaded: PermuteFormerPreTrainedModel = model.eval()
    return loaded


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must be one that torch has here, such as 'cpu' or 'cuda', got {str(device)!r}: {error}") from None
    if found.type == "meta":
        raise ValueError("device must be one that can compute, got 'meta'")
    return found
