"""Folders of models from strangers: looked at before anything is built of them, and refused in a sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.utils import logging

from permuteformer.folders import json_of
from permuteformer.texts import printable

if TYPE_CHECKING:
    from permuteformer.models.config import PermuteFormerConfig

SPARE = 2**26
"""Numbers that a model may have besides those of its weights: a new head, for one."""

CODE = tuple(
    f"{before}{what}_implementation{after}" for what in ("attn", "experts") for before, after in (("", ""), ("_", ""), ("_", "_internal"))
)
"""Fields by which transformers fetches kernels, which are programs, where their value is the name of a repository."""

KNOWN = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "grouped_mm", "batched_mm")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise where a configuration asks for code of others."""
    for name in CODE:
        if (value := fields.get(name)) not in KNOWN:
            raise ValueError(f"{name} is {printable(repr(value))}, and may ask for code of others: take it out of config.json")
    if fields.get("quantization_config") is not None:
        raise ValueError("the model is quantized, which takes libraries of others to read: give one that is not")


def check_folder(folder: Path, kind: type[PermuteFormerConfig]) -> None:
    """Raise unless configuration and weights can be read, and belong together as far as sizes say. No weight is read here."""
    fields = json_of(folder / "config.json")
    if not isinstance(fields, dict):
        raise ValueError(f"config.json must be an object; it is a {type(fields).__name__}")
    sizes = [size for file in _weight_files(folder) for size in _sizes(file)]
    config = kind.from_dict(fields)
    if not sizes:
        return
    if config.num_hidden_layers > len(sizes):
        raise ValueError(f"config.json tells of {config.num_hidden_layers:,} layers, and there are {len(sizes):,} weights")
    check_size(numbers(config), sum(sizes))


def check_size(needed: int, held: int) -> None:
    """Raise where a model is far larger than its weights: what they lack would be made up, and fill the memory."""
    if needed > 2 * held + SPARE:
        raise ValueError(f"config.json tells of a model of {needed:,} numbers, and the weights have {held:,}: they are of two models")


def numbers(config: PermuteFormerConfig) -> int:
    """About how many a model has, from one of its layers, which takes no memory."""
    with torch.device("meta"):
        layer, embeddings = config.build_layer(0), config.build_embedding_positions()
    of_layer = _count(layer) + 2 * config.hidden_size * config.intermediate_size
    return config.vocab_size * config.hidden_size + config.num_hidden_layers * of_layer + sum(map(_count, embeddings))


def _count(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


def _weight_files(folder: Path) -> list[Path]:
    """Of a model in one file, or in several that an index names."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.exists() or not index.exists():
        return [whole] if whole.exists() else []
    content = json_of(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) and name == os.path.basename(name) for name in names.values()):
        raise ValueError(f"{index.name} must have a weight_map to names of files in the folder")
    return [folder / name for name in sorted(set(names.values()))]


def _sizes(file: Path) -> list[int]:
    """Numbers of every tensor, by the header alone."""
    from safetensors import safe_open

    if not file.is_file():
        raise FileNotFoundError(f"there is no file {printable(file.name)}")
    with safe_open(file, framework="pt") as opened:
        return [torch.Size(opened.get_slice(name).get_shape()).numel() for name in opened.keys()]  # noqa: SIM118


@contextmanager
def in_words(source: Any) -> Iterator[None]:
    """Whatever the libraries raise, of many types and in many lines, becomes one sentence about ``source``."""
    try:
        with one_sentence():
            yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        wrong = f"{printable(str(source))} cannot be loaded ({error}); copy the folder again, or fetch it anew"
        raise type(error)(wrong) from error.__cause__


@contextmanager
def one_sentence() -> Iterator[None]:
    """What is raised is a ``ValueError``, ``TypeError`` or ``FileNotFoundError``, in one line that can be printed."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        said = " ".join(str(first).split()).removesuffix(".")
        if "ignore_mismatched_sizes" in said:
            said = "the weights are of other sizes than config.json says"
        elif type(first) not in (ValueError, TypeError) or not said:  # which those of the libraries rarely are
            said = f"{type(first).__name__}: {said}"
        kind = FileNotFoundError if isinstance(first, OSError) else TypeError if isinstance(first, TypeError) else ValueError
        raise kind(printable(said, 500)) from error


@contextmanager
def quietly() -> Iterator[None]:
    """Without the bar and the tables of transformers, which print names of strangers as they are; what they tell of is checked."""
    bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
